"""The launcher: refuses what cannot work, shows why a start failed, and leaves no process behind whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle import Job, JobError, RunError
from recycle.exec.launch.observer import Observer
from recycle.job import price
from recycle.runs import read_lines, read_logs
from tests.exec.runs import Run, job, kinds, processes_writing_below

pytestmark = pytest.mark.process

STEPS = 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"kind": "gpt", "layers": 3}}, r"\[model\] layers: 3 layers do not divide over 2 stages"),
        ({"model": {"kind": "gpt"}, "data": {"path": "/nowhere/at/all"}}, "/nowhere/at/all"),
    ],
)
def test_an_impossible_job_is_refused_before_anything_starts(
    changes: dict, says: str, launch: Run, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=says):
        launch(job(3, 2, 2, **changes), STEPS, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_steps_are_refused(launch: Run, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="steps must be at least 1, got 0"):
        launch(job(3, 2, 2), 0, directory=tmp_path / "run")


def test_a_directory_that_holds_a_run_is_not_overwritten(launch: Run, tmp_path: Path) -> None:
    launch(job(1, 2, 2), 1, directory=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(JobError, match="holds a run already"):
        launch(job(1, 2, 2), 1, directory=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_run_directory_holds_everything_that_the_run_is_known_by(launch: Run, tmp_path: Path) -> None:
    of = job(2, 2, 2)
    run = launch(of, STEPS, directory=tmp_path)
    assert price(Job.load(tmp_path / "job.toml")) == of
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics == run.metrics
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert {line["mode"] for line in metrics} == {"barrier"}
    assert [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()] == run.events
    assert kinds(run) == ["generation"]
    assert (tmp_path / "plans" / f"{metrics[0]['plan']}.json").exists()
    assert (tmp_path / "trace.json").exists()
    assert sorted(path.name for path in (tmp_path / "logs").glob("?.?.log")) == [
        f"{k}.{r}.log" for k in (0, 1) for r in (0, 1)
    ]


class _KillAtStart(Observer):
    def __init__(self, directory: Path, worker: str) -> None:
        self.log = directory / "logs" / f"{worker}.log"

    def waiting(self, what: str) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = processes_writing_below(str(self.log))
            if found:
                self.log.write_text("about to load the weights\n")
                os.kill(found[0], signal.SIGKILL)
                return
            time.sleep(0.001)


def test_a_worker_that_dies_while_starting_ends_the_run_with_its_last_lines(launch: Run, tmp_path: Path) -> None:
    says = r"worker 0\.1 killed by SIGKILL during start-up; its last lines: about to load the weights"
    with pytest.raises(RunError, match=says):
        launch(job(2, 2, 2, kind="gpt"), STEPS, observer=_KillAtStart(tmp_path, "0.1"), directory=tmp_path)
    assert not processes_writing_below(str(tmp_path))


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_outlives_a_launcher_that_is_interrupted_or_killed(
    sent: signal.Signals, code: int, tmp_path: Path
) -> None:
    text = job(2, 2, 2, model={"seconds_per_unit": 0.05}).to_toml()
    (tmp_path / "job.toml").write_text(text)
    command = [sys.executable, "-c", "from recycle.cli import main; main()", "train", "job.toml", "--run", "run"]
    shared = set(os.listdir("/dev/shm"))
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if re.match("step +2/", line):  # whoever reported this one has written the trace of the ones before
            break
    family = _descendants(launcher.pid)
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in family]
    assert sum("recycle.exec.processes.forkserver" in command for command in commands) == 5  # with its four workers
    assert sum("recycle.exec.planning.planner_process" in command for command in commands) == 2
    stopped = next(pid for pid in family if pid in processes_writing_below(str(tmp_path / "run" / "logs" / "1.1.log")))
    os.kill(stopped, signal.SIGSTOP)  # one that cannot end by itself
    launcher.send_signal(sent)
    output, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in family if _alive(pid)]
    assert set(os.listdir("/dev/shm")) <= shared
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
