"""What moving layers costs, and whether that pays: the copies between two hostings, their seconds, and the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from recycle.exec.leader.holdings import Holdings
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts, layers_in, layers_of
from recycle.plans.moves import Move
from recycle.pricing import profile_of_layout
from recycle.shape import Worker


def is_worth(before: float, after: float, pause: float, until_change: float) -> bool:
    """Whether moving saves more than it costs: (before - after) / before * until_change > pause.

    Args:
        before, after: periods. pause: that the move takes. until_change: expected time to the next change of the live
            workers. All in one unit of time.
    """
    return before > after and (before - after) / before * until_change > pause


def copy_time(moves: Sequence[Move]) -> float:
    """Until all is copied, each source sending one after the other, in the profile's unit of time."""
    until: Counter[str] = Counter()
    for move in moves:
        until[move.source] += move.seconds  # type: ignore[assignment]  # counts are of any number
    return float(max(until.values(), default=0.0))


def moves_between(job: PricedJob, now: Hosts, then: Hosts) -> tuple[Move, ...]:
    """What the workers of `then`, all of which hold what `now` says, copy from each other; with bytes and seconds as
    the job's profile has them."""
    shape, prices = job.shape, job.prices
    each, moves = _bytes_of_layers(job), []
    for copy in Holdings(now).copies(then, sorted(then.units), sorted(then.units)):
        begin, end = layers_in((copy.first, copy.last), then.count)
        source, worker = (shape.worker_index(Worker.parse(name)) for name in (copy.source, copy.worker))
        amount = float(sum(each[begin:end]))
        (seconds,) = prices.copy_seconds(shape, [source], [worker], amount)
        moves.append(Move(copy.worker, copy.worker, copy.source, amount, (begin, end), float(seconds)))
    return tuple(moves)


def _bytes_of_layers(job: PricedJob) -> list[float]:
    """Parameters and optimizer state of each layer; embedding and head count as parts of the layers beside them."""
    shape = replace(job.shape, cut=(1,) * sum(layers_of(job)))
    return profile_of_layout(job, job.prices, shape).per_stage("static", shape.stages)
