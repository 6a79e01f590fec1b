"""Runs that resume from a checkpoint: after the loss of a stage, after the end of the launcher, in another shape."""

import json
import resource
import shutil
import signal
from itertools import combinations
from pathlib import Path

import pytest

from recycle import Job, JobError, Shape
from recycle.cli.planner import plan_for_training
from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import folder_of
from recycle.exec.checkpoint.resume import find_resume_point, find_script_part, whole_metrics
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.launch.trackers import Observer
from recycle.exec.leader.membership import reassign
from recycle.job import PricedJob, price
from tests.exec.launch.test_run_directory import files_of_at_most
from tests.exec.runs import (
    calm_run,
    events_of,
    job,
    lines_of,
    live_workers,
    of_kind,
    processes_writing_below,
)
from tests.exec.sharded import calm_course, require_equal, stored
from tests.waiting import until
from tests.warm import start_recycle

EVERY = {"checkpoint_every": 3, "checkpoint_keep": 9}
PLANNER = {"seconds": 1.0, "ahead": 0}
WHOLE_STAGE = ("kill:0.1@{}", "kill:1.1@{}", "kill:2.1@{}")


def assert_same_course(run: Path, config: PricedJob):
    """Losses, norms, and the last checkpoint are those of the job without faults, to the last bit."""
    lines = lines_of(run, "metrics")
    metrics, state = calm_course(config, len(lines))
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in lines] == metrics
    require_equal(stored(checkpoint.verify(folder_of(run / "checkpoints", len(lines) - 1)).folder), state)


def copy_of(calm: RunResult, tmp_path: Path) -> Path:
    """Copy a run's directory, to resume it."""
    return Path(shutil.copytree(calm.directory, tmp_path / "run"))


def gpt(pipelines=3, ranks=2, micro_batches=2) -> PricedJob:
    """Six layers for any number of ranks, with clipped gradients and staggered steps in turn."""
    model = {"layers": 6, "hidden": 32, "heads": 2, "sequence": 16}
    return job(
        pipelines,
        ranks,
        micro_batches,
        kind="gpt",
        model=model,
        train={**EVERY, "clip": 1.0, "steps": 8},
        planner=PLANNER,
    )


@pytest.fixture
def part(launch, tmp_path):
    """A GPT, trained for 4 steps; its last checkpoint has step 3."""
    return copy_of(calm_run(gpt(), launch, 4, in_processes=True), tmp_path)


@pytest.mark.parametrize("shape", [(2, 3, 3), pytest.param((3, 2, 2), marks=pytest.mark.soak)])
def test_gpt_resumed_in_any_shape_has_the_bits_of_the_uninterrupted_run(shape, part, launch):
    resumed = gpt(*shape)
    result = launch(resumed, 8, directory=part, resume=True)
    assert_same_course(part, gpt())
    lines = lines_of(part, "metrics")
    assert max(line["grad_norm"] for line in lines) > resumed.train.clip
    assert result.metrics == lines
    assert price(Job.load(part / "job.toml")) == resumed
    assert [event["step"] for event in events_of(part, "restored")] == [4]
    assert events_of(part, "warning") == []
    assert (part / "trace.json").exists()
    assert (part / "earlier" / "0" / "logs").exists() == (shape != (3, 2, 2))
    times, generations = ([line[key] for line in lines] for key in ("time", "generation"))
    assert times == sorted(times)
    assert generations == sorted(generations)
    assert generations[3] < generations[4]


def test_gpt_that_loses_a_stage_continues_from_the_checkpoint_to_the_same_bits(part, launch):
    result = launch(gpt(), 8, *(kill.format(5) for kill in WHOLE_STAGE), directory=part, resume=True)
    assert_same_course(part, gpt())
    restored = events_of(part, "restored")
    assert restored[-1]["live"] == ["0.0", "0.1", "1.0"]
    assert restored[-1]["step"] in (4, 6)
    assert live_workers(result)[-1] == 3
    assert result.digests["0.1"].keys() == {1}


def small(**train) -> PricedJob:
    return job(3, 2, 2, train={**EVERY, **train}, planner=PLANNER)


@pytest.fixture
def begun(launch, tmp_path):
    """A run of 5 steps, with a checkpoint of step 4."""
    return copy_of(calm_run(small(), launch, 5, in_processes=True), tmp_path)


def add_steps(run: Path):
    """Steps after the checkpoint, and incomplete lines."""
    last = lines_of(run, "metrics")[-1]
    with (run / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(last | {"step": step, "loss": 99.0}) + "\n" for step in (5, 6, 7))
        stream.write('{"step": 8, "lo')
    with (run / "events.jsonl").open("a") as stream:
        stream.write('{"time": 1, "ki')


def damage_checkpoint(run: Path):
    path = folder_of(run / "checkpoints", 4) / "stage-0001-1-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def leave_out_metrics(run: Path, begin=3, end=4):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:begin] + lines[end:]))


@pytest.mark.parametrize(
    ("harm", "steps", "warnings"),
    [
        (add_steps, [0, 1, 2, 3, 4], []),
        (damage_checkpoint, [0, 1, 2], ["stage-0001-1-of-1.safetensors: cut off"]),
        (leave_out_metrics, [0, 1, 2], ["metrics.jsonl is whole up to step 2 only"]),
    ],
)
def test_damaged_run_resumes_from_its_newest_complete_checkpoint(harm, steps, warnings, begun):
    harm(begun)
    point = find_resume_point(begun, small(), 12, None)
    assert [line["step"] for line in point.metrics] == steps
    assert point.checkpoint.manifest.step == steps[-1]
    assert len(point.warnings) == len(warnings)
    assert all(says in message for says, message in zip(warnings, point.warnings, strict=True))


def test_steps_after_the_checkpoint_are_trained_again(begun, launch):
    add_steps(begun)
    damage_checkpoint(begun)
    launch(small(), 9, directory=begun, resume=True)
    assert_same_course(begun, small())
    assert [event["step"] for event in events_of(begun, "restored")] == [3]
    assert len(events_of(begun, "warning")) == 1


@pytest.mark.parametrize(
    "damaged", [{"step": 2, "loss": 0.5}, {"step": 2, "loss": 0.5, "mode": "x"}, {"mode": "barrier"}]
)
def test_metrics_count_up_to_a_damaged_line(damaged, tmp_path):
    lines = [{"step": step, "time": 1.0, "loss": None, "mode": "barrier"} for step in range(4)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], damaged, *lines[2:]]))
    assert whole_metrics(path) == lines[:2]


def test_time_of_a_resumed_run_continues_after_the_last_evaluation(tmp_path):
    (tmp_path / "job.toml").write_text(small().to_toml())
    line = {"step": 0, "time": 4.0, "loss": 1.0, "mode": "barrier", "eval_seconds": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    earlier = find_script_part(tmp_path)
    assert earlier is not None
    assert earlier.seconds == 4.5


def test_refused_resume_changes_nothing(begun, launch, tmp_path):
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    cases = [
        (small(), 5, begun, "is finished, it has all 5 steps"),
        (small(), 4, begun, "has 5 steps, more than 4"),
        (job(3, 2, 3, train=EVERY), 12, begun, r"another model, batch or optimizer, .*\(D\*m\) is 9, there 6"),
        (job(2, 3, 3, train=EVERY), 12, begun, r"another model, batch or optimizer, .*layers is 6, there 4"),
        (small(), 12, tmp_path / "nowhere", "no such run directory"),
        (small(), 12, begun / "plans", "is not a run directory, job.toml is missing"),
    ]
    for other, steps, directory, says in cases:
        with pytest.raises(JobError, match=says):
            launch(other, steps, directory=directory, resume=True)
    with pytest.raises(JobError, match="holds a run already"):
        launch(small(), 12, directory=begun)
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before
    manifests = sorted((begun / "checkpoints").glob("*/manifest.json"))
    assert len(manifests) == 2
    for manifest in manifests:
        manifest.write_text("{")
    with pytest.raises(JobError) as refused:
        launch(small(), 12, directory=begun, resume=True)
    assert all(manifest.parent.name in str(refused.value) for manifest in manifests)
    shutil.rmtree(begun / "checkpoints")
    with pytest.raises(JobError, match="has no complete checkpoint to resume from"):
        launch(small(), 12, directory=begun, resume=True)


def test_run_directory_is_locked(begun, launch, tmp_path):
    opened = RunDirectory(tmp_path / "other", small())
    opened.metric({"step": 0})
    shutil.copytree(begun / "checkpoints", tmp_path / "other" / "checkpoints")
    shutil.copy(begun / "metrics.jsonl", tmp_path / "other" / "metrics.jsonl")
    for steps in (12, 1):  # also with fewer than it has
        with pytest.raises(JobError, match="is in use by another"):
            launch(small(), steps, directory=tmp_path / "other", resume=True)
    opened.close()


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({}, ["[data] samples", "samples = 72"]),
        ({"samples": 120}, ["[data] samples", "samples = 72"]),
        ({"samples": 72, "seed": 3}, ["[data] seed"]),
        ({"samples": 72, "split": "1"}, ["[data] split"]),
        ({"samples": 72}, ["[data] path"]),
        ({"samples": 72, "end_of_document": 5, "mask_loss": True}, []),
    ],
)
def test_resume_with_another_order_of_samples_names_the_key(keys, names, begun):
    """The run started with the samples of 12 steps; the job has 20, and its data another digest."""
    data = {"kind": "gpt-dataset", "path": "a"}
    (begun / "job.toml").write_text(job(3, 2, 2, data=data, train={**EVERY, "steps": 12}).to_toml())
    longer = job(3, 2, 2, data=data | keys, train={**EVERY, "steps": 20})
    if not names:
        assert find_resume_point(begun, longer, 12, "another digest").warnings
        return
    with pytest.raises(JobError) as refused:
        find_resume_point(begun, longer, 12, "another digest")
    assert all(name in str(refused.value) for name in names)


def test_next_launcher_continues_after_a_killed_one(launch, tmp_path):
    slow = job(3, 2, 2, train=EVERY, model={"seconds_per_unit": 0.004}, planner=PLANNER)
    (tmp_path / "job.toml").write_text(slow.to_toml())
    with (tmp_path / "output").open("wb") as output:
        launcher = start_recycle(("train", "job.toml", "--steps", "12", "--run", "run"), tmp_path, output)
    until(lambda: "is complete" in (tmp_path / "output").read_text(), 120.0)
    launcher.kill()
    assert launcher.wait(30) == -signal.SIGKILL
    launch(slow, 12, directory=tmp_path / "run", resume=True)
    assert_same_course(tmp_path / "run", small())


@pytest.mark.parametrize("is_written", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_pending_evaluation_is_repeated_when_the_run_resumes(is_written, launch, tmp_path):
    """The step's line is written with its evaluation, after the checkpoint."""
    evaluated = job(3, 2, 2, train={**EVERY, "clip": 1e9}, planner=PLANNER, eval={"every": 3, "batches": 2})
    calm, run = calm_run(evaluated, launch, 9), tmp_path / "run"
    launch(evaluated, 6, directory=run)
    if not is_written:
        leave_out_metrics(run, 5, 6)
    resumed = launch(evaluated, 9, directory=run, resume=True)
    assert lines_of(run, "metrics") == resumed.metrics
    assert sorted(calm.evaluations) == [2, 5, 8]
    assert (resumed.losses, resumed.evaluations, resumed.digests) == (calm.losses, calm.evaluations, calm.digests)
    assert [event["step"] for event in events_of(run, "restored")] == [6]
    assert events_of(run, "warning") == []


class FullDisk(Observer):
    """Workers can write no longer files than this."""

    def __init__(self, logs: Path, workers: int, most: int):
        self._logs, self._workers, self._most = str(logs), workers, most

    def waiting(self, what: str):
        until(lambda: len(processes_writing_below(self._logs)) == self._workers)
        for pid in processes_writing_below(self._logs):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._most, self._most))


def test_training_continues_on_a_full_disk_with_warnings(launch, servers, tmp_path):
    """Files may be a little shorter than a manifest: too short for the trace, the metrics, the events and manifests,
    which name the files of six stages and so are longer than the job."""
    stages, directory = job(1, 6, 2, train=EVERY, planner=PLANNER), tmp_path / "run"
    calm = launch(stages, 12, directory=tmp_path / "calm")  # it also leaves no module that is compiled later
    most = (tmp_path / "calm" / "checkpoints" / "step-00000011" / "manifest.json").stat().st_size - 100
    more = {"planner": plan_for_training, "server": servers["emulated"]}
    with files_of_at_most(most):
        run = train(stages, directory, steps=12, observer=FullDisk(directory / "logs", 6, most), **more)
    assert run.losses == calm.losses
    messages = "\n".join(event["message"] for event in of_kind(run, "warning"))
    assert "the trace has gaps" in messages
    assert "metrics.jsonl: cannot be written (File too large)" in messages
    assert "no trace.json" in messages
    assert of_kind(run, "checkpoint")[-1]["error"]
    assert checkpoint.newest(directory / "checkpoints", lambda _: None) is None


@pytest.mark.parametrize("shape", [Shape(3, 2, 4), Shape(3, 3, 1)], ids=str)
def test_reassigned_workers_are_balanced_with_the_fewest_moves(shape):
    workers = list(shape.workers())
    assert reassign(shape, workers[: shape.ranks - 1]) is None
    for count in range(shape.ranks, len(workers) + 1):
        for live in combinations(workers, count):
            assigned = reassign(shape, live)
            assert len(set(assigned)) == count
            hosts, before = (
                [sum(w.rank == rank for w in each) for rank in range(shape.ranks)] for each in (assigned, live)
            )
            assert min(hosts) >= 1
            assert max(hosts) - min(hosts) <= 1
            moves = sum(max(0, after - old) for after, old in zip(hosts, before, strict=True))
            assert len(set(assigned) - set(live)) == moves
