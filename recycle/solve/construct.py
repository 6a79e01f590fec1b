"""The list scheduler: an order for any shape, caps, times and dead workers, in time linear in its instructions.

Whenever a worker is idle it takes the first that applies: a backward (I, or the whole B) that is ready; a forward if
memory allows and fewer than `weights` W wait; a W; a forward if memory allows. Ready forwards and backwards are taken
by micro-batch index, then pipeline. A dead worker's micro-batches go to its live peers, evenly in time, round-robin
over all the dead of the stage. A `Policy` holds what may be varied; `portfolio` lists a few that between them do well.

It cannot deadlock: a backward frees memory whenever one is ready, the last stage can always run one after its
forward, and with several chunks per worker each chunk leaves a free slot for every deeper one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recycle.solve.compiled import as_arrays, compiled
from recycle.solve.problem import Order, Problem

COMPILE_FROM = 60_000
"""Operations from which loading the compiled loop costs less than running in plain Python."""
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Policy:
    """What the list scheduler may be told; per-stage lists have one entry per stage.

    Attributes:
        hold: micro-batches between F and I that a host may have, below its memory cap.
        weights: W that may wait before a forward has to stand back.
        weight_first: a W goes before a ready I when a forward waits for memory.
        lead: places by which re-routed micro-batches are moved up in the queues, in micro-batch indices.
        swaps: pairs of (stage, micro-batch) whose hosts change places.
    """

    hold: tuple[int, ...]
    weights: tuple[int, ...]
    weight_first: tuple[bool, ...]
    lead: float = 0.0
    swaps: tuple[tuple[int, int, int], ...] = ()


def default_policy(problem: Problem) -> Policy:
    """Forwards and backwards first, W when nothing else can run."""
    stages = problem.shape.stages
    return Policy((UNLIMITED,) * stages, (UNLIMITED,) * stages, (False,) * stages)


def portfolio(problem: Problem) -> Iterator[Policy]:
    """A few policies, the generally best first."""
    stages, ranks = problem.shape.stages, problem.shape.ranks
    plain = default_policy(problem)
    yield plain
    limits: list[tuple[int, ...]] = [plain.weights]
    if problem.split:
        limits += [(1,) * stages, (2,) * stages, tuple(max(1, s % ranks) for s in range(stages)), (4,) * stages]
    holds = [plain.hold]
    if problem.shape.chunks == 1:
        holds.append(tuple(max(1, stages - s) for s in range(stages)))
        holds.append(tuple(max(1, stages - s + 1) for s in range(stages)))
        holds.append(tuple(max(1, 2 * (stages - s) - 1) for s in range(stages)))
    for hold in holds:
        for weights in limits:
            for first in (False, True) if problem.split else (False,):
                for lead in (0.0, 2.0) if problem.dead else (0.0,):
                    policy = replace(plain, hold=hold, weights=weights, weight_first=(first,) * stages, lead=lead)
                    if policy != plain:
                        yield policy


def hosts_of(problem: Problem, policy: Policy) -> list[int]:
    """Worker of each (stage, micro-batch): its home if that lives, else the peer that would be done with it first."""
    shape = problem.shape
    m, ranks, n = shape.micro_batches, shape.ranks, problem.micro_batches
    host: list[int] = []
    for s in range(shape.stages):
        live = problem.hosts[s]
        dead = [k for k in range(shape.pipelines) if k * ranks + s % ranks not in set(live)]
        row = [(g // m) * ranks + s % ranks for g in range(n)]
        load = [(problem.speed[w] * (m + 1), place, w) for place, w in enumerate(live)]
        heapq.heapify(load)
        for k in dead:
            for j in range(m):
                finished, place, w = heapq.heappop(load)
                row[k * m + j] = w
                heapq.heappush(load, (finished + problem.speed[w], place, w))
        host += row
    for s, g, h in policy.swaps:
        host[s * n + g], host[s * n + h] = host[s * n + h], host[s * n + g]
    return host


def construct(
    problem: Problem, policy: Policy | None = None, *, noise: float = 0.0, seed: int = 0, often: bool = False
) -> Order:
    """The order that the list scheduler makes under `policy`; always complete and within the caps.

    Args:
        noise: share of decisions taken at random, for a search to vary.
        seed: of those decisions.
        often: many more will follow, so that the compiled loop pays for small problems too.
    """
    policy = policy or default_policy(problem)
    shape, n, m = problem.shape, problem.micro_batches, problem.shape.micro_batches
    host = hosts_of(problem, policy)
    rank: list[float] = []
    for s in range(shape.stages):
        rerouted = [host[s * n + g] != (g // m) * shape.ranks + s % shape.ranks for g in range(n)]
        rank += [(g % m) * shape.pipelines + g // m - policy.lead * shape.pipelines * rerouted[g] for g in range(n)]
    hosted = np.bincount(np.array(host), minlength=shape.worker_count)
    queue = np.concatenate([[0], np.cumsum(hosted)]).tolist()
    started = [0] * problem.size
    arguments: list[Any] = [
        shape.stages,
        n,
        shape.ranks,
        host,
        rank,
        queue,
        [*problem.forward, *problem.backward, *problem.weight],
        problem.link,
        list(problem.speed),
        [min(c, float(UNLIMITED)) for c in problem.cap],
        problem.stash,
        int(problem.split),
        list(policy.hold),
        list(policy.weights),
        [int(first) for first in policy.weight_first],
        noise,
        seed % 2147483647,
        _wakes(problem),
        started,
    ]
    if problem.size >= COMPILE_FROM or (often and problem.size >= COMPILE_FROM // 100):
        arguments = as_arrays(arguments)
        done = compiled(_list_schedule)(*arguments)
        started = arguments[-1].tolist()
    else:
        done = _list_schedule(*arguments)
    assert done == problem.size, "the list scheduler came to a halt"
    order: Order = [[] for _ in range(shape.worker_count)]
    plane = shape.stages * n
    for operation in started:
        order[host[operation % plane]].append(operation)
    return order


def _wakes(problem: Problem) -> list[int]:
    """For each operation the F or backward that can start once it ends, -1 if none.

    That is the one of another stage that waits for it; at the end of the model the backward of its own micro-batch.
    """
    wakes = list(problem.feeds)
    plane = problem.shape.stages * problem.micro_batches
    for backward in range(plane, 2 * plane):
        if problem.needs[backward] < 0:
            wakes[problem.needs_here[backward]] = backward
    return wakes


def _list_schedule(
    stages: Any,
    n: Any,
    ranks: Any,
    host: Any,
    rank: Any,
    queue: Any,
    times: Any,
    link: Any,
    speed: Any,
    cap: Any,
    stash: Any,
    split: Any,
    hold: Any,
    weights: Any,
    weight_first: Any,
    noise: Any,
    seed: Any,
    wakes: Any,
    started: Any,
) -> int:
    """Event-driven simulation. An event is (time, code): operation `code` arrives, or (< 0) worker -code-1 is idle."""
    workers = len(queue) - 1
    plane = stages * n
    chunks = stages // ranks
    forwards = [0] * plane
    backwards = [0] * plane
    waiting = [0] * plane
    forward_count = [0] * workers
    backward_count = [0] * workers
    waiting_head = [0] * workers
    waiting_count = [0] * workers
    held = [0.0] * workers
    flying = [0] * workers
    busy = [False] * workers
    finished = [0] * workers
    dirty = [0] * workers
    events = [(0.0, g) for g in range(n)]
    heapq.heapify(events)
    for w in range(workers):
        finished[w] = -1
    state = seed + 1
    done = 0
    while len(events) > 0:
        now = events[0][0]
        marked = 0
        while len(events) > 0 and events[0][0] <= now + 1e-12:
            code = heapq.heappop(events)[1]
            if code < 0:
                w = -code - 1
                busy[w] = False
                x = finished[w]
                finished[w] = -1
                kind = x // plane
                s = x // n - kind * stages
                after = wakes[x]
                if kind == 1:
                    if split:
                        held[w] -= 1.0 - stash
                        waiting[queue[w] + waiting_count[w]] = x + plane
                        waiting_count[w] += 1
                    else:
                        held[w] -= 1.0
                    flying[w] -= 1
                elif kind == 2:
                    held[w] -= stash
                if after >= 0:
                    v = host[after % plane]
                    heapq.heappush(events, (now + (link if v != w else 0.0), after))
            else:
                w = host[code % plane]
                if code < plane:
                    forwards[queue[w] + forward_count[w]] = code
                    forward_count[w] += 1
                else:
                    backwards[queue[w] + backward_count[w]] = code
                    backward_count[w] += 1
            dirty[marked % workers] = w
            marked += 1
        for entry in range(min(marked, workers)):
            w = dirty[entry] if marked <= workers else entry
            if busy[w]:
                continue
            # the best forward that memory admits, and the best backward
            first = queue[w]
            forward = -1
            blocked = False
            for k in range(first, first + forward_count[w]):
                x = forwards[k]
                s = x // n
                if held[w] + 1.0 > cap[w] - (chunks - 1 - s // ranks) + 1e-9:
                    blocked = True
                    continue
                if flying[w] >= hold[s]:
                    continue
                if (
                    forward < 0
                    or (s // ranks > forwards[forward] // n // ranks)
                    or (s // ranks == forwards[forward] // n // ranks and rank[x] < rank[forwards[forward]])
                ):
                    forward = k
            backward = -1
            for k in range(first, first + backward_count[w]):
                if backward < 0 or rank[backwards[k] - plane] < rank[backwards[backward] - plane]:
                    backward = k
            pending = waiting_count[w] - waiting_head[w]
            choice = -1
            s = w % ranks
            if backward >= 0 and not (weight_first[s] and pending > 0 and blocked and forward < 0):
                choice = 1
            elif forward >= 0 and pending < weights[s]:
                choice = 0
            elif pending > 0:
                choice = 2
            elif backward >= 0:
                choice = 1
            elif forward >= 0:
                choice = 0
            if noise > 0.0 and choice >= 0:
                state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                if (state >> 8) % 10000 < noise * 10000:
                    state = (state * 1103515245 + 12345) & 0x7FFFFFFF
                    other = (state >> 8) % 3
                    if (other == 0 and forward >= 0) or (other == 1 and backward >= 0) or (other == 2 and pending > 0):
                        choice = other
            if choice < 0:
                continue
            if choice == 0:
                x = forwards[forward]
                forward_count[w] -= 1
                forwards[forward] = forwards[first + forward_count[w]]
                held[w] += 1.0
                flying[w] += 1
            elif choice == 1:
                x = backwards[backward]
                backward_count[w] -= 1
                backwards[backward] = backwards[first + backward_count[w]]
            else:
                x = waiting[first + waiting_head[w]]
                waiting_head[w] += 1
            kind = x // plane
            busy[w] = True
            finished[w] = x
            started[done] = x
            done += 1
            heapq.heappush(events, (now + times[kind * stages + x // n - kind * stages] * speed[w], -w - 1))
    return done
