"""Insertion: one micro-batch after another takes its whole way through the model, each operation in the first gap.

The list scheduler goes by the clock: a worker that falls idle takes whatever is ready, so that newer micro-batches fill
gaps and slots of memory that older ones, held on many workers already, need a moment later. Here nothing newer ever
delays what is older, and a micro-batch is held no longer than its way takes. With tight memory, slow links and several
chunks per worker the period follows from how long that is. Serial schedule generation of project scheduling
(Kolisch, 1996), with micro-batches for activities.

A forward begins when its worker has a gap, and a slot then and at all times after it. A W waits until more than
`waiting` of them wait on its worker, or until a forward finds no slot before. The assignment says how many micro-
batches of others a worker runs at each stage; which of them is decided here: whoever could end the forward first takes
it. A free manner takes the assignment for how many micro-batches a worker runs at all, and moves those of live workers
as well: with tight memory the period follows from how long a micro-batch is held, and one that finds its own worker
busy on its way is held shorter on a peer. Of hosts that end at the same time its home is the first choice. It may have
some to spare, too: where memory and not work limits the iteration, workers need not have the same number at each stage,
and the slots of one are filled without gaps by more of the first chunk, those of another by more of the second.

Limits: that transfers queue is left out here and counted when the order is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from random import Random
from typing import NamedTuple

import numpy as np

from recycle.ir.compiled import called_by_kernels, run
from recycle.solve.assignment import Assignment, at_home
from recycle.solve.effort import Effort, Incumbent
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import Floats, Operations, ProblemArrays
from recycle.solve.search.event_loop import UNLIMITED
from recycle.solve.search.order_kernels import timed

NEVER = 1e300
SAME = 1e-9
"""Difference up to which two times are the same instant."""
PREFERENCE = 1e-3
"""Seconds, in typical operation times, by which a host may be later for each micro-batch more that it has to take."""
WAITING = (0, UNLIMITED, 2, 5, 1, 3)
"""W that may wait on a worker, one number for all ranks, in the order in which they are tried."""
SPARE, SPARES = 0.2, (0.0, 0.1, 0.2, 0.5, 1.0)
"""What a host may have beyond the assignment to begin with, where memory is limited, and what a search tries."""
DELAYS = 8
"""A search stands an operation back by up to half so many typical operations' times."""


@dataclass(frozen=True, eq=False)
class Manner:
    """What may be varied.

    Attributes:
        assignment: says how many micro-batches each host has at each stage, and which stay at home.
        waiting: per rank, W that may wait before the oldest takes the first gap.
        delay: per kind (F, backward) and stage, seconds by which an operation stands back from its earliest time.
        sequence: the micro-batches, those first that go first.
        is_free: any host may take any micro-batch, up to the number that the assignment gives it.
        spare: by how much a host may exceed this number then, as a share of it, and by one more unless it is 0.
    """

    assignment: Assignment
    waiting: tuple[int, ...]
    delay: tuple[float, ...]
    sequence: tuple[int, ...]
    is_free: bool = False
    spare: float = 0.0


class Insertion(NamedTuple):
    """The state of the kernel. A unit is a (stage, micro-batch); w has the places units[w] to units[w + 1] for its own.

    Attributes:
        host: [units], where a unit stays, or -1; the kernel fills in who takes it.
        home: [units], where it would run if all were alive.
        quota: [stages * workers], units that each worker has to take, of those that stay nowhere.
        waiting, delay, sequence: as in `Manner`.
        preference: seconds by which a host may be later for each micro-batch more that it has to take, and for being
            the home.
        units: [workers + 1].
        start: [operations], the result.
        low, high: [places of operations], begins and ends of the operations of each worker, in their order.
        busy: [workers], how many of these there are.
        taken, halved, freed: [places], from when a unit holds a slot, from when the stashed share of one, until when;
            by worker, the latest `freed` last.
        holder: [places], which unit that is.
        held: [workers], how many of these there are.
        pending: [places], the units whose W wait, by worker.
        first, last: [workers], those that wait still.
    """

    host: Operations
    home: Operations
    quota: Operations
    waiting: Operations
    delay: Floats
    sequence: Operations
    preference: float
    units: Operations
    start: Floats
    low: Floats
    high: Floats
    busy: Operations
    taken: Floats
    halved: Floats
    freed: Floats
    holder: Operations
    held: Operations
    pending: Operations
    first: Operations
    last: Operations


def plain(problem: Problem, assignment: Assignment, waiting: int, is_free: bool = False, spare: float = 0.0) -> Manner:
    """Nothing stands back, and micro-batches go by their index, then pipeline."""
    m = problem.shape.micro_batches
    g = np.arange(problem.micro_batches)
    sequence = tuple(np.lexsort((g // m, g % m)).tolist())
    return Manner(
        assignment, (waiting,) * problem.shape.ranks, (0.0,) * 2 * problem.shape.stages, sequence, is_free, spare
    )


def insertion_orders(problem: Problem, assignments: list[Assignment]) -> Iterator[tuple[Order, Manner]]:
    """The orders of plain manners, with each assignment; those that do not fit the memory are left out."""
    ways = [(False, 0.0)]
    if problem.reroute and problem.shape.pipelines > 1:
        ways += [(True, 0.0)] + [(True, SPARE)] * (min(problem.cap) < inf)
    for waiting, (is_free, spare), assignment in product(WAITING if problem.split else WAITING[:1], ways, assignments):
        manner = plain(problem, assignment, waiting, is_free, spare)
        order = inserted(problem, manner)
        if order is not None:
            yield order, manner


def inserted(problem: Problem, manner: Manner) -> Order | None:
    """The order that insertion makes; None where rounding puts it beyond a cap."""
    order = _made(problem, manner)
    return order if problem.is_within_caps(order) else None


def _made(problem: Problem, manner: Manner) -> Order:
    """The order that insertion makes, within the caps but for rounding."""
    state = _state(problem, manner)
    *_, state = run(insert, problem.size, problem.arrays, state)
    plane = problem.shape.stages * problem.micro_batches
    host, start = np.tile(np.asarray(state.host), problem.kinds), np.asarray(state.start)
    kind = np.arange(problem.size) // plane
    line = np.lexsort((-kind, start, host))
    ends = np.cumsum(np.bincount(host, minlength=problem.shape.worker_count))[:-1]
    return [program.tolist() for program in np.split(line, ends)]


def vary_insertion(problem: Problem, start: Incumbent, manner: Manner, effort: Effort) -> Incumbent:
    """Local search over manners: change a few things at random, keep what is not worse.

    Args:
        start: the order of `manner`, or a better one.
    """
    random = Random(effort.seed)
    best, current, candidate, current_period = start, manner, manner, inf
    while effort.goes_on(problem, best.period):
        found = timed(problem, _made(problem, candidate))
        if found.period <= current_period and problem.is_within_caps(found.order):
            current, current_period = candidate, found.period
            if found.period < best.period - SAME:
                best = found
        candidate = vary_manner(problem, current, random)
    return best


def vary_manner(problem: Problem, manner: Manner, random: Random) -> Manner:
    """The manner with one or two things changed."""
    waiting, delay, sequence = list(manner.waiting), list(manner.delay), list(manner.sequence)
    for _ in range(random.choice((1, 1, 2))):
        how = random.random()
        if how < 0.3 and problem.split:
            first = random.randrange(len(waiting))
            until = random.choice((first + 1, len(waiting)))
            waiting[first:until] = [random.choice((0, 1, 2, 3, 5, 8, UNLIMITED))] * (until - first)
        elif how < 0.7:
            place = random.randrange(len(delay))
            delay[place] = 0.5 * problem.unit * max(0, random.randrange(DELAYS) - DELAYS // 2 + 1)
            delay[random.randrange(len(delay))] = 0.0
        else:
            i = random.randrange(len(sequence))
            j = max(0, min(len(sequence) - 1, i + random.randint(-problem.shape.pipelines, problem.shape.pipelines)))
            sequence.insert(j, sequence.pop(i))
    spare = random.choice(SPARES) if manner.is_free and random.random() < 0.1 else manner.spare
    return replace(manner, waiting=tuple(waiting), delay=tuple(delay), sequence=tuple(sequence), spare=spare)


def _state(problem: Problem, manner: Manner) -> Insertion:
    stages, workers, plane = problem.shape.stages, problem.shape.worker_count, len(manner.assignment.host)
    assigned, home = manner.assignment.host, at_home(problem).ravel()
    moved = np.full(plane, True) if manner.is_free else assigned != home
    quota = np.bincount((problem.stage_of * workers + assigned)[moved], minlength=stages * workers)
    if manner.spare:
        more = np.ceil(quota * manner.spare).astype(np.int64) + 1
        quota = np.where(quota > 0, np.minimum(quota + more, problem.micro_batches), 0)
    most = np.bincount(assigned[~moved], minlength=workers) + quota.reshape(stages, workers).sum(axis=0)
    units = np.concatenate([[0], np.cumsum(most)])
    room = int(units[-1])

    def zeros(count: int) -> Operations:
        return np.zeros(count, dtype=np.int64)

    return Insertion(
        host=np.where(moved, -1, home),
        home=home,
        quota=quota,
        waiting=np.array(manner.waiting, dtype=np.int64),
        delay=np.array(manner.delay, dtype=np.float64),
        sequence=np.array(manner.sequence, dtype=np.int64),
        preference=PREFERENCE * problem.unit,
        units=units.astype(np.int64),
        start=np.zeros(problem.size),
        low=np.zeros(problem.kinds * room),
        high=np.zeros(problem.kinds * room),
        busy=zeros(workers),
        taken=np.zeros(room),
        halved=np.zeros(room),
        freed=np.zeros(room),
        holder=zeros(room),
        held=zeros(workers),
        pending=zeros(room),
        first=zeros(workers),
        last=zeros(workers),
    )


def insert(problem: ProblemArrays, state: Insertion) -> None:
    """The kernel: fills `start` and `host`."""
    stages, n, ranks = problem.stages, problem.micro_batches, problem.ranks
    times, speed, plane = problem.times, problem.speed, problem.stages * problem.micro_batches
    host, home, quota, start, delay = state.host, state.home, state.quota, state.start, state.delay
    workers = len(speed)
    for g in state.sequence:
        now = 0.0
        before = -1
        for s in range(stages):
            x = s * n + g
            w = host[x]
            if w >= 0:
                ready = now + delay[s] + _hop(problem, before, w, False)
                at = _forward_gap(problem, state, w, ready, times[s] * speed[w])
            else:
                at = NEVER
                least = NEVER
                for v in range(s % ranks, workers, ranks):
                    if quota[s * workers + v] > 0:
                        ready = now + delay[s] + _hop(problem, before, v, False)
                        time = times[s] * speed[v]
                        favour = state.preference * (quota[s * workers + v] + (1 if v == home[x] else 0))
                        if ready + time - favour >= least:
                            continue
                        here = _forward_gap(problem, state, v, ready, time)
                        if here + time - favour < least:
                            least = here + time - favour
                            at = here
                            w = v
                quota[s * workers + w] -= 1
                host[x] = w
            start[x] = at
            now = at + times[s] * speed[w]
            _occupy(problem, state, w, at, now)
            i = state.units[w] + state.held[w]
            state.taken[i] = at
            state.halved[i] = NEVER
            state.freed[i] = NEVER
            state.holder[i] = x
            state.held[w] += 1
            before = w
        for s in range(stages - 1, -1, -1):
            x = s * n + g
            w = host[x]
            ready = now + delay[stages + s] + _hop(problem, before, w, True)
            time = times[stages + s] * speed[w]
            at = _gap(problem, state, w, ready, time)
            start[plane + x] = at
            now = at + time
            _occupy(problem, state, w, at, now)
            if problem.split:
                i = state.units[w] + state.held[w] - 1
                while state.holder[i] != x:
                    i -= 1
                state.halved[i] = now
                state.pending[state.units[w] + state.last[w]] = x
                state.last[w] += 1
                while state.last[w] - state.first[w] > state.waiting[w % ranks]:
                    _weight(problem, state, w)
            else:
                _free(state, w, x, now, now)
            before = w
    for w in range(workers):
        while state.first[w] < state.last[w]:
            _weight(problem, state, w)


@called_by_kernels
def _hop(problem: ProblemArrays, before: int, w: int, goes_back: bool) -> float:
    """Seconds until what worker `before` has made is at worker w; -1 for what nobody makes."""
    if before < 0 or before == w:
        return 0.0
    if len(problem.hops) == 0:
        return problem.link
    workers, ranks = len(problem.speed), problem.ranks
    behind = workers if goes_back and ranks > 2 else 0
    hop: float = problem.hops[(before + behind) * (workers // ranks) + w // ranks]
    return hop


@called_by_kernels
def _weight(problem: ProblemArrays, state: Insertion, w: int) -> None:
    """The W of worker w that waits longest takes its first gap."""
    plane, n = problem.stages * problem.micro_batches, problem.micro_batches
    x = state.pending[state.units[w] + state.first[w]]
    state.first[w] += 1
    ready = state.start[plane + x] + problem.times[problem.stages + x // n] * problem.speed[w]
    time = problem.times[2 * problem.stages + x // n] * problem.speed[w]
    at = _gap(problem, state, w, ready, time)
    state.start[2 * plane + x] = at
    _occupy(problem, state, w, at, at + time)
    _free(state, w, x, ready, at + time)


@called_by_kernels
def _free(state: Insertion, w: int, x: int, halved: float, freed: float) -> None:
    """Unit x of worker w holds its slot no longer; the slots stay in the order in which they are freed."""
    i = state.units[w] + state.held[w] - 1
    while state.holder[i] != x:
        i -= 1
    taken = state.taken[i]
    while i > state.units[w] and state.freed[i - 1] > freed:
        state.taken[i] = state.taken[i - 1]
        state.halved[i] = state.halved[i - 1]
        state.freed[i] = state.freed[i - 1]
        state.holder[i] = state.holder[i - 1]
        i -= 1
    state.taken[i] = taken
    state.halved[i] = halved
    state.freed[i] = freed
    state.holder[i] = x


@called_by_kernels
def _forward_gap(problem: ProblemArrays, state: Insertion, w: int, ready: float, time: float) -> float:
    """When worker w may begin a forward; W that wait are placed as long as there is no slot at any time."""
    at = _slot(problem, state, w, ready)
    while at >= NEVER and state.first[w] < state.last[w]:
        _weight(problem, state, w)
        at = _slot(problem, state, w, ready)
    return _gap(problem, state, w, at, time)


@called_by_kernels
def _slot(problem: ProblemArrays, state: Insertion, w: int, ready: float) -> float:
    """The first time from `ready` on at which worker w has a free slot, and has one ever after; NEVER if none."""
    end = state.units[w] + state.held[w]
    cap = problem.cap[w] + SAME
    if state.held[w] + 1 <= cap:
        return ready
    if problem.stash == 1.0:
        # so many are freed last as there are slots; until the first of them is, all slots are taken
        first = end - int(cap)
        until: float = state.freed[first]
        if until <= ready + SAME or until >= NEVER:
            return ready if until < NEVER else NEVER
        latest = until
        for i in range(first, end):
            latest = max(latest, state.taken[i] + SAME)
        if latest <= until:
            return until
    at = ready
    while at < NEVER:
        low = end
        while low > state.units[w] and state.freed[low - 1] > at + SAME:
            low -= 1
        if end - low + 1 <= cap:
            return at
        following = -1.0
        for i in range(low - 1, end):
            moment = at if i < low else state.taken[i]
            if moment < at:
                continue
            held = 1.0
            change = NEVER
            for j in range(low, end):
                if state.taken[j] <= moment + SAME and state.freed[j] > moment + SAME:
                    if state.halved[j] > moment + SAME:
                        held += 1.0
                        change = min(change, state.halved[j] if problem.stash < 1.0 else state.freed[j])
                    else:
                        held += problem.stash
                        change = min(change, state.freed[j])
            if held > cap:
                following = max(following, change)
        if following < 0.0:
            return at
        at = following
    return NEVER


@called_by_kernels
def _gap(problem: ProblemArrays, state: Insertion, w: int, ready: float, time: float) -> float:
    """The first time from `ready` on at which worker w is idle for so long."""
    kinds = 3 if problem.split else 2
    begin = kinds * state.units[w]
    low = begin
    end = begin + state.busy[w]
    high = end
    while low < high:
        middle = (low + high) // 2
        if state.high[middle] <= ready + SAME:
            low = middle + 1
        else:
            high = middle
    while low < end and state.low[low] < ready + time - SAME:
        ready = max(ready, state.high[low])
        low += 1
    return ready


@called_by_kernels
def _occupy(problem: ProblemArrays, state: Insertion, w: int, at: float, until: float) -> None:
    """Worker w is busy from `at` to `until`."""
    kinds = 3 if problem.split else 2
    begin = kinds * state.units[w]
    i = begin + state.busy[w]
    while i > begin and (state.low[i - 1] > at or (state.low[i - 1] == at and state.high[i - 1] > until)):
        state.low[i] = state.low[i - 1]
        state.high[i] = state.high[i - 1]
        i -= 1
    state.low[i] = at
    state.high[i] = until
    state.busy[w] += 1
