"""Exact model of a small problem: routes, orders and stage windows are all free, so its proofs hold for all schedules.

Time is divided into the largest unit that makes every time whole. For periods T between the bound and the best known
period, an integer program decides whether a schedule exists. Variables `by[x, w, t]`: operation x has started on w by
slot t. They are monotone in t, so each row needs few of them:

    route      all operations of a micro-batch at a stage run on one live host, home or peer
    order      an operation starts after the end of its dependency, plus the link if that ran on another worker
    capacity   at most one operation of a worker runs in a slot
    memory     forwards started - freed <= slots, where I frees 1 - stash and W (or B) the rest
    window     staggered: the work of a rank lies in [open, open + T - u], with u the reduce and step of a stage, and
               `open` free except 0 for rank 0; equivalent to E_s - S_w <= T for each host;
               barrier: all work lies in [0, T - u]. A worker's work and all its reduces and steps fill at most T

If each stage has one host, micro-batches run by index. Starts may be whole, because rounding down preserves a schedule
of a whole period. A staggered period is a mean over at most all stages, so a proof that T is infeasible raises the
bound to T + 1 / stages.

Written with python-mip and solved by HiGHS. Limits: one link time without queues; no ordering of several chunks'
updates, so a schedule may take longer than T; times with a common unit; no link inside a rank; several pipelines only
with re-routing; about a hundred operations and 30 slots.
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
from recycle.solve.effort import Incumbent
from recycle.solve.problem import TOLERANCE, Order, Problem
from recycle.solve.search.order_kernels import time_order

MOST_VARIABLES = 60_000


@dataclass(frozen=True)
class ExactResult(Incumbent):
    """An order, never worse than the start, and the proven lower bound on the period, at least the given one."""

    bound: float


def solve(
    problem: Problem,
    start: Order,
    bound: float,
    seconds: float,
    *,
    most: int = MOST_VARIABLES,
) -> ExactResult:
    """Return the best order and the bound that `seconds` prove; the start if there are more than `most` variables."""
    period = time_order(problem, start).period
    unit = problem.grain
    is_linked_on_rank = 0 in problem.hop_after[:-1] and problem.link > 0
    is_fixed = not problem.reroute and problem.shape.pipelines > 1
    unchanged = ExactResult(start, period, bound)
    if not unit or len(problem.links) > 1 or is_linked_on_rank or is_fixed:
        return unchanged
    first, last = ceil(bound / unit - TOLERANCE), ceil(period / unit - TOLERANCE) - 1
    if first > last or TimeGrid(problem, unit, last).variables > most:
        return unchanged
    for slots, starts in _in_child((problem, unit, first, last, seconds), seconds):
        if starts is None:
            bound = max(bound, slots * unit + (unit / problem.shape.stages if problem.staggered else unit))
            continue
        order = _order(problem, starts)
        found_period = time_order(problem, order).period
        if found_period < period - TOLERANCE and problem.is_within_caps(order):
            start, period = order, found_period
    return ExactResult(start, period, bound)


def _order(problem: Problem, starts: list[list[int]]) -> Order:
    order: Order = [[] for _ in problem.cap]
    for _, x, w in sorted(starts):
        order[w].append(x)
    return order


@dataclass(frozen=True)
class TimeGrid:
    """Start slots of each operation for a period of `slots` slots, by its fastest host."""

    problem: Problem
    unit: float
    slots: int

    @property
    def plane(self) -> int:
        return self.problem.shape.stages * self.problem.micro_batches

    def hosts(self, x: int) -> list[int]:
        """Return the workers that may run an operation."""
        return self.problem.hosts[x // self.problem.micro_batches % self.problem.shape.stages]

    def length(self, x: int, worker: int) -> int:
        n = self.problem.micro_batches
        problem, kind, stage = self.problem, x // self.plane, x // n % self.problem.shape.stages
        seconds = (problem.forward, problem.backward, problem.weight)[kind][stage] * problem.speed[worker]
        return round(seconds / self.unit)

    def shortest(self, x: int) -> int:
        return min(self.length(x, w) for w in self.hosts(x))

    def update_slots(self, stage: int) -> int:
        return round(self.problem.update_seconds[stage] / self.unit)

    @property
    def link(self) -> int:
        return round(self.problem.link / self.unit)

    @cached_property
    def after(self) -> list[tuple[int, int, int]]:
        """(x, y, slots): y starts at least `slots` after the end of x, by dependency or symmetry."""
        edges = []
        needs = zip(self.problem.needs.tolist(), self.problem.needs_here.tolist(), strict=True)
        for y, (across, same_stage) in enumerate(needs):
            edges += [(across, y, self.link)] * (across >= 0) + [(same_stage, y, 0)] * (same_stage >= 0)
        return edges + [(x, y, 0) for x, y in self.in_line]

    @cached_property
    def in_line(self) -> list[tuple[int, int]]:
        """(x, y) on one worker, with x before y without loss; none if a stage has several hosts."""
        problem, n, stages = self.problem, self.problem.micro_batches, self.problem.shape.stages
        if any(len(live) > 1 for live in problem.hosts):
            return []
        rows = range(0, problem.size, n)
        pairs = [pair for row in rows for pair in pairwise(range(row, row + n))]
        for s in range(stages if problem.stash == 1 else 0):
            slots = int(min(problem.cap[problem.hosts[s][0]], n) + TOLERANCE)
            freed = (problem.kinds - 1) * self.plane + s * n
            pairs += [(freed + g, s * n + h) for g, h in enumerate(range(slots, n))]
        return pairs

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
        """(windows of the operations, openings of the ranks), tightened against each other until a fixed point."""
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
            for x, s in enumerate(stage):
                rank = problem.shape.rank_of(s)
                closing = opening[rank] + self.slots - self.update_slots(s)
                latest[x] = min(latest[x], closing - self.shortest(x))
                opening[rank] = min(opening[rank], latest[x])
            if any(first > last for first, last in zip(earliest, latest, strict=True)):
                break
        windows = [range(first, last + 1) for first, last in zip(earliest, latest, strict=True)]
        opens = [
            range(min(earliest[r * n : r * n + n]) * problem.staggered, last + 1) for r, last in enumerate(opening)
        ]
        return windows, [range(1), *opens[1:]]

    @property
    def is_open(self) -> bool:
        """Whether every operation and every rank's window has a start slot."""
        return all(len(window) > 0 for window in (*self.windows, *self.opens))

    @property
    def variables(self) -> int:
        return sum(len(window) * len(self.hosts(x)) for x, window in enumerate(self.windows))


class _Program:
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
        for w in sorted({w for _, w in self.by}):
            self._worker(w)
        self._windows()

    def solved(self, seconds: float) -> tuple[bool | None, list[tuple[int, int, int]]]:
        """Return (whether a schedule exists, None after a timeout; its (slot, operation, worker))."""
        known = self.mip.OptimizationStatus
        status = self.model.optimize(max_seconds=seconds, max_solutions=1)
        if status in (known.INFEASIBLE, known.INT_INFEASIBLE, known.UNBOUNDED):
            return False, []  # nothing is unbounded, but HiGHS does not always distinguish it from infeasible
        if status not in (known.OPTIMAL, known.FEASIBLE):
            return None, []
        starts = []
        for (x, w), steps in self.by.items():
            late = sum(self.variables[step].x < 0.5 for step in steps)
            if late < len(steps):
                starts.append((self.grid.windows[x][0] + late, x, w))
        return True, starts

    def _steps(self, count: int) -> list[int]:
        first = len(self.variables)
        self.variables += [self.model.add_var(var_type=self.mip.BINARY) for _ in range(count)]
        steps = list(range(first, first + count))
        for earlier, later in pairwise(steps):
            self._row([(1, later), (-1, earlier)], ">", 0)
        return steps

    def _row(self, terms: Iterable[tuple[float, int | None]], sense: str, constant: float) -> None:
        summed: dict[int, float] = {}
        for coefficient, variable in terms:
            if variable is not None:
                summed[variable] = summed.get(variable, 0) + coefficient
        summed = {variable: coefficient for variable, coefficient in summed.items() if coefficient}
        if summed:
            named = [self.variables[variable] for variable in summed]
            self.model += self.mip.LinExpr(named, list(summed.values()), -constant, sense)

    def _started(self, x: int, w: int, slot: int) -> int | None:
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

    def _follows(self, x: int, y: int, gap: int) -> None:
        for slot in self.grid.windows[y]:
            started = [(1, self._started(y, w, slot)) for w in self.grid.hosts(y)]
            self._row([*started, *((-1, self._ended(x, w, slot - gap)) for w in self.grid.hosts(x))], "<", 0)

    def _worker(self, w: int) -> None:
        grid, problem = self.grid, self.grid.problem
        n, plane, hosted = problem.micro_batches, grid.plane, problem.shape.stages_of_rank(w % problem.shape.ranks)
        places = [x for x in range(plane) if x // n in hosted]
        rows = [x + kind * plane for x in places for kind in range(problem.kinds)]
        work: list[tuple[float, int | None]] = [(grid.length(x, w), self.by[x, w][-1]) for x in rows]
        updates = sum(map(grid.update_slots, hosted))
        self._row(work, "<", grid.slots - updates)
        stash = problem.stash if problem.split else 0.0
        for slot in range(min(grid.windows[x][0] for x in rows), max(grid.windows[x][-1] for x in rows) + 1):
            running = [(1.0, self._started(x, w, slot)) for x in rows]
            self._row(running + [(-1.0, self._ended(x, w, slot)) for x in rows], "<", 1)
            if problem.cap[w] < len(places):
                held = [(1.0, self._started(x, w, slot)) for x in places]
                held += [(stash - 1, self._ended(x + plane, w, slot)) for x in places]
                held += [(-stash, self._ended(x + 2 * plane, w, slot)) for x in places if stash]
                self._row(held, "<", problem.cap[w] + TOLERANCE)

    def _windows(self) -> None:
        grid, n = self.grid, self.grid.problem.micro_batches
        last = (grid.problem.kinds - 1) * grid.plane
        for x in range(grid.plane):
            s, hosts = x // n, grid.hosts(x)
            rank = grid.problem.shape.rank_of(s)
            length = grid.slots - grid.update_slots(s)
            for slot, is_open in zip(grid.opens[rank], [*self.open[rank], None], strict=True):
                ended = [(1, self._ended(last + x, w, slot + length)) for w in hosts]
                if is_open is None:  # in the last of its slots the window is open in any case
                    self._row(ended, "=", 1)
                    continue
                self._row([(-1, is_open), *((1, self._started(x, w, slot)) for w in hosts)], "<", 0)
                self._row([(-1, is_open), *ended], ">", 0)


def _in_child(request: tuple[object, ...], seconds: float) -> list[Any]:
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
    begun, of_slots, high, step = monotonic(), partial(TimeGrid, problem, unit), last + 1, 1
    low = bisect_left(range(first, high), True, key=lambda slots: of_slots(slots).is_open) + first - 1
    if low >= first:
        yield low, None
    while high - low > 1 and (seconds_left := begun + seconds - monotonic()) > 0:
        slots = min(low + step, (low + high) // 2)
        exists, starts = _Program(of_slots(slots)).solved(max(0.1, seconds_left / 2))
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
