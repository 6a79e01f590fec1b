"""The order in which workers run the legs of routes: list scheduling under a few policies, the best by its period.

The period is an estimate from above: each worker starts as late as its own end allows, a stage is reduced once all its
hosts have come to it, first stage first, and then its hosts may begin the next iteration. With the barrier it is when
the last stage has been reduced and stepped, from idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from recycle.ir.compiled import is_cached, load, run
from recycle.profile import Profile
from recycle.shape import Shape
from recycle.solve.deadline import Deadline, Pace
from recycle.solve.layout.route_kernels import LegQueues, Legs, Preferences, latest_starts, list_legs
from recycle.solve.layout.routes import Routes
from recycle.solve.layout.units import Units, common
from recycle.solve.problem_arrays import Floats, Operations

UNLIMITED = 1 << 30
WORTH_LOADING, COMPILING_SECONDS = 1_000_000, 60.0
"""Operations in all orders from which the compiled loops pay, and seconds that must be left where they have not been
compiled yet."""
_KERNELS = (list_legs, latest_starts)


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
    if len(rules) * len(legs.seconds) >= WORTH_LOADING and (is_cached(*_KERNELS) or deadline.left > COMPILING_SECONDS):
        load(*_KERNELS)
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
    n, workers = len(routes), len(routes.workers)
    kinds = 3 if legs.split else 2
    line = np.lexsort((routes.begin, routes.micro_batch, routes.host))
    place = np.empty(n, dtype=np.int64)
    place[line] = np.arange(n)
    begins = np.concatenate([[0], np.cumsum(np.bincount(routes.host, minlength=workers))])

    def zeros(length: int) -> Operations:
        return np.zeros(length, dtype=np.int64)

    queues = LegQueues(
        begins=begins,
        line=line,
        place=place,
        ready=zeros(2 * n),
        head=np.concatenate([begins[:-1], n + begins[:-1]]),
        tail=zeros(2 * workers) - 1,
        waiting=zeros(n),
        waiting_head=zeros(workers),
        waiting_tail=zeros(workers),
        held=np.zeros(workers),
        in_flight=np.zeros(workers),
        running=zeros(workers) - 1,
        woken=zeros(workers),
        is_woken=zeros(workers),
        begun=zeros(3 * n),
        start=np.zeros(3 * n),
    )
    done, *_, after = run(list_legs, kinds * n, legs, rule, queues)
    if done < kinds * n:
        return None
    begun, start = np.array(after.begun[:done], dtype=np.int64), np.array(after.start)
    host = legs.host[begun % n]
    end = np.zeros(workers)
    np.maximum.at(end, host, start[begun] + legs.seconds[begun])
    late = np.zeros(3 * n)
    *_, late, _ = run(latest_starts, kinds * n, legs, begun, end, late, np.zeros(workers))
    first = np.full(workers, np.inf)
    np.minimum.at(first, host, np.array(late)[begun])
    counts = np.cumsum(np.bincount(host, minlength=workers))
    programs = np.split(begun[np.argsort(host, kind="stable")], counts[:-1])
    ready = _ready(routes, units, end)
    return RouteOrder(programs, float((ready - first).max() if staggered else ready.max()))


def _ready(routes: Routes, units: Units, end: Floats) -> Floats:
    """When each worker has reduced and stepped all its units, first unit first, each with all its hosts."""
    ready = end.copy()
    cuts = [0, *np.cumsum(routes.common_cut()).tolist()]
    updates = np.concatenate([[0.0], np.cumsum(units.update_seconds)])
    for begin, stop in pairwise(cuts):
        hosts = [w for w, parts in enumerate(routes.parts) if common(parts, ((begin, stop),))]
        ready[hosts] = ready[hosts].max() + updates[stop] - updates[begin]
    return ready
