"""How numbers and times are written, on every page and axis and in every text: amounts with three significant digits,
shares in percent, times with their unit.

A place on a time axis is no amount: it keeps as many digits as tell it from its neighbours.
"""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple

from viz.lanes import LaneTable

DIGITS, PLACE_DIGITS = 3, 6
"""Significant digits of an amount, and of a place in time."""


def short(value: float, digits: int = DIGITS) -> str:
    """A number with so many significant digits, of a large one all before the point: 11660 in place of 1.17e+04."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) and abs(value) < 1e15 else text


def signed(value: float, digits: int = DIGITS) -> str:
    """A difference, with its sign: "+1.5", "0"."""
    return "0" if abs(value) < 1e-9 else f"{'+' if value > 0 else ''}{short(value, digits)}"


def percent(share: float) -> str:
    """A share: 0.2727 is "27.3 %"."""
    return f"{short(100 * share)} %"


def signed_percent(share: float) -> str:
    """A change: 0.2727 is "+27.3 %"."""
    return f"{signed(100 * share)} %"


MOST_TICKS = 10


class TimeUnit(NamedTuple):
    """A factor for times, and the unit that they then have: "s", "ms", or "" for the times of a plan."""

    scale: float
    word: str

    def text(self, value: float, digits: int = PLACE_DIGITS) -> str:
        """A place in time with its unit."""
        return f"{short(value * self.scale, digits)}{self.word and ' ' + self.word}"

    def amount(self, value: float) -> str:
        """A length of time with its unit."""
        return self.text(value, DIGITS)

    @property
    def suffix(self) -> str:
        """The unit after the heading of a column or an axis: " (ms)", or nothing for the times of a plan."""
        return f" ({self.word})" if self.word else ""


PLAN_UNIT = TimeUnit(1.0, "")
"""Times as a plan has them: units of its profile."""


def time_unit(table: LaneTable, span: float | None = None) -> TimeUnit:
    """The unit for an axis of length `span`, the table's own if left out."""
    return PLAN_UNIT if table.unit != "s" else seconds_unit(table.span if span is None else span)


def seconds_unit(length: float) -> TimeUnit:
    """The unit for an axis of so many seconds."""
    return TimeUnit(1.0, "s") if length >= 2.0 else TimeUnit(1000.0, "ms")


def tick_step(length: float) -> float:
    """Distance of round ticks on an axis of that length: 1, 2 or 5 times a power of ten; MOST_TICKS + 1 at most."""
    rough = length / MOST_TICKS
    power: float = 10.0 ** floor(log10(rough))
    return float(f"{power * next(f for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9)):.3g}")


def ticks(length: float) -> list[float]:
    """Round numbers from 0 to `length`."""
    if length <= 0:
        return [0.0]
    step = tick_step(length)
    return [round(i * step, 12) for i in range(int(length / step + 1e-9) + 1)]
