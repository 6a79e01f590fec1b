"""The same loop twice: plain Python over lists for small problems, compiled by numba over arrays for large ones.

numba is imported only when a loop is worth it; what it compiles is cached on disk beside the source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled; the first call of a new version takes some seconds."""
    import numba

    made: Callable[..., Any] = numba.njit(cache=True)(function)
    return made


def as_arrays(arguments: list[Any]) -> list[Any]:
    """Lists of numbers as arrays of float64 or int64, which the compiled loop may write into; the rest as it is."""
    return [
        np.array(a, dtype=np.float64 if a and isinstance(a[0], float) else np.int64) if isinstance(a, list) else a
        for a in arguments
    ]
