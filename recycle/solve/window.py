"""One window: a convex part of an order, closed, with the model of how its freed workers may be re-ordered.

A window frees some workers in a time slice. It is closed to a convex set: what lies on a path between two of its
operations joins it, in fixed order. So nothing outside is both after one operation and before another, and what is
outside comes down to constants: heads (when what comes before has ended) and tails (how late a worker gets by what
comes after). The late workers may trade their lateness; all others stay as punctual as they are.

What cannot gain is not solved: without the order of the freed workers, only their sums of work, the cost must fall.
The rest is in `disjunctive`: one binary per pair of operations of a freed worker that dependencies, heads and tails
leave open. W of one worker and stage follow the order of their I, without loss. Memory is linear in the binaries, for
any stash and any number of chunks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, isinf

import numpy as np

from recycle.solve.disjunctive import Model
from recycle.solve.problem import Operations, Order, Problem
from recycle.solve.standing import NEVER, Standing, Times, in_line

MOST_BINARIES = 300
"""Binaries per window, at most."""
MOST_PAIRS = 12
"""Pairs of a window's operations per binary, at most: how many can be decided beforehand."""
MOST_LATE = 12
"""Late workers whose lateness may be traded within a window; the others get no later."""
_SLACK = 1e-9


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
        return in_line(standing.problem, order)


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
        if least.sum() > standing.cost - gain(self.problem):
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
                ends = -NEVER
                for head, i in sorted((self.earliest[i], i) for i in _bits(self.into[j] & machine[j])):
                    ends = max(ends, head) + self.seconds[i]
                self.earliest[j] = max(self.earliest[j], ends)
            for i in reversed(range(count)):
                for j, delay in self.following[i]:
                    self.out[i] |= self.out[j] | 1 << j
                    self.latest[i] = min(self.latest[i], self.latest[j] - delay)
                begins, mine = NEVER, _bits(self.out[i] & machine[i])
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
        nobody = np.full(len(self.standing.deadline), NEVER)
        for number, late_worker in enumerate(soft):
            limit = nobody.copy()
            limit[late_worker] = self.standing.deadline[late_worker]
            latest = self.standing.latest(limit)
            for i, x in enumerate(self.operations):
                for y, w, delay in self._after(x):
                    until = float(limit[w] if y < 0 else latest[y])
                    if until < NEVER / 10 and self.latest[i] + delay - until > late[number][0] + _SLACK:
                        delays[i, number] = max(delays.get((i, number), -NEVER), delay - until)
        return [(i, number, delay) for (i, number), delay in delays.items()]


def gain(problem: Problem) -> float:
    """The least that a window must gain: nearly a grain."""
    return max(problem.grain * 0.999, problem.unit / 100)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
