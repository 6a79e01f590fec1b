"""Steps of a worker's stages: taken ahead, taken back bit for bit, caught up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from recycle import RunError
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.stage import Stage
from recycle.exec.model.state.layouts import Shards
from recycle.exec.protocol import Commit, StepMode
from recycle.exec.worker import kept_states
from recycle.exec.worker.kept_states import StateCopy
from recycle.exec.worker.updates import Updates
from tests.exec.drive import build_pipeline, run_pipelines, small_job
from tests.exec.runs import job
from tests.exec.sharded import sharded

GPT = small_job(1, 2, 2, model={"layers": 2, "hidden": 32})
EMULATED = small_job(1, 2, 2)


def commit(step: int, clip_factor: float | None = 1.0) -> Commit:
    return Commit(step, 1.0, 0.5, clip_factor)


def pipeline(kind: str) -> list[Stage]:
    if kind == "emulated":
        return [EmulatedStage(EMULATED, index, scale=0.0) for index in (0, 1)]
    return list(build_pipeline(GPT))


def updates_of(stages: Sequence[Stage]) -> Updates:
    return Updates(dict(enumerate(stages)))


def train(stages: Sequence[Stage], updates: Updates, step: int) -> None:
    """The gradients of one iteration."""
    run_pipelines([stages], step, 2)
    updates.reduced(step)


def step_ahead(updates: Updates, step: int) -> None:
    for index in (0, 1):
        updates.step_ahead(index, step)


def digests(stages: Sequence[Stage]) -> list[str]:
    return [stage.state_digest() for stage in stages]


@pytest.fixture(params=["emulated", "gpt"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def trained(kind: str, steps: int) -> list[str]:
    """Digests after each of the steps, all of which waited for their commits."""
    stages = pipeline(kind)
    updates = updates_of(stages)
    after = [" ".join(digests(stages))]
    for step in range(steps):
        train(stages, updates, step)
        for index in (0, 1):
            updates.step(index, commit(step))
        after.append(" ".join(digests(stages)))
    return after


def test_a_step_ahead_is_that_of_the_commit_and_undo_restores_every_bit_again_and_again(kind: str) -> None:
    expected = trained(kind, 3)
    assert len(set(expected)) == 4
    stages = pipeline(kind)
    updates = updates_of(stages)
    for step in range(3):
        for _ in range(2):
            train(stages, updates, step)
            step_ahead(updates, step)
            assert " ".join(digests(stages)) == expected[step + 1]
            assert updates.ahead(step - 1) == [0, 1]
            updates.settle(step - 1, commit(step - 1) if step else None)
            assert " ".join(digests(stages)) == expected[step]
            assert updates.ahead(step - 1) == []
        train(stages, updates, step)
        step_ahead(updates, step)


def test_a_stage_that_is_behind_steps_from_its_reduced_gradient_while_its_neighbour_stays(kind: str) -> None:
    expected = trained(kind, 1)
    stages = pipeline(kind)
    updates = updates_of(stages)
    train(stages, updates, 0)
    updates.step_ahead(1, 0)
    updates.settle(0, commit(0))
    assert " ".join(digests(stages)) == expected[1]


def test_a_step_that_a_commit_skips_counts_and_changes_nothing(kind: str) -> None:
    stages = pipeline(kind)
    updates = updates_of(stages)
    before = digests(stages)
    train(stages, updates, 0)
    updates.settle(0, commit(0, None))
    assert digests(stages) == before
    updates.settle(0, commit(0, None))


def test_a_stage_whose_gradient_is_gone_cannot_catch_up() -> None:
    stages = pipeline("emulated")
    updates = updates_of(stages)
    with pytest.raises(RunError, match="stage 0 is at iteration -1, the register at 0"):
        updates.settle(0, commit(0))
    updates.joined(4)
    updates.settle(4, commit(4))
    with pytest.raises(RunError, match="stage 0 is at iteration 4, the register at 6"):
        updates.settle(6, commit(6))


def test_a_device_that_fails_while_the_state_is_copied_early_is_left_to_the_main_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages, raised = pipeline("emulated"), list[threading.ExceptHookArgs]()
    failed = threading.Event()

    def piece(_: StateCopy) -> bool:
        failed.set()
        raise RuntimeError("accelerator error")

    monkeypatch.setattr(StateCopy, "piece", piece)
    hook, threading.excepthook = threading.excepthook, raised.append
    try:
        updates = Updates(dict(enumerate(stages)), decided=lambda step: replace(commit(step), next_mode="staggered"))
        copying = threading.enumerate()[-1]
        updates.begin(1)
        updates.waits(True)
        assert failed.wait(60)
        copying.join(60)
        assert not copying.is_alive()
    finally:
        threading.excepthook = hook
    assert raised == []


@pytest.mark.parametrize("mode", ["staggered", "barrier"])
def test_in_a_wait_the_state_is_copied_once_its_step_is_committed_and_the_rest_by_the_step(
    mode: StepMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, copied, copy_piece = dict[int, Commit](), list[StateCopy](), StateCopy.piece

    def piece(copy: StateCopy) -> bool:
        copied.append(copy)
        time.sleep(0.001)
        return copy_piece(copy)

    monkeypatch.setattr(kept_states, "PIECE", 256)
    monkeypatch.setattr(StateCopy, "piece", piece)
    stages = pipeline("gpt")
    updates = Updates(dict(enumerate(stages)), decided=known.get)
    train(stages, updates, 0)
    step_ahead(updates, 0)
    after = digests(stages)
    copied.clear()
    updates.begin(1)
    updates.waits(True)
    time.sleep(0.05)
    assert not copied
    known[0] = replace(commit(0), next_mode=mode)
    time.sleep(0.1)
    updates.waits(False)
    assert bool(copied) == (mode == "staggered"), "a step that waits for its own commit is not undone"
    train(stages, updates, 1)
    step_ahead(updates, 1)
    assert digests(stages) != after
    updates.settle(0, known[0])
    assert digests(stages) == after


def test_a_step_of_other_shards_is_taken_back_in_memory_that_fits_them() -> None:
    of = sharded(job(3, 2, 2, model={"layers": 6}))
    stages = [EmulatedStage(of, index, scale=0.0) for index in (0, 1)]
    shards = stages[0].layout
    assert isinstance(shards, Shards)
    updates = Updates({0: stages[0]})
    shards.own([0, 1])
    for step, owned in enumerate(([0, 1], [1], [0, 1, 2])):
        if step:
            updates.reshard()
            shards.own(owned)
            shards.keep_only(owned)
        before = stages[0].digests()
        assert sorted(before) == owned
        train(stages, updates, step)
        updates.step_ahead(0, step)
        assert all(stages[0].digests()[number] != text for number, text in before.items())
        updates.settle(step - 1, commit(step - 1) if step else None)
        assert stages[0].digests() == before
        updates.step(0, commit(step))
