"""Longest paths over a schedule's event graph: topological order, and end times as early as possible.

Large graphs run the loops here compiled, small ones in plain Python (`compiled`). Who goes through one graph several
times numbers its nodes in topological order first (`ranked`): a pass then reads memory from front to back, and takes a
tenth of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Floats, Rows, offsets_of
from recycle.ir.compiled import COMPILE_FROM, load, run


def group_edges(values: Rows, keys: Rows, nodes: int) -> tuple[Rows, Rows]:
    """CSR grouping: (offsets, values sorted by key, those of one key in the order given)."""
    offsets = offsets_of(keys, nodes)
    if len(values) < COMPILE_FROM:
        return offsets, values[np.argsort(keys, kind="stable")]
    *_, grouped = run(_place, len(values), values, keys, offsets[:-1].copy(), np.empty(len(values), dtype=np.int64))
    return offsets, np.asarray(grouped, dtype=np.int64)


def _place(values: Any, keys: Any, free: Any, grouped: Any) -> None:
    """Counting sort; `free` is where the next value of each key goes."""
    for i in range(len(values)):
        key = keys[i]
        grouped[free[key]] = values[i]
        free[key] += 1


def topological_order(source: Rows, target: Rows, nodes: int) -> Rows:
    """Nodes in an order in which each target comes after its sources; nodes on or behind a cycle are left out."""
    offsets, targets = group_edges(target, source, nodes)
    waiting, order = np.bincount(target, minlength=nodes), np.empty(nodes, dtype=np.int64)
    done, *_, order = run(_topological_order, nodes, offsets, targets, waiting, order)
    return np.asarray(order[:done], dtype=np.int64)


def earliest(order: Rows, offsets: Rows, sources: Rows, seconds: Floats, release: Floats) -> tuple[Floats, Rows]:
    """Start of each node when it begins as soon as all it waits for has ended, and which predecessor was last.

    Args:
        order: topological order of the nodes.
        offsets, sources: CSR of predecessors.
        seconds: duration of each node.
        release: no node starts before its release.

    Returns:
        (start, last): `last` is -1 where the release decided.
    """
    graph = ranked(order, offsets, sources)
    return graph.by_node(*earliest_ranked(graph, seconds[order], release[order]), release)


class Ranked(NamedTuple):
    """A graph with its nodes numbered by their place in a topological order.

    Attributes:
        order: node at each place.
        place: place of each node.
        offsets, sources: CSR of predecessors, all by place, int32.
    """

    order: Rows
    place: Rows
    offsets: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]

    def by_node(self, start: Floats, last: Rows, release: Floats) -> tuple[Floats, Rows]:
        """What `earliest_ranked` gives, by node; nodes without a place start at their release."""
        starts, lasts = release.copy(), np.full(len(release), -1, dtype=np.int64)
        starts[self.order], lasts[self.order] = start, np.where(last >= 0, self.order[last], -1)
        return starts, lasts


def ranked(order: Rows, offsets: Rows, sources: Rows) -> Ranked:
    """The graph with its nodes numbered by `order`; arguments as of `earliest`."""
    place = np.empty(len(offsets) - 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    count = np.diff(offsets)[order]
    begin = np.concatenate([[0], np.cumsum(count)])
    edges = np.arange(begin[-1]) + np.repeat(offsets[order] - begin[:-1], count)
    return Ranked(order, place, begin.astype(np.int32), place[sources[edges]].astype(np.int32))


def earliest_ranked(graph: Ranked, seconds: Floats, release: Floats) -> tuple[Floats, Rows]:
    """What `earliest` gives, everything by place."""
    start, last = release.copy(), np.full(len(release), -1, dtype=np.int64)
    *_, start, last = run(_earliest_ranked, len(release), graph.offsets, graph.sources, seconds, start, last)
    return np.asarray(start, dtype=np.float64), np.asarray(last, dtype=np.int64)


def _topological_order(offsets: Any, targets: Any, waiting: Any, order: Any) -> int:
    done = 0
    for node in range(len(waiting)):
        if waiting[node] == 0:
            order[done] = node
            done += 1
    head = 0
    while head < done:
        node = order[head]
        head += 1
        for edge in range(offsets[node], offsets[node + 1]):
            target = targets[edge]
            waiting[target] -= 1
            if waiting[target] == 0:
                order[done] = target
                done += 1
    return done


def _earliest_ranked(offsets: Any, sources: Any, seconds: Any, start: Any, last: Any) -> None:
    for place in range(len(start)):
        begin = start[place]
        for edge in range(offsets[place], offsets[place + 1]):
            source = sources[edge]
            ready = start[source] + seconds[source]
            if ready > begin:
                begin = ready
                last[place] = source
        start[place] = begin


def load_compiled() -> None:
    """Load the compiled loops, for a caller who is about to time hundreds of small graphs."""
    load(_topological_order, _earliest_ranked, _place)


def compile_all() -> None:
    """Compile each of them, by a call with arguments of the types that all calls have."""
    load_compiled()
    source, target, seconds = np.array([0]), np.array([1]), np.zeros(2)
    order = topological_order(source, target, 2)
    offsets, sources = group_edges(source, target, 2)
    run(_place, 1, source, target, offsets[:-1].copy(), np.empty(1, dtype=np.int64))
    earliest(order, offsets, sources, seconds, seconds)
