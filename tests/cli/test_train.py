"""`recycle train`: what it prints, and that bad input costs one line, no process and no directory."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from recycle.cli.train import end_at_termination, print_line
from recycle.ir.families import one_f_one_b
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape
from tests.cli.command import Command

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


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "job.toml"
    path.write_text(EMULATED)
    return path


@pytest.mark.process
def test_progress_is_a_line_per_step_and_one_per_failure_and_rejoin(command: Command, job: Path) -> None:
    outcome = command("train", job, "--run", "run", "--fault", "kill:1.1@2", "--fault", "rejoin:1.1@4")
    assert outcome.status == 0
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == [f"{n}/6" for n in range(6)]
    assert [line.split("tokens/s")[1].split()[0] for line in steps] == ["4/4"] * 2 + ["3/4"] * 2 + ["4/4"] * 2
    assert sum("fault: kill:1.1@2 (worker 1.1, step 2)" in line for line in lines) == 1
    assert sum("worker 1.1 is dead: killed by SIGKILL; step 2 starts again without it" in line for line in lines) == 1
    assert sum("recovered in" in line for line in lines) == 1
    assert sum("worker 1.1 re-joined at step 4, state copied from 0.1" in line for line in lines) == 1
    done = "done: 6 steps (6 with the barrier; 0 undone); run directory run; see it with: recycle view run"
    assert lines[-1] == done


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_a_checkpoint_that_it_goes_on_from_to_the_same_bits(
    command: Command, job: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Without it the job would keep none: it has none every so many steps."""
    job.write_text(f"{EMULATED}seconds_per_unit = 0.02".replace("[train]\nsteps = 6\n", "") + "\n[train]\nsteps = 9\n")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def terminate() -> None:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    told = threading.Thread(target=terminate)
    told.start()
    outcome = command("train", job, "--run", "run")
    told.join()
    assert outcome.status == 143
    count = metrics.read_text().count("\n")
    assert 3 <= count < 9
    assert (
        f"ended early after step {count - 1}, as it was told to; it can go on from step-{count - 1:08d}" in outcome.out
    )
    go_on = f"ended after step {count - 1} as told; go on with: recycle train {job} --resume --run run"
    assert outcome.out.splitlines()[-1] == go_on
    assert signal.getsignal(number) is signal.SIG_DFL
    assert command("train", job, "--resume", "--run", "run").status == 0
    assert command("train", job, "--run", "calm").status == 0
    losses, calm = (
        [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]
        for path in (metrics, tmp_path / "calm" / "metrics.jsonl")
    )
    assert losses == calm


def test_a_closed_terminal_hangs_up_twice_and_fails_to_print_and_interrupts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Closed(io.FileIO):
        def write(self, text: object) -> int:
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


@pytest.mark.process
@pytest.mark.parametrize(("fault", "lines"), [("stall:1.1@2", 2), ("stall:1.1@1.evaluation", 1)])
def test_sigterm_ends_a_run_that_hangs_within_the_grace_and_keeps_the_last_committed_step(
    command: Command, job: Path, tmp_path: Path, fault: str, lines: int
) -> None:
    """Step 1 is the last one each time; its line in the metrics comes with its evaluation."""
    limits = "[membership]\nhung_after = 1000\nwarm_up = 1000\ngrace = 12\n"
    job.write_text(f"{EMULATED}{limits}" + "[eval]\nevery = 2\n" * (lines == 1))
    metrics = tmp_path / "run" / "metrics.jsonl"
    told_at = [0.0]

    def terminate() -> None:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") == lines) and time.monotonic() < deadline:
            time.sleep(0.01)
        told_at[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)

    told = threading.Thread(target=terminate)
    told.start()
    outcome = command("train", job, "--run", "run", "--fault", fault)
    told.join()
    assert outcome.status == 143
    assert time.monotonic() - told_at[0] < 13
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert command("train", job, "--resume", "--run", "run").status == 0
    assert command("train", job, "--run", "calm").status == 0
    losses, calm = (
        [(line["step"], line["loss"], line.get("eval_loss")) for line in map(json.loads, path.read_text().splitlines())]
        for path in (metrics, tmp_path / "calm" / "metrics.jsonl")
    )
    assert losses == calm


@pytest.mark.process
def test_sigterm_in_the_first_iteration_after_a_resume_leaves_the_checkpoint_that_it_came_from(
    command: Command, job: Path, tmp_path: Path
) -> None:
    """All hosts of a stage are busy for longer than the grace, as when they compile it."""
    limits = "[membership]\nhung_after = 1000\nwarm_up = 1000\ngrace = 12\n"
    job.write_text(f"{EMULATED}checkpoint_every = 1\ncheckpoint_keep = 1\n{limits}")
    events, manifest = tmp_path / "run" / "events.jsonl", tmp_path / "run/checkpoints/step-00000001/manifest.json"
    assert command("train", job, "--run", "run", "--steps", "2").status == 0
    written = manifest.stat().st_mtime_ns

    def terminate() -> None:
        deadline = time.monotonic() + 60
        while events.read_text().count('"fault"') < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    told = threading.Thread(target=terminate)
    told.start()
    faults = [text for fault in ("stall:0.0@2", "stall:1.0@2") for text in ("--fault", fault)]
    assert command("train", job, "--resume", "--run", "run", *faults).status == 143
    told.join()
    assert manifest.stat().st_mtime_ns == written
    assert json.loads(events.read_text().splitlines()[-1])["checkpoint"] == "step-00000001"


@pytest.mark.process
def test_a_drain_of_what_cannot_be_drained_is_one_line(command: Command, job: Path) -> None:
    assert command("drain", "nowhere", "1.1").refused("nowhere: there is no run here")
    assert command("train", job, "--run", "run").status == 0
    assert command("drain", "run", "1.1").refused("run: this run has ended")
    assert command("drain", "run", "1.1", "--in", "-1").status == 2


@pytest.mark.process
def test_a_punished_run_prints_its_faults_as_options_and_trains_to_the_same_losses(
    command: Command, job: Path, tmp_path: Path
) -> None:
    lines = command("train", job, "--run", "punished", "--punish", "2,7").out.splitlines()
    drawn = lines[0].removeprefix("punished with 4 faults:").split()
    assert drawn == [
        "--fault",
        "kill:0.1@1",
        "--fault",
        "rejoin:0.1@2",
        "--fault",
        "kill:0.0@3",
        "--fault",
        "rejoin:0.0@5",
    ]
    assert command("train", job, "--run", "free").status == 0
    losses = []
    for run in ("punished", "free"):
        metrics = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in metrics])
    assert losses[0] == losses[1]
    events = [json.loads(line) for line in (tmp_path / "punished" / "events.jsonl").read_text().splitlines()]
    assert [event["fault"] for event in events if event["kind"] == "fault"] == [drawn[1], drawn[5]]
    assert [(event["worker"], event["step"]) for event in events if event["kind"] == "rejoined"] == [
        ("0.1", 2),
        ("0.0", 5),
    ]


@pytest.mark.process
def test_a_family_and_a_file_run_as_the_schedule(command: Command, job: Path, tmp_path: Path) -> None:
    one_f_one_b(Shape(2, 2, 2)).save(tmp_path / "mine.json")
    for name, run in (("1f1b", "a"), ("mine.json", "b")):
        assert command("train", job, "--schedule", name, "--steps", "2", "--run", run).status == 0
    used = [Schedule.load(next((tmp_path / run / "plans").iterdir())) for run in ("a", "b")]
    assert used[0] == used[1] == one_f_one_b(Shape(2, 2, 2))
    assert (tmp_path / "a" / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.process
def test_an_evaluation_is_shown_with_its_step(command: Command, job: Path, tmp_path: Path) -> None:
    job.write_text(EMULATED + "[eval]\nevery = 2\n")
    printed = command("train", job, "--schedule", "1f1b", "--steps", "3", "--run", "run").out.splitlines()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shown = [line.split("evaluation loss ")[1].split()[0] for line in printed if "evaluation loss" in line]
    assert shown == [f"{lines[step]['eval_loss']:.6f}" for step in (1, 2)]
    assert printed.count("waiting for the evaluation after step 1") == 1


@pytest.mark.process
def test_a_staggered_schedule_says_how_each_step_ran_and_what_was_undone(command: Command, job: Path) -> None:
    job.write_text(EMULATED + "clip = 1e9\n")
    printed = command("train", job, "--schedule", "gpipe", "--steps", "4", "--run", "run", "--fault", "nan:0.1@2").out
    lines = printed.splitlines()
    modes = [line.split("period ")[1] for line in lines if line.startswith("step")]
    assert modes == ["9 (barrier)", "9 (staggered)", "9 (barrier)", "9 (staggered)"]
    assert sum("step 2 is repeated, undone on 4 workers: a gradient is not finite" in line for line in lines) == 1
    assert lines[-1].startswith("done: 4 steps (2 with the barrier, 2 staggered; 1 undone); run directory run;")


def test_explain_prints_every_key_as_a_job_that_loads(command: Command, job: Path, tmp_path: Path) -> None:
    printed = command("train", job, "--explain").out
    assert 'kind = "emulated"\n' in printed
    assert "clip = 1.0                            # default" in printed
    (tmp_path / "again.toml").write_text(printed)
    assert command("train", tmp_path / "again.toml", "--explain").out.split() == printed.replace("6   ", "6").split()


@pytest.mark.process
@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ('kind = "gpt"\n[model.config]\ncalculate_per_token_loss = true', "[model.config] calculate_per_token_loss"),
        ('kind = "gpt"\n[model.config]\nnum_query_group = 2', "[model.config] num_query_group"),
        ('kind = "gpt"\n[model.config]\nlayernorm_epsilon = "small"', "[model.config] layernorm_epsilon"),
        ('kind = "gpt"\nlayers = 3', "[model] layers"),
        ('kind = "emulated"\nlayers = 4\n[membership]\ntransport = "carrier"', "[membership] transport"),
        ('kind = "emulated"\n[times]\nforward = 0.0', "[times] forward"),
        ('kind = "emulated"\nseconds_per_unit = 1e6\n[times]\nforward = 9.0', "[model] seconds_per_unit"),
    ],
)
def test_explain_refuses_the_settings_that_training_refuses(
    command: Command, tmp_path: Path, lines: str, key: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[shape]\npipelines = 1\nranks = 2\nmicro_batches = 2\n[model]\n{lines}\n")
    explained, trained = command("train", path, "--explain"), command("train", path, "--run", tmp_path / "run")
    assert explained.refused(f"job.toml: {key}")
    assert trained.err == explained.err
    assert not (tmp_path / "run").exists()


def test_explain_refuses_the_schedule_that_training_refuses(command: Command, job: Path) -> None:
    one_f_one_b(Shape(3, 2, 2)).save("other.json")
    options = ("train", job, "--schedule", "other.json")
    explained, trained = command(*options, "--explain"), command(*options, "--run", "run")
    assert explained.refused("D=3 P=2 m=2", "D=2 P=2 m=2")
    assert trained.err == explained.err


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.toml"], ["none.toml", "cannot be read"]),
        (["job.toml", "--fault", "kill:5.5@2"], ["kill:5.5@2", "outside the grid"]),
        (["job.toml", "--fault", "kill:1.1@6"], ["kill:1.1@6", "ends after step 5"]),
        (["job.toml", "--fault", "kill:1.1@2", "--steps", "2"], ["ends after step 1"]),
        (["job.toml", "--fault", "explode:1.1@2"], ["explode", "known are rejoin, nan, flip, slow, slow-link, flaky"]),
        (["job.toml", "--fault", "slow:1.1@2"], ["slow:1.1@2", "slow takes a factor"]),
        (["job.toml", "--punish", "often"], ["--punish often", "expected MEAN_STEPS"]),
        (["job.toml", "--punish", "2", "--fault", "kill:1.1@2"], ["--punish and --fault", "one of them"]),
        (["job.toml", "--steps", "0"], ["steps must be at least 1"]),
        (["job.toml", "--schedule", "nowhere"], ["nowhere", "neither a file nor a family", "1f1b"]),
        (["job.toml", "--schedule", "job.toml"], ["job.toml"]),
        (["job.toml", "--schedule", "other.json"], ["D=3 P=2 m=2", "D=2 P=2 m=2"]),
        (["job.toml", "--schedule", "broken.json"], ["does not pass check", "worker 0.1"]),
        (["job.toml", "--run", "job.toml"], ["job.toml"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], words: list[str], command: Command, job: Path, tmp_path: Path
) -> None:
    one_f_one_b(Shape(3, 2, 2)).save(tmp_path / "other.json")
    text = one_f_one_b(Shape(2, 2, 2)).text() | {"0.1": "1F0.0 1B0.0 1F0.1"}
    Schedule.from_text(Shape(2, 2, 2), text).save(tmp_path / "broken.json")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert command("train", *arguments).refused(*words)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name != "runs")
    assert left == before
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_broken_job_names_file_key_and_type(command: Command, job: Path, tmp_path: Path) -> None:
    job.write_text(EMULATED.replace("ranks = 2", 'ranks = "two"'))
    assert command("train", job).refused("job.toml", "[shape] ranks", "expected `int`, got `str`")
    job.write_text(EMULATED.replace("micro_batches = 2", "micro_batches = 0"))
    assert command("train", job).refused("job.toml", "[shape] micro_batches", ">= 1")
    job.write_text(EMULATED + "spteps = 7\n")
    assert command("train", job).refused("job.toml", "[train]", "spteps")


@pytest.mark.process
def test_a_run_that_cannot_go_on_exits_with_1(command: Command, job: Path) -> None:
    outcome = command("train", job, "--run", "run", "--fault", "kill:0.1@1", "--fault", "kill:1.1@2")
    assert outcome.status == 1
    assert outcome.err.startswith("recycle: stage 1 has no live host left after step 1")
    assert outcome.err.count("\n") == 1


@pytest.mark.process
def test_a_run_is_resumed_to_more_steps_and_what_cannot_be_is_refused_with_one_line(
    command: Command, job: Path, tmp_path: Path
) -> None:
    job.write_text(EMULATED + "checkpoint_every = 3\n")
    assert command("train", job, "--resume").refused("there is no run to resume", "--run")
    assert command("train", job, "--resume", "--run", "nowhere").refused("nowhere", "no run directory")
    outcome = command("train", job)
    assert "checkpoint step-00000005 is complete" in outcome.out
    run = next(path for path in (tmp_path / "runs").iterdir() if path.name != "latest")
    assert command("train", job, "--resume").refused(run.name, "is finished, it has all 6 steps")
    job.write_text(EMULATED.replace("micro_batches = 2", "micro_batches = 3"))
    assert command("train", job, "--resume").refused(run.name, "another model or batch", "(D*m) is 6, there 4")
    job.write_text(EMULATED.replace("pipelines = 2", "pipelines = 1").replace("micro_batches = 2", "micro_batches = 4"))
    outcome = command("train", job, "--resume", "--steps", "8")
    assert outcome.status == 0
    assert "goes on at step 6 from checkpoint step-00000005 with 2 workers" in outcome.out
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(8))
    manifest = run / "checkpoints" / "step-00000005" / "manifest.json"
    body = json.loads(manifest.read_text())["manifest"] | {"version": 7}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"manifest": body, "sha256": digest}))
    assert command("train", job, "--resume", "--steps", "9").refused("manifest.json: of version 7", "update it")
    for manifest in (run / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    assert command("train", job, "--resume", "--steps", "9").refused("no complete checkpoint", "has no manifest.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[times]\nforward = 1e30", "[times] forward: stage 0 takes 1e+30"),
        ("[times]\nforward = 0", "[times] forward: stage 0 takes 0; a plan needs a time above 0"),
        ("[times]\nlink = 1e30", "[times] link: a transfer takes 1e+30"),
        ("[times]\nstep = 1e30", "[times] step: stage 0 takes 1e+30"),
        (f"[model]\nvocabulary = {10**30}", "[model] vocabulary: "),
        (f"[model]\nvocabulary = {10**12}", "[model] vocabulary: expected `int` <= 2147483647"),
        (f"[model]\nvocabulary = {2**31 - 1}", "2147483647 rows of hidden = 64 weigh 549,755,813,632 bytes"),
        (f"[model]\nffn = {10**30}", "[model] ffn: "),
        (f"[model]\nffn = {2**31 - 1}", "[model] ffn: 2147483647 rows of hidden = 64 weigh"),
        (f"[planner]\nahead = {10**30}", "[planner] ahead: "),
        ('[model]\nkind = "emulated"\nseconds_per_unit = inf', "[model] seconds_per_unit: expected `float` <= 1000000"),
        ('[model]\nkind = "emulated"\nseconds_per_unit = 1e308', "[model] seconds_per_unit: "),
        (
            '[model]\nkind = "emulated"\nseconds_per_unit = 1e3\n[times]\nforward = 1e9',
            "[model] seconds_per_unit: an operation takes 1e+12 s, at most 1e+06 s can be run",
        ),
        ("[membership]\nheartbeat = 1e30", "[membership] heartbeat: expected `float` <= 1000000"),
        ("[membership]\nwarm_up = inf", "[membership] warm_up: "),
    ],
)
def test_a_value_that_no_run_can_have_is_refused_at_once(
    text: str, says: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(f"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n{text}\n")
    assert command("train", "job.toml", "--run", "run").refused(says)
    assert not (tmp_path / "run").exists()
