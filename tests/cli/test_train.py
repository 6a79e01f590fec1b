"""`recycle train`: its output, signals, and input that is refused before a process or a directory exists."""

import errno
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle.cli.train import end_at_termination, print_line, unused_directory
from recycle.exec.launch import launcher
from recycle.job import Job, price
from recycle.job.manifest import manifest_content, manifest_text
from recycle.runs.logs import read_lines
from tests.cli.command import Command, Outcome
from tests.exec.runs import local_run
from tests.waiting import until

EMULATED = """
[shape]
pipelines = 2
ranks = 2
micro_batches = 2
[planner]
seconds = 1
[model]
kind = "emulated"
[train]
steps = 6
"""


@pytest.fixture(autouse=True)
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(EMULATED)
    return path


@pytest.fixture(autouse=True)
def late_limit(monkeypatch):
    """A process that has not ended when its grace is over is ended: here the one of the tests, on a busy machine."""
    monkeypatch.setattr("recycle.cli.train.end_at_termination", lambda grace: end_at_termination(grace + 90.0))


def lines_of(name: str, run="run"):
    return [line for _, line in read_lines(Path(run, f"{name}.jsonl"))]


def losses(run: str) -> list[tuple[int, float, float | None]]:
    return [(line["step"], line["loss"], line.get("eval_loss")) for line in lines_of("metrics", run)]


def end_by_signal(command: Command, line: str, number: int, when: Callable[[], bool]) -> tuple[Outcome, float]:
    """Run a command that gets a signal as soon as `when` holds; also return the seconds from the signal to its end."""
    signaled_at = [0.0]

    def send_signal():
        until(when, 200.0)
        signaled_at[0] = time.monotonic()
        os.kill(os.getpid(), number)

    signaling = threading.Thread(target=send_signal)
    signaling.start()
    outcome = command(line)
    signaling.join()
    assert outcome.status == 143
    return outcome, time.monotonic() - signaled_at[0]


HANGS = "[membership]\nhung_after = 1000\nwarm_up = 1000\ngrace = 8\n"


def assert_has_the_bits_of_a_calm_run():
    settled = price(Job.load("job.toml"))
    calm = local_run(settled).run(settled.train.steps)
    assert losses("run") == [(line["step"], line["loss"], line.get("eval_loss")) for line in calm.metrics]


def assert_resumes_to_the_same_bits(command: Command):
    assert command("train job.toml --resume --run run").status == 0
    assert_has_the_bits_of_a_calm_run()


@pytest.mark.process
def test_progress_is_a_line_per_step_and_one_per_failure_and_rejoin(command):
    outcome = command("train job.toml --run run --fault kill:1.1@2 --fault rejoin:1.1@4")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == [f"{n}/6" for n in range(6)]
    assert [line.split("tokens/s")[1].split()[0] for line in steps] == ["4/4"] * 2 + ["3/4"] * 2 + ["4/4"] * 2
    for text in (
        "fault: kill:1.1@2 (worker 1.1, step 2)",
        "worker 1.1 is dead: killed by SIGKILL; step 2 starts again without it",
        "recovered in",
        "worker 1.1 re-joined at step 4, state copied from 0.1",
    ):
        assert sum(text in line for line in lines) == 1
    done = "done: 6 steps (6 with the barrier; 0 undone); run directory run; see it with: recycle view run"
    assert lines[-1] == done
    assert command("drain run 1.1").refused("run: this run has ended")


@pytest.mark.process
def test_signal_ends_a_run_with_a_checkpoint_to_resume_from(command, job):
    """Without it the job would keep none: it has none every so many steps."""
    job.write_text(f"{EMULATED}seconds_per_unit = 0.02".replace("[train]\nsteps = 6\n", "") + "\n[train]\nsteps = 9\n")
    outcome, _ = end_by_signal(
        command, "train job.toml --run run", signal.SIGTERM, lambda: len(lines_of("metrics")) > 2
    )
    count = len(lines_of("metrics"))
    assert 3 <= count < 9
    early = f"ended early after step {count - 1} on request; resume from step-{count - 1:08d}"
    assert early in outcome.out
    go_on = f"stopped after step {count - 1}; resume with: recycle train job.toml --resume --run run"
    assert outcome.out.splitlines()[-1] == go_on
    assert_resumes_to_the_same_bits(command)


@pytest.mark.process
def test_signals_to_all_workers_end_a_run_with_its_exit_code(command, job):
    job.write_text(EMULATED.replace("[train]", "seconds_per_unit = 0.02\n[train]"))
    faults = " ".join(f"--fault drain:{worker}@1" for worker in ("0.0", "0.1", "1.0", "1.1"))
    outcome = command(f"train job.toml --run run {faults}")
    count = len(lines_of("metrics"))
    assert 1 < count < 6
    assert (outcome.status, outcome.out.splitlines()[-1].split(";")[0]) == (143, f"stopped after step {count - 1}")


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_interrupted_run_names_the_command_that_resumes_it_if_there_is_a_checkpoint(
    has_checkpoint, command, monkeypatch
):
    def interrupt(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("recycle.exec.launch.launcher.train", interrupt)
    if has_checkpoint:
        Path("run/checkpoints/step-00000001").mkdir(parents=True)
        Path("run/checkpoints/step-00000001/manifest.json").touch()
    outcome = command("train job.toml --run run")
    assert (outcome.status, "--resume" in outcome.out) == (130, has_checkpoint)


def test_closed_terminal_does_not_interrupt(monkeypatch, tmp_path):
    class Closed(io.FileIO):
        def write(self, text) -> int:
            raise OSError(errno.EIO, "Input/output error")

    with end_at_termination(60.0) as stop, Closed(tmp_path / "terminal", "w") as terminal:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            print_line("step")
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.process
@pytest.mark.parametrize(("fault", "lines"), [("stall:1.1@2", 2), ("stall:1.1@1.evaluation", 1)])
def test_sigterm_ends_a_hung_run_within_the_grace(command, job, fault, lines):
    """Step 1 is the last one each time; its line in the metrics comes with its evaluation."""
    job.write_text(f"{EMULATED}{HANGS}" + "[eval]\nevery = 2\n" * (lines == 1))
    line = f"train job.toml --run run --fault {fault}"
    _, seconds = end_by_signal(command, line, signal.SIGTERM, lambda: len(lines_of("metrics")) == lines)
    assert seconds < 100
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000001"]
    assert_resumes_to_the_same_bits(command)


@pytest.mark.process
def test_sigterm_after_a_resume_keeps_the_checkpoint(command, job):
    """All hosts of a stage are busy for longer than the grace, as when they compile it."""
    job.write_text(f"{EMULATED}checkpoint_every = 1\ncheckpoint_keep = 1\n{HANGS}")
    manifest = Path("run/checkpoints/step-00000001/manifest.json")
    assert command("train job.toml --run run --steps 2").status == 0
    written = manifest.stat().st_mtime_ns
    line = "train job.toml --resume --run run --fault stall:0.0@2 --fault stall:1.0@2"
    end_by_signal(
        command, line, signal.SIGTERM, lambda: sum(event["kind"] == "fault" for event in lines_of("events")) == 2
    )
    assert manifest.stat().st_mtime_ns == written
    assert lines_of("events")[-1]["checkpoint"] == "step-00000001"


def test_runs_of_one_second_get_two_directories(tmp_path):
    directories = [unused_directory(tmp_path, "tiny")]
    directories[0].mkdir()
    directories.append(unused_directory(tmp_path, "tiny"))
    assert sorted(set(directories)) == directories


@pytest.mark.process
def test_punished_run_prints_its_faults_and_has_the_same_losses(command):
    line = command("train job.toml --run run --punish 2,7").out.splitlines()[0]
    drawn = line.removeprefix("punished with 4 faults:").split(" --fault ")[1:]
    assert drawn == ["kill:0.1@1", "rejoin:0.1@2", "kill:0.0@3", "rejoin:0.0@5"]
    assert_has_the_bits_of_a_calm_run()
    events = lines_of("events")
    assert [event["fault"] for event in events if event["kind"] == "fault"] == [drawn[0], drawn[2]]
    rejoined = [(event["worker"], event["step"]) for event in events if event["kind"] == "rejoined"]
    assert rejoined == [("0.1", 2), ("0.0", 5)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ('kind = "gpt"\nlayers = 3', "[model] layers"),
        ('kind = "emulated"\nlayers = 4\n[membership]\ntransport = "carrier"', "[membership] transport"),
        ('kind = "emulated"\n[times]\nforward = 0.0', "[times] forward"),
        ('kind = "emulated"\nseconds_per_unit = 1e6\n[times]\nforward = 9.0', "[model] seconds_per_unit"),
    ],
)
def test_explain_refuses_the_settings_that_training_refuses(command, job, lines, key):
    job.write_text(f"[shape]\npipelines = 1\nranks = 2\nmicro_batches = 2\n[model]\n{lines}\n")
    explained, trained = command("train job.toml --explain"), command("train job.toml --run run")
    assert explained.refused(f"job.toml: {key}")
    assert trained.err == explained.err
    assert not Path("run").exists()


@pytest.mark.process
def test_run_is_resumed_or_refused(command, job):
    job.write_text(EMULATED + "checkpoint_every = 3\n")
    assert "checkpoint step-00000005 is complete" in command("train job.toml").out
    (run,) = (path for path in Path("runs").iterdir() if path.name != "latest")
    job.write_text(EMULATED.replace("pipelines = 2", "pipelines = 1").replace("micro_batches = 2", "micro_batches = 4"))
    outcome = command("train job.toml --resume --steps 8")
    assert outcome.status == 0
    assert "continues at step 6 from step-00000005 with 2 workers" in outcome.out
    assert [step for step, *_ in losses(str(run))] == list(range(8))
    manifest = run / "checkpoints" / "step-00000005" / "manifest.json"
    manifest.write_text(manifest_text(manifest_content(manifest.parent) | {"version": 7}))
    assert command("train job.toml --resume --steps 9").refused("manifest.json: has version 7", "update it")


JOB = """
[shape]
pipelines = 1
ranks = 1
micro_batches = 1
[planner]
seconds = 0.1
[model]
layers = 1
provider = "cli_models:{model}"
[data]
provider = "cli_models:{data}"
[train]
steps = 1
loss = "cli_models:{loss}"
"""
MODULE = """
import torch
def bare(job, first, last, pre_process, post_process):
    return torch.nn.GELU()
def batches(job):
    return 5
def function(job):
    return lambda iteration, micro_batch: {}
"""


@pytest.fixture(autouse=True)
def module():
    Path("cli_models.py").write_text(MODULE)


@pytest.mark.process
def test_a_wrong_function_is_one_line_before_anything_starts(command):
    Path("job.toml").write_text(JOB.format(model="bare", data="batches", loss="bare"))
    assert command("train job.toml --run run").refused("job.toml: [data] provider: cli_models:batches returned int")
    assert not Path("run").exists()


@pytest.mark.process
def test_error_of_a_custom_loss_is_in_the_last_line(command):
    loss_alone = JOB.format(model="bare", data="function", loss="function").replace('provider = "cli_models', "# = ")
    Path("job.toml").write_text(loss_alone)
    outcome = command("train job.toml --run run --schedule 1f1b")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("recycle: stage 0 has no live host left")
    assert "ended with exit code 1 (TypeError: function() takes 1 positional argument but 2 were given)" in outcome.err


def test_a_script_that_ends_its_run_early_ends_it_with_exit_code_0(command, monkeypatch):
    early = launcher.RunResult([], [], {}, Path("run"), ended_early=True)
    monkeypatch.setattr(launcher, "train", lambda *_, **__: early)
    assert command("agent job.toml -- python loop.py").status == 0
