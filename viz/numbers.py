"""Format of numbers and times on pages, axes and in texts: three significant digits, percent, times with unit."""

from __future__ import annotations

from math import floor, log10
from typing import Any, Literal, NamedTuple, TypeGuard

from viz.lanes import LaneTable

DIGITS, PLACE_DIGITS = 3, 6
"""Significant digits of an amount, and of a position in time."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a JSON file is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(value: float, digits: int = DIGITS) -> str:
    """Format a number with `digits` significant digits, without an exponent: 11660 instead of 1.17e+04."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) and abs(value) < 1e15 else text


def signed(value: float) -> str:
    """Format a difference with its sign: "+1.5", "0"."""
    return "0" if abs(value) < 1e-9 else f"{'+' if value > 0 else ''}{short(value)}"


def percent(share: float) -> str:
    return f"{short(100 * share)} %"


def signed_percent(share: float) -> str:
    """Format a change: 0.2727 is "+27.3 %"."""
    return f"{signed(100 * share)} %"


def bytes_text(amount: float) -> str:
    """Format bytes: "1.5 GB", "8.4 MB"."""
    return f"{short(amount / 1e9)} GB" if amount >= 1e9 else f"{short(amount / 1e6)} MB"


MAX_TICKS = 10


class TimeUnit(NamedTuple):
    """A factor for times, and the resulting unit: "s", "ms", or "" for the times of a plan."""

    scale: float
    word: str

    def text(self, value: float, digits: int = PLACE_DIGITS) -> str:
        """Format a position in time with its unit."""
        return f"{short(value * self.scale, digits)}{self.word and ' ' + self.word}"

    def amount(self, value: float) -> str:
        """Format a duration with its unit."""
        return self.text(value, DIGITS)

    @property
    def suffix(self) -> str:
        """Suffix of a column's or axis's heading: " (ms)", or "" for the times of a plan."""
        return f" ({self.word})" if self.word else ""


UNITS = "units"
"""Word at an axis for times of a plan."""
PLAN_UNIT = TimeUnit(1.0, "")
"""Times of a plan, in units of its profile."""


def time_unit(table: LaneTable, span: float | None = None) -> TimeUnit:
    """Return the unit for an axis of length `span`; None: the table's span."""
    return unit_for(table.span if span is None else span, table.unit)


def unit_for(length: float, unit: Literal["s", ""] = "s") -> TimeUnit:
    """Return the unit for an axis of `length` seconds, or units of a profile."""
    return PLAN_UNIT if not unit else TimeUnit(1.0, "s") if length >= 2.0 else TimeUnit(1000.0, "ms")


def ticks(length: float) -> list[float]:
    """Return 0 and the multiples up to `length` of 1, 2 or 5 times a power of ten, at most MAX_TICKS + 1 numbers."""
    if length <= 0:
        return [0.0]
    rough = length / MAX_TICKS
    power: float = 10.0 ** floor(log10(rough))
    step = float(f"{power * next(f for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9)):.3g}")
    return [round(i * step, 12) for i in range(int(length / step + 1e-9) + 1)]
