"""States that hosts compare: copied piece by piece, and gone back to bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from recycle import RunError
from recycle.exec.checksums import Checksum
from recycle.exec.leader.commit import Comparison
from recycle.exec.model import integrity
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import RunningChecksum
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Commit
from recycle.exec.worker.hosted import Hosted
from recycle.exec.worker.updates import Updates
from recycle.job.shape import Worker
from tests.exec.drive import execute, micro_batches, one_f_one_b
from tests.exec.runs import job
from tests.exec.worker.test_updates import commit, digests, pipeline, train

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
