"""Kernels over an order: the forward pass that times it, its right-shift, and the annealing moves.

The forward pass starts every operation as early as its worker, the order and its dependency allow. A lane is a directed
pair of workers, which carries one transfer at a time in the order of the sender's program. After a change only
operations that began at or after the earliest changed one are timed again.

The first pass gives the last end E_r of every rank r, reduces and optimizer steps included (with the barrier: the
makespan). A second pass shifts every operation and transfer as late as these ends and its successors allow. Let S_w be
the latest first start of worker w. Lanes begin their first transfer as late, and end their last one as early, as these
starts permit. Then

    period = max(max over w of (E_r(w) - S_w), time of the longest lane)    staggered optimizer
    period = max over r of E_r                                              barrier.

The staggered period is an upper estimate, nearly always exact; `simulate` is exact.

Annealing decides whether an order has a period T. The state is a sequence of operations per worker and a due time D_r
per rank r. A worker of rank r may begin at D_r - T and should end by D_r, reduce and step included. The cost is the sum
of the workers' delays. The order reaches T if the cost is 0 and no lane takes longer than T. Micro-batches of a single
pipeline are interchangeable: relabelling them in index order per worker never delays an operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import numpy as np

from recycle.ir.compiled import called_by_kernels, run
from recycle.solve.effort import Incumbent
from recycle.solve.problem import Order, Problem, flatten
from recycle.solve.problem_arrays import Floats, Operations, ProblemArrays, draw, draw_below, lane_between

MOVED, EXCHANGED, SHIFTED, REHOSTED = 1, 2, 3, 4
"""Kinds of steps: move an operation, exchange two micro-batches, shift a due time, re-host a micro-batch."""
PER_THOUSAND_MOVED, PER_THOUSAND_MOVED_FAR, PER_THOUSAND_NOT_SHIFTED = 860, 100, 985
"""Thresholds in 1,000 steps: operations moved, operations moved far, due times not shifted."""
PER_THOUSAND_MOVED_OR_REHOSTED = 890
"""Threshold in 1,000 steps: an operation moved or a mobile micro-batch re-hosted."""
PER_THOUSAND_RUNS = 150
"""Of 1,000 moves in a single pipeline: moves of a run of micro-batches' operations of one kind and stage."""
PER_THOUSAND_CRITICAL = 400
"""Of 1,000 steps: steps that choose an operation on the critical path of a late worker."""
NEVER = 1e300


class TimedOrder(NamedTuple):
    """An order, its times, and the workspace of the passes. W is the number of workers.

    Attributes:
        sequence: [operations], the concatenated programs.
        offsets: [W + 1], begin of each program, and end of the last.
        host: [operations], worker of each operation.
        place: [operations], index of each operation in `sequence`.
        release: [W], earliest start of each worker.
        begin, end: [operations], the valid times.
        arrival: [operations], arrival of each result at another worker; unset without a transfer.
        arrived: [operations], time when all of the worker's transfers up to this operation have arrived.
        new_begin, new_end, new_arrival, new_arrived: [operations], the times of the latest pass.
        timed_in: [operations], number of the latest pass that timed each operation; negative if none has.
        visited: [operations], operations of the latest pass in topological order.
        stack: [operations + W + 1], workers to resume.
        next, first: [W], index of the next operation to time, and of the first one of the pass.
        free: [W], end of each worker's last timed operation.
        lane_first, lane_free: [lanes], latest begin of the first transfer, and the corresponding end of the last one.
            Indexed by `lane_between`; empty if transfers never queue.
    """

    sequence: Operations
    offsets: Operations
    host: Operations
    place: Operations
    release: Floats
    begin: Floats
    end: Floats
    arrival: Floats
    arrived: Floats
    new_begin: Floats
    new_end: Floats
    new_arrival: Floats
    new_arrived: Floats
    timed_in: Operations
    visited: Operations
    stack: Operations
    next: Operations
    first: Operations
    free: Floats
    lane_first: Floats
    lane_free: Floats


class Annealing(NamedTuple):
    """One round of annealing. P is the number of ranks.

    Attributes:
        due: [P], due time of each rank; modified by the round.
        target: period to reach.
        quantum: seconds by which a due time shifts.
        mobile: flat (stage, micro-batch) that may change their hosts.
        is_mobile: [stages * micro-batches], 1 for each entry of `mobile`.
        live: [W], 1 for each live worker.
        hot, cold: first and last temperature, in seconds.
        random: [1], state of the random generator.
        latest: [operations], workspace for right-shifted starts.
        places: [2 * micro-batches + 3], workspace for old and new places of operations.
    """

    due: Floats
    target: float
    quantum: float
    mobile: Operations
    is_mobile: Operations
    live: Operations
    hot: float
    cold: float
    steps: int
    random: Operations
    latest: Floats
    places: Operations


def initial_state(problem: Problem, order: Order) -> TimedOrder:
    """Return the state of `order` before its first pass, with every worker released at 0."""
    sequence, offsets = flatten(order)
    workers, size = len(order), problem.size
    host, place = np.full(size, -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    host[sequence] = np.repeat(np.arange(workers), np.diff(offsets))
    place[sequence] = np.arange(len(sequence))
    begin, end, new_begin, new_end = np.zeros((4, size))
    arrival, arrived, new_arrival, new_arrived = np.zeros((4, size if problem.link > 0 else 0))
    lane_first, lane_free = np.zeros((2, problem.lanes))
    return TimedOrder(
        sequence=sequence,
        offsets=offsets,
        host=host,
        place=place,
        release=np.zeros(workers),
        begin=begin,
        end=end,
        arrival=arrival,
        arrived=arrived,
        new_begin=new_begin,
        new_end=new_end,
        new_arrival=new_arrival,
        new_arrived=new_arrived,
        timed_in=np.full(size, -2, dtype=np.int64),
        visited=np.zeros(len(sequence), dtype=np.int64),
        stack=np.zeros(len(sequence) + workers + 1, dtype=np.int64),
        next=np.zeros(workers, dtype=np.int64),
        first=np.zeros(workers, dtype=np.int64),
        free=np.zeros(workers),
        lane_first=lane_first,
        lane_free=lane_free,
    )


@called_by_kernels
def forward_pass(problem: ProblemArrays, order: TimedOrder, since: float, number: int) -> int:
    """Time operations that began at `since` or later, and return their number, or -1 if the order deadlocks.

    Args:
        since: earliest start that a change affects; -NEVER to time everything.
        number: unique number of this pass.
    """
    # local names avoid counting references at each field access in the loops
    sequence, offsets, host, place = order.sequence, order.offsets, order.host, order.place
    end, arrival, arrived = order.end, order.arrival, order.arrived
    new_begin, new_end, new_arrival, new_arrived = order.new_begin, order.new_end, order.new_arrival, order.new_arrived
    timed_in, visited, stack, place_of_next = order.timed_in, order.visited, order.stack, order.next
    first, free, release = order.first, order.free, order.release
    needs, feeds, n, link = problem.needs, problem.feeds, problem.micro_batches, problem.link
    times, speed, hops, ranks = problem.times, problem.speed, problem.hops, problem.ranks
    workers = len(offsets) - 1
    queues = len(order.lane_first) > 0
    waiting = 0
    expected = 0
    for w in range(workers):
        low = _first_since(order, w, since)
        first[w] = low
        place_of_next[w] = low
        expected += offsets[w + 1] - low
        free[w] = end[sequence[low - 1]] if low > offsets[w] else release[w]
        stack[waiting] = w
        waiting += 1
    count = 0
    while waiting > 0:
        waiting -= 1
        w = stack[waiting]
        ready = free[w]
        k = place_of_next[w]
        while k < offsets[w + 1]:
            x = sequence[k]
            before = needs[x]
            if before >= 0:
                v = host[before]
                if timed_in[before] == number:
                    arrives = new_arrival[before] if link > 0.0 and v != w else new_end[before]
                elif place[before] < first[v]:
                    arrives = arrival[before] if link > 0.0 and v != w else end[before]
                else:
                    break
                if arrives > ready:
                    ready = arrives
            new_begin[x] = ready
            ready += times[x // n] * speed[w]
            new_end[x] = ready
            timed_in[x] = number
            visited[count] = x
            count += 1
            after = feeds[x]
            v = host[after] if after >= 0 else w
            if link > 0.0:
                # --- the transfer begins after the lane's latest one, among those still under way
                sent = ready
                last = ready
                i = k - 1 if queues else -1
                if i >= offsets[w]:
                    y = sequence[i]
                    last = max(last, new_arrived[y] if i >= first[w] else arrived[y])
                while v != w and i >= offsets[w]:
                    y = sequence[i]
                    if (new_arrived[y] if i >= first[w] else arrived[y]) <= ready:
                        break
                    following = feeds[y]
                    if following >= 0 and host[following] == v:
                        sent = max(sent, new_arrival[y] if i >= first[w] else arrival[y])
                        break
                    i -= 1
                if v != w:
                    if len(hops) > 0:
                        sent += hops[lane_between(w, v, workers, ranks)]
                    else:
                        sent += link
                    new_arrival[x] = sent
                    last = max(last, sent)
                new_arrived[x] = last
            k += 1
            if v != w and place_of_next[v] == place[after]:
                stack[waiting] = v
                waiting += 1
        free[w] = ready
        place_of_next[w] = k
    return count if count == expected else -1


def time_from_idle(problem: ProblemArrays, order: TimedOrder, due: Floats, latest: Floats) -> tuple[float, float]:
    """Kernel of `time_order`: return (period, makespan), infinite if the order deadlocks.

    Args:
        due: [P], output: end of each rank, reduce and step included; with the barrier the makespan for all.
        latest: [operations], output: right-shifted starts.
    """
    count = forward_pass(problem, order, -NEVER, 0)
    if count < 0:
        return np.inf, np.inf
    for w in range(len(order.free)):
        r = w % problem.ranks
        due[r] = max(due[r], order.free[w] + problem.update_seconds[r])
    makespan = 0.0
    for r in range(problem.ranks):
        makespan = max(makespan, due[r])
    if not problem.staggered:
        for r in range(problem.ranks):
            due[r] = makespan
    period = _right_shift(problem, order, count, due, latest)
    return period if problem.staggered else makespan, makespan


@called_by_kernels
def _right_shift(problem: ProblemArrays, order: TimedOrder, count: int, due: Floats, latest: Floats) -> float:
    offsets, sequence, host, link = order.offsets, order.sequence, order.host, problem.link
    place, visited, lane_first = order.place, order.visited, order.lane_first
    feeds, times, speed, update_seconds = problem.feeds, problem.times, problem.speed, problem.update_seconds
    hops, n, ranks, workers = problem.hops, problem.micro_batches, problem.ranks, len(speed)
    queues = len(lane_first) > 0
    for lane in range(len(lane_first)):
        lane_first[lane] = NEVER
    for t in range(count - 1, -1, -1):
        x = visited[t]
        w = host[x]
        until = due[w % ranks] - update_seconds[w % ranks]
        k = place[x] + 1
        if k < offsets[w + 1] and latest[sequence[k]] < until:
            until = latest[sequence[k]]
        after = feeds[x]
        if after >= 0:
            sent = latest[after]
            v = host[after]
            if v != w:
                lane = lane_between(w, v, workers, ranks)
                hop = hops[lane] if len(hops) > 0 else link
                if queues:
                    sent = min(sent, lane_first[lane]) - hop
                    lane_first[lane] = sent
                else:
                    sent -= hop
            if sent < until:
                until = sent
        latest[x] = until - times[x // n] * speed[w]
    period = 0.0
    for w in range(workers):
        if offsets[w + 1] > offsets[w]:
            period = max(period, due[w % ranks] - latest[sequence[offsets[w]]])
    if queues:
        period = max(period, _longest_lane(problem, order, latest))
    return period


@called_by_kernels
def _longest_lane(problem: ProblemArrays, order: TimedOrder, latest: Floats) -> float:
    sequence, host, feeds, link = order.sequence, order.host, problem.feeds, problem.link
    lane_first, lane_free, times, speed = order.lane_first, order.lane_free, problem.times, problem.speed
    hops, n, ranks, workers = problem.hops, problem.micro_batches, problem.ranks, len(speed)
    for lane in range(len(lane_first)):
        lane_free[lane] = lane_first[lane]
    for k in range(len(sequence)):
        x = sequence[k]
        w = host[x]
        after = feeds[x]
        if after >= 0 and host[after] != w:
            lane = lane_between(w, host[after], workers, ranks)
            hop = hops[lane] if len(hops) > 0 else link
            lane_free[lane] = max(lane_free[lane], latest[x] + times[x // n] * speed[w]) + hop
    longest = 0.0
    for lane in range(len(lane_first)):
        longest = max(longest, lane_free[lane] - lane_first[lane])
    return longest


def anneal_order(problem: ProblemArrays, order: TimedOrder, annealing: Annealing) -> tuple[bool, int]:
    """Kernel of `annealing`: modify `order` and `due`, and return (whether the target is met, moves tried)."""
    sequence, offsets, host, place = order.sequence, order.offsets, order.host, order.place
    begin, end, arrival, arrived = order.begin, order.end, order.arrival, order.arrived
    new_begin, new_end, new_arrival, new_arrived = order.new_begin, order.new_end, order.new_arrival, order.new_arrived
    visited, release, free, update_seconds = order.visited, order.release, order.free, problem.update_seconds
    n, ranks, random, due = problem.micro_batches, problem.ranks, annealing.random, annealing.due
    link, plane = problem.link, problem.stages * n
    kinds = 3 if problem.split else 2
    lanes_may_overrun = len(order.lane_first) > 0 and problem.staggered
    size = len(sequence)
    is_single = len(offsets) - 1 == ranks
    current = NEVER
    heat = annealing.hot
    cooling = (annealing.cold / annealing.hot) ** (1.0 / annealing.steps) if annealing.steps > 0 else 1.0
    for step in range(-1, annealing.steps):
        move = 0
        i = 0
        j = 0
        a = 0
        b = 0
        donor = 0
        moved = 0
        shift = 0.0
        since = -NEVER
        is_within_cap = True
        if step >= 0:
            heat *= cooling
            roll = draw_below(random, 1000)
            number = draw(random)
            i = (number >> 8) % size
            if draw_below(random, 1000) < PER_THOUSAND_CRITICAL:
                i = _critical_place(problem, order, annealing, i)
            x = sequence[i]
            if is_single and (roll < PER_THOUSAND_NOT_SHIFTED or not problem.staggered):
                roll %= PER_THOUSAND_MOVED
            if roll < PER_THOUSAND_MOVED:
                reach = 1 + draw_below(random, 6)
                if roll < PER_THOUSAND_MOVED_FAR:
                    reach *= 4
                j = i + reach if (draw(random) >> 16) % 2 else i - reach
                kind = x // plane
                many = 1
                if is_single and draw_below(random, 1000) < PER_THOUSAND_RUNS:
                    many = 2 + draw_below(random, n)
                    j = i + (j - i) // 2 if abs(j - i) > 3 else j  # long runs rarely fit as a whole
                shifted = j - i
                since = NEVER
                moved = 0
                while moved < many:
                    i = place[x]
                    j = max(offsets[host[x]], min(offsets[host[x] + 1] - 1, i + shifted))
                    if not is_single:
                        if kind > 0:
                            j = max(j, place[x - plane] + 1)
                        if kind < kinds - 1:
                            j = min(j, place[x + plane] - 1)
                    if j == i:
                        break
                    since = min(since, begin[sequence[min(i, j)]])
                    _move(order, i, j)
                    if is_single and not _relabel_range(order, i, j, n, plane, kinds):
                        _move(order, j, i)
                        _relabel_range(order, j, i, n, plane, kinds)
                        break
                    annealing.places[2 * moved] = i
                    annealing.places[2 * moved + 1] = j
                    moved += 1
                    x += 1
                    if x % n == 0:
                        break
                if moved == 0:
                    continue
                x = sequence[j]
                move = MOVED
                if (kind == 0 and shifted < 0) or (kind > 0 and shifted > 0):
                    is_within_cap = not _is_beyond_cap(problem, order, host[x])
            elif roll < PER_THOUSAND_MOVED_OR_REHOSTED and len(annealing.mobile) > 0:
                a = x % plane
                if annealing.is_mobile[a] == 0:
                    a = annealing.mobile[(number >> 8) % len(annealing.mobile)]
                donor = host[a]
                b = donor % ranks + draw_below(random, len(annealing.live) // ranks) * ranks
                if b == donor or annealing.live[b] == 0:
                    continue
                since = begin[a]
                if link > 0.0:
                    since = min(since, _sent_to(problem, order, a))
                for kind in range(kinds):
                    x = a + kind * plane
                    annealing.places[kind] = place[x]
                    _rehost(order, x, b, _first_since(order, b, begin[x]) - (1 if host[x] < b else 0))
                move = REHOSTED
                is_within_cap = not _is_beyond_cap(problem, order, b)
            elif roll < PER_THOUSAND_NOT_SHIFTED or not problem.staggered:
                a = x % plane
                b = a // n * n + draw_below(random, n)
                if a == b or (host[a] != host[b] and (annealing.is_mobile[a] == 0 or annealing.is_mobile[b] == 0)):
                    continue
                since = NEVER
                for x in range(a, kinds * plane, plane):
                    since = min(since, begin[x], begin[x - a + b])
                if link > 0.0 and host[a] != host[b]:
                    since = min(since, _sent_to(problem, order, a), _sent_to(problem, order, b))
                _exchange(order, a, b, kinds, plane)
                move = EXCHANGED
            else:
                a = (number >> 8) % ranks
                shift = annealing.quantum if (number >> 20) % 2 else -annealing.quantum
                due[a] += shift
                move = SHIFTED
        cost = NEVER
        count = 0
        if is_within_cap:
            if move == 0 or move == SHIFTED:
                for w in range(len(offsets) - 1):
                    release[w] = due[w % ranks] - annealing.target
            count = forward_pass(problem, order, since, step)
            if count >= 0:
                cost = 0.0
                for w in range(len(offsets) - 1):
                    late = free[w] + update_seconds[w % ranks] - due[w % ranks]
                    if late > 1e-9 and offsets[w + 1] > offsets[w]:
                        cost += late
        if cost <= current or (cost < NEVER and exp((current - cost) / heat) * 2147483647.0 > draw(random)):
            current = cost
            for k in range(count):
                x = visited[k]
                begin[x] = new_begin[x]
                end[x] = new_end[x]
                if link > 0.0:
                    arrival[x] = new_arrival[x]
                    arrived[x] = new_arrived[x]
            if cost <= 1e-9 and (not lanes_may_overrun or _fits(problem, order, annealing, -4 - step)):
                return True, step + 1
        elif move == SHIFTED:
            due[a] -= shift
            for w in range(a, len(offsets) - 1, ranks):
                release[w] = due[a] - annealing.target
        elif move == EXCHANGED:
            _exchange(order, a, b, kinds, plane)
        elif move == REHOSTED:
            for kind in range(kinds - 1, -1, -1):
                _rehost(order, a + kind * plane, donor, annealing.places[kind])
        else:
            while moved > 0:
                moved -= 1
                i = annealing.places[2 * moved]
                j = annealing.places[2 * moved + 1]
                _move(order, j, i)
                if is_single:
                    _relabel_range(order, j, i, n, plane, kinds)
    return False, annealing.steps


@called_by_kernels
def _critical_place(problem: ProblemArrays, order: TimedOrder, annealing: Annealing, otherwise: int) -> int:
    sequence, offsets, host, place = order.sequence, order.offsets, order.host, order.place
    begin, end, release, needs = order.begin, order.end, order.release, problem.needs
    due, update_seconds, ranks, random = annealing.due, problem.update_seconds, problem.ranks, annealing.random
    workers = len(offsets) - 1
    w = draw_below(random, workers)
    last = -1
    for _ in range(workers):
        w = w + 1 if w + 1 < workers else 0
        if offsets[w + 1] > offsets[w]:
            x = sequence[offsets[w + 1] - 1]
            if end[x] + update_seconds[w % ranks] - due[w % ranks] > 1e-9:
                last = x
                break
    if last < 0:
        return otherwise
    length = 0
    remaining = -1
    while True:  # the first pass counts the path, the second finds the chosen operation
        x = last
        while x >= 0 and remaining != 0:
            k = place[x]
            length += 1
            remaining -= 1
            if k > offsets[host[x]] and end[sequence[k - 1]] >= begin[x] - 1e-9:
                x = sequence[k - 1]
            elif begin[x] > release[host[x]] + 1e-9:
                x = needs[x]
            else:
                x = -1
        if remaining >= 0:
            break
        remaining = draw_below(random, length)
    return int(place[x])


@called_by_kernels
def _fits(problem: ProblemArrays, order: TimedOrder, annealing: Annealing, number: int) -> bool:
    count = forward_pass(problem, order, -NEVER, number)
    return _right_shift(problem, order, count, annealing.due, annealing.latest) <= annealing.target + 1e-9


@called_by_kernels
def _sent_to(problem: ProblemArrays, order: TimedOrder, a: int) -> float:
    since = NEVER
    plane = problem.stages * problem.micro_batches
    for x in (a, a + plane):
        if problem.needs[x] >= 0:
            since = min(since, order.begin[problem.needs[x]])
    return since


@called_by_kernels
def _move(order: TimedOrder, i: int, j: int) -> None:
    x = order.sequence[i]
    step = 1 if i < j else -1
    for k in range(i, j, step):
        y = order.sequence[k + step]
        order.sequence[k] = y
        order.place[y] = k
    order.sequence[j] = x
    order.place[x] = j


@called_by_kernels
def _relabel_range(order: TimedOrder, i: int, j: int, n: int, plane: int, kinds: int) -> bool:
    sequence, place = order.sequence, order.place
    row = sequence[j] // n
    step = 1 if i > j else -1
    last = j
    for k in range(j + step, i + step, step):
        y = sequence[k]
        if y // n == row:
            x = sequence[last]
            sequence[last] = y
            place[y] = last
            sequence[k] = x
            place[x] = k
            last = k
    for k in range(min(i, j), max(i, j) + 1):
        y = sequence[k]
        if y // n == row:
            if y >= plane and place[y - plane] > k:
                return False
            if y < (kinds - 1) * plane and place[y + plane] < k:
                return False
    return True


@called_by_kernels
def _rehost(order: TimedOrder, x: int, v: int, j: int) -> None:
    w = order.host[x]
    _move(order, order.place[x], j)
    for u in range(w + 1, v + 1):
        order.offsets[u] -= 1
    for u in range(v + 1, w + 1):
        order.offsets[u] += 1
    order.host[x] = v


@called_by_kernels
def _first_since(order: TimedOrder, w: int, since: float) -> int:
    low = order.offsets[w]
    high = order.offsets[w + 1]
    while low < high:
        middle = (low + high) // 2
        if order.begin[order.sequence[middle]] < since:
            low = middle + 1
        else:
            high = middle
    return int(low)


@called_by_kernels
def _exchange(order: TimedOrder, a: int, b: int, kinds: int, plane: int) -> None:
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


@dataclass(frozen=True, eq=False)
class Timing:
    """Times of an order, in seconds.

    Attributes:
        period: by right-shift; infinite if the order deadlocks.
        makespan: end of the last stage, step included, from an empty pipeline.
        due: E_r of each rank; with the barrier the makespan for all.
        latest_starts: [operations], right-shifted starts.
    """

    period: float
    makespan: float
    due: list[float]
    latest_starts: Floats


def time_order(problem: Problem, order: Order) -> Timing:
    state, due, latest = initial_state(problem, order), np.zeros(problem.shape.ranks), np.zeros(problem.size)
    (period, makespan), *_, due, latest = run(time_from_idle, problem.size, problem.arrays, state, due, latest)
    return Timing(float(period), float(makespan), np.asarray(due).tolist(), np.asarray(latest))


def evaluate(problem: Problem, order: Order) -> Incumbent:
    """Return an order with its period."""
    return Incumbent(order, time_order(problem, order).period)
