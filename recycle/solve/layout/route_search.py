"""The order in which workers run the legs of routes: list scheduling under a few policies, the best by its period.

The period is an estimate from above: each worker starts as late as its own end allows, a stage is reduced once all its
hosts have come to it, first stage first, and then its hosts may begin the next iteration. With the barrier it is when
the last stage has been reduced and stepped, from idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from recycle.ir.compiled import is_cached, load, run
from recycle.job.profile import Profile
from recycle.job.shape import Shape
from recycle.solve.effort import Deadline, Pace
from recycle.solve.layout.routes import Routes
from recycle.solve.layout.units import Units, common
from recycle.solve.problem_arrays import Floats, Operations, ProblemArrays, seeded
from recycle.solve.search.event_loop import UNLIMITED, Rule, by_worker, list_schedule, queues_of

WORTH_LOADING, COMPILING_SECONDS = 1_000_000, 60.0
"""Operations in all orders from which the compiled loops pay, and seconds that must be left where they have not been
compiled yet."""


class Legs(NamedTuple):
    """Legs as they are scheduled. An operation is one F, I or W of a leg, numbered `kind * legs + leg`.

    Attributes:
        host, before, after: [legs], worker, and the neighbouring legs of its micro-batch, -1 for none.
        seconds: [3 * legs], of F, I (or B) and W.
        hop: [legs], seconds from its worker to that of the next leg, and back.
        size: [legs], of its activation.
        cap: [workers], what each worker may hold of activations.
        stash: share of an activation held between I and W.
        split: the backward pass is cut into I and W.
    """

    host: Operations
    before: Operations
    after: Operations
    seconds: Floats
    hop: Floats
    size: Floats
    cap: Floats
    stash: float
    split: bool


class Preferences(NamedTuple):
    """How an idle worker chooses; all by worker, as the fields of `list_scheduling.Policy` by stage."""

    hold: Floats
    weights: Operations
    forward_first: Operations
    weight_first: Operations


@dataclass(frozen=True, eq=False)
class RouteOrder:
    """An order of the operations of legs.

    Attributes:
        programs: operations of each worker, in order: `kind * legs + leg`, with F, I (or B) and W as kinds 0, 1 and 2.
        period: an estimate from above.
    """

    programs: list[Operations]
    period: float


def legs_of(
    routes: Routes, units: Units, prices: Profile, shape: Shape, caps: Sequence[float], *, split: bool, in_bytes: bool
) -> Legs:
    """The legs with their seconds and sizes.

    Args:
        shape: of the job, in which links are priced.
        caps: what each worker of `routes` may hold of activations, in those of a fault-free stage or in bytes.
        split: whether the backward pass is cut into I and W.
        in_bytes: whether `caps` are bytes.
    """
    size = np.full(len(units), len(units.whole) / len(units)) if not in_bytes else units.price("activation")
    parts = np.array([*(units.price(name) for name in ("forward", "backward_input", "backward_weight")), size])
    sums = np.concatenate([np.zeros((4, 1)), np.cumsum(parts, axis=1)], axis=1)
    amounts = sums[:, routes.end] - sums[:, routes.begin]
    speed = np.array([prices.speed_of(worker) for worker in routes.workers])[routes.host]
    seconds = amounts[:3] * speed
    if not split:
        seconds = np.array([seconds[0], seconds[1] + seconds[2], 0 * speed])
    after = routes.after
    before = np.full(len(routes), -1)
    before[after[after >= 0]] = np.flatnonzero(after >= 0)
    index = np.array([shape.worker_index(worker) for worker in routes.workers])[routes.host]
    hop = np.zeros(len(routes))
    handing = np.flatnonzero(after >= 0)
    if len(handing):
        message = units.price("message")[routes.end[handing] - 1]
        hop[handing] = prices.copy_seconds(shape, index[handing], index[after[handing]], message)
    return Legs(
        host=routes.host,
        before=before,
        after=after,
        seconds=seconds.ravel(),
        hop=hop,
        size=amounts[3],
        cap=np.array(caps, dtype=np.float64),
        stash=float(prices.weight_stash) if split else 1.0,
        split=split,
    )


def best_order(
    routes: Routes, legs: Legs, units: Units, deadline: Deadline, *, staggered: bool = True
) -> RouteOrder | None:
    """The order with the least period of a few policies; None where none of them comes to an end.

    Args:
        staggered: each stage steps on its own time; else all together.
        deadline: no further policy is tried after it.
    """
    best: RouteOrder | None = None
    rules = list(policies(routes, legs))
    if len(rules) * len(legs.seconds) >= WORTH_LOADING and (
        is_cached(list_schedule) or deadline.left > COMPILING_SECONDS
    ):
        load(list_schedule)
    pace = Pace(deadline)
    for turn, rule in enumerate(rules):
        if turn and pace.is_over():
            break
        found = _scheduled(routes, legs, units, rule, staggered)
        if found is not None and (best is None or found.period < best.period * (1 - 1e-9)):
            best = found
    return best


def policies(routes: Routes, legs: Legs) -> Iterator[Preferences]:
    """A few ways to choose, generally good ones first.

    A worker whose micro-batches have d legs to go, its own included, needs d of them between F and I before the first
    comes back; that and a few more is what it may have.
    """
    workers = len(routes.workers)
    depth = np.zeros(len(routes), dtype=np.int64)
    for leg in range(len(routes) - 1, -1, -1):
        depth[leg] = 1 + (depth[legs.after[leg]] if legs.after[leg] >= 0 else 0)
    deepest = np.zeros(workers, dtype=np.int64)
    np.maximum.at(deepest, routes.host, depth)
    size = np.zeros(workers)
    np.maximum.at(size, routes.host, legs.size)
    no, yes = np.zeros(workers, dtype=np.int64), np.ones(workers, dtype=np.int64)
    anything, any_weights = np.full(workers, np.inf), np.full(workers, UNLIMITED)
    yield Preferences(anything, any_weights, no, no)
    for more, weight_first in product((0, 1, 2, 3), (yes, no) if legs.split else (no,)):
        yield Preferences((deepest + more) * size, any_weights, yes, weight_first)
    for factor, first in product((1.5, 2.0), (no, yes)):
        yield Preferences((factor * deepest + 1) * size, any_weights, no, first)
    if legs.split:
        for most in (1, 2, 4):
            yield Preferences(anything, np.full(workers, most), no, no)
            yield Preferences(2 * deepest * size, np.full(workers, most), no, yes)
        yield Preferences(anything, deepest, no, no)


def _scheduled(
    routes: Routes, legs: Legs, units: Units, rule: Preferences, staggered: bool = True
) -> RouteOrder | None:
    """Each worker has one queue of forwards and one of backwards. A hand-over takes its time and waits for nothing."""
    n, workers, leg = len(routes), len(routes.workers), np.arange(len(routes))
    operations = (3 if legs.split else 2) * n
    wakes = np.full(3 * n, -1)
    wakes[:n] = np.where(legs.after >= 0, legs.after, n + leg)
    wakes[n : 2 * n] = np.where(legs.before >= 0, n + legs.before, -1)
    hop = np.concatenate([legs.hop, np.where(legs.before >= 0, legs.hop[legs.before], 0.0), np.zeros(n)])
    none = np.zeros(0, dtype=np.int64)
    arrays = ProblemArrays(
        stages=n,
        micro_batches=1,
        ranks=workers,
        split=legs.split,
        staggered=staggered,
        times=legs.seconds,
        update_seconds=np.zeros(workers),
        link=float(hop.max()),
        hops=np.zeros(0),
        speed=np.ones(workers),
        cap=legs.cap,
        stash=legs.stash,
        needs=none,
        feeds=none,
        wakes=wakes,
    )
    priority = np.tile(leg, 2).astype(np.float64)
    starts = np.flatnonzero(legs.before < 0)
    preferred = Rule(
        priority=priority,
        by_priority=0,
        hold=rule.hold,
        weights=rule.weights,
        forward_first=rule.forward_first,
        weight_first=rule.weight_first,
        noise=0.0,
        random=seeded(0),
        patience=0.0,
        weight_patience=0.0,
        starts=starts,
        release=np.zeros(len(starts)),
    )
    queues = queues_of(legs.host, legs.host, 1, priority, 3 * n, workers=workers, size=legs.size, hop=hop)
    done, *_, after = run(list_schedule, operations, arrays, preferred, queues)
    if done < operations:
        return None
    begun, start = np.array(after.begun[:done], dtype=np.int64), np.array(after.start)
    end = np.zeros(workers)
    np.maximum.at(end, legs.host[begun % n], start[begun] + legs.seconds[begun])
    first = _latest_first_starts(legs, begun.tolist(), wakes.tolist(), hop.tolist(), end)
    ready = _ready(routes, units, end)
    period = float((ready - first).max() if staggered else ready.max())
    line, ends = by_worker(begun, legs.host, workers)
    return RouteOrder(np.split(line, ends[:-1]), period)


def _latest_first_starts(legs: Legs, begun: list[int], wakes: list[int], hop: list[float], end: Floats) -> Floats:
    """When each worker has to begin at the latest, so that it ends when it does.

    Args:
        begun: operations in an order in which none needs a later one.
        end: [workers].
    """
    host, seconds = legs.host.tolist(), legs.seconds.tolist()
    following, late = end.tolist(), [0.0] * len(wakes)
    for x in reversed(begun):
        w = host[x % len(host)]
        until = following[w]
        if wakes[x] >= 0:
            until = min(until, late[wakes[x]] - hop[x])
        late[x] = following[w] = until - seconds[x]
    return np.array(following)


def _ready(routes: Routes, units: Units, end: Floats) -> Floats:
    """When each worker has reduced and stepped all its units, first unit first, each with all its hosts."""
    ready = end.copy()
    cuts = [0, *np.cumsum(routes.common_cut()).tolist()]
    updates = np.concatenate([[0.0], np.cumsum(units.update_seconds)])
    for begin, stop in pairwise(cuts):
        hosts = [w for w, parts in enumerate(routes.parts) if common(parts, ((begin, stop),))]
        ready[hosts] = ready[hosts].max() + updates[stop] - updates[begin]
    return ready
