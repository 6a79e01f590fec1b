"""Closed-form lower bounds on period and makespan: the least work and waiting of the hosts of one rank.

A rank hosts one stage, or with several chunks one of each on the same workers, r first. A *unit* is one micro-batch
in one chunk. A bound is the smallest period in which the live hosts have room for all units (`_least`).

S is the first start among all hosts of rank r, and w* its host. w* begins its next program only after S + T, and its
reduces wait for every host. So all work of the rank lies in S to S + T. No host can run a backward before S + `path`:
one micro-batch from r through all later stages and back to the deepest chunk of the rank. Until then a host runs only
forwards, limited by its memory and its units, and waits for the rest: `idle`.

    load    every host takes its idle time and its work, then reduces and steps all stages in sequence; w* performs the
            reduces after the last W of any host
    detour  E_q - S_q for q <= r < P: from q's first start through the stages to rank r, where *every* host idles before
            its first backward; all F and backwards of the rank and the W that memory requires before the last F, or
            all units in sequence through the slots of its hosts; the last backward of stage r follows the deeper
            chunks' backwards, and its gradient returns to q, whose W and step follow

With the barrier S is at least the arrival of the first micro-batch. A whole backward counts as I without a W. Source:
load and round trip after ReCycle's section 4 figures.

Limits: assumes the fastest links, and the fastest hosts on the path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, floor, gcd, inf

import numpy as np

from recycle.solve.bounds.bound import Bound
from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.problem_arrays import Floats

_HALVINGS = 36
_FUZZ = 1e-6
"""Rounding error of a whole time."""
Room = Callable[[float], float | Floats]
"""Units and work, or work alone, that a worker has room for, as a function of time."""


def loads_and_detours(problem: Problem) -> Bound:
    """Return the best bound of load and detour, with the barrier of one iteration from an empty pipeline."""
    from_idle = not problem.staggered
    loads = [(load(problem, r) + from_idle * _fill(problem, r), r) for r in range(problem.shape.ranks)]
    longest = (("load", max(loads)), ("detour", max(detours(problem, from_idle))))
    return max(Bound.of_rule(value, problem.is_integral, rule, *place) for rule, (value, *place) in longest)


def load(problem: Problem, rank: int) -> float:
    """Return the bound from work, idle time before the first backward, and reduce and step of all stages."""
    each = [problem.seconds[s] for s in _stages(problem, rank)]
    return _least_work(problem, rank, each) + problem.rank_update_seconds[rank]


def lanes(problem: Problem) -> Bound:
    """Return the bound from transfers between neighboring stages, one at a time per pair of workers.

    The last activation to leave a stage waits for the others of its lane, and returns through all later stages.
    """
    longest = (0.0, 0)
    for s, (hosts, receivers) in enumerate(pairwise(problem.hosts)):
        waits = ceil(problem.micro_batches / (len(hosts) * len(receivers))) - 1
        start = 0.0 if problem.staggered else _fill(problem, s)
        length = (
            start
            + problem.seconds[s] * problem.fastest[s]
            + waits * problem.hop_after[s]
            + problem.return_path[s]
            + problem.update_seconds[s]
        )
        longest = max(longest, (length, s))
    return Bound.of_rule(longest[0], problem.is_integral, "lane", longest[1])


def work(problem: Problem, rank: int) -> float:
    """Return the work of a rank, spread evenly over its hosts."""
    each = sum(problem.seconds[s] for s in _stages(problem, rank))
    return problem.micro_batches * each / sum(1 / problem.speed[w] for w in problem.hosts[rank])


def slot_time(problem: Problem, rank: int, after: float = 0.0) -> float:
    """Return the time from the first start of a rank until all units have passed the whole slots of its hosts.

    Args:
        after: part of the last unit of each slot that need not have ended.
    """
    share = float(problem.stash == 1)
    held = _held(problem, rank, problem.fastest[rank], share)
    shortest = min(problem.forward[s] for s in _stages(problem, rank))
    units, total = problem.micro_batches * len(held), problem.micro_batches * sum(held)

    def room_of(w: int) -> Room:
        own_times = _held(problem, rank, problem.speed[w], share)
        slower = min(own / least for own, least in zip(own_times, held, strict=True))
        taken = np.arange(floor(min(problem.cap[w], units) + TOLERANCE)) * shortest * problem.speed[w]
        return lambda time: float(_filled(np.maximum(0.0, time + after - taken), own_times).sum()) / slower

    rooms = [(count, room_of(w)) for w, count in problem.kinds_of_host[rank].items()]
    return _least(problem, rooms, total, total / sum(min(problem.cap[w], units) for w in problem.hosts[rank]))


def _filled(times: Floats, lengths: Sequence[float]) -> Floats:
    if len(lengths) > 2:
        return times
    longer, shorter = lengths[0], lengths[-1]
    filled = np.zeros_like(times)
    for count in range(floor(times.max(initial=0.0) / longer + TOLERANCE) + 1 if longer > shorter else 1):
        remaining = times - count * longer
        whole = count * longer + np.floor(remaining / shorter + TOLERANCE) * shorter
        filled = np.where(remaining >= -TOLERANCE, np.maximum(filled, whole), filled)
    return filled


def _held(problem: Problem, rank: int, speed: float, share: float) -> list[float]:
    return [
        (problem.forward[s] + problem.backward[s] + share * problem.weight[s]) * speed + problem.return_path[s]
        for s in _stages(problem, rank)
    ]


def detours(problem: Problem, from_idle: bool = False) -> list[tuple[float, int, int]]:
    """Return (length, q, r) for ranks q <= r: from stage q's first start through all work of rank r to q's step.

    For each rank r these are the detour from rank 0 and the longest one. `from_idle` counts from the iteration's start.
    """
    lengths: list[tuple[float, int, int]] = []
    path, longest = 0.0, (-inf, 0)
    for r in range(problem.shape.ranks):
        tail = problem.weight[r] * problem.fastest[r] + problem.update_seconds[r]
        tail += _fill(problem, r) if from_idle else 0.0
        longest = max(longest, (tail - path, r))
        if r == 0:
            first = tail
        length = path + last_backward(problem, r)
        lengths += [(length + first, 0, r), (length + longest[0], longest[1], r)]
        path += (problem.forward[r] + problem.backward[r]) * problem.fastest[r] + 2 * problem.hop_after[r]
    return lengths


def last_backward(problem: Problem, rank: int) -> float:
    """Return the least time from the first start of a rank to the end of its last backward.

    The idle time precedes the first backward. The last F needs a free slot. Of the `count` units started so far at most
    `cap` may be held; a unit between I and W counts as `stash`. At most count - 1 have had their I. All further units
    must have had their W, and the last I follows the last F.
    """
    stages = _stages(problem, rank)
    both = [problem.forward[s] + problem.backward[s] for s in stages]
    weights = [problem.weight[s] for s in stages]
    after = max(weights) * problem.fastest[rank] if problem.stash == 1 else 0.0
    bound = max(_held(problem, rank, problem.fastest[rank], 0.0)[0], slot_time(problem, rank, after))
    return max(bound, _least_work(problem, rank, both, min(weights)))


def _waits(problem: Problem, rank: int, worker: int, weight: float) -> Floats:
    """Return, by number of units, a worker's idle time and the time of each `weight` that its memory requires."""
    stages, (out, back) = _stages(problem, rank), problem.remaining_path
    hops = problem.remaining_hops[rank] + problem.remaining_hops[stages[-1]]
    path = out[rank] + back[stages[-1] + 1] + hops
    units, cap, speed = np.arange(problem.micro_batches * len(stages) + 1), problem.cap[worker], problem.speed[worker]
    forwards = np.floor(np.minimum(cap, units) + TOLERANCE)
    longest = max(problem.forward[s] for s in stages) * speed
    waits = np.where(forwards > 0, np.maximum(0.0, path - forwards * longest), 0.0)
    if weight and problem.stash:
        over = np.maximum(0.0, units - cap - (1 - problem.stash) * (units - 1))
        waits += np.ceil(over / problem.stash - TOLERANCE) * weight * speed
    return waits


def _room(problem: Problem, rank: int, each: Sequence[float], worker: int, weight: float) -> Room:
    speed, waits = problem.speed[worker], _waits(problem, rank, worker, weight)
    times, units = [t * speed for t in each], np.arange(len(waits))
    seconds, most = units * min(times) + waits, units * max(times)
    grain = times[0] if max(times) - min(times) < TOLERANCE else 0.0
    if not grain and problem.is_integral:
        grain = float(gcd(*(round(t) for t in times)))

    def room(time: float) -> Floats:
        possible = units[: int(max(0.0, time) / min(times)) + 2]
        possible = possible[seconds[possible] <= time + TOLERANCE]
        work = np.maximum(0.0, time - waits[possible])
        work = np.minimum(most[possible], np.floor(work / grain + TOLERANCE) * grain if grain else work)
        return np.array([possible.max(initial=0), work.max(initial=0.0) / speed])

    return room


def _least_work(problem: Problem, rank: int, each: Sequence[float], weight: float = 0.0) -> float:
    """Return the least time in which the hosts of a rank run all units of `each` seconds."""
    hosts, total = problem.kinds_of_host[rank].items(), problem.micro_batches * sum(each)
    rooms = [(count, _room(problem, rank, each, w, weight)) for w, count in hosts]
    return _least(problem, rooms, np.array([problem.micro_batches * len(each), total]), total)


def _least(problem: Problem, rooms: Sequence[tuple[int, Room]], total: float | Floats, first: float) -> float:
    def is_short(time: float) -> bool:
        return bool(np.any(sum(count * room(time) for count, room in rooms) < total - TOLERANCE))

    whole = problem.is_integral
    low, high = -1.0 if whole else 0.0, max(0.0, ceil(first) if whole else first)
    fuzz = _FUZZ if whole else 0.0
    while is_short(high + fuzz):
        low, high = high, 2 * high + whole
    for _ in range(_HALVINGS):
        if whole and high - low <= 1:
            return high
        middle = floor((low + high) / 2) if whole else (low + high) / 2
        low, high = (middle, high) if is_short(middle + fuzz) else (low, middle)
    return low


def _stages(problem: Problem, rank: int) -> tuple[int, ...]:
    return problem.shape.stages_of_rank(rank)


def _fill(problem: Problem, stage: int) -> float:
    out, _ = problem.remaining_path
    return out[0] - out[stage] + problem.remaining_hops[0] - problem.remaining_hops[stage]
