"""The times at which a bound's linear program looks at a window: any are sound, and better ones prove more.

A lag that is no multiple of the distance between two points counts as the next shorter one that is. What decides lies
in warm-up and drain, unless memory does: then how long activations are held is what must not be rounded.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.problem_arrays import Floats

POINTS = 40
"""Grid points at either end of the window, and between, where it is fine at both ends."""
STEPS, WIDEST = 200, 1.5
"""Distances that are tried, up to so many times the shortest that so many points allow."""


def fine_at_ends(problem: Problem, end: float) -> Floats:
    """Times from 0 to `end`: close together in warm-up and drain, wide apart between."""
    step = max(_shortest(problem), problem.shape.stages * problem.unit / POINTS)
    if problem.is_integral:
        step = max(1.0, ceil(step - TOLERANCE))
    if 2 * POINTS * step >= end:
        return np.append(np.arange(0, end - TOLERANCE, step), end)
    near = np.arange(POINTS) * step
    between = np.linspace(near[-1], end - near[-1], POINTS)
    return np.concatenate([near, between[1:-1], end - near[::-1]])


def is_exact(problem: Problem, end: float) -> bool:
    """Whether a grid that is fine at the ends has every whole time of a window, and all times are whole."""
    return problem.is_integral and float(np.diff(fine_at_ends(problem, end)).max(initial=0.0)) <= 1.0


def aligned(problem: Problem, end: float, points: int, lags: list[float]) -> Floats:
    """Times from 0 to `end`, all equally far apart, so that these lags lose little when they are rounded down.

    Args:
        points: at most.
    """
    least = 1.0 if problem.is_integral else _shortest(problem)
    if end <= least * points:
        return np.append(np.arange(0, end - TOLERANCE, least), end)
    steps = np.linspace(1.0, WIDEST, STEPS) * end / (points - 1)
    exact = np.array([lag for lag in lags if lag > 0])[:, None]
    lost = exact - np.floor(exact / steps + TOLERANCE) * steps
    step = float(steps[np.argmin((lost / exact).sum(axis=0))])
    return np.append(np.arange(0, end - TOLERANCE, step), end)


def _shortest(problem: Problem) -> float:
    """A quarter of the shortest operation."""
    return min((t for t in problem.times.tolist() if t > 0), default=1.0) / 4
