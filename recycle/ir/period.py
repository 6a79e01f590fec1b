"""The period: the distance of two iterations in steady state when a schedule is repeated for ever.

It is the largest mean of a cycle through the edges that lead from one iteration into the next (carried dependencies,
each worker's program starting over, each lane's next transfer), in other words the eigenvalue of the max-plus matrix
of the repeated schedule. It is found by repeating the iteration and reading longer and longer cycles off the critical
path, and proven by a fixed point: with that period no start time has to move.

Nodes are given by their place in a topological order, as in `graph.Ranked`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from recycle.ir.columns import Floats, Rows, chain_ends
from recycle.ir.graph import Ranked, earliest_ranked
from recycle.ir.memory import TOLERANCE


class Repeats(NamedTuple):
    """Edges from one iteration into the next, and the chains of which each node follows the one before it.

    Attributes:
        source, target: the edges, by target.
        targets: each target once.
        first: the first edge to each of them.
        chains: (chain, node) of workers, and of lanes, chain by chain in order.
    """

    source: Rows
    target: Rows
    targets: Rows
    first: Rows
    chains: Sequence[tuple[Rows, Rows]]


def repeats(carried_source: Rows, carried_target: Rows, chains: Sequence[tuple[Rows, Rows]]) -> Repeats:
    """The carried dependencies, and each of the chains starting over."""
    firsts, lasts = zip(*(chain_ends(one) for one in chains), strict=True)
    source = np.concatenate([carried_source, *lasts])
    target = np.concatenate([carried_target, *firsts])
    by_target = np.argsort(target, kind="stable")
    target = target[by_target]
    first = np.flatnonzero(np.diff(target, prepend=-1))
    return Repeats(source[by_target], target, target[first], first, chains)


def period_of(graph: Ranked, edges: Repeats, seconds: Floats, start: Floats, last: Rows) -> float:
    """Largest mean of a cycle through the repeated schedule.

    From a lower bound on, iterations are released one period after another. Either the releases settle, and the bound
    is the period; or some cycle takes longer, and the critical path to a release that still grows comes to run around
    it: its mean is the next bound. Ends because there are finitely many means. The first bound is what the busiest
    worker or lane takes, which is the period of most schedules that are any good.

    Args:
        seconds: duration of each node.
        start, last: of one iteration from idle, as of `earliest_ranked`.
    """
    released = np.zeros(len(seconds))
    tolerance = float((start + seconds).max(initial=0.0)) * TOLERANCE
    if not tolerance:
        return 0.0
    best = _busiest(edges, seconds)
    history: list[tuple[Rows, Rows]] = []
    while True:
        ready = start[edges.source] + seconds[edges.source] - best
        following = np.maximum.reduceat(ready, edges.first) if len(ready) else ready
        moved = following > released[edges.targets] + tolerance
        if not moved.any():
            return best
        latest = np.zeros(len(seconds))
        latest[edges.targets[moved]] = following[moved]
        decides = np.full(len(seconds), -1, dtype=np.int64)
        chosen = np.flatnonzero((latest[edges.target] > 0) & (ready >= latest[edges.target]))
        decides[edges.target[chosen]] = edges.source[chosen]
        released[edges.targets[moved]] = following[moved]
        history.append((last, decides))
        longer = _cycle_mean(history, seconds, int(latest.argmax()))
        if longer > best:
            best = longer
            history.clear()
            released = np.zeros(len(seconds))
        start, last = earliest_ranked(graph, seconds, released)


def _busiest(edges: Repeats, seconds: Floats) -> float:
    """Seconds that the busiest worker or lane takes for an iteration: no period is shorter."""
    longest = 0.0
    for chain, nodes in edges.chains:
        if len(nodes):
            taken = seconds[nodes]
            bounds = np.flatnonzero(np.diff(chain, prepend=-1, append=-1))
            most = int(np.add.reduceat(taken, bounds[:-1]).argmax())
            longest = max(longest, math.fsum(taken[bounds[most] : bounds[most + 1]].tolist()))
    return longest


def _cycle_mean(history: list[tuple[Rows, Rows]], seconds: Floats, node: int) -> float:
    """Seconds per iteration of the first cycle on the critical path to the release of `node`; 0 when there is none."""
    seen: dict[int, tuple[int, int]] = {}
    path: list[float] = []
    for iteration in range(len(history) - 1, -1, -1):
        last, decides = history[iteration]
        if node in seen:
            later, begin = seen[node]
            return math.fsum(path[begin:]) / (later - iteration)
        seen[node] = iteration, len(path)
        node = int(decides[node])
        if node < 0:
            return 0.0
        path.append(float(seconds[node]))
        while last[node] >= 0:
            node = int(last[node])
            path.append(float(seconds[node]))
    return 0.0
