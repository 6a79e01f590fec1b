"""A proven lower bound with its proof, and the certificate that `plans.verify` verifies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import floor, log10
from typing import Any, Self

from recycle.job.profile import Profile
from recycle.plans import Plan
from recycle.plans.verify import Certificate, NotProven, prove

SHORTER = 5e-10
"""How much shorter than the bound, as a share, a window is that need not be whole."""
DIGITS = (4, 8, 12)
"""Digits of multipliers to try: more where a proof is close."""


Proof = Callable[[int], dict[str, Any]]


class Bound(float):
    """A proven lower bound.

    Attributes:
        window: longest time, in `unit`, into which no iteration fits.
        proof: returns `rows`, `stages` and `grid` of the certificate, with multipliers of so many digits.
    """

    window: float
    proof: Proof
    unit: float

    def __new__(cls, value: float, window: float, proof: Proof, unit: float = 1.0) -> Self:
        bound = super().__new__(cls, value * unit)
        bound.window, bound.proof, bound.unit = window, proof, unit
        return bound

    @classmethod
    def of_rule(cls, value: float, is_whole: bool, rule: str, *place: int) -> Self:
        """Create the bound that one row proves."""
        window = value - 1 if is_whole else value * (1 - SHORTER)
        return cls(value, max(0.0, window), lambda digits: {"rows": [(rule, list(place), [], [])]})

    def in_units(self, unit: float) -> Bound:
        return Bound(self, self.window, self.proof, unit)


def rounded_down(time: float) -> float:
    """Return a time with 11 digits, so that the grid still covers it when both are read with 12."""
    unit = 10.0 ** (floor(log10(time or 1.0)) - 10)
    return floor(time / unit + 1e-3) * unit


def certify(plan: Plan, bound: Bound, profile: Profile) -> Plan:
    """Return the plan with the certificate of a bound; without one if it does not verify."""
    usual = Profile().to_json()
    stated = {key: value for key, value in profile.to_json().items() if value != usual[key] and key != "measured"}
    for digits in DIGITS:
        certificate = Certificate(float(bound), bound.unit, rounded_down(bound.window), stated, **bound.proof(digits))
        certified = replace(plan, certificate=certificate)
        with suppress(NotProven):
            prove(certified.as_schedule())
            return certified
    return replace(plan, certificate=None)
