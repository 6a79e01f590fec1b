"""Problems that leave slow workers out: whatever is an order there is one of the whole problem as well.

A worker that holds up its peers more than it helps them is best left without work. Leaving it out as if it were dead
makes the others alike, so that slots and the template apply. Which workers are best left out is not known beforehand:
all that are slower than the median of their peers, and each of them alone, are tried.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from recycle.solve.problem import Problem

MOST = 4
"""Slow workers that are left out alone, the slowest first."""


def without_slow(problem: Problem) -> list[Problem]:
    """The problem without all slow workers, then without each; empty where none is slow or nothing is re-routed."""
    if problem.peers_are_alike or not problem.reroute:
        return []
    ranks = problem.hosts[: problem.shape.ranks]
    slow = [w for hosts in ranks for w in hosts if problem.speed[w] > median_low([problem.speed[v] for v in hosts])]
    slow.sort(key=lambda w: (-problem.speed[w], w))
    left_out = [slow] if len(slow) > 1 else []
    left_out += [[w] for w in slow[:MOST]]
    return [replace(problem, dead=problem.dead | {problem.shape.worker_at(w) for w in out}) for out in left_out]
