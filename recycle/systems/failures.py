"""Failure traces for the cluster simulation: times at which nodes die and join.

A `FailureTrace` is a list of changes. All events at one time stamp form one change: a node in both `failed` and
`joined` died and was replaced (or repaired) at once. Nodes are places 0 .. nodes - 1. If instance names are never
reused (spot markets), a new instance takes the lowest free place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np

from recycle.errors import TraceError
from recycle.systems.system import Nodes

ANNOUNCED = "announced"
"""Cause of a failure of which there was notice: nothing has to be detected, and no work is lost."""
CORRUPTION = "silent data corruption"
"""Cause of a failure that began with wrong results, which were noticed only now."""


class NodeChange(NamedTuple):
    """All events at one time stamp.

    `failed` nodes were up; `joined` nodes were down, or are among `failed`. `causes` has the known causes of failures.
    """

    time: float
    failed: Nodes
    joined: Nodes
    causes: Mapping[int, str] = {}

    def is_announced(self, nodes: Nodes) -> bool:
        return all(self.causes.get(node) == ANNOUNCED for node in nodes)

    def is_corruption(self, nodes: Nodes) -> bool:
        return any(self.causes.get(node) == CORRUPTION for node in nodes)


class SlowPeriod(NamedTuple):
    """A node takes `factor` times as long from `begin` to `end`, in seconds, or until it fails."""

    begin: float
    end: float
    node: int
    factor: float


@dataclass(frozen=True)
class FailureTrace:
    """A failure trace.

    Attributes:
        nodes: population, including nodes without events.
        up: nodes that are up before the first change.
        changes: by time, ascending and distinct.
        end: seconds.
        notes: caveats to print with figures of this trace.
        slow: by begin, ascending.
    """

    name: str
    nodes: int
    up: Nodes
    changes: tuple[NodeChange, ...]
    end: float
    notes: tuple[str, ...] = field(default=())
    slow: tuple[SlowPeriod, ...] = ()

    @property
    def failures(self) -> int:
        return sum(len(change.failed) for change in self.changes)

    def node_seconds(self) -> float:
        steps = pairwise([*self.alive(), (self.end, 0)])
        return sum((live * (until - since) for (since, live), (until, _) in steps), 0.0)

    def alive(self) -> list[tuple[float, int]]:
        """Return (time, number of live nodes from then on), from 0."""
        times = [0.0, *(change.time for change in self.changes)]
        gains = (len(change.joined) - len(change.failed) for change in self.changes)
        return list(zip(times, accumulate(gains, initial=len(self.up)), strict=True))

    def shares_alive(self, parts: int) -> list[float]:
        return mean_per_part([(time, live / self.nodes) for time, live in self.alive()], self.end, parts)

    @property
    def rate(self) -> float:
        seconds = self.node_seconds()
        return self.failures / seconds if seconds else 0.0

    def fitted(self, nodes: int, seed: int = 0) -> FailureTrace:
        """Return the trace for a job of `nodes` nodes.

        A larger population is sampled; a smaller one is placed on random nodes, and the other nodes never fail.
        """
        chosen = random.Random(seed).sample(range(max(self.nodes, nodes)), min(self.nodes, nodes))
        place = {node: at for at, node in enumerate(chosen)} if self.nodes >= nodes else dict(enumerate(chosen))
        never = frozenset(range(nodes)).difference(place.values())

        def places(group: Iterable[int]) -> Nodes:
            return frozenset(place[node] for node in group if node in place)

        changes = []
        for change in self.changes:
            failed, joined = places(change.failed), places(change.joined)
            if failed or joined:
                causes = {place[node]: cause for node, cause in change.causes.items() if node in place}
                changes.append(NodeChange(change.time, failed, joined, causes))
        slow = tuple(period._replace(node=place[period.node]) for period in self.slow if period.node in place)
        return replace(self, nodes=nodes, up=places(self.up) | never, changes=tuple(changes), slow=slow)


def mean_per_part(steps: Sequence[tuple[float, float]], end: float, parts: int) -> list[float]:
    """Return the mean of a step function, given as (time, value from then on), over equal parts of [0, end]."""
    if not end:
        return [0.0] * parts
    times = np.clip([0.0, *(time for time, _ in steps), end], 0.0, end)
    values = np.array([0.0, *(value for _, value in steps)])
    sums = np.concatenate([[0.0], np.cumsum(values * np.diff(times))])
    means: list[float] = (np.diff(np.interp(np.linspace(0.0, end, parts + 1), times, sums)) * parts / end).tolist()
    return means


class Row(NamedTuple):
    """One line of a trace, at a time in seconds: a node fails or comes up. `line` counts from 1, for errors."""

    line: int
    time: float
    fails: bool
    name: str
    cause: str = ""


def trace_from_rows(
    rows: Iterable[Row], name: str, *, population: int | None = None, counted: bool = False
) -> FailureTrace:
    """Create a trace from its rows, in file order.

    If the first row is a removal, all nodes were up from the start; otherwise every node has to join before it can go.
    A node that returns under its name keeps its place.

    Args:
        name: file name, the prefix of every error.
        population: number of nodes; None for the nodes with rows, or the maximum number of simultaneous nodes.
        counted: faults of one node may overlap; it returns when the last one ends.

    Raises:
        TraceError: times out of order, a node that goes before it came or comes while it is up, or more nodes than the
            population.
    """
    rows = list(rows)
    if not rows:
        raise TraceError(f"{name}: has no events: write lines such as 480000,add,node1 (milliseconds, event, node)")
    from_start = rows[0].fails
    fails_first: dict[str, bool] = {}
    arrivals: Counter[str] = Counter()
    for row in rows:
        fails_first.setdefault(row.name, row.fails)
        arrivals[row.name] += not row.fails
    keeps_place = from_start or counted or max(arrivals.values()) > 1
    place = {node: at for at, node in enumerate(node for node, fails in fails_first.items() if fails and from_start)}
    reasons = dict.fromkeys(place, 0) | {node: 1 for node in fails_first if node not in place}
    up, most, free = frozenset(place.values()), len(place), list[int]()
    changes: list[NodeChange] = []
    before = 0.0
    for time, rows_of_stamp in groupby(rows, key=lambda row: row.time):
        was_up: dict[str, bool] = {}
        failed: dict[str, str] = {}
        for row in rows_of_stamp:
            where = f"{name}, line {row.line}"
            if time < before:
                begin = f"{before:.15g} s" if before else "the start of the trace"
                raise TraceError(f"{where}: {time:.15g} s comes after {begin}: put the rows in order of time")
            if fails_first[row.name] and not from_start:
                raise TraceError(
                    f"{where}: {row.name} is removed but was never added: add it first, or begin the trace with a"
                    f" removal if its nodes were up from the start"
                )
            was_up.setdefault(row.name, not reasons[row.name])
            if row.fails == bool(reasons[row.name]) and not (row.fails and counted):
                event, reason = ("removed", "is not up") if row.fails else ("added", "is up already")
                raise TraceError(f"{where}: {row.name} is {event} but {reason}: drop the row, or name another node")
            if row.fails and was_up[row.name]:
                failed.setdefault(row.name, row.cause)
            reasons[row.name] += 1 if row.fails else -1
        before = time
        causes = {place[node]: cause for node, cause in failed.items()}
        if not keeps_place:
            free = sorted(free + [place.pop(node) for node in failed], reverse=True)
        joined = [node for node, up in was_up.items() if not reasons[node] and (not up or node in failed)]
        for node in joined:
            if node not in place:
                place[node] = free.pop() if free else most
                most = max(most, place[node] + 1)
        if failed or joined:
            known = {at: cause for at, cause in causes.items() if cause}
            changes.append(NodeChange(time, frozenset(causes), frozenset(place[node] for node in joined), known))
    if population is not None and population < most:
        raise TraceError(f"{name}: {most} nodes have events, which is more than the population of {population}")
    nodes = most if population is None else population
    quiet = frozenset(range(most, nodes)) if from_start else frozenset[int]()
    return FailureTrace(name, nodes, up | quiet, tuple(changes), before)
