"""Which state is gone back to where hosts replay each other's work."""

from __future__ import annotations

import msgspec
import pytest

from recycle.exec.membership.messages import Commit, GenerationRecord, Verified
from recycle.exec.membership.verified_states import kept_state, verified_after


def steps_of(record: GenerationRecord) -> tuple[int | None, int | None]:
    return tuple(None if one is None else one.step for one in (record.verified, record.candidate))  # type: ignore[return-value]


def committed(record: GenerationRecord, has_states: bool) -> GenerationRecord:
    verified, candidate = verified_after(record, has_states)
    step = record.committed + 1
    commit = Commit(step, 1.0, 1.0, 1.0, last=step + 1, checkpoint=True)
    return msgspec.structs.replace(record, committed=step, commit=commit, verified=verified, candidate=candidate)


def test_without_replays_it_is_the_last_state_that_was_compared() -> None:
    record = GenerationRecord(1, [], {}, "")
    found = []
    for step in range(5):
        record = committed(record, step % 2 == 0)
        found.append(steps_of(record))
    assert found == [(-1, None), (-1, None), (1, None), (1, None), (3, None)]
    assert record.verified is not None
    assert (record.verified.commit.last, record.verified.commit.checkpoint) == (None, False)  # type: ignore[union-attr]


def test_with_them_a_state_counts_once_all_was_replayed_since() -> None:
    record, found = GenerationRecord(1, [], {}, "", rounds=3), []
    for step in range(10):
        record = committed(record, step % 3 == 0)
        found.append(steps_of(record))
    assert found[:5] == [(-1, -1), (-1, -1), (-1, -1), (-1, 2), (-1, 2)]
    assert found[5:] == [(2, 2), (2, 5), (2, 5), (5, 5), (5, 8)]


def test_a_generation_begins_anew_and_a_round_that_it_has_in_part_counts_for_nothing() -> None:
    """It begins with iteration 7; of the round from 6 to 8 it has two. The next whole one ends with 11."""
    record = GenerationRecord(1, [], {}, "", rounds=3)
    for step in range(7):
        record = committed(record, step % 3 == 0)
    assert steps_of(record) == (2, 5)
    record, found = msgspec.structs.replace(record, generation=2, candidate=None), []
    for step in range(7, 13):
        record = committed(record, step == 7 or step % 3 == 0)
        found.append(steps_of(record))
    assert found == [(2, 6), (2, 6), (2, 8), (2, 8), (8, 8), (8, 11)]


def test_a_state_that_was_gone_back_to_is_the_one_that_hosts_keep_in_the_layout_at_hand() -> None:
    before = Verified(4, None, ["1.0"], holds="layout before")
    record = GenerationRecord(3, [], {}, "", 4, verified=before, rounds=5, holds="layout at hand")
    assert committed(record, False).verified == before
    after = committed(record, True).verified
    assert after is not None
    assert (after.step, after.without, after.holds) == (4, [], "layout at hand")


@pytest.mark.parametrize("first", [0, 1, 5, 6])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_workers_keep_the_state_that_the_coordinator_goes_back_to(first: int, rounds: int) -> None:
    verified = GenerationRecord(1, [], {}, "", rounds=rounds, committed=first - 1)
    before = committed(verified, True).verified if first == 0 else None
    record = msgspec.structs.replace(verified, verified=before)
    begun_with = None if before is None else before.step
    kept: set[int] = set()
    for step in range(first, first + 12):
        if step == first or step % rounds == 0:
            besides = kept_state(step, first, rounds, begun_with)
            kept = {one for one in kept if one == besides} | {step - 1}
            assert record.verified is None or record.verified.step in kept
        record = committed(record, step == first or step % rounds == 0)
        assert record.verified is not None
        assert record.verified.step in kept
