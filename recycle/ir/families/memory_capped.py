"""V-shaped families under a memory cap: ZB-V, V-half and V-min (Qi et al., 2023, arXiv 2401.10241, section 6, and 2024,
arXiv 2405.15362).

Rank r hosts stages r and 2 P - 1 - r. A micro-batch goes down the ranks with chunk 0, turns on the last rank and comes
back with chunk 1; its gradients take the same path back. Per rank a micro-batch has six kinds of work, numbered in the
order in which they can first run. Every rank takes the micro-batches of one kind in order, so a program is a list of
these numbers.

A building block (arXiv 2405.15362) gives each rank four slots, for F and I of both chunks of one micro-batch; the next
micro-batch follows six slots later, or after more slots under a cap that no such block keeps, and W takes free slots.
The block determines the peak memory of the repeated order.
Repetition leaves bubbles at both ends, which squeezing closes: list scheduling over the order, where a free rank takes
the first ready work, and runs a forward ahead of other work only if the skipped work still fits under the cap. A rank
may keep W for times when nothing else is ready. A second pass squeezes from the end to the start, where W allocates and
F frees. Squeezing under a cap of C chunks, for every P and m, is our own. Limits: two chunks per rank; no proof of
optimality. No V takes less than 2 m (F + B) + (P - 1) F.

ZB-V has no inner bubble at the memory of 1F1B, C = 2 P. For m >= 2 P - 1 it starts from the paper's hand-made order,
else from V-half's block. Peak min(2 m, 2 P) on the worst rank. At F = I = W = 1 and m >= P the makespan is
6 m + P - 1, the least of any V; the largest inner bubble is 0 for m >= 2 P - 1. With m >= 2 P - 1 and I >= F, the
bubble of every rank is (P - 1) max(I, 2 (I - W)) + E and the largest inner bubble (P - 1) max(I - F, 2 (I - W)) + E,
where E = max(0, P - 2) max(0, W - I). No closed form is known for F > I or m < P.

V-half holds half of 1F1B's activations, C = 2 floor(P / 2) + 2. Its block takes two slots per rank on the ways down,
one on the ways up. V-min holds a third, C = 2 (floor((P + 1) / 3) + 1), with one slot per rank on every way. For both,
at F = I = W = 1 and m >= P, the makespan is 6 m + max(P - 1, 3 (2 P - C) - 1): measured for P up to 64, not proven, and
the least of any V only for P <= 2. If F, I and W differ much, `times` gives shorter orders.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice, product
from typing import Any

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.families.every_pipeline import in_turn, vee_stages
from recycle.ir.instruction import BackwardInput, BackwardWeight, Compute, Forward
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import Shape

F0, F1, I1, I0, W1, W0 = range(6)
Orders = list[list[int]]
"""Numbers of the six kinds of work, by rank, in program order."""

_CLASS_AND_CHUNK: tuple[tuple[type[Compute], int], ...] = (
    (Forward, 0),
    (Forward, 1),
    (BackwardInput, 1),
    (BackwardInput, 0),
    (BackwardWeight, 1),
    (BackwardWeight, 0),
)
_HOLDS = (1, 1, 0, 0, -1, -1)
"""Activations that each kind of work takes or frees."""
PERIOD = 6
_SLOW_WAYS = ((0,), (1,), (2,), (3,), (0, 2), (1, 3))
"""Ways on which the building blocks of `under_cap` may take two slots from rank to rank."""

Times = tuple[float, float, float]
"""Durations of F, I and W of one chunk, in any unit."""
UNIT_TIMES: Times = (1, 1, 1)

Score = tuple[float, float]
"""(makespan, largest inner bubble); smaller is better."""


def memory_capped(
    shape: Shape, family: str, starts: Sequence[Orders], cap: int, optimizer: Optimizer, times: Times
) -> Schedule:
    """Build the compute-only schedule with the best order found from `starts`. Errors as in `zb_v`."""
    vee_stages(shape, family)
    orders = best_under_cap(starts, shape.micro_batches, cap, times)
    stated = {"times": list(times)} if tuple(times) != UNIT_TIMES else {}
    return _schedule(shape, family, orders, optimizer, **stated)


def _schedule(shape: Shape, family: str, orders: Orders, optimizer: Optimizer, **stated: Any) -> Schedule:
    stages, metadata = vee_stages(shape, family), {"family": family, **stated}
    work = [(cls, [hosted[chunk] for hosted in stages]) for cls, chunk in _CLASS_AND_CHUNK]
    return in_turn(shape, orders, work, optimizer=optimizer, metadata=metadata, stages=stages)


def building_block(ranks: int, steps: Sequence[Sequence[int]], waits: Sequence[int]) -> list[list[int]]:
    """Return the slots of F0, F1, I1 and I0 on each rank, for the first micro-batch.

    Args:
        steps: slots between ranks r and r + 1, for each r, on the way down (F0), up (F1), down again (I1) and up (I0).
        waits: slots lost at each of the three turns.
    """
    block: list[list[int]] = [[] for _ in range(ranks)]
    slot = 0
    for way, (hops, wait) in enumerate(zip(steps, (*waits, 0), strict=True)):
        path = range(ranks)[:: -1 if way % 2 else 1]
        for n, rank in enumerate(path):
            slot += hops[min(rank, path[n - 1])] if n else 0
            block[rank].append(slot)
        slot += 1 + wait
    return block


def repeated(block: Sequence[Sequence[int]], micro_batches: int, period: int = PERIOD) -> Orders:
    """Repeat a building block, whose slots per rank differ modulo `period`, for each micro-batch; W fills gaps."""
    orders = []
    for slots in block:
        taken = sorted((slot + period * j, work) for work, slot in enumerate(slots) for j in range(micro_batches))
        order: list[int] = []
        waiting: list[int] = []
        now = done = 0
        for slot, work in taken:
            free = slot - now
            order += waiting[done : done + free]
            done = min(done + free, len(waiting))
            order.append(work)
            if work in (I0, I1):
                waiting.append(W1 if work == I1 else W0)
            now = slot + 1
        orders.append(order + waiting[done:])
    return orders


def best_under_cap(starts: Sequence[Orders], micro_batches: int, cap: int, times: Times) -> Orders:
    """Return the best order found from `starts`: least makespan, then least inner bubble, then first.

    A rank holds at most `cap` activations (in chunks), as in `starts`. The result for `times` is never longer than the
    order for unit times. Raises ScheduleError unless `times` is three finite numbers of at least 0.
    """
    if len(times) != 3 or not all(0 <= seconds < math.inf for seconds in times):
        raise ScheduleError(f"times must be three finite numbers of at least 0 (F, I and W), got {times!r}")
    if tuple(times) != UNIT_TIMES:
        starts = [*starts, best_under_cap(starts, micro_batches, cap, UNIT_TIMES)]
    ideal = (2 * micro_batches * sum(times) + (len(starts[0]) - 1) * times[0], 0)
    best: tuple[Score, Orders] | None = None
    for score, orders in _candidates(starts, micro_batches, cap, times):
        if best is None or score < best[0]:
            best = score, orders
        if score <= ideal:
            break
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class _Rule:
    """How a pass traverses an order.

    Attributes:
        ahead: work may run ahead of earlier work in the order.
        spare_weights: W runs only if nothing else is ready.
        backwards: from the end of time to the start.
    """

    ahead: bool = True
    spare_weights: bool = False
    backwards: bool = False


_IN_ORDER = _Rule(ahead=False)
_FORWARDS = (_Rule(spare_weights=True), _Rule())
_BACKWARDS = _Rule(backwards=True)


def _candidates(starts: Iterable[Orders], micro_batches: int, cap: int, times: Times) -> Iterator[tuple[Score, Orders]]:
    for start in starts:
        yield _squeeze(start, micro_batches, cap, times, _IN_ORDER)
        for rule in _FORWARDS:
            score, orders = _squeeze(start, micro_batches, cap, times, rule)
            yield score, orders
            _, orders = _squeeze(orders, micro_batches, cap, times, _BACKWARDS)
            yield _squeeze(orders, micro_batches, cap, times, _IN_ORDER)


def _links(ranks: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    last = ranks - 1
    for r in range(1, ranks):
        yield (r - 1, F0), (r, F0)
        yield (r, F1), (r - 1, F1)
        yield (r - 1, I1), (r, I1)
        yield (r, I0), (r - 1, I0)
    yield (last, F0), (last, F1)
    yield (0, F1), (0, I1)
    yield (last, I1), (last, I0)
    for r in range(ranks):
        yield (r, I1), (r, W1)
        yield (r, I0), (r, W0)


def _squeeze(orders: Orders, micro_batches: int, cap: int, times: Times, rule: _Rule) -> tuple[Score, Orders]:
    ranks = len(orders)
    cost = [times[0], times[0], times[1], times[1], times[2], times[2]]
    holds = list(_HOLDS)
    links = list(_links(ranks))
    if rule.backwards:
        orders = [order[::-1] for order in orders]
        holds = [-held for held in holds]
        links = [(after, before) for before, after in links]
    followers: list[list[list[tuple[int, int]]]] = [[[] for _ in cost] for _ in orders]
    for (rank, work), follower in links:
        followers[rank][work].append(follower)
    # Links over which each micro-batch has not arrived, by kind of work; the last entry is beyond the micro-batches.
    entries = Counter(follower for _, follower in links)
    missing = [[[entries[rank, work]] * micro_batches + [1] for work in range(len(cost))] for rank in range(ranks)]

    remaining = [list(order) for order in orders]
    result: Orders = [[] for _ in orders]
    begun = [[0] * len(cost) for _ in orders]
    held = [0] * ranks
    busy = [False] * ranks
    first, end = [math.inf] * ranks, [0.0] * ranks
    running: list[tuple[float, int, int]] = []
    now, woken = 0.0, set(range(ranks))
    while woken:
        for rank in sorted(woken):
            if busy[rank] or not remaining[rank]:
                continue
            place = _next_work(remaining[rank], missing[rank], begun[rank], held[rank], cap, holds, rule)
            if place < 0:
                continue
            work = remaining[rank].pop(place)
            result[rank].append(work)
            begun[rank][work] += 1
            held[rank] += holds[work]
            busy[rank] = True
            first[rank] = min(first[rank], now)
            end[rank] = now + cost[work]
            heappush(running, (end[rank], rank, work))
        woken = set()
        if running:
            now = running[0][0]
        while running and running[0][0] == now:
            _, rank, work = heappop(running)
            busy[rank] = False
            woken.add(rank)
            for next_rank, next_work in followers[rank][work]:
                missing[next_rank][next_work][begun[rank][work] - 1] -= 1
                woken.add(next_rank)
    assert not any(remaining), "an order that cannot be run was given"
    inner = max(e - f for e, f in zip(end, first, strict=True)) - micro_batches * sum(cost)
    if rule.backwards:
        result = [order[::-1] for order in result]
    return (max(end), inner), result


def _next_work(
    remaining: list[int], missing: list[list[int]], begun: list[int], held: int, cap: int, holds: list[int], rule: _Rule
) -> int:
    ready = [not links[begun[work]] for work, links in enumerate(missing)]
    if not rule.ahead:
        return 0 if ready[remaining[0]] else -1
    unseen = sum(ready)
    if not unseen:
        return -1
    peak, spare = held, -1
    for place, work in enumerate(remaining):
        if ready[work]:
            if holds[work] <= 0 or peak < cap:
                if work < W1 or not rule.spare_weights:
                    return place
                if spare < 0:
                    spare = place
            ready[work] = False
            unseen -= 1
            if not unseen:
                break
        if holds[work]:
            held += holds[work]
            peak = max(peak, held)
    return spare


def zb_v(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only ZB-V schedule of `shape`, optimized for the `times` of F, I and W of one chunk.

    Raises ScheduleError if chunks is not 2, or `times` is not three finite numbers of at least 0.
    """
    starts = [_repeated_half(shape)]
    if shape.micro_batches >= 2 * shape.ranks - 1:
        starts.insert(0, _hand_made(shape.ranks, shape.micro_batches))
    return memory_capped(shape, "zb-v", starts, 2 * shape.ranks, optimizer, times)


def under_cap(shape: Shape, cap: int, times: Times = UNIT_TIMES) -> Iterator[Schedule]:
    """Yield schedules for a cap of any number of chunks, the likeliest first: ZB-V's if it fits, else of many blocks.

    Of the blocks with one or two slots from rank to rank, those that hold most under the cap, then the shortest, give
    the shortest schedules. If the cap is below V-min's, micro-batches follow at the least distance of more than six
    slots that fits. Raises ScheduleError as `zb_v`.
    """
    ranks, micro_batches = shape.ranks, shape.micro_batches
    is_known = cap >= 2 * ranks and micro_batches >= 2 * ranks - 1
    known = [_hand_made(ranks, micro_batches)] if is_known else []
    for start in known or _repeated_blocks(ranks, micro_batches, cap):
        for _, orders in islice(_candidates([start], micro_batches, cap, times), not known, None):
            yield _schedule(shape, "v", orders, "staggered")


def _repeated_blocks(ranks: int, micro_batches: int, cap: int) -> Iterator[Orders]:
    # A rank holds the two chunks of a micro-batch for 4 P slots or more.
    for period in range(max(PERIOD, 4 * ranks // max(1, cap - 1)), 4 * ranks + PERIOD):
        starts = (repeated(block, micro_batches, period) for block in _blocks(ranks, cap, period))
        fitting = (start for start in starts if max(map(_peak, start)) <= cap)
        first = next(fitting, None)
        if first is not None:
            yield first
            yield from fitting
            break


def _blocks(ranks: int, cap: int, period: int) -> list[list[list[int]]]:
    plain, last = [1] * (ranks - 1), ranks - 1
    waits = [waits for waits in product(range(PERIOD), repeat=3) if sum(waits) <= PERIOD]
    shifts = np.cumsum(np.insert(np.array(waits), 0, 0, axis=1), axis=1)
    found: dict[tuple[float, int, str], list[list[int]]] = {}
    for count, is_deep in product(sorted({*range(min(4, ranks)), last // 4, last // 2, last}), (False, True)):
        slow = [1 + (r >= last - count if is_deep else r < count) for r in range(last)]
        for slow_ways in _SLOW_WAYS:
            steps = [slow if way in slow_ways else plain for way in range(4)]
            slots = np.array(building_block(ranks, steps, (0, 0, 0))) + shifts[:, None, :]
            is_free = (np.diff(np.sort(slots % period, axis=2), axis=2) > 0).all(axis=(1, 2))
            held = 1 + (slots @ (-1, -1, 1, 1)).max(axis=1) / period
            for variant in np.flatnonzero(is_free & (held <= cap)).tolist():
                block = slots[variant].tolist()
                found[-held[variant], block[0][-1], str(block)] = block
    return [found[key] for key in sorted(found)]


def _peak(order: Sequence[int]) -> int:
    return max(accumulate(_HOLDS[work] for work in order))


def v_half(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only V-half schedule of `shape`. Arguments and errors as in `zb_v`."""
    cap = 2 * (shape.ranks // 2) + 2
    return memory_capped(shape, "v-half", [_repeated_half(shape)], cap, optimizer, times)


def v_min(shape: Shape, optimizer: Optimizer = "staggered", times: Times = UNIT_TIMES) -> Schedule:
    """The compute-only V-min schedule of `shape`. Arguments and errors as in `zb_v`."""
    cap = 2 * ((shape.ranks + 1) // 3 + 1)
    return memory_capped(shape, "v-min", [_repeated_min(shape)], cap, optimizer, times)


def _repeated_min(shape: Shape) -> Orders:
    block = building_block(shape.ranks, [[1] * shape.ranks] * 4, (0, 0 if shape.ranks % 3 else 2, 0))
    return repeated(block, shape.micro_batches)


def _repeated_half(shape: Shape) -> Orders:
    steps = [[2] * shape.ranks, [1] * shape.ranks]
    block = building_block(shape.ranks, steps * 2, (0, 0 if shape.ranks % 2 else 3, 1))
    return repeated(block, shape.micro_batches)


def _hand_made(ranks: int, micro_batches: int) -> Orders:
    orders = []
    for rank in range(ranks):
        below = ranks - rank  # this rank and the ranks further down the V
        warm_up = [F0] * (2 * below - 1) + [F1, F0] * rank + [F1, I1, W1] * below
        steady = [F0, I0, W0, F1, I1, W1] * (micro_batches - ranks - below + 1) + [I0, W0, F1, I1, W1] * (below - 1)
        cool_down = [I0, I1] * rank + [I0, W0] * below + [W1] * rank + [W0] * rank
        orders.append(warm_up + steady + cool_down)
    return orders
