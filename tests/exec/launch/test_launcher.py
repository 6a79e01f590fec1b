"""The launcher: refuses what cannot work, shows why a start failed, and leaves no process behind whatever happens."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recycle import RunError
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from recycle.exec.launch.trackers import Observer
from recycle.exec.processes.forkserver import ForkServer
from recycle.runs.logs import read_lines, read_logs
from tests.exec.runs import (
    await_release,
    calm_run,
    heavy_libraries,
    job,
    kinds,
    live_workers,
    of_kind,
    processes_writing_below,
    shared_memory,
)
from tests.waiting import until

pytestmark = pytest.mark.process

STEPS = 3


def test_job_without_a_planner_gets_the_commands_planner(servers, launch, tmp_path):
    config = job(2, 2, 2)
    alone = train(config, tmp_path / "run", steps=STEPS, faults=[parse_fault("kill:1.1@1")], server=servers["emulated"])
    assert alone.losses == calm_run(config, launch, STEPS).losses
    assert live_workers(alone) == [4, 3, 3]


class _StrikeAtStart(Observer):
    def __init__(self, directory: Path, worker: str, sent: signal.Signals):
        self.log, self._sent = directory / "logs" / f"{worker}.log", sent

    def waiting(self, what: str):
        until(lambda: processes_writing_below(str(self.log)))
        self.log.write_text("about to load the weights\n")
        os.kill(processes_writing_below(str(self.log))[0], self._sent)


def test_a_worker_that_dies_while_starting_ends_the_run_with_its_last_lines(launch, tmp_path):
    says = r"worker 0\.1 was killed by SIGKILL during start-up; its last lines: about to load the weights"
    with pytest.raises(RunError, match=says):
        launch(
            job(2, 2, 2, kind="gpt"),
            STEPS,
            observer=_StrikeAtStart(tmp_path, "0.1", signal.SIGKILL),
            directory=tmp_path,
        )
    assert not processes_writing_below(str(tmp_path))


class _StopServer(Observer):
    """Stops the fork server at a step."""

    def __init__(self, server: ForkServer, step: int):
        self._pid, self._step = server.pid, step

    def committed(self, line: dict):
        if line["step"] == self._step:
            os.kill(self._pid, signal.SIGSTOP)


@pytest.fixture
def server():
    """One that the test may strike."""
    server = ForkServer("emulated")
    yield server
    server.close()


def test_a_run_ends_and_finds_deaths_at_once_though_its_fork_server_stands_still(server, launch, tmp_path):
    config = job(3, 2, 2, membership={"dead_after": 30.0})
    reference = calm_run(config, launch, 6)
    run = train(
        config,
        tmp_path,
        steps=6,
        faults=[parse_fault("kill:1.1@3"), parse_fault("exception:0.0@4")],
        planner=plan_for_training,
        observer=_StopServer(server, 1),
        server=server,
    )
    assert run.losses == reference.losses
    assert live_workers(run) == [6, 6, 6, 5, 4, 4]
    assert {event["worker"]: event["cause"].partition(":")[0] for event in of_kind(run, "detected")} == {
        "1.1": "killed by SIGKILL",
        "0.0": "ended with exit code 1 (RuntimeError",
    }
    assert not processes_writing_below(str(tmp_path))


def test_a_fork_server_that_stands_still_at_the_start_ends_the_run(server, tmp_path, monkeypatch):
    """It is asked for more processes than its pipe holds requests."""
    config = job(6, 4, 2, membership={"warm_up": 1.0, "dead_after": 0.5})
    call = server.call

    def call_and_stop(*arguments):
        answer = call(*arguments)
        os.kill(server.pid, signal.SIGSTOP)
        return answer

    monkeypatch.setattr(server, "call", call_and_stop)
    with pytest.raises(RunError, match=r"worker 0\.0 had no heartbeat for 1 s during start-up"):
        train(config, tmp_path, steps=2, planner=plan_for_training, server=server)


def test_a_check_that_dies_ends_the_run_with_its_last_lines(server, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os\nprint('reading the data', flush=True)\nos.kill(os.getpid(), 9)\n")
    config = job(1, 2, 2, kind="gpt", data={"provider": "deadly:data"}, model={"import_from": [str(tmp_path)]})
    with pytest.raises(RunError, match=r"the process that checks the job was killed by SIGKILL; .*: reading the data"):
        train(config, tmp_path / "run", steps=1, planner=plan_for_training, server=server)
    assert not (tmp_path / "run").exists()


def _descendants(pid: int) -> set[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    result, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - result
        result |= frontier
    return result


@pytest.mark.parametrize(
    ("sent", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGKILL, -9)]
)
def test_no_process_outlives_a_launcher_that_is_interrupted_or_killed(sent, code, tmp_path):
    text = job(2, 2, 2, model={"seconds_per_unit": 0.05}).to_toml()
    (tmp_path / "job.toml").write_text(text)
    command = [sys.executable, "-c", "from recycle.cli import main; main()", "train", "job.toml", "--run", "run"]
    shared = shared_memory()
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in launcher.stdout:
        if re.match("step +3/", line):  # its reporters have written the traces of earlier steps
            break
    family = _descendants(launcher.pid)
    worker, *_ = processes_writing_below(str(tmp_path / "run" / "logs" / "0.0.log"))
    assert (heavy_libraries(launcher.pid), heavy_libraries(worker)) == (set(), {"torch"})
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in family]
    assert sum("recycle.exec.processes.forkserver" in command for command in commands) == 5  # with its four workers
    assert sum("recycle.exec.planning.planner_process" in command for command in commands) == 2
    stopped = next(pid for pid in family if pid in processes_writing_below(str(tmp_path / "run" / "logs" / "1.1.log")))
    os.kill(stopped, signal.SIGSTOP)  # one that cannot end by itself
    launcher.send_signal(sent)
    output, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == code
    assert "Traceback" not in errors
    until(lambda: not any(map(_alive, family)))
    await_release(shared)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 99, "lo')  # a line that the end cut short
    lines = [line for _, line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert lines
    assert read_logs(tmp_path / "run", job(2, 2, 2).shape).steps
    if sent == signal.SIGINT:
        assert "interrupted after step" in output


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_message_may_take_longer_than_groups_may_take_to_form(launch):
    """The second stage waits 3.5 s for the first; receives of gloo keep the timeout that groups were formed with."""
    times = {"forward": [1.0, 0.01], "backward_input": 0.01, "backward_weight": 0.01}
    run = launch(job(2, 2, 1, times=times, model={"seconds_per_unit": 3.5}, membership={"form_timeout": 3.0}), 1)
    assert kinds(run) == ["generation"]
