"""Longest paths over a schedule's event graph: topological order, and end times as early as possible.

The two loops here are plain Python functions over arrays. Small graphs run them as they are; large ones run the same
source compiled by numba, which is imported only then; where it is not installed they run as they are too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
COMPILE_FROM = 50_000
"""Nodes from which loading the compiled loops costs less than running them in plain Python."""
LOADED_FROM = 1_000
"""The same once they are loaded."""


def topological_order(offsets: Rows, targets: Rows, waiting: Rows) -> Rows:
    """Nodes in an order in which each comes after all it waits for; nodes on or behind a cycle are left out.

    Args:
        offsets, targets: CSR of successors.
        waiting: number of predecessors of each node.
    """
    order = np.empty(len(waiting), dtype=np.int64)
    if not _worth_compiling(len(waiting)):
        plain: list[int] = order.tolist()
        done = _topological_order(offsets.tolist(), targets.tolist(), waiting.tolist(), plain)
        return np.array(plain[:done], dtype=np.int64)
    done = _compiled(_topological_order)(offsets, targets, waiting.copy(), order)
    return order[:done]


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
    if not _worth_compiling(len(release)):
        starts, lasts = start.tolist(), last.tolist()
        _earliest(order.tolist(), offsets.tolist(), sources.tolist(), seconds.tolist(), starts, lasts)
        return np.array(starts, dtype=np.float64), np.array(lasts, dtype=np.int64)
    _compiled(_earliest)(order, offsets, sources, seconds, start, last)
    return start, last


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


def _worth_compiling(nodes: int) -> bool:
    return nodes >= (LOADED_FROM if _compiled.cache_info().currsize else COMPILE_FROM) and _has_numba()


def load_compiled() -> None:
    """Load the compiled loops, for who is about to time hundreds of small graphs."""
    if _has_numba():
        _compiled(_topological_order)
        _compiled(_earliest)


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    compiled: Callable[..., Any] = numba.njit(cache=True)(function)
    return compiled
