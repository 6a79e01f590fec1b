"""Curves of one line for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

WIDE = 60
"""Characters of a curve."""
_LEVELS = " ▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], most: float) -> str:
    """A character per value, from blank for 0 to a full block for `most` and beyond."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, max(0, round(top * value / most)))] for value in values)
