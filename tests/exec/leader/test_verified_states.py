"""Which state is gone back to where hosts replay each other's work."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from recycle.exec.leader.commit import comparison, verified_after
from recycle.exec.protocol import Commit, GenerationRecord, Verified


def steps_of(record: GenerationRecord) -> tuple[int | None, int | None]:
    return tuple(None if one is None else one.step for one in (record.verified, record.candidate))  # type: ignore[return-value]


def committed(record: GenerationRecord, has_states: bool) -> GenerationRecord:
    verified, candidate = verified_after(record, has_states)
    step = record.committed + 1
    commit = Commit(step, 1.0, 1.0, 1.0, last=step + 1, checkpoint=True)
    return msgspec.structs.replace(record, committed=step, commit=commit, verified=verified, candidate=candidate)


def commits(rounds: int, compared: Callable[[int], bool], steps: int) -> list[tuple[int | None, int | None]]:
    """(verified, candidate) after each iteration of one generation."""
    record, found = GenerationRecord(1, [], {}, "", rounds=rounds), []
    for step in range(steps):
        record = committed(record, compared(step))
        found.append(steps_of(record))
    return found


def test_without_replays_it_is_the_last_state_that_was_compared() -> None:
    assert commits(0, lambda step: step % 2 == 0, 5) == [(-1, -1), (-1, -1), (1, 1), (1, 1), (3, 3)]
    after = committed(committed(GenerationRecord(1, [], {}, ""), True), True).verified
    assert after is not None
    assert after.commit is not None
    assert (after.commit.last, after.commit.checkpoint) == (None, False)


def test_with_them_a_state_counts_once_all_was_replayed_since() -> None:
    found = commits(3, lambda step: step % 3 == 0, 10)
    assert found[:5] == [(-1, -1), (-1, -1), (-1, -1), (-1, 2), (-1, 2)]
    assert found[5:] == [(2, 2), (2, 5), (2, 5), (5, 5), (5, 8)]


def test_states_that_are_compared_more_often_than_all_is_replayed_are_not_all_kept() -> None:
    """Everything takes five iterations. The states before 2 and 4 are compared only; that before 6 is kept."""
    found = commits(5, lambda step: step % 2 == 0, 12)
    assert found == [(-1, -1)] * 6 + [(-1, 5)] * 4 + [(5, 5)] * 2


def test_where_they_are_compared_less_often_a_state_counts_when_the_replays_since_are_complete() -> None:
    found = commits(2, lambda step: step % 4 == 0, 8)
    assert found == [(-1, -1)] * 4 + [(-1, 3)] + [(3, 3)] * 3


def test_a_generation_begins_anew_and_iterations_before_it_do_not_count() -> None:
    """It begins with iteration 7, whose state counts once 7, 8 and 9 have replayed everything."""
    record = GenerationRecord(1, [], {}, "", rounds=3)
    for step in range(7):
        record = committed(record, step % 3 == 0)
    assert steps_of(record) == (2, 5)
    record, found = msgspec.structs.replace(record, generation=2, candidate=None), []
    for step in range(7, 16):
        record = committed(record, step == 7 or step % 3 == 0)
        found.append(steps_of(record))
    assert found == [(2, 6), (2, 6), (6, 6), (6, 6), (6, 6), (6, 11), (6, 11), (11, 11), (11, 14)]


def test_a_state_that_was_gone_back_to_is_the_one_that_hosts_keep_in_the_layout_at_hand() -> None:
    before = Verified(4, None, ["1.0"], holds="layout before")
    record = GenerationRecord(3, [], {}, "", committed=4, verified=before, rounds=5, holds="layout at hand")
    assert record.has_gone_back
    assert committed(record, False).verified == before
    after = committed(record, True)
    assert not after.has_gone_back
    assert after.verified is not None
    assert (after.verified.step, after.verified.without, after.verified.holds) == (4, [], "layout at hand")


def test_a_state_is_named_by_what_its_holders_have_reported() -> None:
    record = GenerationRecord(3, [], {}, "", committed=4, holds="by now")
    for has_states, name in ((True, "in the state"), (False, None)):
        verified, _ = verified_after(record, has_states, lambda: "in the state")
        assert (None if verified is None else verified.holds) == name


@pytest.mark.parametrize("first", [0, 1, 5, 6])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_workers_keep_the_state_that_the_coordinator_goes_back_to(first: int, rounds: int, every: int) -> None:
    record = GenerationRecord(1, [], {}, "", rounds=rounds, committed=first - 1)
    kept, begun_with = set[int](), None
    if first == 5:  # another generation before has kept an older state
        record = msgspec.structs.replace(record, verified=Verified(2, None))
        kept, begun_with = {2, 4}, 2
    for step in range(first, first + 25):
        compared = comparison(step, first, every, rounds, begun_with)
        assert (compared is not None) == (step == first or step % every == 0)
        if compared is not None and compared.is_kept:
            if len(kept) == 2 and step - 1 not in kept:
                kept.remove(next(one for one in sorted(kept) if one != compared.besides))
            kept |= {step - 1}
            assert record.verified is None or record.verified.step in kept
        record = committed(record, compared is not None)
        assert record.verified is not None
        assert record.verified.step in kept
        assert record.candidate is not None
        assert record.candidate.step in kept
