"""What moving layers costs, and whether that pays: the copies between two hostings, their seconds, and the rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from recycle.exec.leader.holdings import Holdings
from recycle.exec.protocol import StepMode
from recycle.job import PricedJob
from recycle.job.pricing import profile_of_layout
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts, layers_in, layers_of
from recycle.plans.moves import Move


def is_worth(before: float, after: float, pause: float, until_change: float) -> bool:
    """Whether moving saves more than it costs: (before - after) / before * until_change > pause.

    Args:
        before, after: periods. pause: that the move takes. until_change: expected time to the next change of the live
            workers. All in one unit of time.
    """
    return before > after and (before - after) / before * until_change > pause


def common_mode(one: Collection[StepMode], other: Collection[StepMode]) -> StepMode:
    """The mode in which two plans are compared, given the modes that each may run in."""
    return "staggered" if "staggered" in one and "staggered" in other else "barrier"


def copy_time(moves: Sequence[Move]) -> float:
    """Until all is copied, each source sending one after the other, in the profile's unit of time."""
    until: dict[str, float] = defaultdict(float)
    for move in moves:
        until[move.source] += move.seconds
    return max(until.values(), default=0.0)


def moves_between(job: PricedJob, now: Hosts | None, then: Hosts | None) -> tuple[Move, ...]:
    """What the workers of `then`, all of which hold what `now` says, copy from each other; with bytes and seconds as
    the job's profile has them."""
    assert now is not None
    assert then is not None
    shape, moves, workers = job.shape, [], sorted(then.units)
    # Embedding and head count as parts of the layers beside them.
    by_layer = profile_of_layout(job, job.prices, replace(shape, cut=(1,) * sum(layers_of(job))))
    each = by_layer.per_stage("static", sum(layers_of(job)))
    for copy in Holdings(now).copies(then, workers, workers):
        begin, end = layers_in((copy.first, copy.last), then.count)
        source, worker = (shape.worker_index(Worker.parse(name)) for name in (copy.source, copy.worker))
        amount = float(sum(each[begin:end]))
        (seconds,) = job.prices.copy_seconds(shape, [source], [worker], amount)
        moves.append(Move(copy.worker, copy.worker, copy.source, amount, (begin, end), float(seconds)))
    return tuple(moves)
