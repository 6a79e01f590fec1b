"""Longest paths over a schedule's event graph: topological order, and end times as early as possible.

Large graphs run the two loops here compiled, small ones in plain Python (`compiled`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recycle.ir.columns import Floats, Rows
from recycle.ir.compiled import load, run


def topological_order(offsets: Rows, targets: Rows, waiting: Rows) -> Rows:
    """Nodes in an order in which each comes after all it waits for; nodes on or behind a cycle are left out.

    Args:
        offsets, targets: CSR of successors.
        waiting: number of predecessors of each node.
    """
    order = np.empty(len(waiting), dtype=np.int64)
    done, *_, order = run(_topological_order, len(waiting), offsets, targets, waiting.copy(), order)
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
    start, last = release.copy(), np.full(len(release), -1, dtype=np.int64)
    *_, start, last = run(_earliest, len(release), order, offsets, sources, seconds, start, last)
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


def _earliest(order: Any, offsets: Any, sources: Any, seconds: Any, start: Any, last: Any) -> None:
    for node in order:
        begin = start[node]
        for edge in range(offsets[node], offsets[node + 1]):
            source = sources[edge]
            ready = start[source] + seconds[source]
            if ready > begin:
                begin = ready
                last[node] = source
        start[node] = begin


def load_compiled() -> None:
    """Load the compiled loops, for a caller who is about to time hundreds of small graphs."""
    load(_topological_order, _earliest)
