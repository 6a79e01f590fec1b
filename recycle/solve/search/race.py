"""A race between the whole problem and what is left of it without slow workers.

Nobody knows beforehand whether a slow worker helps more than it holds up, so the problem and those that leave slow
workers out (`leaving_out`) are all begun; the two with the best orders are searched, where they are close and there is
time for both, and the better one of them gets the rest. Their orders are all orders of the whole problem, with the same
periods.
"""

from __future__ import annotations

from dataclasses import replace

from recycle.solve.deadline import Deadline, Pace
from recycle.solve.incumbent import Incumbent, Progress, is_met
from recycle.solve.leaving_out import without_slow
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


def begin_all(
    problem: Problem, bound: float, deadline: Deadline, most: int = ALL_POLICIES, progress: Progress | None = None
) -> list[Beginning]:
    """Where to begin with the problem and with it less slow workers; the one with the best order first.

    Args:
        bound: a proven lower bound; an order that meets it ends the search.
        most: policies to try with each.
    """
    smaller = without_slow(problem)
    found = [initial_orders(problem, bound, deadline.part(BEGINNING_SHARE) if smaller else deadline, most, progress)]
    pace = Pace(deadline)
    for turn, one in enumerate(smaller):
        if pace.is_over() or is_met(problem, min(begun.best.period for begun in found), bound):
            break
        share = LESS_SHARE if turn else NO_SLOW_SHARE
        found.append(initial_orders(one, bound, deadline.part(share), most, progress))
    return sorted(found, key=lambda beginning: beginning.best.period)


def _expected(beginning: Beginning) -> float:
    """The period of the best order, for a comparison of what searches will come to."""
    return beginning.best.period * (ALIKE if beginning.problem.peers_are_alike else 1)


def race(
    beginnings: list[Beginning],
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    processes: int = 1,
    progress: Progress | None = None,
) -> Incumbent:
    """The best order found; never worse than the best of the beginnings. Arguments as in `walks.search`."""
    spent = 0
    first = beginnings[0]
    is_short = steps is None and HEAT * deadline.left < LEAST_HEAT + HEAT_SECONDS * first.problem.size
    if is_short:
        first = min(beginnings, key=_expected)
    elif len(beginnings) > 1 and beginnings[1].best.period <= CLOSE * first.best.period:
        share = None if steps is None else int(steps * HEAT)
        searched: list[Beginning] = []
        for turn, one in enumerate(beginnings[:2]):
            if searched and steps is None and one.best.period > STILL_CLOSE * searched[0].best.period:
                break
            mine = deadline.part(HEAT / (1 - turn * HEAT))
            found, where = search_from(
                one, bound, steps=share, seed=seed, deadline=mine, processes=processes, progress=progress
            )
            spent += found.steps
            if is_met(one.problem, found.period, bound):
                return replace(found, steps=spent)
            searched.append(where)
        first = min(searched, key=lambda one: one.best.period)
    found, _ = search_from(
        first,
        bound,
        steps=None if steps is None else max(1, steps - spent),
        seed=seed + bool(spent),
        deadline=deadline,
        processes=processes,
        progress=progress,
    )
    best = min(found, beginnings[0].best, key=lambda order: order.period)
    return replace(best, steps=spent + found.steps)
