"""Windows: large neighbourhood search, where a part of an order is freed and an integer program re-orders it.

As in `anneal` the question is whether an order reaches a period T: a worker of rank r works from its release D_r - T on
and should be done by its deadline D_r (both before its reduce and step); what the workers are late in sum is the cost.
A window frees some workers (those of a run of stages, or of a few pipelines) in a time slice around an operation that
makes somebody late. It is closed to a convex set: what lies on a path between two of its operations joins it, in fixed
order. So nothing outside is both after one operation and before another, and what is outside comes down to constants:
heads (when what comes before has ended) and tails (how late a worker gets by what comes after). The late workers may
trade their lateness; all others stay as punctual as they are.

What cannot gain is not solved: without the order of the freed workers, only their sums of work, the cost must fall.
The rest is in `disjunctive`: one binary per pair of operations of a freed worker that dependencies, heads and tails
leave open. W of one worker and stage follow the order of their I, without loss. In half of the windows so do all
operations of one kind follow the start's true order, which leaves room for longer slices. Memory is linear in the
binaries, for any stash and any number of chunks. Only the order is taken from the solution; it is timed again, and
dropped unless it is within the caps and better.

Between windows a due time moves where nobody gets later in sum by it: without that, windows soon have nothing left to
gain. They are drawn by the seed, and without a deadline solvers end at a number of nodes alone. Routes stay as they
are.

What it brings (one walk of 20 to 40 s on a busy machine, without -> with): stages of unlike weight gain most, as in
`uneven-d4p8` of benchmarks/planner.py, bound 5518: 5888 -> 5831, 5888 -> 5813, 5844 -> 5791, 5843 -> 5803 for seeds 1
to 4, but 5877 -> 5888 where two walks shared 24 s. Other unlike stages gain little (6, 8, 24: 13911 -> 13896) or none.
With equal times the policies leave a slot at most, and windows do not find it (D, P, m = 8, 8, 32 and 4, 4, 8 at cap P;
nor at measured times, 8, 8, 32: 12121). At 16, 16, 64 hardly any window could gain: beyond `search.WINDOWS_UP_TO`
operations none is tried.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, isinf, sqrt
from random import Random
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.solve import disjunctive
from recycle.solve.anneal import Annealed
from recycle.solve.child import Child
from recycle.solve.compiled import as_lists, compiled
from recycle.solve.deadline import Deadline
from recycle.solve.disjunctive import Model
from recycle.solve.engines import Solver
from recycle.solve.problem import Operations, Order, Problem, flat

Times = npt.NDArray[np.float64]

MOST_BINARIES, NODES = 300, 50
"""Binaries and branch and bound nodes per window, at most."""
MOST_PAIRS = 12
"""Pairs of a window's operations per binary, at most: how many can be decided beforehand."""
MOST_LATE = 12
"""Late workers whose lateness may be traded within a window; the others get no later."""
DRAWS = 100
"""Windows drawn for each one that is solved, at most; most could gain nothing."""
SECONDS, PATIENT_SECONDS, GRACE_SECONDS = 0.5, 60.0, 5.0
"""Per window against the clock, and without one; what the child may take on top before it is killed."""
_NEVER = 1e300
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
        late = np.full(len(self.host), _NEVER)
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
    order = _in_line(problem, order)
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


def _in_line(problem: Problem, order: Order) -> Order:
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


@dataclass(frozen=True)
class Window:
    """A convex set of operations, and its model.

    Attributes:
        operations: each after all that it waits for; the model numbers them in this order.
        segments: the places in its program that each freed worker's part has.
        before: for each operation, by the model's numbers, the bits of those that always come before it.
        model: how the freed workers may be re-ordered.
    """

    operations: list[int]
    segments: dict[int, range]
    before: list[int]
    model: Model

    def ordered(self, standing: Standing, kept: list[bool]) -> Order:
        """The order with the freed parts as the binaries say."""
        number = {x: i for i, x in enumerate(self.operations)}
        reversed_pairs = {(i, j) for i, j, b in self.model.pairs if not kept[b]}
        order = [list(program) for program in standing.order]
        for w, places in self.segments.items():
            mine = [number[x] for x in standing.sequence[places.start : places.stop].tolist()]
            ahead = dict.fromkeys(mine, 0)
            for i, j in combinations(mine, 2):
                ahead[i if (i, j) in reversed_pairs else j] += 1
            first = places.start - int(standing.offsets[w])
            order[w][first : first + len(mine)] = [self.operations[i] for i in sorted(mine, key=ahead.__getitem__)]
        return _in_line(standing.problem, order)


def closed(standing: Standing, freed: set[int], since: float, until: float) -> list[int]:
    """The operations of the workers `freed` that begin in [since, until), and all on paths between them."""
    begin, problem = standing.begin[standing.topological], standing.problem
    inside = standing.topological[(begin >= since - _SLACK) & (begin < until - _SLACK)].tolist()
    sequence, host, place = standing.sequence, standing.host, standing.place
    offsets = standing.offsets

    def joined(line: list[int], other: Operations, step: int) -> set[int]:
        found: set[int] = set()
        for x in line:
            w, k = int(host[x]), int(place[x]) + step
            beside = offsets[w] <= k < offsets[w + 1] and int(sequence[k]) in found
            if w in freed or beside or int(other[x]) in found:
                found.add(x)
        return found

    both = joined(inside, problem.needs, -1) & joined(inside[::-1], problem.feeds, 1)
    return [x for x in inside if x in both]


def window(
    standing: Standing, freed: set[int], since: float, until: float, *, in_turn: bool, most: int = MOST_BINARIES
) -> Window | None:
    """The window of `freed` in [since, until); None when it needs more than `most` binaries or could gain nothing.

    Args:
        in_turn: all F of a worker and stage keep their order, and all I; else only what depends on each other does.
    """
    return _Builder(standing, freed, closed(standing, freed, since, until), in_turn).window(most)


class TooLarge(Exception):
    """More binaries than asked for."""


class _Builder:
    """Puts one window's model together."""

    def __init__(self, standing: Standing, freed: set[int], operations: list[int], in_turn: bool) -> None:
        self.standing, self.problem, self.operations, self.in_turn = standing, standing.problem, operations, in_turn
        self.plane = self.problem.shape.stages * self.problem.micro_batches
        self.number = {x: i for i, x in enumerate(operations)}
        self.seconds = [float(standing.length[x]) for x in operations]
        self.segments: dict[int, range] = {}
        for x in operations:
            w, k = int(standing.host[x]), int(standing.place[x])
            old = self.segments.get(w, range(k, k + 1))
            self.segments[w] = range(min(old.start, k), max(old.stop, k + 1))
        self.free = {w: places for w, places in self.segments.items() if w in freed}
        self.before: list[list[tuple[int, float]]] = [[] for _ in operations]
        self.following: list[list[tuple[int, float]]] = [[] for _ in operations]
        self.open: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def window(self, most: int) -> Window | None:
        standing = self.standing
        least = standing.without(self.free)
        if least.sum() > standing.cost - _gain(self.problem):
            return None
        sizes = [len(places) for places in self.free.values()]
        if sum(size * (size - 1) // 2 for size in sizes) > MOST_PAIRS * most:
            raise TooLarge
        self._dependencies()
        for w in self.free:
            self._pairs(w)
        soft = [int(w) for w in np.argsort(-standing.late, kind="stable")[:MOST_LATE] if standing.late[w] > 0]
        traded = float(standing.late[soft].sum())
        limit = standing.deadline + standing.late
        limit[soft] = standing.deadline[soft] + traded
        latest_after = standing.latest(limit)
        self.earliest = [self._head(x) for x in self.operations]
        self.latest = [self._tail(x, latest_after, limit) for x in self.operations]
        self._propagate()
        if len(self.open) > most:
            raise TooLarge
        binary = {key: b for b, key in enumerate(self.open)}
        pairs = [(i, j, binary[key]) for key, tied in self.open.items() for i, j in tied]
        late = [(float(least[w]), traded) for w in soft]
        model = Model(
            seconds=self.seconds,
            earliest=self.earliest,
            latest=self.latest,
            after=[(i, j, delay) for j, edges in enumerate(self.before) for i, delay in edges],
            pairs=pairs,
            binaries=len(binary),
            memory=self._memory({(i, j): b for i, j, b in pairs}),
            exits=self._exits(soft, late),
            late=late,
            starts=[float(standing.begin[x]) for x in self.operations],
            lateness=[float(standing.late[w]) for w in soft],
        )
        return Window(self.operations, self.free, self.into, model)

    def _edge(self, i: int, j: int, delay: float) -> None:
        self.before[j].append((i, delay))
        self.following[i].append((j, delay))

    def _dependencies(self) -> None:
        problem, host, number = self.problem, self.standing.host, self.number
        for j, x in enumerate(self.operations):
            for y, link in ((int(problem.needs[x]), problem.link), (int(problem.needs_here[x]), 0.0)):
                if y in number:
                    self._edge(number[y], j, self.seconds[number[y]] + link * bool(host[x] != host[y]))
        for w, places in self.segments.items():
            if w not in self.free:
                for i, j in pairwise(self._numbers(places)):
                    self._edge(i, j, self.seconds[i])

    def _numbers(self, places: range) -> list[int]:
        return [self.number[x] for x in self.standing.sequence[places.start : places.stop].tolist()]

    def _pairs(self, w: int) -> None:
        """Open pairs of a freed worker, earlier one first, under the pair that decides; what is tied to the start."""
        mine = self._numbers(self.free[w])
        row = [self.operations[i] // self.problem.micro_batches for i in mine]
        weights = 2 * self.problem.shape.stages
        turns: dict[int, list[int]] = defaultdict(list)
        for i, r in zip(mine, row, strict=True):
            turns[r].append(i)
        for r, line in turns.items():
            if self.in_turn:
                for i, j in pairwise(line):
                    self._edge(i, j, self.seconds[i])
            else:
                for i, j in combinations(line, 2):
                    backwards = [self.number.get(self.operations[k] - self.plane, -1) for k in (i, j)]
                    if r < weights:
                        self.open[i, j] = [(i, j), *self.open.get((i, j), [])]
                    elif min(backwards) < 0:
                        self._edge(i, j, self.seconds[i])
                    else:
                        self.open.setdefault((backwards[0], backwards[1]), []).append((i, j))
        for (a, i), (b, j) in combinations(zip(row, mine, strict=True), 2):
            if a != b:
                self.open[i, j] = [(i, j)]
        if self.in_turn and self.problem.stash == 1 and self.problem.shape.chunks == 1:
            stages, stage = self.problem.shape.stages, w % self.problem.shape.ranks
            forwards, freeing = (turns[kind * stages + stage] for kind in (0, self.problem.kinds - 1))
            missing = self._held(w) + 1 - self.problem.cap[w]
            for turn, f in enumerate(forwards):
                lacking = -1 if isinf(missing) else ceil(missing + turn - _SLACK)
                if lacking > 0:
                    self._edge(freeing[lacking - 1], f, self.seconds[freeing[lacking - 1]])

    def _held(self, w: int) -> float:
        """Activations that the worker holds where its segment begins."""
        first = int(self.standing.offsets[w])
        kinds = self.standing.sequence[first : self.free[w].start] // self.plane
        return float(sum(self._grows(int(kind)) for kind in kinds))

    def _grows(self, kind: int) -> float:
        return (1.0, self.problem.stash - 1.0 if self.problem.split else -1.0, -self.problem.stash)[kind]

    def _head(self, x: int) -> float:
        """When everything outside has ended that comes before."""
        standing, problem = self.standing, self.problem
        w, y = int(standing.host[x]), int(problem.needs[x])
        k = self.segments[w].start - 1
        head = float(standing.end[standing.sequence[k]] if k >= standing.offsets[w] else standing.release[w])
        if y >= 0 and y not in self.number:
            head = max(head, float(standing.end[y]) + problem.link * bool(standing.host[y] != w))
        return head

    def _tail(self, x: int, latest: Times, limit: Times) -> float:
        """The latest start that keeps everybody outside in time."""
        return min(float(limit[w] if y < 0 else latest[y]) - delay for y, w, delay in self._after(x))

    def _after(self, x: int) -> list[tuple[int, int, float]]:
        """(operation outside or -1 for the end of the program, its worker, delay) that comes after x."""
        standing, problem = self.standing, self.problem
        w, seconds = int(standing.host[x]), float(standing.length[x])
        stop = self.segments[w].stop
        after = [(int(standing.sequence[stop]) if stop < standing.offsets[w + 1] else -1, w, seconds)]
        y = int(problem.feeds[x])
        if y >= 0 and y not in self.number:
            v = int(standing.host[y])
            after.append((y, v, seconds + problem.link * (v != w)))
        return after

    def _propagate(self) -> None:
        """Tighten heads and tails and decide pairs by them, in turn, until nothing changes."""
        count = len(self.operations)
        machine = [0] * count
        for places in self.free.values():
            mine = self._numbers(places)
            for i in mine:
                machine[i] = sum(1 << j for j in mine)
        while True:
            self.into, self.out = [0] * count, [0] * count
            for j in range(count):
                for i, delay in self.before[j]:
                    self.into[j] |= self.into[i] | 1 << i
                    self.earliest[j] = max(self.earliest[j], self.earliest[i] + delay)
                ends = -_NEVER
                for head, i in sorted((self.earliest[i], i) for i in _bits(self.into[j] & machine[j])):
                    ends = max(ends, head) + self.seconds[i]
                self.earliest[j] = max(self.earliest[j], ends)
            for i in reversed(range(count)):
                for j, delay in self.following[i]:
                    self.out[i] |= self.out[j] | 1 << j
                    self.latest[i] = min(self.latest[i], self.latest[j] - delay)
                begins, mine = _NEVER, _bits(self.out[i] & machine[i])
                for tail, j in sorted(((self.latest[j] + self.seconds[j], j) for j in mine), reverse=True):
                    begins = min(begins, tail) - self.seconds[j]
                self.latest[i] = min(self.latest[i], begins - self.seconds[i])
            decided = [key for key, tied in self.open.items() if any(self._is_decided(i, j) for i, j in tied)]
            if not decided:
                return
            for key in decided:
                for i, j in self.open.pop(key):
                    if not self.out[i] >> j & 1:
                        self._edge(i, j, self.seconds[i])

    def _is_decided(self, i: int, j: int) -> bool:
        return bool(self.out[i] >> j & 1) or self.earliest[j] + self.seconds[j] > self.latest[i] + 1e-6

    def _memory(self, binary: dict[tuple[int, int], int]) -> list[tuple[list[tuple[int, float]], float]]:
        """At each forward of a freed worker: what it and those before it hold."""
        rows = []
        for w, places in self.free.items():
            if isinf(self.problem.cap[w]):
                continue
            mine, held = self._numbers(places), self._held(w)
            for f in mine:
                if self.operations[f] >= self.plane:
                    continue
                room, terms = self.problem.cap[w] - held - 1.0, []
                for i in mine:
                    grows = self._grows(self.operations[i] // self.plane)
                    if self.into[f] >> i & 1:
                        room -= grows
                    elif (i, f) in binary:
                        terms.append((binary[i, f], grows))
                    elif (f, i) in binary:
                        room -= grows
                        terms.append((binary[f, i], -grows))
                if sum(max(0.0, grows) for _, grows in terms) > room + _SLACK:
                    rows.append((terms, room + _SLACK))
        return rows

    def _exits(self, soft: list[int], late: list[tuple[float, float]]) -> list[tuple[int, int, float]]:
        """What each late worker is late by each operation from which it can be reached outside."""
        delays: dict[tuple[int, int], float] = {}
        nobody = np.full(len(self.standing.deadline), _NEVER)
        for number, late_worker in enumerate(soft):
            limit = nobody.copy()
            limit[late_worker] = self.standing.deadline[late_worker]
            latest = self.standing.latest(limit)
            for i, x in enumerate(self.operations):
                for y, w, delay in self._after(x):
                    until = float(limit[w] if y < 0 else latest[y])
                    if until < _NEVER / 10 and self.latest[i] + delay - until > late[number][0] + _SLACK:
                        delays[i, number] = max(delays.get((i, number), -_NEVER), delay - until)
        return [(i, number, delay) for (i, number), delay in delays.items()]


def _gain(problem: Problem) -> float:
    """The least that a window must gain: nearly a grain."""
    return max(problem.grain * 0.999, problem.unit / 100)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


class Windows:
    """Solves window after window in one child process, which ends with the `with` block."""

    def __init__(
        self,
        problem: Problem,
        *,
        solver: Solver = "HiGHS",
        most: int = MOST_BINARIES,
        nodes: int = NODES,
        often: bool = False,
    ) -> None:
        self.problem, self.solver, self.most, self.nodes, self.often = problem, solver, most, nodes, often
        self.child = Child(disjunctive.__name__)
        self.spans: dict[tuple[str, int, bool], float] = {}
        self.is_broken = False

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.child.kill()

    def better(
        self,
        order: Order,
        due: list[float],
        target: float,
        *,
        count: int,
        patience: int,
        seed: int,
        deadline: Deadline | None = None,
    ) -> Annealed:
        """The order after `count` windows, or after `patience` in a row that gain nothing; never later in sum.

        Returns:
            `steps` is the number of windows solved; `due` may have moved.
        """
        random, solved, idle, deadline = Random(seed), 0, 0, deadline or Deadline(None)
        standing = stand(self.problem, order, due, target, self.often)
        while solved < count and idle < patience and standing.cost > 0 and not deadline.is_over and not self.is_broken:
            due, standing = self._shifted(standing, due, target, random)
            if standing.cost == 0:
                break
            drawn = self._drawn(standing, random, deadline)
            if drawn is None:
                break
            before, solved = standing.cost, solved + 1
            standing = self._solved(standing, drawn, due, target, deadline)
            idle = idle + 1 if standing.cost == before else 0
        return Annealed(standing.order, due, standing.cost <= _SLACK, solved)

    def _shifted(
        self, standing: Standing, due: list[float], target: float, random: Random
    ) -> tuple[list[float], Standing]:
        """Due times moved one at a time where that makes nobody later in sum; a new place to draw windows from."""
        problem, ranks = self.problem, self.problem.shape.ranks
        quantum = max(problem.grain, problem.unit / 4)
        for _ in range(2 * ranks if problem.staggered else 0):
            rank = random.randrange(ranks)
            latest = float(standing.late[rank::ranks].max())
            shift = random.choice((-quantum, quantum, latest, -float(standing.late.max())))
            if shift:
                moved = [*due[:rank], due[rank] + shift, *due[rank + 1 :]]
                after = stand(problem, standing.order, moved, target, self.often)
                if after.cost <= standing.cost:
                    due, standing = moved, after
        return due, standing

    def _solved(
        self, standing: Standing, drawn: Window, due: list[float], target: float, deadline: Deadline
    ) -> Standing:
        seconds = PATIENT_SECONDS if isinf(deadline.left) else min(SECONDS, deadline.left)
        request = (drawn.model, self.solver, seconds, self.nodes, _gain(self.problem))
        answers, ended = self.child.ask(request, seconds + GRACE_SECONDS, deadline)
        self.is_broken = ended == "solver failed"
        if not answers:
            return standing
        status, _, kept = answers[-1]
        if status not in ("optimal", "feasible"):
            return standing
        order = drawn.ordered(standing, kept)
        if order == standing.order or not self.problem.is_within_caps(order):
            return standing
        after = stand(self.problem, order, due, target, self.often)
        return after if after.cost < standing.cost - _SLACK else standing

    def _drawn(self, standing: Standing, random: Random, deadline: Deadline) -> Window | None:
        for _ in range(DRAWS):
            drawn = None if deadline.is_over else self._draw(standing, random)
            if drawn:
                return drawn
        return None

    def _draw(self, standing: Standing, random: Random) -> Window | None:
        """A window around an operation that makes somebody late; None if it could gain nothing."""
        shape = self.problem.shape
        slack = standing.latest(standing.deadline) - standing.begin
        critical = np.flatnonzero(slack < -_SLACK / 2)
        x = int(critical[random.randrange(len(critical))])
        in_turn, way = random.random() < 0.5, random.choice(("stages", "pipelines"))
        of = shape.ranks if way == "stages" else shape.pipelines
        width = 1 + random.randrange(of)
        first = max(0, min(of - width, int(standing.host[x]) % shape.ranks - random.randrange(width)))
        pipeline = int(standing.host[x]) // shape.ranks
        if way == "stages":
            freed = {w for w in range(shape.worker_count) if first <= w % shape.ranks < first + width}
        else:
            others = random.sample([k for k in range(of) if k != pipeline], width - 1)
            freed = {w for w in range(shape.worker_count) if w // shape.ranks in (pipeline, *others)}
        share, key = random.random(), (way, width, in_turn)
        span = self.spans.get(key, self.problem.unit * sqrt((6 if in_turn else 3) * self.most / len(freed)))
        middle = float(standing.begin[x])
        for _ in range(6):
            try:
                drawn = window(
                    standing, freed, middle - share * span, middle + (1 - share) * span, in_turn=in_turn, most=self.most
                )
            except TooLarge:
                span *= 0.75
                continue
            break
        else:
            drawn = None
        self.spans[key] = span * (1.5 if drawn and drawn.model.binaries < 0.7 * self.most else 1.0)
        return drawn


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
