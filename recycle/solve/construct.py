"""The list scheduler: an order for any shape, caps, times and dead workers, in time linear in its instructions.

Whenever a worker is idle it takes the first that applies:

    F   if the policy puts forwards first, memory allows and fewer than `hold` micro-batches are between F and I;
        a W instead while as many as `weights` wait
    W   if the policy puts weights first, one waits, and only memory keeps an F from running
    I   (or the whole B)
    F   if memory allows, fewer than `hold` are between F and I and fewer than `weights` W wait
    W
    F   if memory allows and fewer than `hold` are between F and I

Forwards first with a hold of P - s is ZB-H1's rotation of I, W and F, which keeps the pipeline's pace even; backwards
first drains what is in flight, which suits ample memory. Ready forwards and backwards are taken by micro-batch index,
then pipeline; with chunks the deepest forward first, or both by groups of micro-batches. A dead worker's micro-batches
go to its live peers as `deal` says. A `Policy` holds what may be varied; `portfolio` lists a few that between them do
well.

It cannot deadlock: a backward frees memory whenever one is ready, the last stage can always run one after its
forward, and with several chunks per worker each chunk leaves a free slot for every deeper one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from recycle.solve.compiled import as_lists, compiled
from recycle.solve.deal import deal
from recycle.solve.problem import Operations, Order, Problem

COMPILE_FROM = 60_000
"""Operations from which loading the compiled loop costs less than running in plain Python."""
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Policy:
    """What the list scheduler may be told; per-stage lists have one entry per stage.

    Attributes:
        hold: micro-batches between F and I that a host may have, below its memory cap; at least the number of chunks.
        weights: W that may wait before a forward has to stand back.
        forward_first: a forward that may run goes before a ready I.
        weight_first: a W goes before a ready I when a forward waits for memory.
        lead: places by which re-routed micro-batches are moved up in the queues, in micro-batch indices.
        swaps: pairs of (stage, micro-batch) whose hosts change places.
        evenness: how far the clock by which the scheduler decides is from the true times (0) to one where F, I and W
            take the same and links nothing (1). A true clock fills each wait with a W that then holds up the next F or
            I; an even one keeps the rotation, and what it decides is timed truly afterwards.
        group: with chunks, micro-batches that a worker takes through one before the next, as interleaved 1F1B does;
            0: the deepest chunk's forward first, and backwards by micro-batch.
    """

    hold: tuple[int, ...]
    weights: tuple[int, ...]
    forward_first: tuple[bool, ...]
    weight_first: tuple[bool, ...]
    lead: float = 0.0
    swaps: tuple[tuple[int, int, int], ...] = ()
    evenness: float = 0.0
    group: int = 0


def default_policy(problem: Problem) -> Policy:
    """Backwards, then forwards, and W when nothing else can run."""
    stages = problem.shape.stages
    return Policy((UNLIMITED,) * stages, (UNLIMITED,) * stages, (False,) * stages, (False,) * stages)


def portfolio(problem: Problem) -> Iterator[Policy]:
    """A few policies, the generally best first."""
    for group in groups(problem):
        for policy in _portfolio(problem):
            yield replace(policy, group=group)


def groups(problem: Problem) -> tuple[int, ...]:
    """Sizes of groups worth a try: P micro-batches as in interleaved 1F1B, and half of that for tight memory."""
    ranks = problem.shape.ranks
    return tuple(dict.fromkeys((0, ranks, max(2, ranks // 2)))) if problem.shape.chunks > 1 else (0,)


def _portfolio(problem: Problem) -> Iterator[Policy]:
    stages, ranks = problem.shape.stages, problem.shape.ranks
    plain = default_policy(problem)
    leads = (0.0, 2.0) if problem.dead else (0.0,)
    yield plain
    evennesses = (0.0,) if problem.is_even else (0.0, 1.0)
    for more, evenness, lead in product((0, 1, 2, 3), evennesses, leads):
        for weight_first in (True, False) if problem.split else (False,):
            yield replace(
                plain,
                hold=_warm_up(problem, more),
                weights=tuple(s % ranks + 1 for s in range(stages)) if more == 0 else plain.weights,
                forward_first=(True,) * stages,
                weight_first=(weight_first,) * stages,
                lead=lead,
                evenness=evenness,
            )
    limits = [plain.weights]
    if problem.split:
        limits += [(1,) * stages, (2,) * stages, tuple(max(1, s % ranks) for s in range(stages)), (4,) * stages]
    for hold in (plain.hold, _warm_up(problem, 0), _warm_up(problem, 1), _warm_up(problem, 3)):
        for weights in limits:
            for weight_first in (False, True) if problem.split else (False,):
                for lead in leads:
                    firsts = (weight_first,) * stages
                    policy = replace(plain, hold=hold, weights=weights, weight_first=firsts, lead=lead)
                    if policy != plain:
                        yield policy


def _warm_up(problem: Problem, more: int) -> tuple[int, ...]:
    """Per stage: the forwards before the first backward in 1F1B (with chunks: in interleaved 1F1B), and `more`."""
    stages, ranks, chunks = problem.shape.stages, problem.shape.ranks, problem.shape.chunks
    if chunks == 1:
        return tuple(ranks - s + more for s in range(stages))
    return tuple((chunks - 1) * ranks + 2 * (ranks - 1 - s % ranks) + 1 + more for s in range(stages))


def hosts_of(problem: Problem, policy: Policy) -> Operations:
    """Worker of each (stage, micro-batch), flat: as dealt, but for the policy's swaps."""
    host = deal(problem).host.copy()
    for s, g, h in policy.swaps:
        g, h = s * problem.micro_batches + g, s * problem.micro_batches + h
        host[g], host[h] = host[h], host[g]
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
    g = np.tile(np.arange(n), shape.stages)
    stage = np.repeat(np.arange(shape.stages), n)
    rerouted = host != g // m * shape.ranks + stage % shape.ranks
    rank = g % m * shape.pipelines + g // m - policy.lead * shape.pipelines * rerouted
    turn = _turns(problem, policy, rank, stage)
    line = np.lexsort((g, rank, stage, host))
    place = np.empty(len(line), dtype=np.int64)
    place[line] = np.arange(len(line))
    lane = host * shape.chunks + stage // shape.ranks  # one for each stage of each worker
    lanes = np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=shape.worker_count * shape.chunks))])
    use_arrays = problem.size >= COMPILE_FROM or (often and problem.size >= COMPILE_FROM // 100)
    arguments: list[Any] = [
        shape.stages,
        n,
        shape.ranks,
        host,
        turn,
        line,
        place,
        lanes,
        problem.times + policy.evenness * (problem.unit - problem.times),
        problem.link * (1 - policy.evenness),
        np.array(problem.speed),
        np.minimum(problem.cap, float(UNLIMITED)),
        problem.stash,
        int(problem.split),
        np.array(policy.hold),
        np.array(policy.weights),
        np.array(policy.forward_first, dtype=np.int64),
        np.array(policy.weight_first, dtype=np.int64),
        noise,
        seed % 2147483647,
        problem.wakes,
        np.zeros(problem.size, dtype=np.int64),
    ]
    if use_arrays:
        done = compiled(_list_schedule)(*arguments)
    else:
        arguments = as_lists(arguments)
        done = _list_schedule(*arguments)
    assert done == problem.size, "the list scheduler came to a halt"
    started = np.array(arguments[-1], dtype=np.int64)
    worker = host[started % len(host)]
    ends = np.cumsum(np.bincount(worker, minlength=shape.worker_count))[:-1]
    return [part.tolist() for part in np.split(started[np.argsort(worker, kind="stable")], ends)]


def _turns(problem: Problem, policy: Policy, rank: Any, stage: Any) -> Any:
    """For the F, then for the backward of each (stage, micro-batch): a worker takes the lowest that is ready."""
    chunks, chunk = problem.shape.chunks, stage // problem.shape.ranks
    if not policy.group:
        return np.concatenate([rank - chunk * (1 + np.ptp(rank)), rank])
    size = policy.group * problem.shape.pipelines
    begun = rank // size * chunks * size + rank % size
    return np.concatenate([begun + chunk * size, begun + (chunks - 1 - chunk) * size])


def _list_schedule(
    stages: Any,
    n: Any,
    ranks: Any,
    host: Any,
    turn: Any,
    line: Any,
    place: Any,
    lanes: Any,
    times: Any,
    link: Any,
    speed: Any,
    cap: Any,
    stash: Any,
    split: Any,
    hold: Any,
    weights: Any,
    forward_first: Any,
    weight_first: Any,
    noise: Any,
    seed: Any,
    wakes: Any,
    started: Any,
) -> int:
    """Event-driven simulation. An event is (time, code): operation `code` arrives, or (< 0) worker -code-1 is idle.

    `line` holds the (stage, micro-batch) of every lane (one stage of one worker) in the order in which they are taken,
    from `lanes[lane]` on; `place` is its inverse. What is ready is a flag per place, and `head` and `tail` bound the
    flags of a lane, so that the first ready one is found at once.
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
    flying = [0] * workers
    busy = [False] * workers
    finished = [0] * workers
    dirty = [0] * workers
    marked = [False] * workers
    events = [(0.0, g) for g in range(n)]
    heapq.heapify(events)
    for w in range(workers):
        finished[w] = -1
    state = seed + 1
    done = 0
    while len(events) > 0:
        now = events[0][0]
        count = 0
        while len(events) > 0 and events[0][0] <= now + 1e-12:
            code = heapq.heappop(events)[1]
            if code < 0:
                w = -code - 1
                busy[w] = False
                x = finished[w]
                finished[w] = -1
                kind = x // plane
                after = wakes[x]
                if kind == 1:
                    if split:
                        held[w] -= 1.0 - stash
                        waiting[lanes[w * chunks] + waiting_count[w]] = x + plane
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
                kind = code // plane
                x = code - kind * plane
                w = host[x]
                k = kind * plane + place[x]
                lane = kind * count_of_lanes + w * chunks + x // n // ranks
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
            s = w % ranks
            # the best forward that memory admits (of the deepest chunk), and the best backward
            forward = -1
            backward = -1
            blocked = False
            for chunk in range(chunks - 1, -1, -1):
                lane = w * chunks + chunk
                k = head[lane]
                while k <= tail[lane] and not ready[k]:
                    k += 1
                head[lane] = k
                deeper = chunks - 1 - chunk
                if k <= tail[lane] and flying[w] < hold[s + chunk * ranks] - deeper:
                    if held[w] + 1.0 > cap[w] - deeper + 1e-9:
                        blocked = True
                    elif forward < 0 or turn[line[k]] < turn[line[forward]]:
                        forward = k
                lane += count_of_lanes
                k = head[lane]
                while k <= tail[lane] and not ready[k]:
                    k += 1
                head[lane] = k
                if k <= tail[lane] and (
                    backward < 0 or turn[plane + line[k - plane]] < turn[plane + line[backward - plane]]
                ):
                    backward = k
            pending = waiting_count[w] - waiting_head[w]
            choice = -1
            if forward >= 0 and forward_first[s]:
                choice = 0 if pending < weights[s] or pending == 0 else 2
            elif blocked and forward < 0 and weight_first[s] and pending > 0:
                choice = 2
            elif backward >= 0:
                choice = 1
            elif forward >= 0 and pending < weights[s]:
                choice = 0
            elif pending > 0:
                choice = 2
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
                x = line[forward]
                ready[forward] = False
                held[w] += 1.0
                flying[w] += 1
            elif choice == 1:
                x = plane + line[backward - plane]
                ready[backward] = False
            else:
                x = waiting[lanes[w * chunks] + waiting_head[w]]
                waiting_head[w] += 1
            kind = x // plane
            busy[w] = True
            finished[w] = x
            started[done] = x
            done += 1
            heapq.heappush(events, (now + times[kind * stages + x // n - kind * stages] * speed[w], -w - 1))
    return done
