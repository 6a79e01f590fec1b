"""The exact model of a small problem: routes, orders and stage windows all free, so that what it proves holds for all.

Time is cut into the largest unit that makes every time whole, and for periods T between the bound and the best known an
integer program asks whether some schedule has it. Variables `by[x, w, t]`: operation x has started on w by
slot t; they never fall, so that each row needs few of them:

    route      a micro-batch has all its operations of a stage on one live host, home or peer
    order      what needs an operation has started only as long ago as that one has ended, and the link has been passed
               if it ran on another worker
    capacity   at most one operation of a worker runs in a slot
    memory     forwards started - freed <= slots, where I frees 1 - stash and W (or B) the rest
    window     staggered: the work of a rank lies in [open, open + T - u], with u the reduce and step of a stage, and
               `open` free but for rank 0, where it is 0; that is the same as E_s - S_w <= T for each of its hosts;
               barrier: all work lies in [0, T - u]. A worker's work and all its reduces and steps fill at most T

Micro-batches are alike, and so are hosts of one stage with the same speed and memory; symmetric copies are cut away.
Exchanging what two micro-batches do from some point on keeps a schedule one as long as they share every host before
it: so on the first stages, as long as each has one host only, forwards go by index, on the first stage with several
they start in that order, and where no stage has several everything goes by index. Hosts that are alike are named by
the first micro-batch that they run.

Starts may be whole: rounding down keeps a schedule of a whole period. A staggered
period may also lie between whole ones, a mean over at most as many stages as there are; so a proof that T is out of
reach raises the bound to T + 1 / stages, and the word "optimal" is about whole periods.

Written with python-mip and solved by HiGHS. Limits: links of one time, and without queues, nor are the updates of
several chunks in one order, so that a schedule found may take longer than T; times with a common unit; no link inside a
rank, nor several pipelines without re-routing; sizes that a solver can take, which ends at about a hundred operations
and 30 slots.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import ceil
from time import monotonic
from typing import Any

from recycle.child import Child, serve
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.search.order_kernels import time_order

MOST_VARIABLES = 60_000


@dataclass(frozen=True)
class Solved:
    """What the exact model came to.

    Attributes:
        order: never worse than the start.
        period: its period by right-shift.
        bound: proven lower bound on the period, the given one or better.
        status: "optimal" (no whole period below is possible), "feasible" (a better order may exist), "not modelled", or
            "too large".
    """

    order: Order
    period: float
    bound: float
    status: str


def solve(
    problem: Problem,
    start: Order,
    bound: float,
    seconds: float,
    *,
    most: int = MOST_VARIABLES,
) -> Solved:
    """The best order over all routes and orders, or what `seconds` of wall time prove about it.

    Args:
        start: a complete order within the caps.
        bound: a proven lower bound on the period.
        most: variables above which nothing is tried.
    """
    period = time_order(problem, start).period
    unit = problem.grain
    is_one_rank_linked = problem.shape.ranks == 1 and problem.link > 0
    is_fixed = not problem.reroute and problem.shape.pipelines > 1
    if not unit or len(problem.links) > 1 or is_one_rank_linked or is_fixed:
        return Solved(start, period, bound, "not modelled")
    first, last = ceil(bound / unit - TOLERANCE), ceil(period / unit - TOLERANCE) - 1
    if first > last:
        return Solved(start, period, bound, "optimal")
    if TimeGrid(problem, unit, last).variables > most:
        return Solved(start, period, bound, "too large")
    for slots, starts in _in_child((problem, unit, first, last, seconds), seconds):
        if starts is None:
            bound = max(bound, slots * unit + (unit / problem.shape.stages if problem.staggered else unit))
            continue
        order = _order(problem, starts)
        found = time_order(problem, order).period
        if found < period - TOLERANCE and problem.is_within_caps(order):
            start, period = order, found
    closed = ceil(period / unit - TOLERANCE) == ceil(bound / unit - TOLERANCE)
    return Solved(start, period, bound, "optimal" if closed else "feasible")


def _order(problem: Problem, starts: list[list[int]]) -> Order:
    """`starts`: (slot, operation, worker) of every operation."""
    order: Order = [[] for _ in problem.cap]
    for _, x, w in sorted(starts):
        order[w].append(x)
    return order


@dataclass(frozen=True)
class TimeGrid:
    """The slots that every operation may start in, under a period of `slots` slots.

    An operation has the same window on all its hosts, by the fastest of them.
    """

    problem: Problem
    unit: float
    slots: int

    @property
    def plane(self) -> int:
        return self.problem.shape.stages * self.problem.micro_batches

    def hosts(self, x: int) -> list[int]:
        """Workers that may run an operation."""
        return self._hosts[x % self.plane]

    @cached_property
    def _hosts(self) -> list[list[int]]:
        """Of each (stage, micro-batch); for the first chunk no more alike ones than micro-batches up to its own."""
        problem, n = self.problem, self.problem.micro_batches
        found: list[list[int]] = []
        for s, live in enumerate(problem.hosts):
            kinds: dict[tuple[float, float], list[int]] = {}
            for w in live:
                kinds.setdefault((problem.speed[w], problem.cap[w]), []).append(w)
            most = [g + 1 if s < problem.shape.ranks else len(live) for g in range(n)]
            found += [sorted(w for alike in kinds.values() for w in alike[:count]) for count in most]
        return found

    def length(self, x: int, worker: int) -> int:
        n = self.problem.micro_batches
        return round(self.problem.duration(x // self.plane, x // n % self.problem.shape.stages, worker) / self.unit)

    def shortest(self, x: int) -> int:
        return min(self.length(x, w) for w in self.hosts(x))

    def update_slots(self, stage: int) -> int:
        return round(self.problem.update_seconds[stage] / self.unit)

    @property
    def link(self) -> int:
        return round(self.problem.link / self.unit)

    @cached_property
    def after(self) -> list[tuple[int, int, int]]:
        """(x, y, slots): y starts at least so much after x ends: dependencies, and the order of what is alike."""
        edges = []
        needs = zip(self.problem.needs.tolist(), self.problem.needs_here.tolist(), strict=True)
        for y, (across, here) in enumerate(needs):
            edges += [(across, y, self.link)] * (across >= 0) + [(here, y, 0)] * (here >= 0)
        return edges + [(x, y, 0) for x, y in self.in_line]

    @cached_property
    def in_line(self) -> list[tuple[int, int]]:
        """(x, y) on one worker each, x before y without loss."""
        problem, n, stages = self.problem, self.problem.micro_batches, self.problem.shape.stages
        is_alone = self.leading_alone == stages
        rows = problem.kinds * stages if is_alone else self.leading_alone
        pairs = [pair for row in range(rows) for pair in pairwise(range(row * n, row * n + n))]
        for s in range(stages if is_alone and problem.stash == 1 else 0):
            slots = int(min(problem.cap[self.hosts(s * n)[0]], n) + TOLERANCE)
            freed = (problem.kinds - 1) * self.plane + s * n
            pairs += [(freed + g, s * n + h) for g, h in enumerate(range(slots, n))]
        return pairs

    @cached_property
    def level(self) -> list[tuple[int, int]]:
        """(x, y): y does not start before x without loss; on any workers."""
        n, first = self.problem.micro_batches, self.leading_alone * self.problem.micro_batches
        return list(pairwise(range(first, first + n))) if first < self.plane else []

    @cached_property
    def leading_alone(self) -> int:
        """Stages from the first one on where micro-batches have but one host to run on."""
        stages, n = self.problem.shape.stages, self.problem.micro_batches
        return next((s for s in range(stages) if len(self.hosts(s * n + n - 1)) > 1), stages)

    @property
    def windows(self) -> list[range]:
        """Slots in which each operation may start."""
        return self.heads_and_tails[0]

    @property
    def opens(self) -> list[range]:
        """Slots in which each rank's window may open."""
        return self.heads_and_tails[1]

    @cached_property
    def heads_and_tails(self) -> tuple[list[range], list[range]]:
        """(windows of the operations, of the ranks' openings), tightened against each other until nothing moves."""
        problem, stages, n = self.problem, self.problem.shape.stages, self.problem.micro_batches
        ranks = problem.shape.ranks
        stage = [x // n % stages for x in range(problem.size)]
        earliest, latest = [0] * problem.size, [2 * self.slots] * problem.size
        opening = [(2 * self.slots if problem.staggered and r else 0) for r in range(ranks)]
        before = None
        while before != (earliest, latest, opening):
            before = (list(earliest), list(latest), list(opening))
            for x, y, gap in self.after:
                step = self.shortest(x) + gap
                earliest[y] = max(earliest[y], earliest[x] + step)
                latest[x] = min(latest[x], latest[y] - step)
            for x, y in self.level:
                earliest[y] = max(earliest[y], earliest[x])
                latest[x] = min(latest[x], latest[y])
            for x, s in enumerate(stage):
                closing = opening[s % ranks] + self.slots - self.update_slots(s)
                latest[x] = min(latest[x], closing - self.shortest(x))
                opening[s % ranks] = min(opening[s % ranks], latest[x])
            if any(first > last for first, last in zip(earliest, latest, strict=True)):
                break
        windows = [range(first, last + 1) for first, last in zip(earliest, latest, strict=True)]
        opens = [
            range(min(earliest[r * n : r * n + n]) * problem.staggered, last + 1) for r, last in enumerate(opening)
        ]
        return windows, [range(1), *opens[1:]]

    @property
    def is_open(self) -> bool:
        """Whether every operation, and every rank's window, has a slot to start in."""
        return all(len(window) > 0 for window in (*self.windows, *self.opens))

    @property
    def variables(self) -> int:
        return sum(len(window) * len(self.hosts(x)) for x, window in enumerate(self.windows))


class _Program:
    """The integer program of one grid, in python-mip."""

    def __init__(self, grid: TimeGrid) -> None:
        import mip

        self.mip, self.grid = mip, grid
        self.model = mip.Model(solver_name="HiGHS")
        self.model.verbose = 0
        self.model.threads = 1
        self.variables: list[Any] = []
        self.by = {(x, w): self._steps(len(window)) for x, window in enumerate(grid.windows) for w in grid.hosts(x)}
        self.open = [self._steps(len(opens) - 1) for opens in grid.opens]
        self._routes()
        for x, y, gap in grid.after:
            self._follows(x, y, gap)
        for x, y in grid.level:
            self._follows(x, y, None)
        for w in sorted({w for _, w in self.by}):
            self._worker(w)
        self._windows()

    def solved(self, seconds: float) -> tuple[bool | None, list[tuple[int, int, int]]]:
        """(whether a schedule exists, None if time ran out; its (slot, operation, worker))."""
        known = self.mip.OptimizationStatus
        status = self.model.optimize(max_seconds=seconds, max_solutions=1)
        if status in (known.INFEASIBLE, known.INT_INFEASIBLE, known.UNBOUNDED):
            return False, []  # nothing is unbounded here: HiGHS does not always tell the two apart
        if status not in (known.OPTIMAL, known.FEASIBLE):
            return None, []
        starts = []
        for (x, w), steps in self.by.items():
            late = sum(self.variables[step].x < 0.5 for step in steps)
            if late < len(steps):
                starts.append((self.grid.windows[x][0] + late, x, w))
        return True, starts

    def _steps(self, count: int) -> list[int]:
        """So many new binaries that never fall, by index."""
        first = len(self.variables)
        self.variables += [self.model.add_var(var_type=self.mip.BINARY) for _ in range(count)]
        steps = list(range(first, first + count))
        for earlier, later in pairwise(steps):
            self._row([(1, later), (-1, earlier)], ">", 0)
        return steps

    def _row(self, terms: Iterable[tuple[float, int | None]], sense: str, constant: float) -> None:
        """The sum of coefficient * variable is at most, at least or equal to `constant`; None stands for 0.

        A variable's coefficients are summed here, as python-mip keeps only the last when one is named twice.
        """
        summed: dict[int, float] = {}
        for coefficient, variable in terms:
            if variable is not None:
                summed[variable] = summed.get(variable, 0) + coefficient
        summed = {variable: coefficient for variable, coefficient in summed.items() if coefficient}
        if summed:
            named = [self.variables[variable] for variable in summed]
            self.model += self.mip.LinExpr(named, list(summed.values()), -constant, sense)

    def _started(self, x: int, w: int, slot: int) -> int | None:
        """Whether x has started on w by `slot`."""
        window, steps = self.grid.windows[x], self.by[x, w]
        return None if slot < window[0] else steps[min(slot, window[-1]) - window[0]]

    def _ended(self, x: int, w: int, slot: int) -> int | None:
        return self._started(x, w, slot - self.grid.length(x, w))

    def _routes(self) -> None:
        plane = self.grid.plane
        for x in range(self.grid.problem.size):
            hosts = self.grid.hosts(x)
            if x < plane:
                self._row([(1, self.by[x, w][-1]) for w in hosts], "=", 1)
            else:
                for w in hosts:
                    self._row([(1, self.by[x, w][-1]), (-1, self.by[x % plane, w][-1])], "=", 0)

    def _follows(self, x: int, y: int, gap: int | None) -> None:
        """y has started by a slot only if x has ended `gap` slots before; if None, only if x has started."""
        window = self.grid.windows[y]
        for slot in window:
            terms: list[tuple[float, int | None]] = [(1, self._started(y, w, slot)) for w in self.grid.hosts(y)]
            for w in self.grid.hosts(x):
                terms.append((-1, self._started(x, w, slot) if gap is None else self._ended(x, w, slot - gap)))
            self._row(terms, "<", 0)

    def _worker(self, w: int) -> None:
        """Work within one period; capacity and memory of one worker in every slot."""
        grid, problem = self.grid, self.grid.problem
        n, plane, ranks = problem.micro_batches, grid.plane, problem.shape.ranks
        mine = [x for x in range(plane) if x // n % ranks == w % ranks and w in grid.hosts(x)]
        rows = [x + kind * plane for x in mine for kind in range(problem.kinds)]
        work: list[tuple[float, int | None]] = [(grid.length(x, w), self.by[x, w][-1]) for x in rows]
        updates = sum(grid.update_slots(s) for s in range(w % ranks, problem.shape.stages, ranks))
        self._row(work, "<", grid.slots - updates)
        stash = problem.stash if problem.split else 0.0
        for slot in range(min(grid.windows[x][0] for x in rows), max(grid.windows[x][-1] for x in rows) + 1):
            running = [(1.0, self._started(x, w, slot)) for x in rows]
            self._row(running + [(-1.0, self._ended(x, w, slot)) for x in rows], "<", 1)
            if problem.cap[w] < len(mine):
                held = [(1.0, self._started(x, w, slot)) for x in mine]
                held += [(stash - 1, self._ended(x + plane, w, slot)) for x in mine]
                held += [(-stash, self._ended(x + 2 * plane, w, slot)) for x in mine if stash]
                self._row(held, "<", problem.cap[w] + TOLERANCE)

    def _windows(self) -> None:
        """No start before its rank's window opens, no end after it has closed."""
        grid, n = self.grid, self.grid.problem.micro_batches
        last = (grid.problem.kinds - 1) * grid.plane
        ranks = grid.problem.shape.ranks
        for x in range(grid.plane):
            s, hosts = x // n, grid.hosts(x)
            length = grid.slots - grid.update_slots(s)
            for slot, is_open in zip(grid.opens[s % ranks], [*self.open[s % ranks], None], strict=True):
                ended = [(1, self._ended(last + x, w, slot + length)) for w in hosts]
                if is_open is None:  # at the last of its slots the window is open, whatever else holds
                    self._row(ended, "=", 1)
                    continue
                self._row([(-1, is_open), *((1, self._started(x, w, slot)) for w in hosts)], "<", 0)
                self._row([(-1, is_open), *ended], ">", 0)


def _in_child(request: tuple[object, ...], seconds: float) -> list[Any]:
    """What `_answers` gives to a request; its process is killed after `seconds`, as solvers overshoot their limits."""
    child = Child(__name__, errors=subprocess.DEVNULL)
    killer = threading.Timer(seconds, child.kill)
    killer.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            child.requests.write(pickle.dumps(request))
            child.requests.flush()
        return [json.loads(line) for line in child.lines() if line.endswith(b"\n")]
    finally:
        killer.cancel()
        child.close()


def _answers(problem: Problem, unit: float, first: int, last: int, seconds: float) -> Iterator[tuple[int, Any]]:
    """For some periods from `first` to `last`: (slots, None if no schedule has that period, else its starts).

    It begins with the first that leaves every operation a slot. Steps upwards double until a schedule is found, then
    halve. A period that takes more than half of the time left stays open, and larger ones are asked about.
    """
    begun, of_slots, high, step = monotonic(), partial(TimeGrid, problem, unit), last + 1, 1
    low = bisect_left(range(first, high), True, key=lambda slots: of_slots(slots).is_open) + first - 1
    if low >= first:
        yield low, None
    while high - low > 1 and (left := begun + seconds - monotonic()) > 0:
        slots = min(low + step, (low + high) // 2)
        exists, starts = _Program(of_slots(slots)).solved(max(0.1, left / 2))
        if exists:
            high = slots
            yield slots, starts
        else:
            low, step = slots, 2 * step
            if exists is False:
                yield slots, None


if __name__ == "__main__":
    requests, answers = serve(sys.argv[1])
    for answer in _answers(*pickle.load(requests)):
        answers.write(json.dumps(answer).encode() + b"\n")
