"""The same loop twice: plain Python over lists for small problems, compiled by numba over arrays for large ones.

numba is imported only when a loop is worth it, and done without where it is not installed; what it compiles is cached
on disk beside the source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from recycle.solve.engines import has


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled, as it is without numba; the first call of a new version takes some seconds."""
    if not has("numba"):
        return function
    import numba

    made: Callable[..., Any] = numba.njit(cache=True)(function)
    return made


def as_lists(arguments: list[Any]) -> list[Any]:
    """Arrays as lists, which plain Python indexes several times faster; the rest as it is."""
    return [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
