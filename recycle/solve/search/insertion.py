"""Insertion: schedule one complete micro-batch after another, each operation in the first gap of its worker.

Insertion never delays an older micro-batch, so each is held for a shorter time, which determines the period with tight
memory, slow links and several chunks per worker. Source: serial schedule generation (Kolisch, 1996).

A forward needs a gap, and a free slot from then on. A W waits until more than `waiting` of them wait on its worker, or
until a forward finds no slot. The assignment gives the number of micro-batches per host and stage, or with `is_free`
per worker; insertion selects them by earliest end of the forward, with the home first among equals.

Limits: ignores queueing of transfers, which the timing of the order counts.
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
from recycle.solve.assignment import Assignment, home_hosts
from recycle.solve.constants import HOST_PREFERENCE, SPARE
from recycle.solve.effort import Effort, Incumbent
from recycle.solve.problem import Order, Problem, programs_of
from recycle.solve.problem_arrays import Floats, Operations, ProblemArrays, lane_between
from recycle.solve.search.event_loop import UNLIMITED
from recycle.solve.search.order_kernels import NEVER, evaluate

SAME = 1e-9
"""Times closer than this are equal."""
WAITING = (0, UNLIMITED, 2, 5, 1, 3)
"""Values of `waiting` for all ranks, in the order of trials."""


@dataclass(frozen=True, eq=False)
class InsertionParameters:
    """Parameters of insertion.

    Attributes:
        assignment: number of micro-batches of each host at each stage, and the micro-batches that stay at home.
        waiting: per rank, number of W that may wait before the oldest takes the first gap.
        sequence: the micro-batches in the order of insertion.
        is_free: any host may take any micro-batch, up to its number in the assignment.
        spare: share by which a host may then exceed its number; one more micro-batch is allowed unless 0.
    """

    assignment: Assignment
    waiting: tuple[int, ...]
    sequence: tuple[int, ...]
    is_free: bool = False
    spare: float = 0.0


class Insertion(NamedTuple):
    """State of the kernel. A unit is a (stage, micro-batch); worker w owns the places units[w] to units[w + 1].

    Attributes:
        host: [units], fixed host of a unit, or -1; the kernel fills in the chosen host.
        home: [units], host of a unit in the fault-free layout.
        quota: [stages * workers], units without a fixed host that each worker has to take.
        waiting, sequence: see `InsertionParameters`.
        preference: seconds by which a host may be later for each unit it still has to take, and for being the home.
        units: [workers + 1].
        start: [operations], start times; the result.
        low, high: [3 * places], start and end of each worker's operations, in their order.
        busy: [workers], number of these operations.
        taken, halved, freed: [places], when a unit takes a slot, halves it to the stashed share, and frees it; by
            worker, latest `freed` last.
        holder: [places], unit of each slot.
        held: [workers], number of these slots.
        pending: [places], units whose W wait, by worker.
        first, last: [workers], range of the W that still wait.
    """

    host: Operations
    home: Operations
    quota: Operations
    waiting: Operations
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


def default_parameters(
    problem: Problem, assignment: Assignment, waiting: int, is_free: bool = False, spare: float = 0.0
) -> InsertionParameters:
    """Return parameters that insert micro-batches by index, then pipeline."""
    m = problem.shape.micro_batches
    g = np.arange(problem.micro_batches)
    sequence = tuple(np.lexsort((g // m, g % m)).tolist())
    return InsertionParameters(assignment, (waiting,) * problem.shape.ranks, sequence, is_free, spare)


def insertion_orders(problem: Problem, assignments: list[Assignment]) -> Iterator[tuple[Order, InsertionParameters]]:
    """Yield the orders of plain parameters with each assignment; orders that exceed the memory are skipped."""
    variants = [(False, 0.0)]
    if problem.reroute and problem.shape.pipelines > 1:
        variants += [(True, 0.0)] + [(True, SPARE)] * (min(problem.cap) < inf)
    for waiting, (is_free, spare), assignment in product(
        WAITING if problem.split else WAITING[:1], variants, assignments
    ):
        parameters = default_parameters(problem, assignment, waiting, is_free, spare)
        order = insertion_order(problem, parameters)
        if order is not None:
            yield order, parameters


def insertion_order(problem: Problem, parameters: InsertionParameters) -> Order | None:
    """Return the order that insertion makes; None if rounding exceeds a memory cap."""
    order = _insert_all(problem, parameters)
    return order if problem.is_within_caps(order) else None


def _insert_all(problem: Problem, parameters: InsertionParameters) -> Order:
    state = _state(problem, parameters)
    *_, state = run(insert, problem.size, problem.arrays, state)
    plane = problem.shape.stages * problem.micro_batches
    host, start = np.tile(np.asarray(state.host), problem.kinds), np.asarray(state.start)
    kind = np.arange(problem.size) // plane
    line = np.lexsort((-kind, start))
    return programs_of(line, host[line], problem.shape.worker_count)


def vary_insertion(problem: Problem, start: Incumbent, parameters: InsertionParameters, effort: Effort) -> Incumbent:
    """Change insertion parameters at random and keep those that are not worse; never worse than `start`."""
    random = Random(effort.seed)
    best, current, candidate, current_period = start, parameters, parameters, inf
    while effort.claim_order(problem, best.period):
        result = evaluate(problem, _insert_all(problem, candidate))
        if result.period <= current_period and problem.is_within_caps(result.order):
            current, current_period = candidate, result.period
            if result.period < best.period - SAME:
                best = result
        candidate = vary_parameters(problem, current, random)
    return best


def vary_parameters(problem: Problem, parameters: InsertionParameters, random: Random) -> InsertionParameters:
    waiting, sequence = list(parameters.waiting), list(parameters.sequence)
    for _ in range(random.choice((1, 2))):
        if random.random() < 0.5 and problem.split:
            first = random.randrange(len(waiting))
            until = random.choice((first + 1, len(waiting)))
            waiting[first:until] = [random.choice(WAITING)] * (until - first)
        else:
            i = random.randrange(len(sequence))
            j = max(0, i + random.randint(-problem.shape.pipelines, problem.shape.pipelines))
            sequence.insert(j, sequence.pop(i))
    return replace(parameters, waiting=tuple(waiting), sequence=tuple(sequence))


def _state(problem: Problem, parameters: InsertionParameters) -> Insertion:
    stages, workers, plane = problem.shape.stages, problem.shape.worker_count, len(parameters.assignment.host)
    assigned, home = parameters.assignment.host, home_hosts(problem).ravel()
    moved = np.full(plane, True) if parameters.is_free else assigned != home
    quota = np.bincount((problem.stage_of * workers + assigned)[moved], minlength=stages * workers)
    if parameters.spare:
        more = np.ceil(quota * parameters.spare).astype(np.int64) + 1
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
        waiting=np.array(parameters.waiting, dtype=np.int64),
        sequence=np.array(parameters.sequence, dtype=np.int64),
        preference=HOST_PREFERENCE * problem.unit,
        units=units.astype(np.int64),
        start=np.zeros(problem.size),
        low=np.zeros(3 * room),
        high=np.zeros(3 * room),
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
    """Kernel: fill `start` and `host`."""
    stages, n, ranks = problem.stages, problem.micro_batches, problem.ranks
    times, speed, plane = problem.times, problem.speed, problem.stages * problem.micro_batches
    host, home, quota, start = state.host, state.home, state.quota, state.start
    workers = len(speed)
    for g in state.sequence:
        now = 0.0
        before = -1
        for s in range(stages):
            x = s * n + g
            w = host[x]
            if w >= 0:
                ready = now + _hop(problem, before, w)
                at = _forward_gap(problem, state, w, ready, times[s] * speed[w])
            else:
                at = NEVER
                least = NEVER
                for v in range(problem.rank_of[s], workers, ranks):
                    if quota[s * workers + v] > 0:
                        ready = now + _hop(problem, before, v)
                        time = times[s] * speed[v]
                        favour = state.preference * (quota[s * workers + v] + (1 if v == home[x] else 0))
                        if ready + time - favour >= least:
                            continue
                        gap = _forward_gap(problem, state, v, ready, time)
                        if gap + time - favour < least:
                            least = gap + time - favour
                            at = gap
                            w = v
                quota[s * workers + w] -= 1
                host[x] = w
            start[x] = at
            now = at + times[s] * speed[w]
            _occupy(state, w, at, now)
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
            ready = now + _hop(problem, before, w)
            time = times[stages + s] * speed[w]
            at = _gap(state, w, ready, time)
            start[plane + x] = at
            now = at + time
            _occupy(state, w, at, now)
            if problem.split:
                state.halved[_slot_of(state, w, x)] = now
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
def _hop(problem: ProblemArrays, before: int, w: int) -> float:
    if before < 0 or before == w:
        return 0.0
    if len(problem.hops) == 0:
        return problem.link
    hop: float = problem.hops[lane_between(before, w, len(problem.speed), problem.ranks)]
    return hop


@called_by_kernels
def _weight(problem: ProblemArrays, state: Insertion, w: int) -> None:
    plane, n = problem.stages * problem.micro_batches, problem.micro_batches
    x = state.pending[state.units[w] + state.first[w]]
    state.first[w] += 1
    ready = state.start[plane + x] + problem.times[problem.stages + x // n] * problem.speed[w]
    time = problem.times[2 * problem.stages + x // n] * problem.speed[w]
    at = _gap(state, w, ready, time)
    state.start[2 * plane + x] = at
    _occupy(state, w, at, at + time)
    _free(state, w, x, ready, at + time)


@called_by_kernels
def _slot_of(state: Insertion, w: int, x: int) -> int:
    i = state.units[w] + state.held[w] - 1
    while state.holder[i] != x:
        i -= 1
    return int(i)


@called_by_kernels
def _free(state: Insertion, w: int, x: int, halved: float, freed: float) -> None:
    i = _slot_of(state, w, x)
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
    at = _slot(problem, state, w, ready)
    while at >= NEVER and state.first[w] < state.last[w]:
        _weight(problem, state, w)
        at = _slot(problem, state, w, ready)
    return _gap(state, w, at, time)


@called_by_kernels
def _slot(problem: ProblemArrays, state: Insertion, w: int, ready: float) -> float:
    end = state.units[w] + state.held[w]
    cap = problem.cap[w] + SAME
    if state.held[w] + 1 <= cap:
        return ready
    if problem.stash == 1.0:
        # the units that are freed last occupy all slots until the first of them is freed
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
def _gap(state: Insertion, w: int, ready: float, time: float) -> float:
    low = 3 * state.units[w]
    end = low + state.busy[w]
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
def _occupy(state: Insertion, w: int, at: float, until: float) -> None:
    begin = 3 * state.units[w]
    i = begin + state.busy[w]
    while i > begin and (state.low[i - 1] > at or (state.low[i - 1] == at and state.high[i - 1] > until)):
        state.low[i] = state.low[i - 1]
        state.high[i] = state.high[i - 1]
        i -= 1
    state.low[i] = at
    state.high[i] = until
    state.busy[w] += 1
