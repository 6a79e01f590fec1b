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
from recycle.ir.compiled import run
from recycle.solve.problem import Order, Problem, programs_of
from recycle.solve.problem_arrays import FORWARD, INPUT, WEIGHT, Floats, Operations, ProblemArrays, lane_between

SAME_INSTANT = 1e-12
"""Events within this many seconds count as simultaneous."""
UNLIMITED = 1 << 30


class Rule(NamedTuple):
    """Rule by which an idle worker chooses its next operation.

    Attributes:
        priority: [operations], lowest first. Orders each queue by policy; decides alone by priority.
        hold, weights, forward_first, weight_first: [stages]; see `list_scheduling.Policy`.
        starts: [micro-batches], (stage, micro-batch) at which each micro-batch enters the model.
        release: [micro-batches], earliest entry, in seconds.
        by_priority: 1 for the rule by priority, 0 for the rule by policy.
        patience, weight_patience: seconds that an F or I, and a W, waits for a more urgent operation; by priority only.
        idleness: share of the longest idle time of any worker up to which a worker waits for an F or I rather than run
            a W that would delay it; by policy only.
    """

    priority: Floats
    hold: Floats
    weights: Operations
    forward_first: Operations
    weight_first: Operations
    starts: Operations
    release: Floats
    by_priority: int = 1
    patience: float = 0.0
    weight_patience: float = 0.0
    idleness: float = 0.0


def priority_rule(priority: Floats, stages: int, starts: Operations) -> Rule:
    """Return the rule by priority without limits, patience or release times."""
    no = np.zeros(stages, dtype=np.int64)
    return Rule(
        priority=priority,
        hold=np.full(stages, np.inf),
        weights=np.full(stages, UNLIMITED),
        forward_first=no,
        weight_first=no,
        starts=starts,
        release=np.zeros(len(starts)),
    )


class Assigned(NamedTuple):
    """Where the operations run, and the order that the loop makes.

    Attributes:
        host: [stages * micro-batches], worker of each (stage, micro-batch).
        chunks: chunks per worker.
        size: [stages * micro-batches], share of the memory cap that each (stage, micro-batch) takes.
        hop: [operations], seconds to transfer each result; empty if the transfer depends on the workers alone.
        lanes: range of lane numbers; 0 if transfers never queue.
        begun: [operations], operations in the order of their starts; the result.
        start: [operations], start times; the result.
    """

    host: Operations
    chunks: int
    size: Floats
    hop: Floats
    lanes: int
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
    assigned = Assigned(
        host=host,
        chunks=problem.shape.chunks,
        size=np.ones(len(host)),
        hop=np.zeros(0),
        lanes=problem.lanes,
        begun=np.zeros(problem.size, dtype=np.int64),
        start=np.zeros(problem.size),
    )
    done, *_, after = run(list_schedule, problem.size, arrays, rule, assigned)
    if done < problem.size:
        raise PlanError("[memory] limit: too little memory for any order of the list scheduler; raise the limit")
    begun = np.array(after.begun, dtype=np.int64)
    return programs_of(begun, host[begun % len(host)], len(arrays.cap))


def list_schedule(problem: ProblemArrays, rule: Rule, assigned: Assigned) -> int:
    """Kernel: run until no event is left, and return the number of operations that have begun.

    An event is (time, code): operation `code` arrives, or worker -code - 1 becomes idle. Each chunk of each worker has
    a queue of F, and one of backward passes, that have arrived and not begun: heaps of (priority, operation).
    """
    # local names avoid counting references at each field access in the loop
    n, ranks, stash, split, link = problem.micro_batches, problem.ranks, problem.stash, problem.split, problem.link
    hops, size, hop_of, host, chunks = problem.hops, assigned.size, assigned.hop, assigned.host, assigned.chunks
    times, speed, cap, wakes = problem.times, problem.speed, problem.cap, problem.wakes
    priority, hold, weights, by_priority = rule.priority, rule.hold, rule.weights, rule.by_priority
    forward_first, weight_first, begun, start = rule.forward_first, rule.weight_first, assigned.begun, assigned.start
    plane, workers, freed_by_backward = problem.stages * n, len(cap), 1.0 - stash if split else 1.0
    # empty lists whose comprehensions tell numba the types
    ready = [[(0.0, 0) for _ in range(0)] for _ in range(2 * workers * chunks)]
    waiting = [[0 for _ in range(0)] for _ in range(workers)]  # W that may run
    begun_weights = [0] * workers
    held = [0.0] * workers  # activations in memory
    in_flight = [0.0] * workers  # activations between F and backward
    outward = [0] * workers  # activations of micro-batches that have not passed the last stage; with several chunks
    running = [-1] * workers  # operation, or -1
    arrives = [0.0] * workers  # arrival of the running operation's result at another worker
    lane_free = [0.0] * assigned.lanes  # end of the last transfer of each lane, the running operation's included
    expected = [-1.0] * (2 * workers)  # arrival of the most urgent announced F, and backward, of each worker
    urgency = [0.0] * (2 * workers)  # its priority
    ended = [-1.0] * workers  # end of the latest operation; negative before the first one
    idle = [0.0] * workers  # time waited since the first operation
    woken, is_woken = [0] * workers, [False] * workers  # workers to ask at this instant
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
                        waiting[w].append(x + plane)
                code = wakes[x]
                if not is_woken[w]:
                    is_woken[w] = True
                    woken[count] = w
                    count += 1
                if code < 0:
                    continue
                if link > 0.0 and host[code % plane] != w:
                    heapq.heappush(events, (arrives[w], code))
                    continue
            w = host[code % plane]
            chunk = code % plane // n // ranks if chunks > 1 else 0
            heapq.heappush(ready[(code // plane * workers + w) * chunks + chunk], (priority[code], code))
            if not is_woken[w]:
                is_woken[w] = True
                woken[count] = w
                count += 1
        for entry in range(count):
            w = woken[entry]
            is_woken[w] = False
            if running[w] >= 0:
                continue
            # --- the first forward that fits into memory, the first backward, and the oldest W
            s = w % ranks
            forward = -1
            backward = -1
            is_blocked = False
            for chunk in range(chunks - 1, -1, -1):
                deeper = chunks - 1 - chunk
                queue = ready[w * chunks + chunk]
                if len(queue) > 0:
                    x = queue[0][1]
                    if in_flight[w] + size[x] <= hold[s if chunks == 1 else x // n] - deeper + 1e-9:
                        if held[w] + size[x] > cap[w] + 1e-9 or outward[w] + size[x] > cap[w] - deeper + 1e-9:
                            is_blocked = True
                        elif forward < 0 or priority[x] < priority[forward]:
                            forward = x
                queue = ready[(workers + w) * chunks + chunk]
                if len(queue) > 0 and (backward < 0 or queue[0][0] < priority[backward]):
                    backward = queue[0][1]
            pending = len(waiting[w]) - begun_weights[w]
            weight = waiting[w][begun_weights[w]] if pending > 0 else -1
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
                begun_weights[w] += 1
            else:
                heapq.heappop(ready[(kind * workers + w) * chunks + (x % plane // n // ranks if chunks > 1 else 0)])
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
