"""Lower bounds where a worker hosts several chunks: stages r, r + P, ... of one rank, on the same few workers.

A *unit* is one micro-batch in one chunk. Units may be assigned to the live hosts of a rank in any way; a bound is the
smallest period in which the hosts have room for all of them (`_least`). S is the first start among all hosts of
rank r, w* the host that has it. Whatever rank r does begins with a forward of its first chunk (a deeper one comes after
it in its micro-batch), so w* starts with one, and no host of the rank can run a backward before S + `way`: one
micro-batch through all the stages from r on and back to the deepest chunk of the rank. Until then a host runs forwards
only, no more than its memory admits, and waits for the rest: `idle`.

    load    a worker's program takes its work, and w* also its idle time, then reduce and step of all its stages, which
            it does one after the other; the next iteration's program comes after that
    memory  Little's law: slot-seconds that the units of a rank need, over the slots of its hosts
    detour  E_q - S_q for q <= r < P: from q's first start through the stages to rank r, where *every* host idles before
            its first backward, all F and backwards of the rank and the W that memory asks for before the last F (see
            `one_chunk.last_backward`); the last backward of stage r comes after those of the deeper chunks, and its
            gradient goes back to q, whose W and step follow

Under the barrier S is at least the arrival of the first micro-batch, and every host's work, idle time included, comes
after it. Limits: links are the fastest ones, workers on the way the fastest hosts; that units of one home stay on it
is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, gcd, inf

from recycle.solve.problem import TOLERANCE, Problem

_HALVINGS = 60
Room = Callable[[int, float], float]
"""How much of the work a worker has room for in so much time."""


def period(problem: Problem) -> float:
    """Lower bound on the period with a staggered optimizer."""
    ranks = range(problem.shape.ranks)
    bound = max(max(_load(problem, r, alone=True), _memory(problem, r)) for r in ranks)
    return max(bound, *(detour for detour, _ in _detours(problem)))


def makespan(problem: Problem) -> float:
    """Lower bound on one iteration from idle, which is the period under the barrier."""
    bound = 0.0
    for r in range(problem.shape.ranks):
        here = max(_load(problem, r, alone=False), _memory(problem, r))
        bound = max(bound, _between(problem, 0, r, back=False) + here)
    return max(bound, *(_between(problem, 0, q, back=False) + detour for detour, q in _detours(problem)))


def _load(problem: Problem, rank: int, alone: bool) -> float:
    """Work of the hosts and the idle time before the first backward, of w* `alone` or of every host."""
    stages, hosts = _stages(problem, rank), problem.hosts[rank]
    work = [problem.forward[s] + problem.backward[s] + problem.weight[s] for s in stages]
    total = problem.micro_batches * sum(work)

    def least(first: int | None) -> float:
        def room(w: int, time: float) -> float:
            idle = _idle(problem, rank, w) if first in (None, w) else 0.0
            return _whole(problem, work, w, time - idle)

        return _least(problem, hosts, total, room)

    kinds = {(problem.speed[w], problem.cap[w]): w for w in hosts}.values()
    bound = min(least(w) for w in kinds) if alone else least(None)
    return bound + problem.rank_update_seconds[rank]


def _memory(problem: Problem, rank: int) -> float:
    """Each unit holds a slot from its F through the trip to the last stage and back until its I, then a share."""
    hosts = problem.hosts[rank]
    slots = sum(problem.cap[w] for w in hosts)
    if slots == inf:
        return 0.0
    fastest = problem.fastest[rank]
    held = 0.0
    for s in _stages(problem, rank):
        own = problem.forward[s] + problem.backward[s] + problem.stash * problem.weight[s]
        held += own * fastest + _through(problem, s + 1, (0, 1)) + 2 * (problem.shape.stages - 1 - s) * problem.hop
    return problem.micro_batches * held / slots + problem.rank_update_seconds[rank]


def _detours(problem: Problem) -> Iterator[tuple[float, int]]:
    """(from the first start of stage q by way of all that a later rank must do until q has stepped, q)."""
    for rank in range(problem.shape.ranks):
        here = _last_backward(problem, rank)
        for q in range(rank + 1):
            last = problem.weight[q] * problem.fastest[q] + problem.update_seconds[q]
            yield _between(problem, q, rank, back=True) + here + last, q


def _last_backward(problem: Problem, rank: int) -> float:
    """From the first start of a rank to the end of its last backward."""
    stages, hosts = _stages(problem, rank), problem.hosts[rank]
    both = [problem.forward[s] + problem.backward[s] for s in stages]

    def room(w: int, time: float) -> float:
        return _whole(problem, both, w, time - _idle(problem, rank, w))

    once = _through(problem, rank, (0, 1)) + 2 * (problem.shape.stages - 1 - rank) * problem.hop
    bound = max(once, _least(problem, hosts, problem.micro_batches * sum(both), room))
    units = problem.micro_batches * len(stages)
    weight = min(problem.weight[s] for s in stages)
    if not problem.split or weight <= 0:
        return bound

    def needed(w: int, count: int) -> float:
        over = count - problem.cap[w] - (1 - problem.stash) * (count - 1)
        before = max(0, ceil(over / problem.stash - TOLERANCE)) if over > TOLERANCE else 0
        return (count * min(both) + before * weight) * problem.speed[w] + _idle(problem, rank, w)

    def count_of(w: int, time: float) -> float:
        low, high = 0, units
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed(w, middle) <= time + TOLERANCE else (low, middle - 1)
        return low

    return max(bound, _least(problem, hosts, units, count_of))


def _idle(problem: Problem, rank: int, worker: int) -> float:
    """Time of a host without work between S and the first backward that its rank can run."""
    stages = _stages(problem, rank)
    hops = (problem.shape.stages - 1 - rank) + (problem.shape.stages - 1 - stages[-1])
    way = _through(problem, rank, (0,)) + _through(problem, stages[-1] + 1, (1,)) + hops * problem.hop
    forwards = min(problem.cap[worker], float(problem.micro_batches * len(stages)))
    longest = max(problem.forward[s] for s in stages) * problem.speed[worker]
    return max(0.0, way - floor(forwards + TOLERANCE) * longest)


def _whole(problem: Problem, work: Sequence[float], worker: int, time: float) -> float:
    """The most work, at speed 1, that whole units of these times can fill of a worker's `time`."""
    speed = problem.speed[worker]
    if time <= 0:
        return 0.0
    times = [t * speed for t in work]
    grain = times[0] if max(times) - min(times) < TOLERANCE else 0.0
    if not grain and problem.is_integral:
        grain = float(gcd(*(round(t) for t in times)))
    return (floor(time / grain + TOLERANCE) * grain if grain else time) / speed


def _least(problem: Problem, hosts: Sequence[int], total: float, room: Room) -> float:
    """The smallest time in which the hosts together have room for `total`, from below."""
    low, high = 0.0, total
    while sum(room(w, high) for w in hosts) < total - TOLERANCE:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(room(w, middle) for w in hosts) < total - TOLERANCE:
            low = middle
        else:
            high = middle
    return float(ceil(low - 1e-6)) if problem.is_integral else low


def _stages(problem: Problem, rank: int) -> range:
    return range(rank, problem.shape.stages, problem.shape.ranks)


def _between(problem: Problem, start: int, rank: int, back: bool) -> float:
    """From `start` to the stage of the first chunk of `rank`, and `back`: what lies on the way, and the links."""
    kinds = (0, 1) if back else (0,)
    way = _through(problem, start, kinds) - _through(problem, rank, kinds)
    return way + (rank - start) * len(kinds) * problem.hop


def _through(problem: Problem, start: int, kinds: Sequence[int]) -> float:
    """F (0) or backward (1) of one micro-batch on the fastest hosts of all stages from `start` on."""
    stages = range(start, problem.shape.stages)
    return sum((problem.forward, problem.backward)[kind][s] * problem.fastest[s] for s in stages for kind in kinds)
