"""Lower bounds where a worker hosts several chunks: stages r, r + P, ... of one rank, on the same few workers.

A *unit* is one micro-batch in one chunk. Units may be assigned to the live hosts of a rank in any way; a bound is the
smallest period in which the hosts have room for all of them (`_least`). S is the first start among all hosts of
rank r, w* the host that has it. As w* begins its next program after S + T only, and its reduces wait for every host,
all work of the rank lies in S to S + T. It begins with a forward of the first chunk (a deeper one comes after it in its
micro-batch), so no host can run a backward before S + `way`: one micro-batch through all the stages from r on and back
to the deepest chunk of the rank. Until then a host runs forwards only, no more than its memory admits, and waits for
the rest: `idle`.

    load    every host takes its idle time and its work, and reduces and steps all stages one after the other: those
            that it reduces after its last W, w* reduces after it too
    memory  Little's law: slot-seconds that the units of a rank need, over the slots of its hosts, and the same in whole
            units; then reduce and step of one stage, as those of the others may come before the last slot is free
    detour  E_q - S_q for q <= r < P: from q's first start through the stages to rank r, where *every* host idles before
            its first backward, all F and backwards of the rank and the W that memory asks for before the last F (see
            `one_chunk.last_backward`); the last backward of stage r comes after those of the deeper chunks, and its
            gradient goes back to q, whose W and step follow

Hosts of the same speed and memory have room for as much, so a bound takes time in the ranks and kinds of host, not in
the workers. Under the barrier S is at least the arrival of the first micro-batch. Limits: links are the fastest ones,
workers on the way the fastest hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, floor, gcd, inf

import numpy as np

from recycle.solve.bounds.one_chunk import rounded
from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.problem_arrays import Floats

_HALVINGS = 45
_FUZZ = 1e-6
"""What rounding may add to a whole time."""
Room = Callable[[float], float]
"""How much of the work a worker has room for in so much time."""


def period(problem: Problem) -> float:
    """Lower bound on the period with a staggered optimizer."""
    bound = max(max(load(problem, r), memory(problem, r)) for r in range(problem.shape.ranks))
    return rounded(problem, max(bound, max(detours(problem))[0]))


def makespan(problem: Problem) -> float:
    """Lower bound on one iteration from idle, which is the period under the barrier."""
    bound = 0.0
    for r in range(problem.shape.ranks):
        bound = max(bound, _fill(problem, r) + max(load(problem, r), memory(problem, r)))
    return rounded(problem, max(bound, max(detours(problem, from_idle=True))[0]))


def load(problem: Problem, rank: int) -> float:
    """Work of the hosts and the idle time of each before the first backward, then reduce and step of all stages."""
    stages, kinds = _stages(problem, rank), problem.kinds_of_host[rank]
    work = [problem.forward[s] + problem.backward[s] + problem.weight[s] for s in stages]
    rooms = [(count, _room(problem, work, w, _idle(problem, rank, w))) for w, count in kinds.items()]
    return _least(problem, rooms, problem.micro_batches * sum(work)) + problem.rank_update_seconds[rank]


def memory(problem: Problem, rank: int) -> float:
    """Slot-seconds that the units need, over the slots; and what the slots have room for in whole units.

    Each unit holds a slot from its F through the trip to the last stage and back until its I, then a share.
    """
    slots, units = sum(problem.cap[w] for w in problem.hosts[rank]), problem.micro_batches
    if slots == inf:
        return 0.0
    held = _held(problem, rank)
    weight = [problem.weight[s] * problem.fastest[rank] for s in _stages(problem, rank)]
    little = units * (sum(held) + problem.stash * sum(weight)) / slots
    return max(little, _through_slots(problem, rank, 0.0)) + min(
        problem.update_seconds[s] for s in _stages(problem, rank)
    )


def _through_slots(problem: Problem, rank: int, after: float) -> float:
    """Time from the first start of a rank until all units have gone through the whole slots of its hosts.

    What is held at once has distinct slots, and those of a host are first taken one F after another.

    Args:
        after: part of the last unit of each slot that need not have ended.
    """
    if any(problem.cap[w] == inf for w in problem.hosts[rank]):
        return 0.0
    held = _held(problem, rank)
    if problem.stash == 1:
        held = [
            t + problem.weight[s] * problem.fastest[rank] for t, s in zip(held, _stages(problem, rank), strict=True)
        ]
    forward = min(problem.forward[s] for s in _stages(problem, rank)) * problem.fastest[rank]
    units = problem.micro_batches * len(held)

    def room_of(worker: int) -> Room:
        taken = np.arange(min(floor(problem.cap[worker] + TOLERANCE), units)) * forward

        def room(time: float) -> float:
            return float(_filled(np.maximum(0.0, time + after - taken), held).sum())

        return room

    rooms = [(count, room_of(w)) for w, count in problem.kinds_of_host[rank].items()]
    total, slots = problem.micro_batches * sum(held), sum(problem.cap[w] for w in problem.hosts[rank])
    return _least(problem, rooms, total, total / slots)


def _filled(times: Floats, lengths: Sequence[float]) -> Floats:
    """The most of each of these times that whole units of two lengths, the longer one first, can fill."""
    if len(lengths) > 2:
        return times
    longer, shorter = lengths
    filled = np.zeros_like(times)
    for count in range(floor(times.max(initial=0.0) / longer + TOLERANCE) + 1):
        left = times - count * longer
        whole = count * longer + np.floor(left / shorter + TOLERANCE) * shorter
        filled = np.where(left >= -TOLERANCE, np.maximum(filled, whole), filled)
    return filled


def _held(problem: Problem, rank: int) -> list[float]:
    """Per chunk of a rank: least time from the start of an F there to the end of its I."""
    own = [problem.forward[s] + problem.backward[s] for s in _stages(problem, rank)]
    return [t * problem.fastest[rank] + problem.way_back[s] for t, s in zip(own, _stages(problem, rank), strict=True)]


def detours(problem: Problem, from_idle: bool = False) -> list[tuple[float, int, int]]:
    """(length, q, r) for ranks q <= r: first start of stage q, by way of all that rank r must do, until q has stepped.

    Args:
        from_idle: count from the start of the iteration in place of q's first start.

    Returns:
        For each rank r the one from rank 0 and the longest.
    """
    found: list[tuple[float, int, int]] = []
    way, longest = 0.0, (-inf, 0)
    for r in range(problem.shape.ranks):
        mine = problem.weight[r] * problem.fastest[r] + problem.update_seconds[r]
        mine += _fill(problem, r) if from_idle else 0.0
        longest = max(longest, (mine - way, r))
        if r == 0:
            first = mine
        length = way + _last_backward(problem, r)
        found += [(length + first, 0, r), (length + longest[0], longest[1], r)]
        way += (problem.forward[r] + problem.backward[r]) * problem.fastest[r] + 2 * problem.hop
    return found


def _last_backward(problem: Problem, rank: int) -> float:
    """From the first start of a rank to the end of its last backward."""
    stages, kinds = _stages(problem, rank), problem.kinds_of_host[rank]
    both = [problem.forward[s] + problem.backward[s] for s in stages]
    idle = {w: _idle(problem, rank, w) for w in kinds}
    rooms = [(count, _room(problem, both, w, idle[w])) for w, count in kinds.items()]
    after = max(problem.weight[s] for s in stages) * problem.fastest[rank] if problem.stash == 1 else 0.0
    bound = max(_held(problem, rank)[0], _through_slots(problem, rank, after))
    bound = max(bound, _least(problem, rooms, problem.micro_batches * sum(both)))
    units = problem.micro_batches * len(stages)
    weight = min(problem.weight[s] for s in stages)
    if not problem.split or weight <= 0:
        return bound

    def needed(w: int, count: int) -> float:
        over = count - problem.cap[w] - (1 - problem.stash) * (count - 1)
        before = max(0, ceil(over / problem.stash - TOLERANCE)) if over > TOLERANCE else 0
        return (count * min(both) + before * weight) * problem.speed[w] + idle[w]

    def count_of(w: int, time: float) -> float:
        low, high = 0, units
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed(w, middle) <= time + TOLERANCE else (low, middle - 1)
        return low

    return max(bound, _least(problem, [(count, partial(count_of, w)) for w, count in kinds.items()], units))


def _idle(problem: Problem, rank: int, worker: int) -> float:
    """Time of a host without work between S and the first backward that its rank can run."""
    stages, (out, back) = _stages(problem, rank), problem.rest_of_way
    hops = (problem.shape.stages - 1 - rank) + (problem.shape.stages - 1 - stages[-1])
    way = out[rank] + back[stages[-1] + 1] + hops * problem.hop
    forwards = min(problem.cap[worker], float(problem.micro_batches * len(stages)))
    longest = max(problem.forward[s] for s in stages) * problem.speed[worker]
    return max(0.0, way - floor(forwards + TOLERANCE) * longest)


def _room(problem: Problem, work: Sequence[float], worker: int, idle: float) -> Room:
    """The most work, at speed 1, that whole units of these times can fill of a worker's time, `idle` of it apart."""
    speed = problem.speed[worker]
    times = [t * speed for t in work]
    grain = times[0] if max(times) - min(times) < TOLERANCE else 0.0
    if not grain and problem.is_integral:
        grain = float(gcd(*(round(t) for t in times)))

    def room(time: float) -> float:
        if time <= idle:
            return 0.0
        return (floor((time - idle) / grain + TOLERANCE) * grain if grain else time - idle) / speed

    return room


def _least(problem: Problem, rooms: Sequence[tuple[int, Room]], total: float, first: float | None = None) -> float:
    """The smallest time, from below, in which hosts together have room for `total`.

    Args:
        rooms: (how many hosts, the room of each of them).
        first: where the search begins.
    """

    def is_short(time: float) -> bool:
        return sum(count * room(time) for count, room in rooms) < total - TOLERANCE

    if problem.is_integral:
        return float(_least_whole(is_short, ceil(first or total)))
    low, high = 0.0, first or total
    while is_short(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_short(middle) else (low, middle)
    return low


def _least_whole(is_short: Callable[[float], bool], first: int) -> int:
    """The smallest whole time that is not short; `first` is where the search begins."""
    low, high = -1, max(0, first)
    while is_short(high + _FUZZ):
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_short(middle + _FUZZ) else (low, middle)
    return high


def _stages(problem: Problem, rank: int) -> range:
    return range(rank, problem.shape.stages, problem.shape.ranks)


def _fill(problem: Problem, rank: int) -> float:
    """Before this no micro-batch can be at the first chunk of a rank."""
    out, _ = problem.rest_of_way
    return out[0] - out[rank] + rank * problem.hop
