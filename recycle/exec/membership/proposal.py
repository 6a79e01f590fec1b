"""The record that a generation is proposed with, and that of one which stands for workers about to be started."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from recycle.exec.leader.holdings import Holdings
from recycle.exec.membership.going_back import kept_by
from recycle.exec.membership.interfaces import Ready
from recycle.exec.protocol import GenerationRecord
from recycle.plans.hosting import Hosts
from recycle.shape import Worker


def proposed(
    before: GenerationRecord,
    plan: Ready,
    live: Collection[Worker],
    joined: Collection[Worker],
    holdings: Holdings,
    wanted: Hosts | None,
    disputed: Sequence[tuple[int, int, int]],
) -> GenerationRecord:
    """The record of the generation behind `before`.

    Args:
        plan: for these workers.
        live: all workers. joined: those that hold nothing yet.
        holdings: what the others hold.
        wanted: who hosts what once it runs (`Holdings.wanted`).
        disputed: micro-batches of which hosts made different things when the next iteration ran before.
    """
    commit, workers = before.commit, sorted(live)
    if commit is not None and before.is_evaluation_due:
        commit = msgspec.structs.replace(commit, last=None)  # this generation is new
    return GenerationRecord(
        before.generation + 1,
        [str(worker) for worker in workers],
        {str(worker): str(plan.roles[worker]) for worker in workers},
        plan.digest,
        before.committed,
        commit,
        [str(worker) for worker in sorted(joined)],
        "barrier",  # a repeated iteration must wait for its norm, and any other begins from a standstill anyway
        dict(plan.periods),
        before.evaluated,
        holdings.copies(wanted, live, set(live) - set(joined)),
        holdings.plan,
        holdings.name_of(plan.digest, wanted),
        kept_by(before.verified, live, joined),
        rounds=plan.rounds,
        disputed=list(disputed),
        behind=holdings.behind(wanted, live),
    )


def of_started(before: GenerationRecord, live: Collection[Worker]) -> GenerationRecord:
    """The record, behind `before`, of workers that are to be started; its generation is over from the start."""
    names = [str(worker) for worker in sorted(live)]
    return msgspec.structs.replace(before, generation=before.generation + 1, live=names)
