"""Which states the hosts of a stage compare and keep, and which kept state training goes back to: pure functions.

Hosts compare the state that an iteration begins with: in the first iteration of a generation, and every so many
iterations. Some of the compared states are kept. A kept state is the candidate until everything was replayed since, in
one generation, and nothing differed: a state on which all agree may still be wrong on all hosts, by what one host added
to the sums, and a host that computes wrong all the time would have shown. Then the candidate is verified, and training
goes back to it where hosts differ. While there is a candidate, later states are compared and not kept, so two copies
are enough. Where nothing is replayed, a state is verified as soon as its iteration is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from recycle.exec.protocol import Commit, GenerationRecord, Verified


class Comparison(NamedTuple):
    """The hosts of each stage compare the state after `step`.

    Attributes:
        step: the iteration that the state is from; -1 for the initial one.
        is_kept: whether the state is also kept.
        besides: step of the state that stays kept with it; None for the newest of those kept before.
    """

    step: int
    is_kept: bool = True
    besides: int | None = None


def comparison(iteration: int, first: int, every: int, rounds: int, verified: int | None) -> Comparison | None:
    """The comparison of the state that `iteration` begins with; None where it is not compared.

    Args:
        first: iteration of the generation.
        every: iterations from one comparison to the next, counted from iteration 0; 0 for none.
        rounds: iterations in which everything is replayed once; 0 where nothing is.
        verified: step of the state to go back to when the generation began; None where there was none.
    """
    if not every:
        return None
    if iteration == first:
        return Comparison(first - 1, True, verified)
    if iteration % every:
        return None
    stride = _least_multiple(every, max(rounds, 1))
    since = iteration - _least_multiple(every, first + max(rounds, 1))
    if since < 0 or since % stride:
        return Comparison(iteration - 1, False)
    return Comparison(iteration - 1, True, iteration - stride - 1 if since else first - 1)


def _least_multiple(factor: int, at_least: int) -> int:
    return -(-at_least // factor) * factor


def verified_after(
    record: GenerationRecord, has_states: bool, holds: Callable[[], str] | None = None
) -> tuple[Verified | None, Verified | None]:
    """(state to go back to, candidate) once the iteration after the record is committed.

    Args:
        has_states: whether the hosts have compared the states that the iteration began with.
        holds: gives the name of what workers hold in the states that they have kept; `record.holds` when left out.
    """
    verified, candidate, rounds = record.verified, record.candidate, max(record.rounds, 1)
    if has_states and (candidate is None or record.committed - candidate.step >= rounds):
        held = record.holds if holds is None else holds()
        candidate = Verified(record.committed, _without_orders(record.commit), holds=held)
        if verified is None or verified.step == candidate.step:  # kept again, also by workers that have joined
            verified = candidate
    if candidate is not None and record.committed + 1 - candidate.step >= rounds:
        verified = candidate
    return verified, candidate


def _without_orders(commit: Commit | None) -> Commit | None:
    """The commit for workers that go on from it later: what it announced has been done."""
    if commit is None:
        return None
    return msgspec.structs.replace(commit, last=None, finished=False, checkpoint=False, evaluate=False)
