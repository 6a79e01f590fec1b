"""Closed-form lower bounds on period and makespan, where each worker hosts one chunk.

Each bound looks at one stage and asks what its worst-off live host must at least go through. Micro-batches may be
assigned to the hosts in any way; since every bound grows with a host's number of micro-batches, the best assignment is
found host by host (`fewest`). Times, caps, speeds and links are those of the problem; a backward that stays whole
counts as I with no W. Sources: load and round trip after ReCycle's section 4 figures; memory is Little's law on
activation slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import ceil, floor, inf

from recycle.solve.problem import TOLERANCE, Problem


def period(problem: Problem) -> float:
    """Largest of load, round trip, memory and detour over the stages: the steady state of a staggered schedule.

    Each of them bounds E_s - S_w, last end of the stage minus first start of one of its hosts, and the host cannot
    start the next iteration before the stage has stepped.
    """
    stages = range(problem.shape.stages)
    bound = max(max(load(problem, s), round_trip(problem, s), memory(problem, s)) for s in stages)
    return rounded(problem, max(bound, max(detours(problem))[0]))


def makespan(problem: Problem) -> float:
    """Lower bound on one iteration from idle, which is the period under the barrier.

    Stage s starts only when the first micro-batch has come through the stages before it, and after its last backward
    the gradient still travels back through them.
    """
    bound = 0.0
    for s, (fill, drain) in enumerate(zip(arrivals(problem), departures(problem), strict=True)):
        bound = max(bound, fill + max(load(problem, s), round_trip(problem, s), memory(problem, s)))
        bound = max(bound, fill + last_backward(problem, s) + drain)
        bound = max(bound, fill + _once(problem, s) + problem.update_seconds[s])
    return rounded(problem, bound)


def load(problem: Problem, stage: int) -> float:
    """Work of the most loaded host: its F, I and W, then reduce and step."""
    work = _work(problem, stage)
    worst = fewest(problem, stage, lambda worker, count: count * work * problem.speed[worker])
    return worst + problem.update_seconds[stage]


def round_trip(problem: Problem, stage: int) -> float:
    """Load plus the idle time before the first backward.

    A host's first I needs one micro-batch to go to the last stage and back; until then it can run forwards only, no
    more than memory admits, as nothing is freed before the first I.
    """

    def window(worker: int, count: int) -> float:
        return count * _work(problem, stage) * problem.speed[worker] + _idle(problem, stage, worker, count)

    return fewest(problem, stage, window) + problem.update_seconds[stage]


def memory(problem: Problem, stage: int) -> float:
    """What the most loaded host needs to take all its micro-batches through its slots: the larger of two terms.

    Each micro-batch holds one slot from the start of its F to the end of its I, at least the trip to the last stage
    and back, then the stashed share until the end of its W. Little's law: the slot-seconds needed, over the slots.
    In whole micro-batches: the last one starts at `_last_start`, and its I and W are still to come.
    """

    def window(worker: int, count: int) -> float:
        if problem.cap[worker] == inf or not count:
            return 0.0
        once = _held(problem, stage, worker) + problem.weight[stage] * problem.speed[worker]
        stashed = once - (1 - problem.stash) * problem.weight[stage] * problem.speed[worker]
        return max(count * stashed / problem.cap[worker], _last_start(problem, stage, worker, count) + once)

    return fewest(problem, stage, window) + problem.update_seconds[stage]


def detours(problem: Problem) -> list[tuple[float, int, int]]:
    """(length, r, s) for stages r <= s: from r's first start through all that s has to do, and back to the end of r.

    The first micro-batch that any host of r starts is the earliest that can be at s; the worst-off host of s then
    needs `last_backward`; the gradient of its last backward travels back to r, whose I, W and step follow. So E_r
    minus the first start among the hosts of r is at least the sum, which links the ends of two stages.

    Returns:
        For each stage s the one from stage 0 and the longest.
    """
    found: list[tuple[float, int, int]] = []
    way, longest = 0.0, (-inf, 0)
    for s in range(problem.shape.stages):
        fastest = problem.fastest[s]
        mine = problem.weight[s] * fastest + problem.update_seconds[s]
        longest = max(longest, (mine - way, s))
        if s == 0:
            first = mine
        length = way + last_backward(problem, s)
        found += [(length + first, 0, s), (length + longest[0], longest[1], s)]
        way += (problem.forward[s] + problem.backward[s]) * fastest + 2 * problem.hop
    return found


def rounded(problem: Problem, bound: float) -> float:
    """What a bound proves where all times are whole."""
    return float(ceil(bound - 1e-6)) if problem.is_integral else bound


def last_backward(problem: Problem, stage: int) -> float:
    """From a host's first start to the end of its last backward: all its F and I, idle time, and some W.

    The idle time lies before the first backward. The last F has to find a free slot: of the `count` micro-batches that
    are started with it at most `cap` may be held, where one between I and W counts as `stash`, and at most count - 1
    have had their I. What that leaves over must have had its W, and the last I comes after the last F. It comes a trip
    after the start of the last micro-batch, too. With the backward whole nothing follows the last one, so that
    Little's law bounds it as well.
    """

    def window(worker: int, count: int) -> float:
        both = (problem.forward[stage] + problem.backward[stage]) * problem.speed[worker]
        over = count - problem.cap[worker] - (1 - problem.stash) * (count - 1)
        weights = max(0, ceil(over / problem.stash - TOLERANCE)) if problem.split and over > TOLERANCE else 0
        before = weights * problem.weight[stage] * problem.speed[worker]
        last = _last_start(problem, stage, worker, count) + _held(problem, stage, worker) if count else 0.0
        return max(count * both + before + _idle(problem, stage, worker, count), last)

    bound = fewest(problem, stage, window)
    return bound if problem.split else max(bound, memory(problem, stage) - problem.update_seconds[stage])


def arrivals(problem: Problem) -> list[float]:
    """Per stage: before this no micro-batch can be there, after a forward through each earlier stage's fastest host."""
    out, _ = problem.rest_of_way
    return [out[0] - out[s] + s * problem.hop for s in range(problem.shape.stages)]


def departures(problem: Problem) -> list[float]:
    """Per stage, after its last backward: the backwards of the stages before it, then the W and the step of each.

    Any stage on the way may be the last to finish; each of them waits for the gradient to come that far.
    """
    found, after_back = [], 0.0
    for s, update in enumerate(problem.update_seconds):
        fastest = problem.fastest[s]
        found.append(max(update, after_back))
        after_back = problem.hop + problem.backward[s] * fastest + max(problem.weight[s] * fastest + update, after_back)
    return found


def fewest(problem: Problem, stage: int, window: Callable[[int, int], float]) -> float:
    """Smallest possible maximum of `window(host, micro-batches)` over all assignments to the stage's live hosts.

    Args:
        window: must not fall as the number of micro-batches grows; then dealing each to the host that would be
            lowest with it is optimal.
    """
    hosts, total = problem.hosts[stage], problem.micro_batches
    if len(problem.kinds_of_host[stage]) == 1:
        return window(hosts[0], -(-total // len(hosts)))
    heap = [(window(w, 1), w, 1) for w in hosts]
    heapq.heapify(heap)
    highest = 0.0
    for _ in range(total):
        value, w, count = heapq.heappop(heap)
        highest = max(highest, value)
        heapq.heappush(heap, (window(w, count + 1), w, count + 1))
    return highest


def _work(problem: Problem, stage: int) -> float:
    return problem.forward[stage] + problem.backward[stage] + problem.weight[stage]


def _trip(problem: Problem, stage: int, worker: int) -> float:
    """R_s: from the start of a micro-batch's F on `worker` until its I can start there."""
    return problem.forward[stage] * problem.speed[worker] + problem.way_back[stage]


def _held(problem: Problem, stage: int, worker: int) -> float:
    """From the start of a micro-batch's F on `worker` to the end of its I there."""
    return _trip(problem, stage, worker) + problem.backward[stage] * problem.speed[worker]


def _last_start(problem: Problem, stage: int, worker: int, count: int) -> float:
    """From a host's first start to that of its last micro-batch.

    F follow each other, and with M whole slots the j-th is preceded by at least j - M activations that are freed, so
    that it starts no earlier than the time for which an activation is held after the (j - M)-th.
    """
    forward = problem.forward[stage] * problem.speed[worker]
    if problem.cap[worker] >= count:
        return (count - 1) * forward
    slots = floor(problem.cap[worker] + TOLERANCE)
    held = _held(problem, stage, worker)
    if problem.stash == 1:
        held += problem.weight[stage] * problem.speed[worker]
    rounds, rest = divmod(count - 1, slots)
    return rounds * max(held, slots * forward) + rest * forward


def _idle(problem: Problem, stage: int, worker: int, count: int) -> float:
    """Idle time of a host before its first backward."""
    if not count:
        return 0.0
    forwards = min(count, floor(min(problem.cap[worker], count) + TOLERANCE))
    return max(0.0, _trip(problem, stage, worker) - forwards * problem.forward[stage] * problem.speed[worker])


def _once(problem: Problem, stage: int) -> float:
    """One micro-batch from its F at `stage` to the end of its W there, on the fastest hosts."""
    worker = min(problem.hosts[stage], key=lambda w: problem.speed[w])
    back = (problem.backward[stage] + problem.weight[stage]) * problem.speed[worker]
    return _trip(problem, stage, worker) + back
