"""The list scheduler that follows an order: better ones from one that is there, in time linear in its operations.

Every operation has a priority, the time at which it starts when an order is right-shifted: what is late there is
urgent. Whenever a worker is idle it takes the most urgent of what is ready: an F that memory admits, an I (or whole B),
or the oldest waiting W. It waits instead when something more urgent is known to arrive soon enough: `patience` before
an F or I, `weight_patience` before a W, which otherwise fills each wait and holds up the next F or I. So gaps are
closed that a template or a rule of thumb leaves open, while what was urgent keeps its place. (In scheduling theory: a
parallel schedule generation scheme by latest start times, from which forward-backward improvement is made too.)
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.solve.compiled import as_lists, compiled
from recycle.solve.problem import Operations, Order, Problem, flat

COMPILE_FROM = 60_000
"""Operations from which loading the compiled loop costs less than running in plain Python."""


def hosts_in(problem: Problem, order: Order) -> Operations:
    """Worker of each (stage, micro-batch) in an order, flat."""
    operations, offsets = flat(order)
    host = np.empty(problem.shape.stages * problem.micro_batches, dtype=np.int64)
    host[operations % len(host)] = np.repeat(np.arange(len(order)), np.diff(offsets))
    return host


def follow(
    problem: Problem,
    host: Operations,
    priority: npt.NDArray[np.float64],
    *,
    patience: float = 0.0,
    weight_patience: float = 0.0,
    often: bool = False,
) -> Order:
    """The order that comes of these priorities; always complete and within the caps.

    Args:
        host: worker of each (stage, micro-batch), flat.
        priority: of each operation, the smallest first.
        patience, weight_patience: how long an F or I, and a W, stands back for what is more urgent and on its way.
        often: many more will follow, so that the compiled loop pays for small problems too.
    """
    shape, n = problem.shape, problem.micro_batches
    plane = shape.stages * n
    lane = host * shape.chunks + np.repeat(np.arange(shape.stages) // shape.ranks, n)
    lanes = np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=shape.worker_count * shape.chunks))])
    line = np.concatenate([np.lexsort((priority[k * plane : (k + 1) * plane], lane)) + k * plane for k in (0, 1)])
    place = np.empty(2 * plane, dtype=np.int64)
    place[line] = np.arange(2 * plane)
    arguments: list[Any] = [
        shape.stages,
        n,
        shape.ranks,
        host,
        priority,
        line,
        place,
        lanes,
        problem.times,
        problem.link,
        np.array(problem.speed),
        np.minimum(problem.cap, 1e18),
        problem.stash,
        int(problem.split),
        float(patience),
        float(weight_patience),
        problem.wakes,
        np.zeros(problem.size, dtype=np.int64),
    ]
    if problem.size >= COMPILE_FROM or (often and problem.size >= COMPILE_FROM // 100):
        done = compiled(_follow)(*arguments)
    else:
        arguments = as_lists(arguments)
        done = _follow(*arguments)
    assert done == problem.size, "the list scheduler came to a halt"
    started = np.array(arguments[-1], dtype=np.int64)
    worker = host[started % plane]
    ends = np.cumsum(np.bincount(worker, minlength=shape.worker_count))[:-1]
    return [part.tolist() for part in np.split(started[np.argsort(worker, kind="stable")], ends)]


def _follow(
    stages: Any,
    n: Any,
    ranks: Any,
    host: Any,
    priority: Any,
    line: Any,
    place: Any,
    lanes: Any,
    times: Any,
    link: Any,
    speed: Any,
    cap: Any,
    stash: Any,
    split: Any,
    patience: Any,
    weight_patience: Any,
    wakes: Any,
    started: Any,
) -> int:
    """Event-driven simulation. An event is (time, code): operation `code` arrives, or (< 0) worker -code-1 is idle.

    `line` holds the F, then the I of every lane (one stage of one worker) by priority, from `lanes[lane]` on; `place`
    is its inverse. What is ready is a flag per place, and `head` and `tail` bound the flags of a lane. `coming` and
    `urgency` hold, per kind and worker, when the most urgent announced operation arrives, and its priority.
    """
    plane = stages * n
    chunks = stages // ranks
    count_of_lanes = len(lanes) - 1
    workers = count_of_lanes // chunks
    ready = [False] * (2 * plane)
    head = [0] * (2 * count_of_lanes)
    tail = [-1] * (2 * count_of_lanes)
    for lane in range(count_of_lanes):
        head[lane] = lanes[lane]
        head[count_of_lanes + lane] = plane + lanes[lane]
    waiting = [0] * plane
    waiting_head = [0] * workers
    waiting_count = [0] * workers
    held = [0.0] * workers
    busy = [False] * workers
    finished = [-1] * workers
    coming = [-1.0] * (2 * workers)
    urgency = [0.0] * (2 * workers)
    dirty = [0] * workers
    marked = [False] * workers
    events = [(0.0, g) for g in range(n)]
    heapq.heapify(events)
    done = 0
    while len(events) > 0:
        now = events[0][0]
        count = 0
        while len(events) > 0 and events[0][0] <= now + 1e-9:
            code = heapq.heappop(events)[1]
            if code < 0:
                w = -code - 1
                busy[w] = False
                x = finished[w]
                kind = x // plane
                if kind == 1:
                    if split:
                        held[w] -= 1.0 - stash
                        waiting[lanes[w * chunks] + waiting_count[w]] = x + plane
                        waiting_count[w] += 1
                    else:
                        held[w] -= 1.0
                elif kind == 2:
                    held[w] -= stash
            else:
                x = code % plane
                w = host[x]
                lane = code // plane * count_of_lanes + w * chunks + x // n // ranks
                k = place[code]
                ready[k] = True
                if k < head[lane]:
                    head[lane] = k
                if k > tail[lane]:
                    tail[lane] = k
            if not marked[w]:
                marked[w] = True
                dirty[count] = w
                count += 1
        for entry in range(count):
            w = dirty[entry]
            marked[w] = False
            if busy[w]:
                continue
            best = -1
            for kind in range(2):
                for chunk in range(chunks):
                    lane = kind * count_of_lanes + w * chunks + chunk
                    k = head[lane]
                    while k <= tail[lane] and not ready[k]:
                        k += 1
                    head[lane] = k
                    # each chunk leaves a free slot for every deeper one, or a forward could wait for ever
                    fits = kind == 1 or held[w] + 1.0 <= cap[w] - (chunks - 1 - chunk) + 1e-9
                    if k <= tail[lane] and fits and (best < 0 or priority[line[k]] < priority[best]):
                        best = line[k]
            if waiting_head[w] < waiting_count[w]:
                x = waiting[lanes[w * chunks] + waiting_head[w]]
                if best < 0 or priority[x] < priority[best]:
                    best = x
            if best < 0:
                continue
            until = now + (patience if best < 2 * plane else weight_patience)
            stands_back = False
            for kind in range(2):
                k = kind * workers + w
                if now + 1e-9 < coming[k] <= until and urgency[k] < priority[best]:
                    stands_back = stands_back or kind == 1 or held[w] + 1.0 <= cap[w] + 1e-9
            if stands_back:
                continue
            kind = best // plane
            if kind < 2:
                ready[place[best]] = False
            else:
                waiting_head[w] += 1
            if kind == 0:
                held[w] += 1.0
            busy[w] = True
            finished[w] = best
            started[done] = best
            done += 1
            until = now + times[best // n] * speed[w]
            heapq.heappush(events, (until, -w - 1))
            after = wakes[best]
            if after >= 0:
                v = host[after % plane]
                if v != w:
                    until += link
                    k = after // plane * workers + v
                    if coming[k] <= now + 1e-9 or priority[after] < urgency[k]:
                        coming[k] = until
                        urgency[k] = priority[after]
                heapq.heappush(events, (until, after))
    return done
