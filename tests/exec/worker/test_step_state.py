"""Steps of a worker's stages: ahead of commits, undone, caught up; and snapshots that hosts compare."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from recycle import RunError, Worker
from recycle.exec.checksums import Checksum
from recycle.exec.emulation import EmulatedStage
from recycle.exec.leader.commit import Comparison
from recycle.exec.model import integrity
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import RunningChecksum
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Commit
from recycle.exec.worker import snapshots
from recycle.exec.worker.local_stages import LocalStages
from recycle.exec.worker.snapshots import StateCopy
from recycle.exec.worker.step_state import StepState
from tests.exec.drive import build_pipeline, run_pipelines, small_job
from tests.exec.runs import job
from tests.exec.sharded import sharded
from tests.waiting import until

GPT = small_job(1, 2, 2, model={"layers": 2, "hidden": 32})
EMULATED = small_job(1, 2, 2)


def commit(step: int, clip_factor: float | None = 1.0) -> Commit:
    return Commit(step, 1.0, 0.5, clip_factor)


def pipeline(kind: str) -> list[Stage]:
    if kind == "emulated":
        return [EmulatedStage(EMULATED, index, scale=0.0) for index in (0, 1)]
    return list(build_pipeline(GPT))


def updates_of(stages: Sequence[Stage], **options) -> StepState:
    return StepState(dict(enumerate(stages)), **options)


def train(stages: Sequence[Stage], updates: StepState, step: int):
    """The gradients of one iteration."""
    run_pipelines([stages], step, 2)
    updates.mark_reduced(step)


def iterate(stages: Sequence[Stage], updates: StepState, step: int, ahead=False):
    """One iteration and its steps."""
    train(stages, updates, step)
    for index in (0, 1):
        if ahead:
            updates.step_ahead(index, step)
        else:
            updates.step(index, commit(step))


def digests(stages: Sequence[Stage]) -> list[dict[int, str]]:
    return [stage.digests() for stage in stages]


@pytest.fixture(params=["emulated", "gpt"])
def kind(request):
    return request.param


def trained(kind: str, steps: int) -> list[list[dict[int, str]]]:
    """Digests after each step, if all steps wait for their commits."""
    stages = pipeline(kind)
    updates, after = updates_of(stages), [digests(stages)]
    for step in range(steps):
        iterate(stages, updates, step)
        after.append(digests(stages))
    return after


class LatestCopies:
    """A stream whose copies run as late as a GPU's may: when other work waits for them."""

    def __init__(self, stages: Sequence[Stage]):
        self._queued = []

    def follow(self):
        return

    def copy(self, target: torch.Tensor, source: torch.Tensor):
        target.view(torch.uint8).fill_(0xFF)  # NaN, whatever the bytes stand for
        self._queued.append((target, source))

    def settle(self):
        for target, source in self._queued:
            target.copy_(source)
        self._queued.clear()

    def mark(self) -> Callable[[], None]:
        return self.settle


class EarliestCopies(LatestCopies):
    """A stream whose copies read their source as it was at the last `follow`."""

    def __init__(self, stages: Sequence[Stage]):
        self._stages = stages
        self._seen = {}

    def follow(self):
        storages = [tensor.untyped_storage() for stage in self._stages for tensor in stage.state_tensors()]
        self._seen = {storage.data_ptr(): storage.clone() for storage in storages}

    def copy(self, target: torch.Tensor, source: torch.Tensor):
        seen = torch.empty(0, dtype=source.dtype)
        seen.set_(
            self._seen[source.untyped_storage().data_ptr()], source.storage_offset(), source.shape, source.stride()
        )
        target.copy_(seen)

    def settle(self):
        return


@pytest.mark.parametrize("copies", [None, LatestCopies, EarliestCopies])
def test_step_ahead_equals_the_committed_step_and_undo_restores_every_bit(kind, copies):
    expected = trained(kind, 3)
    assert len(set(map(str, expected))) == 4
    stages = pipeline(kind)
    updates = updates_of(stages, stream=copies and copies(stages))
    for step in range(3):
        for _ in range(2):
            iterate(stages, updates, step, ahead=True)
            assert digests(stages) == expected[step + 1]
            assert updates.stages_ahead(step - 1) == [0, 1]
            updates.roll_to(step - 1, commit(step - 1) if step else None)
            assert digests(stages) == expected[step]
            assert updates.stages_ahead(step - 1) == []
        iterate(stages, updates, step, ahead=True)
        updates.begin_iteration(step + 1)


def test_stage_behind_the_commit_steps_with_its_reduced_gradient(kind):
    expected = trained(kind, 1)
    stages = pipeline(kind)
    updates = updates_of(stages)
    train(stages, updates, 0)
    updates.step_ahead(1, 0)
    updates.roll_to(0, commit(0))
    assert digests(stages) == expected[1]


def test_skipped_step_counts_and_changes_nothing(kind):
    stages = pipeline(kind)
    updates = updates_of(stages)
    before = digests(stages)
    train(stages, updates, 0)
    updates.roll_to(0, commit(0, None))
    assert digests(stages) == before
    updates.roll_to(0, commit(0, None))


def test_stage_without_its_gradient_cannot_catch_up():
    stages = pipeline("emulated")
    updates = updates_of(stages)
    with pytest.raises(RunError, match="stage 0 is at iteration -1, the register at 0"):
        updates.roll_to(0, commit(0))
    updates.mark_copied(4)
    updates.roll_to(4, commit(4))
    with pytest.raises(RunError, match="stage 0 is at iteration 4, the register at 6"):
        updates.roll_to(6, commit(6))


def test_main_thread_reports_a_device_that_fails_during_an_early_copy(monkeypatch):
    stages, raised = pipeline("emulated"), []
    failed = threading.Event()

    def piece(_):
        failed.set()
        raise RuntimeError("accelerator error")

    monkeypatch.setattr(StateCopy, "piece", piece)
    hook, threading.excepthook = threading.excepthook, raised.append
    try:
        updates = updates_of(stages, known_commit=lambda step: replace(commit(step), next_mode="staggered"))
        copying = threading.enumerate()[-1]
        updates.begin_iteration(1)
        updates.set_waiting(True)
        assert failed.wait(60)
        copying.join(60)
        assert not copying.is_alive()
    finally:
        threading.excepthook = hook
    assert raised == []


@pytest.mark.parametrize("mode", ["staggered", "barrier"])
def test_waits_copy_the_committed_state_and_the_step_copies_the_rest(mode, monkeypatch):
    known, copied, copy_piece = {}, [], StateCopy.piece

    def piece(copy):
        copied.append(copy)
        time.sleep(0.001)
        return copy_piece(copy)

    monkeypatch.setattr(snapshots, "piece_of_step", lambda device: 256)
    monkeypatch.setattr(StateCopy, "piece", piece)
    stages = pipeline("gpt")
    updates = updates_of(stages, known_commit=known.get)
    iterate(stages, updates, 0, ahead=True)
    after = digests(stages)
    copied.clear()
    updates.begin_iteration(1)
    updates.set_waiting(True)
    time.sleep(0.05)
    assert not copied
    known[0] = replace(commit(0), next_mode=mode)
    if mode == "staggered":
        until(lambda: copied)
    else:
        time.sleep(0.1)
    updates.set_waiting(False)
    assert bool(copied) == (mode == "staggered"), "a step after its own commit is never undone"
    iterate(stages, updates, 1, ahead=True)
    assert digests(stages) != after
    updates.roll_to(0, known[0])
    assert digests(stages) == after


def test_undo_fits_changed_shards():
    parts = sharded(job(3, 2, 2, model={"layers": 6}))
    stages = [EmulatedStage(parts, index, scale=0.0) for index in (0, 1)]
    shards = stages[0].layout
    updates = StepState({0: stages[0]})
    shards.own([0, 1])
    for step, owned in enumerate(([0, 1], [1], [0, 1, 2])):
        if step:
            updates.mark_resharded()
            shards.own(owned)
            shards.keep_only(owned)
        before = stages[0].digests()
        assert sorted(before) == owned
        train(stages, updates, step)
        updates.step_ahead(0, step)
        assert all(stages[0].digests()[number] != text for number, text in before.items())
        updates.roll_to(step - 1, commit(step - 1) if step else None)
        assert stages[0].digests() == before
        updates.step(0, commit(step))


@pytest.fixture(params=["emulated", pytest.param("gpt", marks=pytest.mark.slow)])
def stages(request):
    return pipeline(request.param)


def sums_of(stages: Sequence[Stage]) -> dict[int, Checksum]:
    return {index: RunningChecksum(stages[index].state_tensors()).finish() for index in (0, 1)}


@pytest.mark.parametrize("copies", [LatestCopies, EarliestCopies])
def test_each_of_the_last_two_snapshots_can_be_restored(stages, copies):
    updates, after = updates_of(stages, stream=copies(stages)), {-1: digests(stages)}
    for step in range(6):
        if step % 2 == 0:
            updates.compare_state(Comparison(step - 1))
            sums = updates.checksums()
            assert sums == sums_of(stages)
        iterate(stages, updates, step)
        after[step] = digests(stages)
    assert len(set(map(str, after.values()))) == 7
    updates.roll_to(3, commit(3), restores=True)
    assert digests(stages) == after[3]
    updates.roll_to(1, commit(1), restores=True)
    assert digests(stages) == after[1]
    for step in (2, 3):
        iterate(stages, updates, step)
        assert digests(stages) == after[step]
    with pytest.raises(RunError, match=r"this worker has no snapshot after step -1"):
        updates.roll_to(-1, None, restores=True)


def test_restored_snapshot_restores_its_layers():
    hosted = LocalStages(Worker(0, 0), partial(build_stages, job(1, 2, 2)), (), [0, 1])
    updates = StepState(hosted.stages, hosted=hosted)

    def run(step):
        train(list(hosted.stages.values()), updates, step)
        updates.roll_to(step, commit(step))

    def compared(step):
        updates.compare_state(Comparison(step))
        return [checksum.words for _, checksum in sorted(updates.checksums().items())]

    given, initial = hosted.layout, compared(-1)
    run(0)
    hosted.place((1, 2, 1), [0, 1, 2])
    updates.mark_rehosted(0)
    hosted.confirm()
    compared(0)
    run(1)
    assert [updates.planned_transition(step, True) for step in (0, -1)] == ["undo", "rehost"]
    updates.roll_to(-1, None, restores=True)
    assert hosted.layout == given
    assert hosted.missing() == set()
    assert compared(-1) == initial


def test_stage_is_copied_before_its_step(stages):
    updates = updates_of(stages)
    before = sums_of(stages)
    train(stages, updates, 0)
    updates.compare_state(Comparison(-1))
    updates.step_ahead(0, 0)
    assert updates.checksums() == before
    updates.step_ahead(1, 0)
    assert updates.checksums() == before


def test_incomplete_snapshot_is_discarded_with_its_generation(stages, monkeypatch):
    monkeypatch.setattr(integrity, "PIECE", 64)
    updates, before = updates_of(stages), digests(stages)
    updates.compare_state(Comparison(-1))
    train(stages, updates, 0)
    updates.step_ahead(0, 0)
    updates.roll_to(-1, None)
    assert digests(stages) == before
    assert updates.all_at(-1)
    updates.compare_state(Comparison(-1))
    assert updates.checksums() == sums_of(stages)


def test_waits_compare_the_committed_state(stages):
    known = {}
    updates = updates_of(stages, known_commit=known.get)
    iterate(stages, updates, 0)
    expected = sums_of(stages)
    updates.begin_iteration(1)
    updates.compare_during_waits(Comparison(0))
    updates.set_waiting(True)
    assert not updates.snapshots.checksums
    known[0] = replace(commit(0), next_mode="barrier")
    done = threading.Event()
    for _ in range(60_000):
        if not updates._is_due:
            break
        done.wait(0.001)
    updates.set_waiting(False)
    assert not updates._is_due
    assert not updates.snapshots.process_piece()
    assert updates.checksums() == expected
