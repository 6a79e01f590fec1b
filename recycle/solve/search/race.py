"""A race between the whole problem and what is left of it without slow workers.

A worker that holds up its peers more than it helps them is best left without work. Leaving it out as if it were dead
makes the others alike, so that slots and the template apply, and every order of what is left is one of the whole
problem, with the same period. Which workers are best left out is not known beforehand: all that are slower than the
median of their peers, and each of them alone, are begun beside the whole problem. The two with the best orders are
searched, where they are close and there is time for both, and the better one of them gets the rest.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from recycle.solve.effort import Effort, Incumbent, Pace, by_period
from recycle.solve.problem import Problem
from recycle.solve.search.from_template import search_from
from recycle.solve.search.initial_orders import ALL_POLICIES, Beginning, initial_orders

CLOSE, STILL_CLOSE = 1.15, 1.07
"""How far the period of the second may be from that of the first for a search of both: from its best order, and from
what its search has found, where that is against the clock."""
HEAT = 0.25
"""Of the time, or of the steps, what each of the two gets before the better one gets the rest."""
LEAST_HEAT, HEAT_SECONDS, ALIKE = 0.2, 2e-4, 0.98
"""Seconds, and per operation more, that a heat must have to tell anything. Where time is shorter, the one with the best
order is searched alone; the period of one whose peers are alike counts as so much less, as its template is worth more.
"""
BEGINNING_SHARE, NO_SLOW_SHARE, LESS_SHARE = 0.25, 0.3, 0.1
"""Of the time that is left, what beginning with the whole problem, without all slow workers, and without each may take.
"""
MOST_LEFT_OUT = 4
"""Slow workers that are left out alone, the slowest first."""


def without_slow(problem: Problem) -> list[Problem]:
    """The problem without all slow workers, then without each; empty where none is slow or nothing is re-routed."""
    if problem.peers_are_alike or not problem.reroute:
        return []
    ranks = problem.hosts[: problem.shape.ranks]
    slow = [w for hosts in ranks for w in hosts if problem.speed[w] > median_low([problem.speed[v] for v in hosts])]
    slow.sort(key=lambda w: (-problem.speed[w], w))
    left_out = [slow] if len(slow) > 1 else []
    left_out += [[w] for w in slow[:MOST_LEFT_OUT]]
    return [replace(problem, dead=problem.dead | {problem.shape.worker_at(w) for w in out}) for out in left_out]


def begin_all(problem: Problem, effort: Effort, most: int = ALL_POLICIES) -> list[Beginning]:
    """Where to begin with the problem and with it less slow workers; the one with the best order first.

    Args:
        most: policies to try with each.
    """
    smaller = without_slow(problem)
    found = [initial_orders(problem, effort.part(BEGINNING_SHARE if smaller else 1.0), most)]
    pace = Pace(effort.deadline)
    for turn, one in enumerate(smaller):
        if pace.is_over() or effort.is_met(problem, min(begun.best.period for begun in found)):
            break
        found.append(initial_orders(one, effort.part(LESS_SHARE if turn else NO_SLOW_SHARE), most))
    return sorted(found, key=lambda beginning: beginning.best.period)


def _expected(beginning: Beginning) -> float:
    """The period of the best order, for a comparison of what searches will come to."""
    return beginning.best.period * (ALIKE if beginning.problem.peers_are_alike else 1)


def race(beginnings: list[Beginning], effort: Effort) -> Incumbent:
    """The best order found; never worse than the best of the beginnings."""
    first = beginnings[0]
    is_timed = effort.steps is None
    if is_timed and HEAT * effort.deadline.left < LEAST_HEAT + HEAT_SECONDS * first.problem.size:
        first = min(beginnings, key=_expected)
    elif len(beginnings) > 1 and beginnings[1].best.period <= CLOSE * first.best.period:
        searched: list[Beginning] = []
        for turn, one in enumerate(beginnings[:2]):
            if searched and is_timed and one.best.period > STILL_CLOSE * searched[0].best.period:
                break
            found, where = search_from(one, effort.part(HEAT, 1 - turn * HEAT))
            if effort.is_met(one.problem, found.period):
                return found
            searched.append(where)
        first = min(searched, key=lambda one: one.best.period)
    found, _ = search_from(first, effort.rest(seed=effort.seed + bool(effort.spent)))
    return by_period([found, beginnings[0].best])[0]
