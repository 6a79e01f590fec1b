"""Event loop of list scheduling: a rule chooses the next operation of each idle worker.

    by policy     F, I or W by preferences of each stage (`list_scheduling.Policy`); each queue by priority
    by priority   the ready operation with the lowest priority; a worker may stay idle for a more urgent one that
                  arrives soon (a parallel schedule generation scheme by latest start times)

A lane is a directed pair of workers. A lane carries one transfer at a time, in the order of the sender's program. A
transfer takes the lane's time in `hops`, or `link` seconds. A worker runs its W in the order of their I. The memory
test of a forward reserves one slot for each deeper chunk of the worker; otherwise forwards can deadlock.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from recycle.errors import PlanError
from recycle.ir.compiled import called_by_kernels, run
from recycle.solve.problem import Order, Problem, programs_of
from recycle.solve.problem_arrays import FORWARD, INPUT, WEIGHT, Floats, Operations, ProblemArrays, lane_between

SAME_INSTANT = 1e-12
"""Events within this many seconds count as simultaneous."""
UNLIMITED = 1 << 30


class Rule(NamedTuple):
    """Rule by which an idle worker chooses its next operation.

    Attributes:
        priority: [operations], lowest first. Orders each queue by policy; decides alone by priority.
        by_priority: 1 for the rule by priority, 0 for the rule by policy.
        hold, weights, forward_first, weight_first: [stages]; see `list_scheduling.Policy`.
        patience, weight_patience: seconds that an F or I, and a W, waits for a more urgent operation; by priority only.
        idleness: share of the longest idle time of any worker up to which a worker waits for an F or I rather than run
            a W that would delay it; by policy only.
        starts: [micro-batches], (stage, micro-batch) at which each micro-batch enters the model.
        release: [micro-batches], earliest entry, in seconds.
    """

    priority: Floats
    by_priority: int
    hold: Floats
    weights: Operations
    forward_first: Operations
    weight_first: Operations
    patience: float
    weight_patience: float
    idleness: float
    starts: Operations
    release: Floats


def priority_rule(priority: Floats, stages: int, starts: Operations) -> Rule:
    """Return the rule by priority without limits, patience or release times."""
    no = np.zeros(stages, dtype=np.int64)
    return Rule(
        priority=priority,
        by_priority=1,
        hold=np.full(stages, np.inf),
        weights=np.full(stages, UNLIMITED),
        forward_first=no,
        weight_first=no,
        patience=0.0,
        weight_patience=0.0,
        idleness=0.0,
        starts=starts,
        release=np.zeros(len(starts)),
    )


class Queues(NamedTuple):
    """State of the loop: runnable, held and running operations of every worker.

    Each stage of each worker has a queue of F and a queue of backward passes, Q of each kind.

    Attributes:
        host: [stages * micro-batches], worker of each (stage, micro-batch).
        size: [stages * micro-batches], share of the memory cap that each (stage, micro-batch) takes.
        hop: [operations], seconds to transfer each result; empty if the transfer depends on the workers alone.
        begins: [Q + 1], offset of each queue's (stage, micro-batch).
        line: [2 * stages * micro-batches], the F of all queues, then the backward passes, each queue by priority.
        place: inverse of `line`.
        ready: [2 * stages * micro-batches], 1 at the place of each operation that has arrived and not begun.
        head, tail: [2 * Q], bounds on the ready places of each queue.
        waiting: [stages * micro-batches], W that each worker may run, starting at the offset of its first queue.
        waiting_head, waiting_tail: [workers], number of these W that have begun, and their number.
        held: [workers], activations in memory.
        outward: [workers], activations of micro-batches that have not passed the last stage; with several chunks only.
        in_flight: [workers], activations between F and backward.
        running: [workers], the running operation, or -1.
        arrives: [workers], arrival time of the running operation's result at another worker.
        lane_free: [lanes], end of the last transfer of each lane, the running operation's included.
        expected, urgency: [2 * workers], arrival time and priority of the most urgent announced F, and backward.
        ended: [workers], end of each worker's latest operation; negative before its first one.
        idle: [workers], time that each worker has waited since its first operation.
        woken, is_woken: [workers], workers to ask at this instant, and 1 for each of them.
        begun: [operations], operations in the order of their starts; the result.
        start: [operations], start times.
    """

    host: Operations
    size: Floats
    hop: Floats
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
    outward: Operations
    in_flight: Floats
    running: Operations
    arrives: Floats
    lane_free: Floats
    expected: Floats
    urgency: Floats
    ended: Floats
    idle: Floats
    woken: Operations
    is_woken: Operations
    begun: Operations
    start: Floats


def run_event_loop(problem: Problem, arrays: ProblemArrays, host: Operations, rule: Rule) -> Order:
    """Run the event loop and return its order, complete and within the memory caps.

    Args:
        arrays: the problem's arrays, possibly with other times.
        host: worker of each (stage, micro-batch), flat.

    Raises:
        PlanError: no further activation fits, which is impossible if a chunk's stages follow all of the one before.
    """
    queue = host * problem.shape.chunks + problem.stage_of // problem.shape.ranks
    queues = initial_queues(
        host, queue, problem.shape.chunks, rule.priority, problem.size, workers=len(arrays.cap), lanes=problem.lanes
    )
    done, *_, after = run(list_schedule, problem.size, arrays, rule, queues)
    if done < problem.size:
        raise PlanError("[memory] limit: too little memory for any order of the list scheduler; raise the limit")
    begun = np.array(after.begun, dtype=np.int64)
    return programs_of(begun, host[begun % len(host)], len(arrays.cap))


def initial_queues(
    host: Operations,
    queue: Operations,
    chunks: int,
    priority: Floats,
    operations: int,
    *,
    workers: int,
    size: Floats | None = None,
    hop: Floats | None = None,
    lanes: int = 0,
) -> Queues:
    """Return the state before the first event; `queue` is worker * `chunks` + chunk of each (stage, micro-batch)."""
    plane, count = len(host), workers * chunks
    begins = np.concatenate([[0], np.cumsum(np.bincount(queue, minlength=count))])
    line = np.lexsort((priority[: 2 * plane], np.concatenate([queue, queue + count])))
    place = np.empty(2 * plane, dtype=np.int64)
    place[line] = np.arange(2 * plane)

    def zeros(length: int) -> Operations:
        return np.zeros(length, dtype=np.int64)

    return Queues(
        host=host,
        size=np.ones(plane) if size is None else size,
        hop=np.zeros(0) if hop is None else hop,
        begins=begins,
        line=line,
        place=place,
        ready=zeros(2 * plane),
        head=np.concatenate([begins[:-1], plane + begins[:-1]]),
        tail=zeros(2 * count) - 1,
        waiting=zeros(plane),
        waiting_head=zeros(workers),
        waiting_tail=zeros(workers),
        held=np.zeros(workers),
        outward=zeros(workers),
        in_flight=np.zeros(workers),
        running=zeros(workers) - 1,
        arrives=np.zeros(workers),
        lane_free=np.zeros(lanes),
        expected=np.full(2 * workers, -1.0),
        urgency=np.zeros(2 * workers),
        ended=np.full(workers, -1.0),
        idle=np.zeros(workers),
        woken=zeros(workers),
        is_woken=zeros(workers),
        begun=zeros(operations),
        start=np.zeros(operations),
    )


def list_schedule(problem: ProblemArrays, rule: Rule, queues: Queues) -> int:
    """Kernel: run until no event is left, and return the number of operations that have begun.

    An event is (time, code): operation `code` arrives, or worker -code - 1 becomes idle.
    """
    # local names avoid counting references at each field access in the loop
    n, ranks, stash, split, link = problem.micro_batches, problem.ranks, problem.stash, problem.split, problem.link
    hops, size, hop_of = problem.hops, queues.size, queues.hop
    times, speed, cap, wakes = problem.times, problem.speed, problem.cap, problem.wakes
    priority, hold, weights, by_priority = rule.priority, rule.hold, rule.weights, rule.by_priority
    forward_first, weight_first = rule.forward_first, rule.weight_first
    host, begins, line, place = queues.host, queues.begins, queues.line, queues.place
    ready, head, tail = queues.ready, queues.head, queues.tail
    waiting, waiting_head, waiting_tail = queues.waiting, queues.waiting_head, queues.waiting_tail
    held, outward, in_flight = queues.held, queues.outward, queues.in_flight
    running, begun, start = queues.running, queues.begun, queues.start
    expected, urgency, woken, is_woken = queues.expected, queues.urgency, queues.woken, queues.is_woken
    arrives, lane_free, ended, idle = queues.arrives, queues.lane_free, queues.ended, queues.idle
    plane = problem.stages * n
    count_of_queues = len(begins) - 1
    workers = len(held)
    chunks = count_of_queues // workers
    freed_by_backward = 1.0 - stash if split else 1.0
    events = [(rule.release[g], rule.starts[g]) for g in range(len(rule.starts))]
    heapq.heapify(events)
    done = 0
    longest_idle = 0.0
    while len(events) > 0:
        now = events[0][0]
        count = 0
        # --- events of this instant
        while len(events) > 0 and events[0][0] <= now + SAME_INSTANT:
            code = heapq.heappop(events)[1]
            if code < 0:
                w = -code - 1
                x = running[w]
                running[w] = -1
                if x >= 2 * plane:
                    held[w] -= stash * size[x - 2 * plane]
                elif x < plane:
                    if chunks > 1 and x >= plane - n:
                        for y in range(x % n, plane, n):
                            outward[host[y]] -= 1
                else:
                    in_flight[w] -= size[x - plane]
                    held[w] -= freed_by_backward * size[x - plane]
                    if split:
                        waiting[begins[w * chunks] + waiting_tail[w]] = x + plane
                        waiting_tail[w] += 1
                code = wakes[x]
                if not is_woken[w]:
                    is_woken[w] = 1
                    woken[count] = w
                    count += 1
                if code < 0:
                    continue
                if link > 0.0 and host[code % plane] != w:
                    heapq.heappush(events, (arrives[w], code))
                    continue
            w = host[code % plane]
            kind = code // plane
            k = place[code]
            queue = kind * count_of_queues + w * chunks
            if chunks > 1:
                queue += code % plane // n // ranks
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
            # --- the first forward that fits into memory, the first backward, and the oldest W
            s = w % ranks
            forward = -1
            backward = -1
            is_blocked = False
            for chunk in range(chunks - 1, -1, -1):
                deeper = chunks - 1 - chunk
                queue = w * chunks + chunk
                k = _first_ready(ready, head, tail, queue)
                if k >= 0:
                    x = line[k]
                    if in_flight[w] + size[x] <= hold[s if chunks == 1 else x // n] - deeper + 1e-9:
                        if held[w] + size[x] > cap[w] + 1e-9 or outward[w] + size[x] > cap[w] - deeper + 1e-9:
                            is_blocked = True
                        elif forward < 0 or priority[x] < priority[forward]:
                            forward = x
                k = _first_ready(ready, head, tail, count_of_queues + queue)
                if k >= 0 and (backward < 0 or priority[line[k]] < priority[backward]):
                    backward = line[k]
            pending = waiting_tail[w] - waiting_head[w]
            weight = waiting[begins[w * chunks] + waiting_head[w]] if pending > 0 else -1
            # --- the choice
            if by_priority:
                x = forward
                if backward >= 0 and (x < 0 or priority[backward] < priority[x]):
                    x = backward
                if weight >= 0 and (x < 0 or priority[weight] < priority[x]):
                    x = weight
                until = now + (rule.patience if x < 2 * plane else rule.weight_patience)
                for kind in range(2 if x >= 0 else 0):
                    k = kind * workers + w
                    is_soon = now + 1e-9 < expected[k] <= until
                    if is_soon and urgency[k] < priority[x] and (kind == INPUT or held[w] + 1.0 <= cap[w] + 1e-9):
                        x = -1  # wait for the more urgent operation
                        break
            else:
                has_room = pending < weights[s] or pending == 0
                x = weight
                if forward >= 0 and forward_first[s]:
                    x = forward if has_room else weight
                elif is_blocked and forward < 0 and weight_first[s] and pending > 0:
                    x = weight
                elif backward >= 0:
                    x = backward
                elif forward >= 0 and has_room:
                    x = forward
                elif x >= 0 and forward < 0 and rule.idleness > 0.0:
                    until = expected[workers + w]
                    is_next = now + 1e-9 < expected[w] and (until <= now + 1e-9 or expected[w] < until)
                    if is_next and held[w] + 1.0 <= cap[w] + 1e-9 and in_flight[w] + 1.0 <= hold[s] + 1e-9:
                        until = expected[w]
                    may_idle = idle[w] + until - now <= rule.idleness * longest_idle + 1e-9
                    if may_idle and now + 1e-9 < until < now + times[x // n] * speed[w] - 1e-9:
                        x = -1
            if x < 0:
                continue
            # --- start the operation
            if ended[w] >= 0.0:
                idle[w] += now - ended[w]
                longest_idle = max(longest_idle, idle[w])
            kind = x // plane
            if kind == WEIGHT:
                waiting_head[w] += 1
            else:
                ready[place[x]] = 0
            if kind == FORWARD:
                held[w] += size[x]
                in_flight[w] += size[x]
                if chunks > 1:
                    outward[w] += 1
            running[w] = x
            start[x] = now
            begun[done] = x
            done += 1
            until = now + times[x // n] * speed[w]
            ended[w] = until
            heapq.heappush(events, (until, -w - 1))
            after = wakes[x]
            if after >= 0 and host[after % plane] != w:
                v = host[after % plane]
                lane = lane_between(w, v, workers, ranks)
                hop = hop_of[x] if len(hop_of) > 0 else hops[lane] if len(hops) > 0 else link
                if link > 0.0 and len(lane_free) == 0:
                    until += hop
                    arrives[w] = until
                elif link > 0.0:
                    until = max(until, lane_free[lane]) + hop
                    lane_free[lane] = until
                    arrives[w] = until
                if by_priority or rule.idleness > 0.0:
                    k = after // plane * workers + v
                    if expected[k] <= now + 1e-9 or priority[after] < urgency[k]:
                        expected[k] = until
                        urgency[k] = priority[after]
    return done


@called_by_kernels
def _first_ready(ready: Operations, head: Operations, tail: Operations, queue: int) -> int:
    k = head[queue]
    while k <= tail[queue] and ready[k] == 0:
        k += 1
    head[queue] = k
    return k if k <= tail[queue] else -1
