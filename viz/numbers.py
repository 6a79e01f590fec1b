"""How numbers are written on every page and in every text: amounts with three significant digits, shares in percent.

A place on a time axis is no amount: it keeps as many digits as tell it from its neighbours.
"""

from __future__ import annotations

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
