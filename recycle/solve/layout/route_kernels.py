"""List scheduling and timing of legs: the loops, which run compiled on large inputs (`ir.compiled`).

An operation is one F, I or W of a leg, numbered `kind * legs + leg`. Whenever a worker falls idle it takes a forward, a
backward or a W by the preferences of `Preferences`. Every worker has one queue of forwards and one of backwards, by
priority; its W run in the order of their backwards. Assumptions: a hand-over takes its seconds and waits for nothing.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from recycle.ir.compiled import called_by_kernels
from recycle.solve.problem_arrays import FORWARD, WEIGHT, Floats, Operations

SAME_INSTANT = 1e-12
"""Seconds within which events count as one instant."""


class Legs(NamedTuple):
    """Legs as the loops read them.

    Attributes:
        host, before, after: [legs], worker, and the neighbouring legs of its micro-batch, -1 for none.
        seconds: [3 * legs], of F, I (or B) and W.
        hop: [legs], seconds from its worker to that of the next leg, and back.
        size: [legs], of its activation.
        cap: [workers], what each worker may hold of activations.
        stash: share of an activation held between I and W.
        split: the backward pass is cut into I and W.
    """

    host: Operations
    before: Operations
    after: Operations
    seconds: Floats
    hop: Floats
    size: Floats
    cap: Floats
    stash: float
    split: bool


class Preferences(NamedTuple):
    """How an idle worker chooses.

    Attributes:
        hold: [workers], activations between F and I that it may have.
        weights: [workers], W that may wait before a forward has to stand back.
        forward_first, weight_first: [workers], a forward that may run goes before a ready I; a W does where only memory
            keeps a forward from running.
    """

    hold: Floats
    weights: Operations
    forward_first: Operations
    weight_first: Operations


class LegQueues(NamedTuple):
    """What every worker can run, holds and runs, while the loop is at work.

    Attributes:
        begins: [workers + 1], where the legs of each worker begin in `line`.
        line, place: [legs], legs by worker, then priority, and the inverse.
        ready: [2 * legs], 1 at the place of each forward, then of each backward, that has arrived and not begun.
        head, tail: [2 * workers], bounds on the ready places.
        waiting: [legs], W that each worker may run, from its first place on; `waiting_head`, `waiting_tail`: [workers].
        held, in_flight: [workers], activations in memory, and those between F and I.
        running: [workers], operation at work, -1 if none.
        woken, is_woken: [workers], to be asked at this instant.
        begun: [3 * legs], operations in the order in which they begin; `start`: [3 * legs], when each does.
    """

    begins: Operations
    line: Operations
    place: Operations
    ready: Operations
    head: Operations
    tail: Operations
    waiting: Operations
    waiting_head: Operations
    waiting_tail: Operations
    held: Floats
    in_flight: Floats
    running: Operations
    woken: Operations
    is_woken: Operations
    begun: Operations
    start: Floats


def list_legs(legs: Legs, rule: Preferences, queues: LegQueues) -> int:
    """The event loop: runs the clock until nothing is left to happen; returns how many operations have begun.

    An event is (time, code): operation `code` arrives at its worker, or, below 0, worker -code - 1 falls idle.
    """
    host, before, after, seconds = legs.host, legs.before, legs.after, legs.seconds
    hop, size, cap, stash, split = legs.hop, legs.size, legs.cap, legs.stash, legs.split
    hold, weights, forward_first, weight_first = rule.hold, rule.weights, rule.forward_first, rule.weight_first
    begins, line, place, ready, head, tail = (
        queues.begins, queues.line, queues.place, queues.ready, queues.head, queues.tail,
    )  # fmt: skip
    waiting, waiting_head, waiting_tail = queues.waiting, queues.waiting_head, queues.waiting_tail
    held, in_flight, running = queues.held, queues.in_flight, queues.running
    woken, is_woken, begun, start = queues.woken, queues.is_woken, queues.begun, queues.start
    n, workers = len(host), len(held)
    events = [(0.0, leg) for leg in range(n) if before[leg] < 0]
    heapq.heapify(events)
    done = 0
    while len(events) > 0:
        now = events[0][0]
        count = 0
        while len(events) > 0 and events[0][0] <= now + SAME_INSTANT:
            code = heapq.heappop(events)[1]
            if code < 0:
                w = -code - 1
                x = running[w]
                running[w] = -1
                leg = x % n
                code = -1
                if x >= 2 * n:
                    held[w] -= stash * size[leg]
                elif x >= n:
                    in_flight[w] -= size[leg]
                    held[w] -= size[leg] * (1.0 - stash if split else 1.0)
                    if split:
                        waiting[begins[w] + waiting_tail[w]] = x + n
                        waiting_tail[w] += 1
                    if before[leg] >= 0:
                        heapq.heappush(events, (now + hop[before[leg]], n + before[leg]))
                elif after[leg] >= 0:
                    heapq.heappush(events, (now + hop[leg], after[leg]))
                else:
                    code = n + leg
                if not is_woken[w]:
                    is_woken[w] = 1
                    woken[count] = w
                    count += 1
                if code < 0:
                    continue
            leg = code % n
            w = host[leg]
            kind = code // n
            k = kind * n + place[leg]
            queue = kind * workers + w
            ready[k] = 1
            head[queue] = min(head[queue], k)
            tail[queue] = max(tail[queue], k)
            if not is_woken[w]:
                is_woken[w] = 1
                woken[count] = w
                count += 1
        for entry in range(count):
            w = woken[entry]
            is_woken[w] = 0
            if running[w] >= 0:
                continue
            forward = -1
            backward = -1
            is_blocked = False
            k = _first_ready(ready, head, tail, w)
            if k >= 0:
                leg = line[k]
                if held[w] + size[leg] > cap[w] + 1e-9:
                    is_blocked = True
                elif in_flight[w] + size[leg] <= hold[w] + 1e-9 or in_flight[w] <= 1e-9:
                    forward = leg
            k = _first_ready(ready, head, tail, workers + w)
            if k >= 0:
                backward = n + line[k - n]
            pending = waiting_tail[w] - waiting_head[w]
            weight = waiting[begins[w] + waiting_head[w]] if pending > 0 else -1
            has_room = pending < weights[w] or pending == 0
            x = weight
            if forward >= 0 and forward_first[w]:
                x = forward if has_room else weight
            elif is_blocked and weight_first[w] and pending > 0:
                x = weight
            elif backward >= 0:
                x = backward
            elif forward >= 0 and has_room:
                x = forward
            if x < 0:
                continue
            kind = x // n
            leg = x % n
            if kind == WEIGHT:
                waiting_head[w] += 1
            else:
                ready[kind * n + place[leg]] = 0
            if kind == FORWARD:
                held[w] += size[leg]
                in_flight[w] += size[leg]
            running[w] = x
            begun[done] = x
            start[x] = now
            done += 1
            heapq.heappush(events, (now + seconds[x], -w - 1))
    return done


@called_by_kernels
def _first_ready(ready: Operations, head: Operations, tail: Operations, queue: int) -> int:
    """The place of the first ready operation of a queue, -1 if there is none."""
    k = head[queue]
    while k <= tail[queue] and ready[k] == 0:
        k += 1
    head[queue] = k
    return k if k <= tail[queue] else -1


def latest_starts(legs: Legs, begun: Operations, end: Floats, late: Floats, following: Floats) -> int:
    """When each operation has to start at the latest, so that every worker ends when it does.

    Args:
        begun: operations in an order in which none needs a later one.
        end: [workers], when each has to end.
        late: [3 * legs], the result.
        following: [workers], scratch.
    """
    host, before, after, seconds, hop = legs.host, legs.before, legs.after, legs.seconds, legs.hop
    n = len(host)
    for w in range(len(end)):
        following[w] = end[w]
    for i in range(len(begun) - 1, -1, -1):
        x = begun[i]
        leg = x % n
        w = host[leg]
        until = following[w]
        if x < n:
            if after[leg] >= 0:
                until = min(until, late[after[leg]] - hop[leg])
            until = min(until, late[n + leg])
        elif x < 2 * n:
            if before[leg] >= 0:
                until = min(until, late[n + before[leg]] - hop[before[leg]])
            if legs.split:
                until = min(until, late[2 * n + leg])
        late[x] = until - seconds[x]
        following[w] = late[x]
    return 0
