"""Timing an order in two linear passes: earliest starts, then right-shift.

Every stage's last end E_s (its step included) is kept from the first pass (with the barrier: the makespan is), and
every operation is put as late as these ends and its successors allow. With S_w the shifted first start of worker w,

    period = max over w of (E_s(w) - S_w)    staggered optimizer         period = max over s of E_s    barrier.

Limits: an upper estimate of the staggered period, nearly always exact (`simulate` is); lanes have no queues here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.solve.compiled import as_lists, compiled
from recycle.solve.problem import Order, Problem, flat

COMPILE_FROM = 20_000
"""Operations from which loading the compiled loop costs less than running in plain Python."""


@dataclass(frozen=True, eq=False)
class Timing:
    """When an order's stages end.

    Attributes:
        period: by right-shift; infinite when the order can never finish.
        makespan: end of its last stage, step included, when started from idle.
        due: E_s of each rank: the latest end, step included, of the stages that its workers host.
        starts: right-shifted start of each operation, by operation.
    """

    period: float
    makespan: float
    due: list[float]
    starts: npt.NDArray[np.float64]


def time_order(problem: Problem, order: Order, often: bool = False) -> Timing:
    """Time an order.

    Args:
        often: many more will follow, so that the compiled loop pays for small problems too.
    """
    arguments = _arguments(problem, order)
    if problem.size >= COMPILE_FROM or (often and problem.size >= COMPILE_FROM // 20):
        compiled(_time)(*arguments)
    else:
        arguments = as_lists(arguments)
        _time(*arguments)
    last, (period, makespan) = [float(v) for v in arguments[12]], arguments[14]
    ranks = problem.shape.ranks
    due = [max(last[rank::ranks]) + problem.closing[rank] for rank in range(ranks)]
    return Timing(float(period), float(makespan), due, np.asarray(arguments[13]))


def start_times(problem: Problem, order: Order) -> list[float]:
    """Right-shifted start of each operation."""
    times: list[float] = time_order(problem, order).starts.tolist()
    return times


def _arguments(problem: Problem, order: Order) -> list[Any]:
    stages, ranks = problem.shape.stages, problem.shape.ranks
    sequence, offsets = flat(order)
    host, place = np.full(problem.size, -1, dtype=np.int64), np.full(problem.size, -1, dtype=np.int64)
    host[sequence] = np.repeat(np.arange(len(order)), np.diff(offsets))
    place[sequence] = np.arange(len(sequence))
    return [
        stages,
        problem.micro_batches,
        ranks,
        sequence,
        offsets,
        host,
        place,
        problem.times,
        np.array([problem.closing[s % ranks] for s in range(stages)]),
        problem.link,
        np.array(problem.speed),
        int(problem.staggered),
        np.zeros(stages),
        np.zeros(problem.size),
        np.zeros(2),
        problem.needs,
        problem.feeds,
    ]


def _time(
    stages: Any,
    n: Any,
    ranks: Any,
    sequence: Any,
    offsets: Any,
    host: Any,
    place: Any,
    times: Any,
    finish: Any,
    link: Any,
    speed: Any,
    staggered: Any,
    last: Any,
    late: Any,
    figures: Any,
    needs: Any,
    feeds: Any,
) -> None:
    workers = len(offsets) - 1
    size = len(sequence)
    total = len(host)
    plane = stages * n
    end = [0.0] * total
    done = [0] * total
    topological = [0] * size
    stack = [0] * (size + workers + 1)
    at = [0] * workers
    free = [0.0] * workers
    period = 1e300
    makespan = 1e300
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
            before = needs[x]
            after = feeds[x]
            begin = free[w]
            if before >= 0:
                if done[before] != 1:
                    break
                ready = end[before] + (link if host[before] != w else 0.0)
                if ready > begin:
                    begin = ready
            begin += times[kind * stages + s] * speed[w]
            end[x] = begin
            free[w] = begin
            if begin > last[s]:
                last[s] = begin
            done[x] = 1
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
        for t in range(size - 1, -1, -1):
            x = topological[t]
            w = host[x]
            kind = x // plane
            s = x // n - kind * stages
            until = last[s] if staggered else makespan - finish[s]
            k = place[x] + 1
            if k < offsets[w + 1] and late[sequence[k]] < until:
                until = late[sequence[k]]
            after = feeds[x]
            if after >= 0:
                ready = late[after] - (link if host[after] != w else 0.0)
                if ready < until:
                    until = ready
            late[x] = until - times[kind * stages + s] * speed[w]
        if staggered:
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
                    if window > period:
                        period = window
        else:
            period = makespan
    figures[0] = period
    figures[1] = makespan
