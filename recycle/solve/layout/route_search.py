"""Order the legs of routes: list scheduling under a few policies, the best by its period.

The period is an upper estimate. Each worker starts as late as its own end allows. A stage is reduced when all its hosts
have reached it, first stage first; then its hosts may begin the next iteration. With the barrier the period is the end
of the last reduce and step, from an empty pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from recycle.ir.compiled import is_cached, load, run
from recycle.job.profile import Profile
from recycle.job.shape import Shape
from recycle.solve.effort import Deadline, Pace
from recycle.solve.layout.routes import Routes
from recycle.solve.layout.units import Units, count_shared
from recycle.solve.problem import Order, programs_of
from recycle.solve.problem_arrays import Floats, ProblemArrays
from recycle.solve.search.event_loop import Assigned, Rule, list_schedule, priority_rule

WORTH_LOADING, COMPILING_SECONDS = 1_000_000, 60.0
"""Operations in all orders from which compiled loops pay; seconds that must remain to compile them."""


@dataclass(frozen=True, eq=False)
class RouteOrder:
    """Operations of each worker, `kind * legs + leg` with F, I (or B), W as 0 to 2; upper estimate of the period."""

    programs: Order
    period: float


@dataclass(frozen=True, eq=False)
class _Legs:
    """Legs as input of the event loop: each leg is a stage with one micro-batch, and each worker is a rank.

    Attributes:
        hop: [operations], seconds from an operation's worker to the worker of its dependent operation.
        size: [legs], size of its activation.
    """

    routes: Routes
    arrays: ProblemArrays
    hop: Floats
    size: Floats


def best_order(
    routes: Routes,
    units: Units,
    prices: Profile,
    shape: Shape,
    caps: Sequence[float],
    deadline: Deadline,
    *,
    split: bool,
    in_bytes: bool = False,
    staggered: bool = True,
) -> RouteOrder | None:
    """Return the order with the least period of a few policies; None if all deadlock.

    Args:
        shape: the job's shape, in which links are priced.
        caps: activation limit of each worker, in activations of a fault-free stage, or in bytes with `in_bytes`.
        split: the backward pass is split into I and W.
        staggered: each stage runs its optimizer step on its own; False for the barrier.
    """
    legs = _legs_of(routes, units, prices, shape, caps, split=split, in_bytes=in_bytes, staggered=staggered)
    best: RouteOrder | None = None
    rules = list(_policies(legs))
    if len(rules) * len(legs.arrays.times) >= WORTH_LOADING and (
        is_cached(list_schedule) or deadline.seconds_left > COMPILING_SECONDS
    ):
        load(list_schedule)
    pace = Pace(deadline)
    for turn, rule in enumerate(rules):
        if turn and pace.is_over():
            break
        candidate = _scheduled(legs, units, rule)
        if candidate is not None and (best is None or candidate.period < best.period * (1 - 1e-9)):
            best = candidate
    return best


def _legs_of(
    routes: Routes,
    units: Units,
    prices: Profile,
    shape: Shape,
    caps: Sequence[float],
    *,
    split: bool,
    in_bytes: bool,
    staggered: bool,
) -> _Legs:
    n, leg, workers = len(routes), np.arange(len(routes)), len(routes.workers)
    size = np.full(len(units), len(units.cut) / len(units)) if not in_bytes else units.price("activation")
    parts = np.array([*(units.price(name) for name in ("forward", "backward_input", "backward_weight")), size])
    sums = np.concatenate([np.zeros((4, 1)), np.cumsum(parts, axis=1)], axis=1)
    amounts = sums[:, routes.end] - sums[:, routes.begin]
    speed = np.array([prices.speed_of(worker) for worker in routes.workers])[routes.host]
    seconds = amounts[:3] * speed
    if not split:
        seconds = np.array([seconds[0], seconds[1] + seconds[2], 0 * speed])
    after = routes.after
    handing = np.flatnonzero(after >= 0)
    receiving = after[handing]
    index = np.array([shape.worker_index(worker) for worker in routes.workers])[routes.host]
    wakes, hop, none = np.full(3 * n, -1), np.zeros(3 * n), np.zeros(0, dtype=np.int64)
    wakes[:n] = np.where(after >= 0, after, n + leg)
    wakes[n + receiving] = n + handing
    if len(handing):
        message = units.price("message")[routes.end[handing] - 1]
        hop[handing] = prices.copy_seconds(shape, index[handing], index[receiving], message)
        hop[n + receiving] = hop[handing]
    arrays = ProblemArrays(
        stages=n,
        micro_batches=1,
        ranks=workers,
        split=split,
        staggered=staggered,
        times=seconds.ravel(),
        rank_of=none,
        update_seconds=np.zeros(workers),
        link=float(hop.max()),
        hops=np.zeros(0),
        speed=np.ones(workers),
        cap=np.array(caps, dtype=np.float64),
        stash=float(prices.weight_stash) if split else 1.0,
        needs=none,
        feeds=none,
        wakes=wakes,
    )
    return _Legs(routes, arrays, hop, amounts[3])


def _policies(legs: _Legs) -> Iterator[Rule]:
    routes, workers, split = legs.routes, len(legs.routes.workers), legs.arrays.split
    after, depth = routes.after, np.zeros(len(routes), dtype=np.int64)
    for leg in range(len(routes) - 1, -1, -1):
        depth[leg] = 1 + (depth[after[leg]] if after[leg] >= 0 else 0)
    deepest, size = np.zeros(workers, dtype=np.int64), np.zeros(workers)
    np.maximum.at(deepest, routes.host, depth)
    np.maximum.at(size, routes.host, legs.size)
    yes = np.ones(workers, dtype=np.int64)
    priority = np.tile(np.arange(len(routes)), 2).astype(np.float64)
    plain = priority_rule(priority, workers, np.flatnonzero(np.diff(routes.micro_batch, prepend=-1)))._replace(
        by_priority=0
    )
    yield plain
    for more, weight_first in product((0, 1, 2, 3), (1, 0) if split else (0,)):
        yield plain._replace(hold=(deepest + more) * size, forward_first=yes, weight_first=weight_first * yes)
    for factor, weight_first in product((1.5, 2.0), (0, 1)):
        yield plain._replace(hold=(factor * deepest + 1) * size, weight_first=weight_first * yes)
    if split:
        for most in (1, 2, 4):
            yield plain._replace(weights=most * yes)
            yield plain._replace(hold=2 * deepest * size, weights=most * yes, weight_first=yes)
        yield plain._replace(weights=deepest)


def _scheduled(legs: _Legs, units: Units, rule: Rule) -> RouteOrder | None:
    arrays, host, workers = legs.arrays, legs.routes.host, len(legs.routes.workers)
    n, operations = len(host), (3 if arrays.split else 2) * len(host)
    begun, start = np.zeros(3 * n, dtype=np.int64), np.zeros(3 * n)
    assigned = Assigned(host, chunks=1, size=legs.size, hop=legs.hop, lanes=0, begun=begun, start=start)
    done, *_, after = run(list_schedule, operations, arrays, rule, assigned)
    if done < operations:
        return None
    begun, start = np.array(after.begun[:done], dtype=np.int64), np.array(after.start)
    end = np.zeros(workers)
    np.maximum.at(end, host[begun % n], start[begun] + arrays.times[begun])
    ready = _ready(legs.routes, units, end)
    period = float((ready - _latest_first_starts(legs, begun.tolist(), end)).max() if arrays.staggered else ready.max())
    return RouteOrder(programs_of(begun, host[begun % n], workers), period)


def _latest_first_starts(legs: _Legs, begun: list[int], end: Floats) -> Floats:
    host, seconds = legs.routes.host.tolist(), legs.arrays.times.tolist()
    wakes, hop = legs.arrays.wakes.tolist(), legs.hop.tolist()
    following, late = end.tolist(), [0.0] * len(wakes)
    for x in reversed(begun):
        w = host[x % len(host)]
        until = following[w]
        if wakes[x] >= 0:
            until = min(until, late[wakes[x]] - hop[x])
        late[x] = following[w] = until - seconds[x]
    return np.array(following)


def _ready(routes: Routes, units: Units, end: Floats) -> Floats:
    ready = end.copy()
    cuts = [0, *np.cumsum(routes.common_cut()).tolist()]
    updates = np.concatenate([[0.0], np.cumsum(units.update_seconds)])
    for begin, stop in pairwise(cuts):
        hosts = [w for w, parts in enumerate(routes.parts) if count_shared(parts, ((begin, stop),))]
        ready[hosts] = ready[hosts].max() + updates[stop] - updates[begin]
    return ready
