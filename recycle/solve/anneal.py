"""Timing an order, and moving single operations in it: simulated annealing over programs.

The state is one sequence of operations per worker. Memory depends on a worker's own sequence alone, so a move is
tested locally; time is two linear passes: earliest starts, then every operation as late as the ends of the stages
allow ("right-shift", Smith and Baker's backward pass). With E_s the last end of stage s over its hosts plus its
reduce and step, and S_w the right-shifted first start of worker w,

    period = max over w of (E_s(w) - S_w)    staggered optimizer         period = max over s of E_s    barrier.

Moves: one operation to another place of its program; two micro-batches of a stage change places, on one worker or,
for re-routed ones, between hosts. The loop is plain Python over arrays; long runs take the same source compiled by
numba, and its random numbers are its own, so that both give the same result for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import exp
from typing import Any

import numpy as np

from recycle.solve.problem import Order, Problem

COMPILE_FROM = 1_500_000
"""Operations times steps from which loading the compiled loop costs less than running in plain Python."""


@dataclass(frozen=True)
class Annealed:
    """What one round found.

    Attributes:
        order: the best order met, the start included.
        period: its period by right-shift (never below the true one), infinite when the order has a cycle.
        makespan: end of its last stage when started from idle.
        current: the order the round ended in, from which another may go on.
    """

    order: Order
    period: float
    makespan: float
    current: Order


def evaluate(problem: Problem, order: Order) -> tuple[float, float]:
    """(period, makespan) of an order; infinite when it can never finish."""
    result = anneal(problem, order, steps=0)
    return result.period, result.makespan


def anneal(
    problem: Problem,
    order: Order,
    *,
    steps: int,
    seed: int = 0,
    hot: float = 1.0,
    cold: float = 0.1,
    target: float = 0.0,
    pull: float = 0.3,
) -> Annealed:
    """One round of simulated annealing.

    Args:
        steps: moves to try; 0 only times the order.
        hot, cold: first and last temperature, in the problem's typical operation time.
        target: stop as soon as the period is at most this (a proven bound).
        pull: weight of the workers' mean window beside the period, which guides the search across plateaus.
    """
    stages, n = problem.shape.stages, problem.micro_batches
    sequence = [operation for program in order for operation in program]
    offsets = np.concatenate([[0], np.cumsum([len(program) for program in order])]).tolist()
    host = [-1] * problem.size
    for worker, program in enumerate(order):
        for operation in program:
            host[operation] = worker
    times = [*problem.forward, *problem.backward, *problem.weight]
    rerouted = _rerouted(problem)
    best = list(sequence)
    figures = [0.0, 0.0, 0.0]
    arguments: list[Any] = [
        stages, n, problem.shape.ranks, sequence, offsets, host, times, list(problem.finish), problem.link,
        list(problem.speed), list(problem.cap), problem.stash, int(problem.split), int(problem.staggered), rerouted,
        best, figures, steps, seed % 2147483647, hot * problem.unit, cold * problem.unit, target, pull,
    ]
    if problem.size * max(steps, 1) >= COMPILE_FROM:
        kinds = {list: lambda v: np.array(v, dtype=np.float64 if v and isinstance(v[0], float) else np.int64)}
        arguments = [kinds[type(a)](a) if isinstance(a, list) else a for a in arguments]
        _compiled(_anneal)(*arguments)
        sequence, best, figures = (arguments[i].tolist() for i in (3, 15, 16))
        host = arguments[5].tolist()
    else:
        _anneal(*arguments)
    split = [(offsets[w], offsets[w + 1]) for w in range(len(order))]
    return Annealed([best[a:b] for a, b in split], figures[0], figures[1], [sequence[a:b] for a, b in split])


def _rerouted(problem: Problem) -> list[int]:
    """1 for each (stage, micro-batch) whose home worker is dead."""
    m, ranks = problem.shape.micro_batches, problem.shape.ranks
    return [
        int((g // m, s % ranks) in problem.dead) for s in range(problem.shape.stages) for g in range(problem.micro_batches)
    ]


def _anneal(
    stages: Any, n: Any, ranks: Any, sequence: Any, offsets: Any, host: Any, times: Any, finish: Any, link: Any,
    speed: Any, cap: Any, stash: Any, split: Any, staggered: Any, rerouted: Any,
    best: Any, figures: Any, steps: Any, seed: Any, hot: Any, cold: Any, target: Any, pull: Any,
) -> None:
    workers = len(offsets) - 1
    size = len(sequence)
    total = len(host)
    plane = stages * n
    kinds = 3 if split else 2
    place = [0] * total
    for i in range(size):
        place[sequence[i]] = i
    end = [0.0] * total
    late = [0.0] * total
    done = [-2] * total
    topological = [0] * size
    stack = [0] * (size + workers + 1)
    at = [0] * workers
    free = [0.0] * workers
    last = [0.0] * stages
    state = seed + 1
    current = 0.0
    best_cost = 0.0
    live = 0
    for w in range(workers):
        if offsets[w + 1] > offsets[w]:
            live += 1
    cooling = (cold / hot) ** (1.0 / steps) if steps > 0 else 1.0
    heat = hot
    for step in range(-1, steps):
        # --- propose a move: (i -> j) of one operation, or micro-batches a and b of a stage change places
        moved = 0
        i = 0
        j = 0
        a = 0
        b = 0
        if step >= 0:
            heat *= cooling
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            roll = (state >> 8) % 100
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            i = (state >> 8) % size
            x = sequence[i]
            w = host[x]
            if roll < 85:
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                reach = 1 + (state >> 8) % 6
                if roll < 10:
                    reach = reach * 4
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                j = i + reach if (state >> 8) % 2 else i - reach
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
                held = 0.0
                full = False
                for k in range(offsets[w], offsets[w + 1]):
                    kind = sequence[k] // plane
                    if kind == 0:
                        held += 1.0
                        if held > cap[w] + 1e-9:
                            full = True
                            break
                    elif kind == 1:
                        held -= 1.0 - stash if split else 1.0
                    else:
                        held -= stash
                if full:
                    moved = 3
            else:
                a = x % plane
                stage = a // n
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                b = stage * n + (state >> 8) % n
                if a == b:
                    continue
                if host[a] != host[b] and (rerouted[a] == 0 or rerouted[b] == 0):
                    continue
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
                moved = 2
        cost = 1e300
        period = 1e300
        makespan = 1e300
        if moved != 3:
            # --- earliest ends
            head = 0
            for w in range(workers):
                at[w] = offsets[w]
                free[w] = 0.0
                stack[head] = w
                head += 1
            for s in range(stages):
                last[s] = 0.0
            count = 0
            while head > 0:
                head -= 1
                w = stack[head]
                k = at[w]
                while k < offsets[w + 1]:
                    x = sequence[k]
                    kind = x // plane
                    s = x // n - kind * stages
                    before = -1
                    after = -1
                    if kind == 0:
                        if s > 0:
                            before = x - n
                        if s < stages - 1:
                            after = x + n
                    elif kind == 1:
                        if s < stages - 1:
                            before = x + n
                        if s > 0:
                            after = x - n
                    begin = free[w]
                    if before >= 0:
                        if done[before] != step:
                            break
                        ready = end[before] + (link if host[before] != w else 0.0)
                        if ready > begin:
                            begin = ready
                    begin += times[kind * stages + s] * speed[w]
                    end[x] = begin
                    free[w] = begin
                    if begin > last[s]:
                        last[s] = begin
                    done[x] = step
                    topological[count] = x
                    count += 1
                    k += 1
                    at[w] = k
                    if after >= 0:
                        v = host[after]
                        if v != w and at[v] == place[after]:
                            stack[head] = v
                            head += 1
            if count == size:
                makespan = 0.0
                for s in range(stages):
                    if last[s] + finish[s] > makespan:
                        makespan = last[s] + finish[s]
                # --- right-shift against the ends of the stages
                windows = 0.0
                if staggered:
                    for t in range(size - 1, -1, -1):
                        x = topological[t]
                        w = host[x]
                        kind = x // plane
                        s = x // n - kind * stages
                        until = last[s]
                        k = place[x] + 1
                        if k < offsets[w + 1] and late[sequence[k]] < until:
                            until = late[sequence[k]]
                        after = -1
                        if kind == 0 and s < stages - 1:
                            after = x + n
                        elif kind == 1 and s > 0:
                            after = x - n
                        if after >= 0:
                            ready = late[after] - (link if host[after] != w else 0.0)
                            if ready < until:
                                until = ready
                        late[x] = until - times[kind * stages + s] * speed[w]
                    period = 0.0
                    for w in range(workers):
                        if offsets[w + 1] > offsets[w]:
                            window = 0.0
                            s = w % ranks
                            while s < stages:
                                if last[s] + finish[s] > window:
                                    window = last[s] + finish[s]
                                s += ranks
                            window -= late[sequence[offsets[w]]]
                            windows += window
                            if window > period:
                                period = window
                else:
                    period = makespan
                    for w in range(workers):
                        windows += free[w]
                cost = period + pull * windows / live
        # --- accept or take back
        accept = cost <= current or step < 0
        if not accept and cost < 1e299:
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            accept = exp((current - cost) / heat) * 2147483647.0 > state
        if accept:
            current = cost
            if step < 0 or period < figures[0] - 1e-9 or (period <= figures[0] + 1e-9 and cost < best_cost):
                figures[0] = period
                figures[1] = makespan
                best_cost = cost
                for k in range(size):
                    best[k] = sequence[k]
                if period <= target + 1e-9:
                    return
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


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    compiled: Callable[..., Any] = numba.njit(cache=True)(function)
    return compiled
