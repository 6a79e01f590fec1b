"""How times are shown, on every axis and in every text: their unit, round ticks, and the words for it."""

from __future__ import annotations

from math import floor, log10
from typing import Any, NamedTuple

from viz.lanes import LaneTable
from viz.numbers import DIGITS, PLACE_DIGITS, short

OVERHANG = 0.004
"""Share of the time axis that is shown before its begin and after its end."""
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
    def title(self) -> str:
        """What a time axis says of its unit."""
        return f"time ({self.word})" if self.word else "time (units of the profile)"

    def axis(self, span: float, title: str = "") -> dict[str, Any]:
        """Title and range of a Plotly axis from time 0 to `span`."""
        length, title = span * self.scale, title or self.title
        return {"title": {"text": title, "standoff": 6}, "range": [-OVERHANG * length, (1 + OVERHANG) * length]}


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


def ticks(length: float, overhang: float = 0.0) -> list[float]:
    """Round numbers from 0 to `length`, on an axis that shows a share of it more at both ends."""
    if length <= 0:
        return [0.0]
    step = tick_step(length * (1 + 2 * overhang))
    return [round(i * step, 12) for i in range(int(length * (1 + overhang) / step + 1e-9) + 1)]
