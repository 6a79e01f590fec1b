"""The random numbers of the kernels: the same in plain Python and compiled, for the same seed.

The plan of a job depends on them, so they never change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.ir.compiled import called_by_kernels


def seeded(seed: int) -> npt.NDArray[np.int64]:
    """[1], the generator's state for a seed."""
    return np.array([seed % 2147483647 + 1], dtype=np.int64)


@called_by_kernels
def draw(state: Any) -> Any:
    """The next number from 0 to 2**31 - 1 of a linear congruential generator (constants of ANSI C's example).

    The low bits have short periods, so callers use the high ones.
    """
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return state[0]


@called_by_kernels
def draw_below(state: Any, most: int) -> Any:
    """The next number from 0 to `most` - 1."""
    return (draw(state) >> 8) % most
