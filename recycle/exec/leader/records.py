"""Generation records: of the next generation, of one whose workers are to be started, and of one that rolls back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from recycle.exec.leader.actions import PreparedPlan
from recycle.exec.leader.holdings import Holdings
from recycle.exec.protocol import GenerationRecord, Verified
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts


def next_record(
    before: GenerationRecord,
    plan: PreparedPlan,
    live: Collection[Worker],
    joined: Collection[Worker],
    holdings: Holdings,
    wanted: Hosts | None,
    disputed: Sequence[tuple[int, int, int]],
    incarnations: Mapping[str, int],
) -> GenerationRecord:
    """The record of the generation after `before`.

    Args:
        plan: for these workers.
        live: all workers. joined: those that hold nothing yet.
        holdings: what the others hold.
        wanted: who hosts what once it runs (`Holdings.wanted`).
        disputed: micro-batches for which hosts computed different results when the next iteration ran before.
        incarnations: numbers of the workers' latest processes.
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
        "barrier",  # a repeated iteration must wait for its norm, and any other starts with an empty pipeline anyway
        dict(plan.periods),
        before.evaluated,
        holdings.copies(wanted, live, set(live) - set(joined)),
        holdings.plan,
        holdings.name_of(plan.digest, wanted),
        _kept_state(before.verified, live, joined),
        rounds=plan.rounds,
        disputed=list(disputed),
        behind=holdings.behind(wanted, live),
        places=before.places,
        incarnations=dict(incarnations),
    )


def started_record(
    before: GenerationRecord, live: Collection[Worker], places: Mapping[str, str], incarnations: Mapping[str, int]
) -> GenerationRecord:
    """The record, after `before`, of workers that are to be started in these places after these processes."""
    return msgspec.structs.replace(
        before,
        generation=before.generation + 1,
        live=[str(worker) for worker in sorted(live)],
        places=dict(places),
        incarnations=dict(incarnations),
    )


def _kept_state(verified: Verified | None, live: Collection[Worker], joined: Collection[Worker]) -> Verified | None:
    """The state to go back to, as the next record names it: workers that join do not have it either."""
    if verified is None:
        return None
    without = {*verified.without, *map(str, joined)}
    return msgspec.structs.replace(verified, without=[str(w) for w in sorted(live) if str(w) in without])


def rollback_record(
    record: GenerationRecord, verified: Verified, live: Collection[Worker], joined: Collection[Worker]
) -> GenerationRecord:
    """The record of a generation that is over from the start, after which all go on from the verified state.

    It says nothing of the steps after that state: they are run, evaluated and kept again.

    Args:
        record: the last one.
        live: the workers that are left. joined: those that have not kept the state, and copy it.
    """
    names, evaluated = [str(worker) for worker in sorted(live)], record.evaluated
    if evaluated is not None and evaluated.step > verified.step:
        evaluated = None
    return msgspec.structs.replace(
        record,
        generation=record.generation + 1,
        live=names,
        roles={name: name for name in names},
        committed=verified.step,
        commit=verified.commit,
        joins=[str(worker) for worker in sorted(joined)],
        mode="barrier",
        evaluated=evaluated,
        copies=[],
        behind=[],
        held=verified.holds,
        holds=verified.holds,
        candidate=None,
        disputed=[],
    )
