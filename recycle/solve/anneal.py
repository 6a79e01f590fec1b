"""Moving single operations: simulated annealing on the question "is there an order with this period?".

The state is one sequence of operations per worker, and a due time D_r for each rank (the E_s of the timing model).
For a target period T a worker of rank r may work from D_r - T on and should be done, step included, by D_r; the cost
is the sum of what the workers are late. It is zero exactly when the order reaches T with these due times, every
worker improves it on its own, and one forward pass computes it, from the first operation that moved. With the
barrier all due times are T and stay.

Moves: one operation to another place of its program (memory depends on that program alone, so it is tested first);
two micro-batches of a stage change places, on one worker or, for re-routed ones, between hosts; a due time shifts.
The loop is plain Python over arrays; long runs take the same source compiled by numba, and its random numbers are its
own, so that both give the same result for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import exp
from typing import Any

import numpy as np

from recycle.solve.compiled import as_lists, compiled
from recycle.solve.problem import Operations, Order, Problem, flat


@dataclass(frozen=True)
class Annealed:
    """What one round came to.

    Attributes:
        order: the order it ended in.
        due: the due time of each rank that goes with it.
        met: whether the order reaches the target.
        steps: moves tried.
    """

    order: Order
    due: list[float]
    met: bool
    steps: int


def anneal(
    problem: Problem,
    order: Order,
    due: list[float],
    target: float,
    *,
    steps: int,
    seed: int = 0,
    hot: float = 1.0,
    cold: float = 0.1,
    often: bool = False,
) -> Annealed:
    """One round of simulated annealing; ends at once when the target is met.

    Args:
        order: where to start; must be able to finish.
        due: due time of each rank; only their differences matter.
        target: the period to reach.
        steps: moves to try.
        hot, cold: first and last temperature, in the problem's typical operation time.
        often: use the compiled loop, as many rounds will follow; the result is the same.
    """
    shape = problem.shape
    sequence, offsets = flat(order)
    host = np.full(problem.size, -1, dtype=np.int64)
    host[sequence] = np.repeat(np.arange(len(order)), np.diff(offsets))
    quantum = max(problem.grain, problem.unit / 4)
    arguments: list[Any] = [
        shape.stages,
        problem.micro_batches,
        shape.ranks,
        sequence,
        offsets,
        host,
        problem.times,
        np.array(problem.closing),
        problem.link,
        np.array(problem.speed),
        np.array(problem.cap),
        problem.stash,
        int(problem.split),
        int(problem.staggered),
        _rerouted(problem),
        np.array(due, dtype=np.float64),
        float(target),
        quantum,
        steps,
        seed % 2147483647,
        hot * problem.unit,
        cold * problem.unit,
        np.zeros(2, dtype=np.int64),
        problem.needs,
        problem.feeds,
    ]
    if often:
        compiled(_anneal)(*arguments)
        arguments = as_lists(arguments)
    else:
        arguments = as_lists(arguments)
        _anneal(*arguments)
    sequence, offsets, due, outcome = (arguments[i] for i in (3, 4, 15, 22))
    programs = [sequence[first:end] for first, end in pairwise(offsets)]
    return Annealed(programs, due, bool(outcome[0]), outcome[1])


def _rerouted(problem: Problem) -> Operations:
    """1 for each (stage, micro-batch) whose home worker is dead."""
    m, ranks = problem.shape.micro_batches, problem.shape.ranks
    dead = np.zeros((problem.shape.pipelines, ranks), dtype=np.int64)
    for worker in problem.dead:
        dead[worker] = 1
    home, stage = np.arange(problem.micro_batches) // m, np.arange(problem.shape.stages) % ranks
    return dead[home[None, :], stage[:, None]].ravel()


def _anneal(
    stages: Any,
    n: Any,
    ranks: Any,
    sequence: Any,
    offsets: Any,
    host: Any,
    times: Any,
    finish: Any,
    link: Any,
    speed: Any,
    cap: Any,
    stash: Any,
    split: Any,
    staggered: Any,
    rerouted: Any,
    due: Any,
    target: Any,
    quantum: Any,
    steps: Any,
    seed: Any,
    hot: Any,
    cold: Any,
    outcome: Any,
    needs: Any,
    feeds: Any,
) -> None:
    workers = len(offsets) - 1
    size = len(sequence)
    total = len(host)
    plane = stages * n
    kinds = 3 if split else 2
    place = [0] * total
    for i in range(size):
        place[sequence[i]] = i
    begin = [0.0] * total
    end = [0.0] * total
    new_begin = [0.0] * total
    new_end = [0.0] * total
    done = [-2] * total
    touched = [0] * size
    stack = [0] * (size + workers + 1)
    at = [0] * workers
    cut = [0] * workers
    free = [0.0] * workers
    state = seed + 1
    current = 1e300
    cooling = (cold / hot) ** (1.0 / steps) if steps > 0 else 1.0
    heat = hot
    for step in range(-1, steps):
        # --- propose: 1 an operation moves from i to j, 2 micro-batches a and b of a stage change places, 4 a due time
        moved = 0
        i = 0
        j = 0
        a = 0
        b = 0
        shift = 0.0
        since = -1e300
        if step >= 0:
            heat *= cooling
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            roll = (state >> 8) % 1000
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            i = (state >> 8) % size
            x = sequence[i]
            w = host[x]
            if roll < 860:
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                reach = 1 + (state >> 8) % 6
                if roll < 100:
                    reach = reach * 4
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                j = i + reach if (state >> 16) % 2 else i - reach
                if j < offsets[w]:
                    j = offsets[w]
                if j >= offsets[w + 1]:
                    j = offsets[w + 1] - 1
                kind = x // plane
                if kind > 0 and j <= place[x - plane]:
                    j = place[x - plane] + 1
                if kind < kinds - 1 and j >= place[x + plane]:
                    j = place[x + plane] - 1
                if j == i:
                    continue
                since = begin[sequence[min(i, j)]]
                k = i
                while k < j:
                    sequence[k] = sequence[k + 1]
                    place[sequence[k]] = k
                    k += 1
                while k > j:
                    sequence[k] = sequence[k - 1]
                    place[sequence[k]] = k
                    k -= 1
                sequence[j] = x
                place[x] = j
                moved = 1
                if (kind == 0 and j < i) or (kind > 0 and j > i):
                    held = 0.0
                    for k in range(offsets[w], offsets[w + 1]):
                        kind = sequence[k] // plane
                        if kind == 0:
                            held += 1.0
                            if held > cap[w] + 1e-9:
                                moved = 3
                                break
                        elif kind == 1:
                            held -= 1.0 - stash if split else 1.0
                        else:
                            held -= stash
            elif roll < 985 or not staggered:
                a = x % plane
                stage = a // n
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                b = stage * n + (state >> 8) % n
                if a == b:
                    continue
                if host[a] != host[b] and (rerouted[a] == 0 or rerouted[b] == 0):
                    continue
                since = 1e300
                for kind in range(kinds):
                    p = a + kind * plane
                    q = b + kind * plane
                    if begin[p] < since:
                        since = begin[p]
                    if begin[q] < since:
                        since = begin[q]
                    k = place[p]
                    place[p] = place[q]
                    place[q] = k
                    sequence[place[p]] = p
                    sequence[place[q]] = q
                    k = host[p]
                    host[p] = host[q]
                    host[q] = k
                moved = 2
            else:
                a = (state >> 8) % ranks
                shift = quantum if (state >> 20) % 2 else -quantum
                due[a] += shift
                moved = 4
        cost = 1e300
        count = 0
        if moved != 3:
            # --- earliest times of everything that began at `since` or later
            head = 0
            expected = 0
            for w in range(workers):
                low = offsets[w]
                high = offsets[w + 1]
                if since > -1e299:
                    while low < high:
                        middle = (low + high) // 2
                        if begin[sequence[middle]] < since:
                            low = middle + 1
                        else:
                            high = middle
                cut[w] = low
                at[w] = low
                expected += offsets[w + 1] - low
                if low > offsets[w]:
                    free[w] = end[sequence[low - 1]]
                else:
                    free[w] = due[w % ranks] - target if staggered else 0.0
                stack[head] = w
                head += 1
            while head > 0:
                head -= 1
                w = stack[head]
                k = at[w]
                while k < offsets[w + 1]:
                    x = sequence[k]
                    kind = x // plane
                    s = x // n - kind * stages
                    before = needs[x]
                    after = feeds[x]
                    ready = free[w]
                    if before >= 0:
                        v = host[before]
                        if done[before] == step:
                            arrived = new_end[before]
                        elif place[before] < cut[v]:
                            arrived = end[before]
                        else:
                            break
                        if v != w:
                            arrived += link
                        if arrived > ready:
                            ready = arrived
                    new_begin[x] = ready
                    ready += times[kind * stages + s] * speed[w]
                    new_end[x] = ready
                    free[w] = ready
                    done[x] = step
                    touched[count] = x
                    count += 1
                    k += 1
                    at[w] = k
                    if after >= 0:
                        v = host[after]
                        if v != w and at[v] == place[after]:
                            stack[head] = v
                            head += 1
            if count == expected:
                cost = 0.0
                for w in range(workers):
                    if offsets[w + 1] > offsets[w]:
                        late = free[w] + finish[w % ranks] - (due[w % ranks] if staggered else target)
                        if late > 1e-9:
                            cost += late
        # --- accept or take back
        accept = cost <= current
        if not accept and cost < 1e299:
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            accept = exp((current - cost) / heat) * 2147483647.0 > state
        if accept:
            current = cost
            for k in range(count):
                x = touched[k]
                begin[x] = new_begin[x]
                end[x] = new_end[x]
            if cost <= 1e-9:
                outcome[0] = 1
                outcome[1] = step + 1
                return
        elif moved == 4:
            due[a] -= shift
        elif moved == 2:
            for kind in range(kinds):
                p = a + kind * plane
                q = b + kind * plane
                k = place[p]
                place[p] = place[q]
                place[q] = k
                sequence[place[p]] = p
                sequence[place[q]] = q
                k = host[p]
                host[p] = host[q]
                host[q] = k
        else:
            x = sequence[j]
            k = j
            while k < i:
                sequence[k] = sequence[k + 1]
                place[sequence[k]] = k
                k += 1
            while k > i:
                sequence[k] = sequence[k - 1]
                place[sequence[k]] = k
                k -= 1
            sequence[i] = x
            place[x] = i
    outcome[1] = steps
