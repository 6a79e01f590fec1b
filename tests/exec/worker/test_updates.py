"""Steps of a worker's stages: taken ahead, taken back bit for bit, caught up; and states that hosts compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from recycle import RunError
from recycle.exec.checksums import Checksum
from recycle.exec.emulation import EmulatedStage
from recycle.exec.leader.commit import Comparison
from recycle.exec.model import integrity
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import RunningChecksum
from recycle.exec.model.stage import Stage
from recycle.exec.model.state.layouts import Shards
from recycle.exec.protocol import Commit, StepMode
from recycle.exec.worker import kept_states
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.kept_states import StateCopy
from recycle.exec.worker.updates import Updates
from recycle.job.shape import Worker
from tests.exec.drive import build_pipeline, execute, micro_batches, one_f_one_b, run_pipelines, small_job
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

    monkeypatch.setattr(kept_states, "piece_of_step", lambda device: 256)
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


TWO_STAGES = (0, 1)


@pytest.fixture(params=["emulated", pytest.param("gpt", marks=pytest.mark.slow)])
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    return pipeline(request.param)


def sums_of(stages: Sequence[Stage]) -> dict[int, Checksum]:
    return {index: RunningChecksum(stages[index].state_tensors()).finish() for index in TWO_STAGES}


def take(stages: Sequence[Stage], updates: Updates, step: int, ahead: bool = False) -> None:
    """One iteration and its steps."""
    train(stages, updates, step)
    for index in TWO_STAGES:
        if ahead:
            updates.step_ahead(index, step)
        else:
            updates.step(index, commit(step))


def test_the_last_two_are_kept_and_each_can_be_gone_back_to(stages: list[Stage]) -> None:
    updates, after = Updates(dict(enumerate(stages))), {-1: digests(stages)}
    for step in range(6):
        if step % 2 == 0:
            updates.compare_state(Comparison(step - 1))
            sums = updates.checksums()
            assert sums == sums_of(stages)
        take(stages, updates, step)
        after[step] = digests(stages)
    assert len(set(map(str, after.values()))) == 7
    updates.settle(3, commit(3), goes_back=True)
    assert digests(stages) == after[3]
    updates.settle(1, commit(1), goes_back=True)
    assert digests(stages) == after[1]
    for step in (2, 3):
        take(stages, updates, step)
        assert digests(stages) == after[step]
    with pytest.raises(RunError, match=r"the state after step -1 is to be gone back to, and is not kept here"):
        updates.settle(-1, None, goes_back=True)


def test_a_state_in_which_other_layers_were_hosted_is_gone_back_to_with_them() -> None:
    hosted = Hosted(Worker(0, 0), partial(build_stages, job(1, 2, 2)), (), [0, 1])
    updates, step = Updates(hosted.stages, hosting=hosted), 0

    def iterate(of: Hosted, its: Updates, step: int) -> None:
        for stage in of.stages.values():
            stage.begin_iteration(step)
        batches = micro_batches(0, 2)
        execute((stage, one_f_one_b(stage.index, len(of.stages), batches)) for stage in of.stages.values())
        its.reduced(step)
        its.settle(step, commit(step))

    def kept(step: int) -> list[int]:
        updates.compare_state(Comparison(step))
        return [one.words for _, one in sorted(updates.checksums().items())]

    given, initial = hosted.layout, kept(-1)
    iterate(hosted, updates, 0)
    hosted.place((1, 2, 1), [0, 1, 2])
    updates.rehost(0)
    hosted.confirm()
    kept(0)
    iterate(hosted, updates, 1)
    assert updates.way_to(0, True) == "undo"
    assert updates.way_to(-1, True) == "rehost"
    updates.settle(-1, None, goes_back=True)
    assert hosted.layout == given
    assert hosted.missing() == set()
    assert kept(-1) == initial
    for step in (0, 1):
        iterate(hosted, updates, step)
    calm = Hosted(Worker(0, 0), partial(build_stages, job(1, 2, 2)), (), [0, 1])
    still = Updates(calm.stages)
    for step in (0, 1):
        iterate(calm, still, step)
    assert digests(list(hosted.stages.values())) == digests(list(calm.stages.values()))


def test_a_stage_that_steps_before_the_others_are_copied_is_copied_first(stages: list[Stage]) -> None:
    updates = Updates(dict(enumerate(stages)))
    before = sums_of(stages)
    train(stages, updates, 0)
    updates.compare_state(Comparison(-1))
    updates.step_ahead(0, 0)
    assert updates.checksums() == before
    updates.step_ahead(1, 0)
    assert updates.checksums() == before


def test_a_copy_that_a_generation_left_half_made_counts_no_more_and_the_step_is_undone_as_ever(
    stages: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "PIECE", 4)
    updates, before = Updates(dict(enumerate(stages))), digests(stages)
    updates.compare_state(Comparison(-1))
    train(stages, updates, 0)
    updates.step_ahead(0, 0)
    updates.settle(-1, None)
    assert digests(stages) == before
    assert updates.stand_at(-1)
    updates.compare_state(Comparison(-1))
    assert updates.checksums() == sums_of(stages)


def test_a_thread_keeps_what_is_to_be_compared_while_the_worker_waits_once_the_step_before_is_committed(
    stages: list[Stage],
) -> None:
    known: dict[int, Commit] = {}
    updates = Updates(dict(enumerate(stages)), decided=known.get)
    take(stages, updates, 0)
    expected = sums_of(stages)
    updates.begin(1)
    updates.compare_in_waits(Comparison(0))
    updates.waits(True)
    assert not updates.kept_states.checksums
    known[0] = replace(commit(0), next_mode="barrier")
    done = threading.Event()
    for _ in range(60_000):
        if not updates._is_due:
            break
        done.wait(0.001)
    updates.waits(False)
    assert not updates._is_due
    assert not updates.kept_states.piece()
    assert updates.checksums() == expected
