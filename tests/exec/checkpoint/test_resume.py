"""Runs that go on from a checkpoint: after a whole stage died, after the launcher ended, in another shape."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recycle import Job, JobError, RunError
from recycle.cli.planner import plan_for_training
from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import folder_of
from recycle.exec.checkpoint.resume import find_earlier
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.dials import Observer
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.processes.forkserver import ForkServer
from recycle.job import price
from tests.exec.runs import job, kinds, processes_writing_below

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("resume")]

EVERY = {"checkpoint_every": 3, "checkpoint_keep": 9}
PLANNER = {"seconds": 1.0, "ahead": 0}
COMMAND = [sys.executable, "-c", "from recycle.cli import main; main()", "train"]


@pytest.fixture(scope="module")
def launch(servers: dict[str, ForkServer]) -> Any:
    def run(
        of: Job, steps: int, directory: Path, *faults: str, resume: bool = False, observer: Observer | None = None
    ) -> RunResult:
        return train(
            of,
            directory,
            steps=steps,
            faults=[parse_fault(fault) for fault in faults],
            planner=plan_for_training,
            server=servers[of.model.kind],
            resume=resume,
            observer=observer,
        )

    return run


def state(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """All parameters, moments and counts of a run's checkpoint, by their names in the whole model."""
    folder = checkpoint.verify(folder_of(directory / "checkpoints", step)).folder
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_state(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(directory)]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def gpt(pipelines: int, ranks: int, micro_batches: int) -> Job:
    """Six layers whatever the ranks, with gradients that are clipped and steps that are staggered in turn."""
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


@pytest.fixture(scope="module")
def whole(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT trained for 8 steps without interruption."""
    directory = tmp_path_factory.mktemp("whole")
    launch(gpt(3, 2, 4), 8, directory)
    return directory


@pytest.fixture(scope="module")
def part(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, ended after 4 steps; its last checkpoint is of step 3."""
    directory = tmp_path_factory.mktemp("part")
    launch(gpt(3, 2, 4), 4, directory)
    return directory


@pytest.mark.parametrize(
    ("pipelines", "ranks", "micro_batches"),
    [(2, 3, 6), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((3, 2, 4), (1, 1, 12)))],
)
def test_a_gpt_resumed_in_any_shape_has_the_losses_and_the_state_of_the_run_that_was_not_interrupted(
    pipelines: int, ranks: int, micro_batches: int, whole: Path, part: Path, launch: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(part, run)
    of = gpt(pipelines, ranks, micro_batches)
    result = launch(of, 8, run, resume=True)
    assert losses(run) == losses(whole)
    assert [line["grad_norm"] for line in metrics(run)] == [line["grad_norm"] for line in metrics(whole)]
    assert max(line["grad_norm"] for line in metrics(run)) > of.train.clip
    assert result.metrics == metrics(run)
    assert_same_state(state(run, 7), state(whole, 7))
    assert price(Job.load(run / "job.toml")) == of
    assert [event["step"] for event in events(run, "restored")] == [4]
    assert events(run, "warning") == []
    assert (run / "trace.json").exists()
    assert (run / "earlier" / "0" / "logs").exists() == ((pipelines, ranks) != (3, 2))
    times = [line["time"] for line in metrics(run)]
    assert times == sorted(times)
    generations = [line["generation"] for line in metrics(run)]
    assert generations == sorted(generations)
    assert generations[3] < generations[4]


def test_a_gpt_that_loses_a_whole_stage_goes_on_with_those_left_to_the_same_bits(
    whole: Path, part: Path, launch: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(part, run)
    result = launch(gpt(3, 2, 4), 8, run, "kill:0.1@5", "kill:1.1@5", "kill:2.1@5", resume=True)
    assert losses(run) == losses(whole)
    assert_same_state(state(run, 7), state(whole, 7))
    restored = events(run, "restored")
    assert restored[-1]["live"] == ["0.0", "0.1", "1.0"]
    assert restored[-1]["step"] in (4, 6)
    assert metrics(run)[-1]["live_workers"] == 3
    assert result.digests["0.1"].keys() == {1}


def small(**train: Any) -> Job:
    return job(3, 2, 2, train={**EVERY, **train}, planner=PLANNER)


@pytest.fixture(scope="module")
def emulated(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 emulated steps without interruption."""
    directory = tmp_path_factory.mktemp("emulated")
    launch(small(), 12, directory)
    return directory


@pytest.fixture
def begun(emulated: Path, tmp_path: Path, launch: Any) -> Path:
    """A copy of a run of 5 steps, with a checkpoint of step 4."""
    directory = emulated.parent / "begun"
    if not directory.exists():
        launch(small(), 5, directory)
    return Path(shutil.copytree(directory, tmp_path / "run"))


@pytest.mark.soak
def test_a_stage_lost_twice_is_brought_back_twice_and_a_worker_that_returns_takes_part_again(
    begun: Path, emulated: Path, launch: Any
) -> None:
    first = ["kill:0.1@6", "kill:1.1@6", "kill:2.1@6"]
    run = launch(small(), 12, begun, *first, "rejoin:2.1@8", "kill:0.0@9", "kill:1.0@9", resume=True)
    assert losses(begun) == losses(emulated)
    assert_same_state(state(begun, 11), state(emulated, 11))
    assert [len(event["live"]) for event in events(begun, "restored")] == [6, 3, 2]
    assert kinds(run).count("rejoined") == 1
    assert run.metrics[-1]["live_workers"] == 2
    assert not processes_writing_below(str(begun))


def test_a_stage_lost_without_a_checkpoint_says_what_would_have_helped(launch: Any, tmp_path: Path) -> None:
    for every, says in ((0, "checkpoint_every is 0, which is never"), (6, "checkpoint_every is 6: the state is kept")):
        directory = tmp_path / str(every)
        with pytest.raises(RunError, match=rf"stage 1 has no live host left after step 3: .*{says}"):
            launch(
                job(2, 2, 2, train={"checkpoint_every": every}, planner=PLANNER),
                7,
                directory,
                "kill:0.1@2",
                "kill:1.1@4",
            )
        assert [step for step, _ in losses(directory)] == [0, 1, 2, 3]
        assert not processes_writing_below(str(directory))


def test_fewer_workers_than_ranks_end_the_run_with_the_command_that_goes_on(launch: Any, tmp_path: Path) -> None:
    of = job(2, 3, 2, train=EVERY, planner=PLANNER)
    launch(of, 4, tmp_path)
    # A step apart, since a worker that is killed while all are started anew from a checkpoint is started anew as well.
    deaths = ["kill:0.0@4", "kill:1.2@5", "kill:0.1@6", "kill:1.1@7"]
    with pytest.raises(RunError, match=r"stage 1 .*, and 2 live workers are too few for 3 ranks; .*--resume --run"):
        launch(of, 8, tmp_path, *deaths, resume=True)


def test_steps_behind_the_checkpoint_are_done_again_and_torn_lines_vanish(
    begun: Path, emulated: Path, launch: Any
) -> None:
    more = [json.dumps(line | {"loss": 99.0}) for line in metrics(emulated)[5:8]]
    with (begun / "metrics.jsonl").open("a") as stream:
        stream.write("\n".join(more) + '\n{"step": 8, "lo')
    with (begun / "events.jsonl").open("a") as stream:
        stream.write('{"time": 1, "ki')
    launch(small(), 12, begun, resume=True)
    assert losses(begun) == losses(emulated)
    assert len(events(begun, "restored")) == 1


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(begun: Path, emulated: Path, launch: Any) -> None:
    path = folder_of(begun / "checkpoints", 4) / "stage-0001-1-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    launch(small(), 12, begun, resume=True)
    assert losses(begun) == losses(emulated)
    assert [event["step"] for event in events(begun, "restored")] == [3]
    assert "stage-0001-1-of-1.safetensors: cut off" in events(begun, "warning")[0]["message"]


def test_a_hole_in_the_metrics_is_filled_from_an_older_checkpoint(begun: Path, emulated: Path, launch: Any) -> None:
    lines = (begun / "metrics.jsonl").read_text().splitlines(keepends=True)
    (begun / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))
    launch(small(), 12, begun, resume=True)
    assert losses(begun) == losses(emulated)
    assert "metrics.jsonl is whole up to step 2 only" in events(begun, "warning")[0]["message"]


def test_another_course_is_gone_on_with_and_said(begun: Path, launch: Any) -> None:
    launch(small(learning_rate=0.5), 6, begun, resume=True)
    assert [step for step, _ in losses(begun)] == list(range(6))
    assert [event["message"] for event in events(begun, "warning")] == [
        "the run goes on otherwise than it began: [train] learning_rate is 0.5, there 0.001"
    ]


def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(begun: Path, launch: Any, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    cases = [
        (small(), 5, begun, "is finished, it has all 5 steps"),
        (small(), 4, begun, "has 5 steps, more than 4"),
        (job(3, 2, 3, train=EVERY), 12, begun, r"another model or batch, .*\(D\*m\) is 9, there 6"),
        (job(2, 3, 3, train=EVERY), 12, begun, r"another model or batch, .*layers is 6, there 4"),
        (small(), 12, tmp_path / "nowhere", "there is no run directory to resume"),
        (small(), 12, begun / "plans", "holds no run to resume, job.toml is missing"),
    ]
    for of, steps, directory, says in cases:
        with pytest.raises(JobError, match=says):
            launch(of, steps, directory, resume=True)
    with pytest.raises(JobError, match="holds a run already"):
        launch(small(), 12, begun)
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before
    manifests = sorted((begun / "checkpoints").glob("*/manifest.json"))
    assert len(manifests) == 2
    for manifest in manifests:
        manifest.write_text("{")
    with pytest.raises(JobError) as refused:
        launch(small(), 12, begun, resume=True)
    assert all(manifest.parent.name in str(refused.value) for manifest in manifests)
    shutil.rmtree(begun / "checkpoints")
    with pytest.raises(JobError, match="holds no complete checkpoint to resume from"):
        launch(small(), 12, begun, resume=True)


def test_one_process_at_a_time_has_a_run_directory(begun: Path, launch: Any, tmp_path: Path) -> None:
    opened = RunDirectory(tmp_path / "other", small())
    opened.metric({"step": 0})
    shutil.copytree(begun / "checkpoints", tmp_path / "other" / "checkpoints")
    shutil.copy(begun / "metrics.jsonl", tmp_path / "other" / "metrics.jsonl")
    with pytest.raises(JobError, match="is in use by another"):
        launch(small(), 12, tmp_path / "other", resume=True)
    with pytest.raises(JobError, match="is in use by another"):
        launch(small(), 1, tmp_path / "other", resume=True)  # fewer steps than it has: that says nothing of its end
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
def test_a_resume_that_changes_the_order_of_samples_is_refused_and_names_the_key(
    keys: dict[str, Any], names: list[str], begun: Path
) -> None:
    """The run began with the samples of 12 steps; the job has 20 by now, and its data another digest."""
    data = {"kind": "gpt-dataset", "path": "a"}
    (begun / "job.toml").write_text(job(3, 2, 2, data=data, train={**EVERY, "steps": 12}).to_toml())
    of = job(3, 2, 2, data=data | keys, train={**EVERY, "steps": 20})
    if not names:
        assert find_earlier(begun, of, 12, "another digest").warnings
        return
    with pytest.raises(JobError) as refused:
        find_earlier(begun, of, 12, "another digest")
    assert all(name in str(refused.value) for name in names)


def test_a_launcher_that_is_killed_can_be_followed_by_another(emulated: Path, launch: Any, tmp_path: Path) -> None:
    of = job(3, 2, 2, train=EVERY, model={"seconds_per_unit": 0.004}, planner=PLANNER)
    (tmp_path / "job.toml").write_text(of.to_toml())
    command = [*COMMAND, "job.toml", "--steps", "12", "--run", "run"]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if "is complete" in line:
            break
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=30)
    assert launcher.returncode == -9
    launch(of, 12, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(emulated)
    assert_same_state(state(tmp_path / "run", 11), state(emulated, 11))


@pytest.mark.parametrize("left", [["metrics"], pytest.param([], marks=pytest.mark.soak)])
def test_a_run_that_ended_in_an_evaluation_is_evaluated_when_it_goes_on(
    left: list[str], launch: Any, tmp_path: Path
) -> None:
    """The step's line comes with its evaluation, and the checkpoint is there before."""
    of = job(3, 2, 2, train={**EVERY, "clip": 1e9}, planner=PLANNER, eval={"every": 3, "batches": 2})
    calm = launch(of, 9, tmp_path / "calm")
    assert sorted(calm.evaluations) == [2, 5, 8]
    run = tmp_path / "run"
    launch(of, 6, run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    if not left:
        (run / "metrics.jsonl").write_text("".join(lines[:5]))
    resumed = launch(of, 9, run, resume=True)
    assert metrics(run) == resumed.metrics
    assert resumed.losses == calm.losses
    assert resumed.evaluations == calm.evaluations
    assert resumed.digests == calm.digests
    assert [event["step"] for event in events(run, "restored")] == [6]
    assert events(run, "warning") == []


@pytest.mark.soak
def test_a_run_that_ended_in_its_last_evaluation_has_only_that_left_to_do(launch: Any, tmp_path: Path) -> None:
    of = job(3, 2, 2, train={**EVERY, "clip": 1e9}, planner=PLANNER, eval={"every": 3, "batches": 2})
    calm, run = launch(of, 6, tmp_path / "calm"), tmp_path / "run"
    shutil.copytree(tmp_path / "calm", run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    resumed = launch(of, 6, run, "kill:1.1@5.evaluation", resume=True)
    assert resumed.losses == calm.losses
    assert resumed.evaluations == calm.evaluations
    assert [event["kind"] for event in resumed.events].count("detected") == 1
    for worker, digests in resumed.digests.items():
        assert digests == calm.digests[worker]


def test_a_step_whose_evaluation_is_no_longer_asked_for_has_its_line_without(launch: Any, tmp_path: Path) -> None:
    sections = {"train": {**EVERY, "clip": 1e9}, "planner": PLANNER}
    of, run = job(3, 2, 2, **sections, eval={"every": 3}), tmp_path / "run"
    whole = launch(of, 6, run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    resumed = launch(job(3, 2, 2, **sections), 9, run, resume=True)
    assert resumed.losses[:6] == whole.losses
    assert [line["step"] for line in resumed.metrics] == list(range(9))
    assert sorted(resumed.evaluations) == [2]


def test_on_a_full_disk_training_goes_on_with_warnings(launch: Any, tmp_path: Path) -> None:
    """A file may be a little shorter than a manifest: too few for the trace, the metrics, the events and the manifests,
    which name the files of six stages and so are longer than the job."""
    of = job(1, 6, 2, train=EVERY, planner=PLANNER)
    calm = launch(of, 12, tmp_path / "calm")
    (tmp_path / "job.toml").write_text(of.to_toml())
    most = (tmp_path / "calm" / "checkpoints" / "step-00000011" / "manifest.json").stat().st_size - 100
    assert (tmp_path / "job.toml").stat().st_size <= most
    run = subprocess.run(
        [*COMMAND, "job.toml", "--steps", "12", "--run", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # which Python 3.11 would leave cut off
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )
    assert run.returncode == 0, run.stderr
    assert [line.split()[3] for line in run.stdout.splitlines() if line.startswith("step")] == [
        f"{loss:.6f}" for loss in calm.losses
    ]
    assert "warning: the trace has gaps" in run.stdout
    assert "metrics.jsonl: cannot be written (File too large)" in run.stdout
    assert "no checkpoint of step 11: " in run.stdout
    assert "warning: no trace.json" in run.stdout
    assert checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None) is None


class _Reaper(Observer):
    """Kills a worker's process while all of them start again from a checkpoint."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._starts = logs, 0

    def waiting(self, what: str) -> None:
        self._starts += 1
        deadline = time.monotonic() + 60.0
        while self._starts == 2:
            for pid in processes_writing_below(str(self._logs / "1.0.log")):
                os.kill(pid, signal.SIGKILL)
                return
            assert time.monotonic() < deadline


def test_a_worker_that_dies_while_all_start_from_a_checkpoint_is_left_out(
    begun: Path, emulated: Path, launch: Any
) -> None:
    lost = ["kill:0.1@6", "kill:1.1@6", "kill:2.1@6"]
    launch(small(), 12, begun, *lost, resume=True, observer=_Reaper(begun / "logs"))
    assert losses(begun) == losses(emulated)
    assert_same_state(state(begun, 11), state(emulated, 11))
    restored = [set(event["live"]) for event in events(begun, "restored")]
    assert [len(live) for live in restored] == [6, 3, 2]
