"""Which kept state is gone back to: the last one of which nothing says that it may be wrong.

Where hosts compare states alone, it is the last one that they agreed on. Where they also replay each other's work, a
state on which all agree may still be wrong on all of them, by what one host added to the sums. It counts once all was
replayed since, in one generation, and nothing differed: what is wrong on a host and stays wrong would have shown. Until
then it is the candidate, and the one before it is gone back to.
"""

from __future__ import annotations

import msgspec

from recycle.exec.membership.messages import Commit, GenerationRecord, Verified


def verified_after(record: GenerationRecord, has_states: bool) -> tuple[Verified | None, Verified | None]:
    """(state to go back to, candidate) once the iteration behind the record is committed.

    Args:
        has_states: whether the hosts have compared the states that the iteration began with.
    """
    begun_with = Verified(record.committed, _without_orders(record.commit), holds=record.holds)
    if not record.rounds:
        return (begun_with if has_states else record.verified), None
    verified, candidate = record.verified, record.candidate
    if has_states:
        candidate = begun_with
        if verified is None or verified.step == candidate.step:  # kept anew, by who joined and in the layout at hand
            verified = candidate
    step = record.committed + 1
    if candidate is not None and ends_round(step, record.rounds) and candidate.step == step - record.rounds:
        verified = candidate
    return verified, candidate


def ends_round(step: int, rounds: int) -> bool:
    """Whether an iteration is the last in which something has its turn."""
    return (step + 1) % rounds == 0


def kept_state(step: int, first: int, rounds: int, verified: int | None) -> int | None:
    """Where `step` begins with a state that is to be compared: the step of the one that is kept besides.

    Args:
        first: iteration of the generation; a generation begins with a state that is compared.
        rounds: iterations until everything was replayed.
        verified: the state to go back to when the generation began; None for that which it began with.
    """
    if step - rounds >= first:
        return step - rounds - 1
    return first - 1 if verified is None else verified


def _without_orders(commit: Commit | None) -> Commit | None:
    """The commit for whoever goes on from it later: what it announced has been done."""
    if commit is None:
        return None
    return msgspec.structs.replace(commit, last=None, finished=False, checkpoint=False, evaluate=False)
