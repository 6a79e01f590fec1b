"""Checkpoints on disk: complete or skipped, without pickles, and readable by any split into stages."""

import json
import math
import os
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from recycle import Job, JobError
from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import Manifest
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Commit
from recycle.job.manifest import manifest_text
from tests.exec.drive import run_pipelines, small_job
from tests.warm import warm_context

pytestmark = pytest.mark.slow

JOB = small_job(1, 2, 2, model={"kind": "emulated", "layers": 2})
FACTS = Commit(0, 1.5, math.nan, None, recent=[0.25, math.nan])


def store(root: Path, job: Job, step: int, stages: Sequence[Stage]) -> Path:
    """Write a complete checkpoint of the stages as they are."""
    folder = checkpoint.folder_of(root, step)
    files = {}
    for stage in stages:
        files |= checkpoint.write_stage(folder, stage.index, "0.0", stage.named_state(stage.state_tensors()))
    commit = Commit(step, FACTS.loss, FACTS.grad_norm, None, recent=FACTS.recent)
    shape = job.shape.to_json()
    manifest = Manifest(step, commit, shape, checkpoint.identity(job), checkpoint.course(job, None), files)
    checkpoint.write_manifest(folder, manifest)
    return folder


@pytest.fixture
def stages():
    return [EmulatedStage(JOB, index) for index in (0, 1)]


@pytest.fixture
def root(tmp_path, stages):
    """Checkpoints of steps 4 and 9."""
    for step in (4, 9):
        store(tmp_path, JOB, step, stages)
    return tmp_path


def newest(root: Path) -> tuple[int | None, list[str]]:
    warnings = []
    complete = checkpoint.newest(root, warnings.append)
    return (None if complete is None else complete.manifest.step), warnings


def test_complete_checkpoint_has_every_float_of_its_commit(root):
    assert newest(root) == (9, [])
    commit = checkpoint.verify(checkpoint.folder_of(root, 9)).manifest.commit
    assert (commit.step, commit.loss, commit.clip_factor, commit.recent[0]) == (9, 1.5, None, 0.25)
    assert math.isnan(commit.grad_norm)
    assert math.isnan(commit.recent[1])
    names = ["manifest.json", "stage-0000-1-of-1.safetensors", "stage-0001-1-of-1.safetensors"]
    folder = checkpoint.folder_of(root, 9)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {folder.stat().st_mode & 0o666}


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, place=-3):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


DAMAGES = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "manifest cut off": (lambda folder: cut(folder / "manifest.json"), "manifest.json: damaged"),
    "manifest not of this kind": (
        lambda folder: (folder / "manifest.json").write_text("[1]"),
        "manifest.json: damaged",
    ),
    "bit of the manifest": (lambda folder: flip(folder / "manifest.json", 300), "manifest.json: damaged"),
    "file missing": (lambda folder: (folder / "stage-0001-1-of-1.safetensors").unlink(), "safetensors: missing"),
    "file cut off": (lambda folder: cut(folder / "stage-0000-1-of-1.safetensors"), r"cut off, \d+ bytes of \d+"),
    "bit of a file": (lambda folder: flip(folder / "stage-0000-1-of-1.safetensors"), "its content is not what"),
    "stray file": (lambda folder: (folder / "x.safetensors").write_bytes(b""), "does not name this file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_for_the_previous_one(damage, root):
    harm, says = DAMAGES[damage]
    harm(checkpoint.folder_of(root, 9))
    step, warnings = newest(root)
    assert step == 4
    assert len(warnings) == 1
    with pytest.raises(checkpoint.Damaged, match=says):
        checkpoint.verify(checkpoint.folder_of(root, 9))
    harm(checkpoint.folder_of(root, 4))
    assert newest(root)[0] is None
    assert len(newest(root)[1]) == 2


def test_newer_format_is_refused(root):
    path = checkpoint.folder_of(root, 9) / "manifest.json"
    body = json.loads(path.read_text())["manifest"] | {"version": 2, "surprise": []}
    path.write_text(manifest_text(body))
    with pytest.raises(JobError, match="has version 2, this recycle reads up to 1"):
        newest(root)


def test_loading_restores_every_bit_and_unpickles_nothing(root, stages, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    expected = [stage.digests() for stage in stages]
    for stage in stages:
        for tensor in stage.state_tensors():
            tensor.fill_(7)
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    checkpoint.load(checkpoint.folder_of(root, 9), stages)
    assert [stage.digests() for stage in stages] == expected


def test_large_state_is_written_in_several_files(tmp_path, stages, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART_BYTES", 64)
    folder = store(tmp_path, JOB, 1, stages)
    names = [f"stage-{stage:04d}-{part}-of-2.safetensors" for stage in (0, 1) for part in (1, 2)]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    expected = stages[1].digests()
    stages[1].state_tensors()[0].zero_()
    checkpoint.load(checkpoint.verify(folder).folder, stages)
    assert stages[1].digests() == expected


GPT = {"layers": 4, "hidden": 32, "heads": 2, "sequence": 16}


def course(job: Job):
    return checkpoint.course(job, None)


def train(stages: Sequence[Stage], step: int) -> tuple[float, float]:
    """One iteration; its loss, and its squared global norm as a commit adds it up."""
    loss = run_pipelines([stages], step, 2)
    norm = math.fsum(part for stage in stages for part in stage.gradient_norms_squared())
    for stage in stages:
        stage.step(step, min(1.0, 0.5 / math.sqrt(norm)))
    return loss, norm


@pytest.mark.parametrize(
    ("facts", "changed", "expected"),
    [
        (checkpoint.identity, {"model": {"hidden": 64}}, ["[model] hidden is 64, there 32"]),
        (checkpoint.identity, {"train": {"precision": "bf16"}}, ["[train] precision is bf16, there fp32"]),
        (checkpoint.identity, {"model": {"recompute": "full"}, "train": {"clip": 9.0}}, []),
        (checkpoint.identity, {"model": {"config": {"transformer_impl": "local"}}}, []),
        (course, {"train": {"steps": 31, "checkpoint_every": 3}}, ["[train] steps is 31, there 30"]),
        (course, {"train": {"learning_rate": 0.5}}, ["[train] learning_rate is 0.5, there 0.001"]),
        (course, {"data": {"seed": 2}}, ["[data] seed is 2, there 0"]),
    ],
)
def test_identity_and_course_name_what_the_state_and_the_next_losses_depend_on(facts, changed, expected):
    sections = {"model": GPT | changed.pop("model", {}), **changed}
    assert (
        checkpoint.differences(facts(small_job(1, 4, 4, **sections)), facts(small_job(2, 2, 2, model=GPT))) == expected
    )


def write_until_killed(root: Path, places: int):
    """Write a checkpoint of step 11 in a process that is killed as it puts its file number `places` in place."""
    put = os.replace

    def replace(source, target):
        nonlocal places
        places -= 1
        if not places:
            os.kill(os.getpid(), signal.SIGKILL)
        put(source, target)

    os.replace = replace
    store(root, JOB, 11, [EmulatedStage(JOB, index) for index in (0, 1)])


@pytest.mark.process
@pytest.mark.parametrize("places", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_killed_writer_leaves_the_previous_checkpoint(places, root, stages):
    """The next attempt at the same step is complete."""
    writer = warm_context().Process(target=write_until_killed, args=(root, places))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    step, warnings = newest(root)
    assert step == 9
    assert [text.rpartition(": ")[2] for text in warnings] == ["incomplete, it has no manifest.json"]
    store(root, JOB, 11, stages)
    assert newest(root) == (11, [])
