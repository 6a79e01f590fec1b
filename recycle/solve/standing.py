"""An order under a target: when everything starts, how late it may, and who is late; what windows are cut from.

As in `anneal` the question is whether an order reaches a period T: a worker of rank r works from its release D_r - T on
and should be done by its deadline D_r (both before its reduce and step); what the workers are late in sum is the cost.
The passes are plain Python over lists for small problems, compiled for large ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.solve.compiled import as_lists, compiled
from recycle.solve.problem import Operations, Order, Problem, flat

Times = npt.NDArray[np.float64]

NEVER = 1e300
_SLACK = 1e-9


@dataclass(frozen=True)
class Standing:
    """An order under a target: when everything starts and who is late. Arrays go by operation or by worker.

    Attributes:
        sequence, offsets: the programs, one after the other.
        host, place: worker of each operation, and its place in `sequence`.
        length: duration of each operation.
        release, deadline: of each worker.
        begin, end: earliest times.
        topological: the operations, each after all that it waits for.
        late: what each worker is late.
    """

    problem: Problem
    order: Order
    sequence: Operations
    offsets: Operations
    host: Operations
    place: Operations
    length: Times
    release: Times
    deadline: Times
    begin: Times
    end: Times
    topological: Operations
    late: Times
    often: bool

    @property
    def cost(self) -> float:
        return float(self.late.sum())

    def without(self, segments: dict[int, range]) -> Times:
        """What each worker is late at least, however the operations at these places of its program are ordered."""
        first, stop = np.full(len(self.order), -1), np.full(len(self.order), -1)
        for w, places in segments.items():
            first[w], stop[w] = places.start, places.stop
        return _lateness(self.offsets, self.sequence, self._passed(first, stop)[1], self.deadline)

    def latest(self, limit: Times) -> Times:
        """Latest start of each operation if worker w is to end by limit[w]; infinite where that does not matter."""
        late = np.full(len(self.host), NEVER)
        arguments: list[Any] = [self.sequence, self.offsets, self.host, self.place, self.length, self.problem.link]
        arguments += [self.problem.feeds, self.topological, limit, late]
        return np.asarray(_run(_latest, arguments, self.often)[9])

    def _passed(self, first: Operations, stop: Operations) -> tuple[Times, Times, Operations]:
        problem, size = self.problem, len(self.host)
        arguments: list[Any] = [self.sequence, self.offsets, self.host, self.place, self.length, problem.link]
        arguments += [problem.needs, problem.needs_here, problem.feeds, self.release, first, stop]
        arguments += [np.zeros(size), np.zeros(size), np.full(size, -1)]
        begin, end, topological = _run(_earliest, arguments, self.often)[12:]
        return np.asarray(begin), np.asarray(end), np.asarray(topological)


def stand(problem: Problem, order: Order, due: list[float], target: float, often: bool = False) -> Standing:
    """`order` under `target`, with the W of each worker and stage in the order of their I.

    Args:
        order: one that cannot finish is infinitely late.
        due: due time of each rank.
        often: use the compiled loops.
    """
    order = in_line(problem, order)
    sequence, offsets = flat(order)
    host, place = np.full(problem.size, -1, dtype=np.int64), np.full(problem.size, -1, dtype=np.int64)
    host[sequence] = np.repeat(np.arange(len(order)), np.diff(offsets))
    place[sequence] = np.arange(len(sequence))
    length = problem.times[np.arange(problem.size) // problem.micro_batches] * np.array(problem.speed)[host]
    rank = np.arange(len(order)) % problem.shape.ranks
    ends = np.array(due)[rank] if problem.staggered else np.full(len(order), target)
    release, deadline = ends - target, ends - np.array(problem.closing)[rank]
    blank = np.zeros(0)
    bare = Standing(
        problem, order, sequence, offsets, host, place, length, release, deadline, blank, blank, sequence, blank, often
    )
    nobody = np.full(len(order), -1)
    begin, end, topological = bare._passed(nobody, nobody)
    late = _lateness(offsets, sequence, end, deadline)
    if (topological < 0).any():
        late = np.full(len(order), np.inf)
    return Standing(
        problem, order, sequence, offsets, host, place, length, release, deadline, begin, end, topological, late, often
    )


def _lateness(offsets: Operations, sequence: Operations, end: Times, deadline: Times) -> Times:
    last = np.maximum(offsets[1:] - 1, 0)
    late = np.where(offsets[1:] > offsets[:-1], end[sequence[last]] - deadline, 0.0)
    return np.where(late > _SLACK, late, 0.0)


def in_line(problem: Problem, order: Order) -> Order:
    """Each W in the place of the W that its I's turn would give it: same times, same memory."""
    plane, n = problem.shape.stages * problem.micro_batches, problem.micro_batches
    made = []
    for program in order:
        waiting: dict[int, deque[int]] = defaultdict(deque)
        line = []
        for x in program:
            if problem.split and x >= plane:
                stage = x % plane // n
                if x < 2 * plane:
                    waiting[stage].append(x + plane)
                else:
                    x = waiting[stage].popleft()
            line.append(x)
        made.append(line)
    return made


def _run(function: Callable[..., Any], arguments: list[Any], often: bool) -> list[Any]:
    if often:
        compiled(function)(*arguments)
    else:
        arguments = as_lists(arguments)
        function(*arguments)
    return arguments


def _earliest(
    sequence: Any,
    offsets: Any,
    host: Any,
    place: Any,
    length: Any,
    link: Any,
    needs: Any,
    needs_here: Any,
    feeds: Any,
    release: Any,
    first: Any,
    stop: Any,
    begin: Any,
    end: Any,
    topological: Any,
) -> None:
    """Earliest times; between first[w] and stop[w] the order of a worker counts for nothing but its sum of work."""
    workers = len(offsets) - 1
    done = [0] * len(host)
    stack = [0] * (len(sequence) + workers + 1)
    at = [0] * workers
    free = [0.0] * workers
    opened = [0.0] * workers
    work = [0.0] * workers
    head = 0
    for w in range(workers):
        at[w] = offsets[w]
        free[w] = release[w]
        stack[head] = w
        head += 1
    count = 0
    while head > 0:
        head -= 1
        w = stack[head]
        k = at[w]
        while k < offsets[w + 1]:
            x = sequence[k]
            before = needs[x]
            ready = free[w]
            inside = first[w] <= k and k < stop[w]
            if inside:
                if k == first[w]:
                    opened[w] = free[w]
                    work[w] = free[w]
                ready = opened[w]
                here = needs_here[x]
                if here >= 0 and place[here] >= first[w] and end[here] > ready:
                    ready = end[here]
            if before >= 0:
                if done[before] != 1:
                    break
                arrived = end[before]
                if host[before] != w:
                    arrived += link
                if arrived > ready:
                    ready = arrived
            begin[x] = ready
            ready += length[x]
            end[x] = ready
            if inside:
                work[w] += length[x]
                if work[w] > free[w]:
                    free[w] = work[w]
                if ready > free[w]:
                    free[w] = ready
            else:
                free[w] = ready
            done[x] = 1
            topological[count] = x
            count += 1
            k += 1
            at[w] = k
            after = feeds[x]
            if after >= 0:
                v = host[after]
                if v != w and at[v] == place[after]:
                    stack[head] = v
                    head += 1


def _latest(
    sequence: Any,
    offsets: Any,
    host: Any,
    place: Any,
    length: Any,
    link: Any,
    feeds: Any,
    topological: Any,
    limit: Any,
    late: Any,
) -> None:
    """Latest starts, backwards."""
    for t in range(len(sequence) - 1, -1, -1):
        x = topological[t]
        w = host[x]
        k = place[x] + 1
        until = late[sequence[k]] if k < offsets[w + 1] else limit[w]
        after = feeds[x]
        if after >= 0:
            ready = late[after]
            if host[after] != w:
                ready -= link
            if ready < until:
                until = ready
        late[x] = until - length[x]
