"""The loops over an order: the forward pass that times it, its right-shift, and the annealing that changes it.

The forward pass starts every operation as early as its worker, the order and its dependency allow; operations are
visited worker by worker, and a worker that has to wait is taken up again when what it waits for has ended. After a
change of the order only what began at or after the earliest changed operation is timed again, beside the times that
stand. Transfers take `link` seconds, any number of them at once.

Annealing asks whether an order has a period T. The state is one sequence of operations per worker and a due time D_r
for each rank r. A worker of rank r may begin at D_r - T and should be done, reduce and step included, by D_r; the cost
is the sum of what the workers are late. It is 0 exactly when the order reaches T with these due times (`timing`).
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np

from recycle.ir.compiled import called_by_kernels
from recycle.solve.problem import Floats, Operations, Order, Problem, ProblemArrays, flat
from recycle.solve.search.random_numbers import draw

MOVED, EXCHANGED, SHIFTED, TOO_LARGE = 1, 2, 3, 4
"""What a step tried: an operation moved, two micro-batches exchanged, a due time shifted, a move beyond the memory."""
PER_THOUSAND_MOVED, PER_THOUSAND_MOVED_FAR, PER_THOUSAND_NOT_SHIFTED = 860, 100, 985
"""Of 1,000 steps: those that move an operation, those of them that move it far, and those that shift no due time."""
NEVER = 1e300


class TimedOrder(NamedTuple):
    """An order, its times, and the working space of the passes. W is the number of workers.

    Attributes:
        sequence: [operations], the programs one after the other.
        offsets: [W + 1], where each program begins and the last ends.
        host: [operations], worker of each operation.
        place: [operations], of each operation in `sequence`.
        release: [W], the time from which a worker may begin.
        begin, end: [operations], the times that stand.
        new_begin, new_end: [operations], the times of the latest pass.
        timed_in: [operations], number of the latest pass that timed each operation; below 0 if none has.
        visited: [operations], those of the latest pass, each after all that it waits for.
        stack: [operations + W + 1], workers to take up.
        next, first: [W], place of the operation to time next, and of the first one that the pass times.
        free: [W], when each worker has ended what is timed.
    """

    sequence: Operations
    offsets: Operations
    host: Operations
    place: Operations
    release: Floats
    begin: Floats
    end: Floats
    new_begin: Floats
    new_end: Floats
    timed_in: Operations
    visited: Operations
    stack: Operations
    next: Operations
    first: Operations
    free: Floats


class Annealing(NamedTuple):
    """One round of annealing. P is the number of ranks.

    Attributes:
        due: [P], due time of each rank; changed by the round.
        target: the period to reach.
        quantum: seconds by which a due time shifts.
        rerouted: [stages * micro-batches], 1 where the home worker is dead.
        hot, cold: first and last temperature, in seconds.
        steps: moves to try.
        random: [1], state of the random generator.
    """

    due: Floats
    target: float
    quantum: float
    rerouted: Operations
    hot: float
    cold: float
    steps: int
    random: Operations


def timed_order(problem: Problem, order: Order) -> TimedOrder:
    """The state of `order` before its first pass, with every worker released at 0."""
    sequence, offsets = flat(order)
    workers, size = len(order), problem.size
    host, place = np.full(size, -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    host[sequence] = np.repeat(np.arange(workers), np.diff(offsets))
    place[sequence] = np.arange(len(sequence))
    begin, end, new_begin, new_end = np.zeros((4, size))
    return TimedOrder(
        sequence=sequence,
        offsets=offsets,
        host=host,
        place=place,
        release=np.zeros(workers),
        begin=begin,
        end=end,
        new_begin=new_begin,
        new_end=new_end,
        timed_in=np.full(size, -2, dtype=np.int64),
        visited=np.zeros(len(sequence), dtype=np.int64),
        stack=np.zeros(len(sequence) + workers + 1, dtype=np.int64),
        next=np.zeros(workers, dtype=np.int64),
        first=np.zeros(workers, dtype=np.int64),
        free=np.zeros(workers),
    )


@called_by_kernels
def forward_pass(problem: ProblemArrays, order: TimedOrder, since: float, number: int) -> int:
    """Time again what began at `since` or later; the count of `visited`, -1 if the order comes to a halt.

    Args:
        since: no operation that begins earlier is affected by what has changed; -NEVER to time everything.
        number: of this pass, another one for each.
    """
    sequence, offsets, host, place = order.sequence, order.offsets, order.host, order.place
    new_end, timed_in, free = order.new_end, order.timed_in, order.free
    needs, feeds, n, link = problem.needs, problem.feeds, problem.micro_batches, problem.link
    workers = len(offsets) - 1
    waiting = 0
    expected = 0
    for w in range(workers):
        low = offsets[w]
        if since > -NEVER:
            high = offsets[w + 1]
            while low < high:
                middle = (low + high) // 2
                if order.begin[sequence[middle]] < since:
                    low = middle + 1
                else:
                    high = middle
        order.first[w] = low
        order.next[w] = low
        expected += offsets[w + 1] - low
        free[w] = order.end[sequence[low - 1]] if low > offsets[w] else order.release[w]
        order.stack[waiting] = w
        waiting += 1
    count = 0
    while waiting > 0:
        waiting -= 1
        w = order.stack[waiting]
        ready = free[w]
        k = order.next[w]
        while k < offsets[w + 1]:
            x = sequence[k]
            before = needs[x]
            if before >= 0:
                v = host[before]
                if timed_in[before] == number:
                    arrived = new_end[before]
                elif place[before] < order.first[v]:
                    arrived = order.end[before]
                else:
                    break
                if v != w:
                    arrived += link
                if arrived > ready:
                    ready = arrived
            order.new_begin[x] = ready
            ready += problem.times[x // n] * problem.speed[w]
            new_end[x] = ready
            timed_in[x] = number
            order.visited[count] = x
            count += 1
            k += 1
            after = feeds[x]
            if after >= 0:
                v = host[after]
                if v != w and order.next[v] == place[after]:
                    order.stack[waiting] = v
                    waiting += 1
        free[w] = ready
        order.next[w] = k
    return count if count == expected else -1


def time_from_idle(problem: ProblemArrays, order: TimedOrder, last: Floats, latest: Floats) -> tuple[float, float]:
    """The kernel of `timing`: (period, makespan), infinite for an order that comes to a halt.

    Args:
        last: [stages], is filled with the end of the last operation of each stage.
        latest: [operations], is filled with right-shifted starts.
    """
    offsets, sequence, stages = order.offsets, order.sequence, problem.stages
    workers = len(offsets) - 1
    count = forward_pass(problem, order, -NEVER, 0)
    if count < 0:
        return np.inf, np.inf
    for t in range(count):
        x = order.visited[t]
        s = x // problem.micro_batches % stages
        if order.new_end[x] > last[s]:
            last[s] = order.new_end[x]
    makespan = 0.0
    for s in range(stages):
        makespan = max(makespan, last[s] + problem.update_seconds[s % problem.ranks])
    for t in range(count - 1, -1, -1):
        x = order.visited[t]
        w = order.host[x]
        s = x // problem.micro_batches % stages
        until = last[s] if problem.staggered else makespan - problem.update_seconds[s % problem.ranks]
        k = order.place[x] + 1
        if k < offsets[w + 1] and latest[sequence[k]] < until:
            until = latest[sequence[k]]
        after = problem.feeds[x]
        if after >= 0:
            sent = latest[after] - (problem.link if order.host[after] != w else 0.0)
            if sent < until:
                until = sent
        latest[x] = until - problem.times[x // problem.micro_batches] * problem.speed[w]
    if not problem.staggered:
        return makespan, makespan
    period = 0.0
    for w in range(workers):
        if offsets[w + 1] > offsets[w]:
            ends = 0.0
            for s in range(w % problem.ranks, stages, problem.ranks):
                ends = max(ends, last[s] + problem.update_seconds[s % problem.ranks])
            period = max(period, ends - latest[sequence[offsets[w]]])
    return period, makespan


def anneal_order(problem: ProblemArrays, order: TimedOrder, annealing: Annealing) -> tuple[bool, int]:
    """The kernel of `annealing`: (whether the target is met, moves tried); `order` and `due` change in place."""
    sequence, offsets, host, place = order.sequence, order.offsets, order.host, order.place
    n, ranks, random, due = problem.micro_batches, problem.ranks, annealing.random, annealing.due
    plane = problem.stages * n
    kinds = 3 if problem.split else 2
    size = len(sequence)
    current = NEVER
    heat = annealing.hot
    cooling = (annealing.cold / annealing.hot) ** (1.0 / annealing.steps) if annealing.steps > 0 else 1.0
    for step in range(-1, annealing.steps):
        move = 0
        i = 0
        j = 0
        a = 0
        b = 0
        shift = 0.0
        since = -NEVER
        if step >= 0:
            heat *= cooling
            roll = (draw(random) >> 8) % 1000
            number = draw(random)
            i = (number >> 8) % size
            x = sequence[i]
            if roll < PER_THOUSAND_MOVED:
                reach = 1 + (draw(random) >> 8) % 6
                if roll < PER_THOUSAND_MOVED_FAR:
                    reach *= 4
                j = i + reach if (draw(random) >> 16) % 2 else i - reach
                j = max(offsets[host[x]], min(offsets[host[x] + 1] - 1, j))
                kind = x // plane
                if kind > 0:
                    j = max(j, place[x - plane] + 1)
                if kind < kinds - 1:
                    j = min(j, place[x + plane] - 1)
                if j == i:
                    continue
                since = order.begin[sequence[min(i, j)]]
                _move(order, i, j)
                move = MOVED
                if ((kind == 0 and j < i) or (kind > 0 and j > i)) and _is_beyond_cap(problem, order, host[x]):
                    move = TOO_LARGE
            elif roll < PER_THOUSAND_NOT_SHIFTED or not problem.staggered:
                a = x % plane
                b = a // n * n + (draw(random) >> 8) % n
                if a == b or (host[a] != host[b] and (annealing.rerouted[a] == 0 or annealing.rerouted[b] == 0)):
                    continue
                since = NEVER
                for x in range(a, kinds * plane, plane):
                    since = min(since, order.begin[x], order.begin[x - a + b])
                _exchange(order, a, b, kinds, plane)
                move = EXCHANGED
            else:
                a = (number >> 8) % ranks
                shift = annealing.quantum if (number >> 20) % 2 else -annealing.quantum
                due[a] += shift
                move = SHIFTED
        cost = NEVER
        count = 0
        if move != TOO_LARGE:
            if move == 0 or move == SHIFTED:
                for w in range(len(offsets) - 1):
                    order.release[w] = due[w % ranks] - annealing.target
            count = forward_pass(problem, order, since, step)
            if count >= 0:
                cost = 0.0
                for w in range(len(offsets) - 1):
                    late = order.free[w] + problem.update_seconds[w % ranks] - due[w % ranks]
                    if late > 1e-9 and offsets[w + 1] > offsets[w]:
                        cost += late
        if cost <= current or (cost < NEVER and exp((current - cost) / heat) * 2147483647.0 > draw(random)):
            current = cost
            for k in range(count):
                x = order.visited[k]
                order.begin[x] = order.new_begin[x]
                order.end[x] = order.new_end[x]
            if cost <= 1e-9:
                return True, step + 1
        elif move == SHIFTED:
            due[a] -= shift
            for w in range(a, len(offsets) - 1, ranks):
                order.release[w] = due[a] - annealing.target
        elif move == EXCHANGED:
            _exchange(order, a, b, kinds, plane)
        else:
            _move(order, j, i)
    return False, annealing.steps


@called_by_kernels
def _move(order: TimedOrder, i: int, j: int) -> None:
    """Put the operation at place i of the sequence at place j; those between move up."""
    x = order.sequence[i]
    step = 1 if i < j else -1
    for k in range(i, j, step):
        y = order.sequence[k + step]
        order.sequence[k] = y
        order.place[y] = k
    order.sequence[j] = x
    order.place[x] = j


@called_by_kernels
def _exchange(order: TimedOrder, a: int, b: int, kinds: int, plane: int) -> None:
    """Exchange the places and hosts of two micro-batches a and b of one stage, in all their kinds of operation."""
    for kind in range(kinds):
        p = a + kind * plane
        q = b + kind * plane
        k = order.place[p]
        order.place[p] = order.place[q]
        order.place[q] = k
        order.sequence[order.place[p]] = p
        order.sequence[order.place[q]] = q
        w = order.host[p]
        order.host[p] = order.host[q]
        order.host[q] = w


@called_by_kernels
def _is_beyond_cap(problem: ProblemArrays, order: TimedOrder, w: int) -> bool:
    """Whether worker w ever holds more activations than it may."""
    plane = problem.stages * problem.micro_batches
    held = 0.0
    for k in range(order.offsets[w], order.offsets[w + 1]):
        kind = order.sequence[k] // plane
        if kind == 0:
            held += 1.0
            if held > problem.cap[w] + 1e-9:
                return True
        elif kind == 1:
            held -= 1.0 - problem.stash if problem.split else 1.0
        else:
            held -= problem.stash
    return False
