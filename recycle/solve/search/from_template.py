"""Search from a beginning: the template first, as a step there costs a part of one on the whole, then the whole.

The search of a single pipeline begins with building blocks and waves beside what the beginning holds; that of any
problem on which insertion does well, with other manners of it.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from recycle.solve.assignment import possible_assignments
from recycle.solve.bounds import closed_form
from recycle.solve.deadline import Deadline, Pace
from recycle.solve.incumbent import Incumbent, Progress, is_met
from recycle.solve.problem import Problem
from recycle.solve.search.building_blocks import block_orders
from recycle.solve.search.initial_orders import MOST_ORDERS, Beginning, Template
from recycle.solve.search.insertion import vary_insertion
from recycle.solve.search.timing import time_order
from recycle.solve.search.walks import SEARCH_STEPS, search
from recycle.solve.search.waves import best_wave

LARGE = 10_000
"""Operations from which a search of the whole problem gains less than one of its template."""
TEMPLATE_SHARE, LARGE_TEMPLATE_SHARE, NEAR = 0.4, 0.65, 1.2
"""Of the time, or of the steps, what the search of the template may take at most; and of the best period, what the
template's may be for a search to pay."""
MOST_TEMPLATES, TEMPLATE_HEAT = 2, 0.25
"""Templates that are searched, and of their time, or steps, what each of several gets before the best gets the rest."""
LEAST_HEAT, HEAT_SECONDS = 0.1, 1e-4
"""Seconds, and per operation more, that such a short search must have; else the best is searched at once."""
HOPE = 0.25
"""Of the gap to a template's own bound, what further search of it is expected to close."""
UNFOLD_SHARE = 0.1
"""Of the time that is left then, what unfolding its order may take."""
BLOCK_SHARE, LARGE_BLOCK_SHARE, BLOCK_STEPS = 0.3, 0.5, 300
"""Of the time, or of the steps, what building blocks may take at most; steps at each of their first intervals."""
INSERTION_SHARE, CLOSE = 0.3, 1.15
"""Of the time, or of the steps, what manners of insertion may take at most; and of the best period, what the one to
begin with may have for this to pay."""
LEADING = 1.03
"""Of the best period, what that of the template or of insertion may be for a second search from there to pay."""
ALONE_SHARE = 0.08
"""What either may take of a smaller single pipeline with one chunk per worker, where annealing gains more."""
ON_SHARE, ON_UP_TO = 0.85, 30_000
"""Of the time that is left then for a large problem with one chunk per worker, what the more promising one of template
and insertion gets; and the operations up to which that pays, as refinement gains more beyond."""
STEPS_OF_ORDER = 50
"""Steps that making an order counts for."""
BLOCK_ORDERS = 3
"""Orders of blocks and waves that are kept."""
WAVE_SHARE, WHOLE_WAVE_SHARE = 0.7, 0.35
"""Of the time, or of the steps, of blocks, what waves get where workers host several chunks; and those of all pipelines
of what is left after the template."""
WAVE_SECONDS = 1e-5
"""Seconds per operation that must be left for waves of all pipelines to be tried: some orders' worth."""


def search_from(
    beginning: Beginning,
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    processes: int = 1,
    progress: Progress | None = None,
) -> tuple[Incumbent, Beginning]:
    """The best order found, never worse than the best of the beginning, and where a further search goes on.

    Arguments as in `walks.search`. Of a beginning that has been searched before, blocks and waves are not made again,
    and insertion goes on only where it leads.
    """
    problem, orders, templates = beginning.problem, beginning.orders, list(beginning.templates)
    spent = 0
    if is_met(problem, orders[0].period, bound):
        return orders[0], beginning
    is_alone = problem.shape.pipelines == problem.shape.chunks == 1 and problem.size <= LARGE
    goes_on = steps is None and LARGE < problem.size < ON_UP_TO and problem.shape.chunks == 1
    of_template: _Tried | None = None
    of_insertion = None
    near, close = (LEADING, LEADING) if beginning.is_searched else (NEAR, CLOSE)
    inserted = beginning.inserted
    closest = [one for one in beginning.templates if one.unfolded.period <= near * orders[0].period][:MOST_TEMPLATES]
    if closest:
        share = LARGE_TEMPLATE_SHARE if problem.size > LARGE and not goes_on else TEMPLATE_SHARE
        most = None if steps is None else int(steps * share)
        tried = _search_templates(problem, closest, bound, most, seed, deadline.part(share), processes)
        spent = sum(one.found.steps for one in tried)
        of_template = tried[-1]
        latest = {one.before.assignment: one.template for one in tried}
        templates = [latest.get(one.assignment, one) for one in templates]
        templates.sort(key=lambda one: one.unfolded.period)
        orders = sorted([*(one.template.unfolded for one in tried), *orders], key=lambda order: order.period)
        if progress:
            progress("searching", orders[0].period)
    elif problem.shape.pipelines == 1 and not (problem.dead or beginning.is_searched):
        share = ALONE_SHARE if is_alone else LARGE_BLOCK_SHARE if problem.size > LARGE else BLOCK_SHARE
        most = None if steps is None else int(steps * share)
        blocks, spent = _blocks(problem, bound, most, seed, deadline.part(share))
        orders = sorted([*orders, *blocks], key=lambda order: order.period)
    is_many = problem.shape.pipelines > 1 and problem.shape.chunks > 1 and not beginning.is_searched
    if is_many and deadline.left > WAVE_SECONDS * problem.size and not is_met(problem, orders[0].period, bound):
        most = None if steps is None else max(1, int(steps * WHOLE_WAVE_SHARE) // STEPS_OF_ORDER)
        wave, took = _wave(problem, bound, most, seed, deadline.part(WHOLE_WAVE_SHARE))
        spent += took
        orders = sorted([wave, *orders], key=lambda order: order.period)
        if progress:
            progress("searching", orders[0].period)
    if inserted is not None and inserted[0].period <= close * orders[0].period:
        share = ALONE_SHARE if is_alone else INSERTION_SHARE
        most = SEARCH_STEPS if steps is None else max(1, int(steps * share) // STEPS_OF_ORDER)
        mine = deadline if steps is not None else deadline.part(share)
        first, manner = inserted
        varied, manner = vary_insertion(problem, first, manner, bound, steps=most, seed=seed, deadline=mine)
        spent += varied.steps
        of_insertion = varied, manner, _promise(first.period, varied.period)
        inserted = replace(varied, steps=0), manner
        orders = sorted([varied, *orders], key=lambda order: order.period)
    if goes_on and not is_met(problem, orders[0].period, bound):
        mine = deadline.part(ON_SHARE)
        if of_template is not None and (of_insertion is None or of_template.promise < of_insertion[-1]):
            template = of_template.template
            begun = template.beginning.orders
            policy = template.beginning.policy
            one = template.beginning.problem
            least = max(bound, closed_form(one))
            found = search(one, begun, policy, least, steps=None, seed=seed + 1, deadline=mine, processes=processes)
            more = template.unfold(problem, found, deadline.part(UNFOLD_SHARE))
            spent += found.steps
            orders = sorted([more, *orders], key=lambda order: order.period)
        elif of_insertion is not None:
            varied, manner, _ = of_insertion
            first = replace(varied, steps=0)
            more, _ = vary_insertion(problem, first, manner, bound, steps=SEARCH_STEPS, seed=seed + 1, deadline=mine)
            spent += more.steps
            orders = sorted([more, *orders], key=lambda order: order.period)
    found = search(
        problem,
        [replace(order, steps=0) for order in orders],
        beginning.policy,
        bound,
        steps=None if steps is None else max(1, steps - spent),
        seed=seed,
        deadline=deadline,
        processes=processes,
        progress=progress,
    )
    kept = sorted([replace(found, steps=0), *orders], key=lambda order: order.period)[:MOST_ORDERS]
    searched = replace(beginning, orders=kept, templates=tuple(templates), inserted=inserted, is_searched=True)
    return replace(found, steps=spent + found.steps), searched


class _Tried(NamedTuple):
    """One search of a template: the template before and after it, and what it found."""

    before: Template
    template: Template
    found: Incumbent

    @property
    def promise(self) -> float:
        return _promise(self.before.unfolded.period, self.template.unfolded.period)


def _search_templates(
    problem: Problem,
    templates: list[Template],
    bound: float,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    processes: int,
) -> list[_Tried]:
    """Searches of templates: of each for a short time where there are several, and then of the best.

    Args:
        steps: moves of all searches together, in place of the deadline.
    """
    tried: list[_Tried] = []
    least = LEAST_HEAT + HEAT_SECONDS * templates[0].beginning.problem.size
    is_short = steps is None and TEMPLATE_HEAT * deadline.left < least
    heats = 0 if is_short or len(templates) == 1 else len(templates)
    for turn in range(heats + 1):
        if turn and is_met(problem, min(one.unfolded.period for one in templates), bound):
            break
        is_heat = turn < heats
        one = templates[turn] if is_heat or is_short else min(templates, key=_hope)
        share = TEMPLATE_HEAT if is_heat else 1 - heats * TEMPLATE_HEAT
        its = one.beginning
        found, its_searched = search_from(
            its,
            max(bound, closed_form(its.problem)),
            steps=None if steps is None else int(steps * share),
            seed=seed + (turn > 0 and not is_heat),
            deadline=deadline.part(share / (1 - turn * TEMPLATE_HEAT)) if is_heat else deadline,
            processes=processes,
        )
        after = one
        if found.period < its.best.period:
            unfolded = one.unfold(problem, found, deadline.part(UNFOLD_SHARE))
            better = min(one.unfolded, unfolded, key=lambda order: order.period)
            after = replace(one, beginning=its_searched, unfolded=better)
        templates = [after if other is one else other for other in templates]
        tried.append(_Tried(one, after, found))
    return tried


def _hope(template: Template) -> float:
    """The period that further search of a template may come to, as far as its own bound lets it."""
    least = closed_form(template.beginning.problem)
    return template.unfolded.period - HOPE * (template.unfolded.period - least)


def _wave(problem: Problem, bound: float, orders: int | None, seed: int, deadline: Deadline) -> tuple[Incumbent, int]:
    """(the best order of waves, the steps spent).

    Args:
        orders: to make, in place of the deadline.
    """
    hosts = [assignment.host for assignment in possible_assignments(problem)]
    best, count = best_wave(problem, hosts, bound, seed=seed, orders=orders, deadline=deadline)
    return best, count * STEPS_OF_ORDER


def _promise(before: float, after: float) -> float:
    """The period that a search that got so far may come to in the same time again."""
    return after - (before - after) / 2


def _blocks(
    problem: Problem, bound: float, most: int | None, seed: int, deadline: Deadline
) -> tuple[list[Incumbent], int]:
    """(the best orders of blocks, and of waves where workers host several chunks; the steps spent).

    Args:
        most: steps in place of the deadline.
    """
    found: dict[float, Incumbent] = {}
    spent = 0
    if problem.shape.chunks > 1:
        orders = None if most is None else max(1, int(most * WAVE_SHARE) // STEPS_OF_ORDER)
        wave, spent = _wave(problem, bound, orders, seed, deadline.part(WAVE_SHARE))
        found[wave.period] = wave
    pace = Pace(deadline)
    for order, _, took in block_orders(problem, steps=BLOCK_STEPS, seed=seed):
        spent += took
        if order is not None:
            period = time_order(problem, order).period
            found.setdefault(period, Incumbent(order, period))
        is_spent = pace.is_over() if most is None else spent >= most
        if is_spent or is_met(problem, min(found, default=inf), bound):
            break
    return [found[period] for period in sorted(found)[:BLOCK_ORDERS]], spent
