"""Search from a beginning: the template first, as a step there costs a part of one on the whole, then the whole.

The search of a single pipeline begins with building blocks and waves beside what the beginning holds; that of any
problem on which insertion does well, with other manners of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from recycle.solve.bounds import closed_form
from recycle.solve.effort import Effort, Incumbent, by_period
from recycle.solve.problem import Problem
from recycle.solve.search.building_blocks import block_incumbents
from recycle.solve.search.initial_orders import MOST_ORDERS, Beginning, Template
from recycle.solve.search.insertion import vary_insertion
from recycle.solve.search.walks import search
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
BLOCK_ORDERS = 3
"""Orders of blocks and waves that are kept."""
WAVE_SHARE, WHOLE_WAVE_SHARE = 0.7, 0.35
"""Of the time, or of the steps, of blocks, what waves get where workers host several chunks; and those of all pipelines
of what is left after the template."""
WAVE_SECONDS = 1e-5
"""Seconds per operation that must be left for waves of all pipelines to be tried: some orders' worth."""


def search_from(beginning: Beginning, effort: Effort) -> tuple[Incumbent, Beginning]:
    """The best order found, never worse than the best of the beginning, and where a further search goes on.

    Of a beginning that has been searched before, blocks and waves are not made again, and insertion goes on only where
    it leads.
    """
    problem, orders, inserted = beginning.problem, beginning.orders, beginning.inserted
    if effort.is_met(problem, orders[0].period):
        return orders[0], beginning
    is_alone = problem.shape.pipelines == problem.shape.chunks == 1 and problem.size <= LARGE
    goes_on = effort.steps is None and LARGE < problem.size < ON_UP_TO and problem.shape.chunks == 1
    near, close = (LEADING, LEADING) if beginning.is_searched else (NEAR, CLOSE)
    closest = [one for one in beginning.templates if one.unfolded.period <= near * orders[0].period][:MOST_TEMPLATES]
    templates, of_template, of_insertion = beginning.templates, None, None
    if closest:
        share = LARGE_TEMPLATE_SHARE if problem.size > LARGE and not goes_on else TEMPLATE_SHARE
        tried = _search_templates(problem, closest, effort.part(share))
        of_template = tried[-1]
        latest = {one.before.assignment: one.template for one in tried}
        replaced = (latest.get(one.assignment, one) for one in templates)
        templates = tuple(sorted(replaced, key=lambda one: one.unfolded.period))
        orders = by_period([*(one.template.unfolded for one in tried), *orders])
    elif problem.shape.pipelines == 1 and not (problem.dead or beginning.is_searched):
        share = ALONE_SHARE if is_alone else LARGE_BLOCK_SHARE if problem.size > LARGE else BLOCK_SHARE
        orders = by_period([*orders, *_blocks(problem, effort.part(share))])
    effort.report("searching", orders[0].period)
    is_many = problem.shape.pipelines > 1 and problem.shape.chunks > 1 and not beginning.is_searched
    is_time_left = effort.deadline.left > WAVE_SECONDS * problem.size
    if is_many and is_time_left and not effort.is_met(problem, orders[0].period):
        orders = by_period([best_wave(problem, effort.part(WHOLE_WAVE_SHARE)), *orders])
        effort.report("searching", orders[0].period)
    if inserted is not None and inserted[0].period <= close * orders[0].period:
        before = inserted[0].period
        inserted = vary_insertion(problem, *inserted, effort.part(ALONE_SHARE if is_alone else INSERTION_SHARE))
        of_insertion = _promise(before, inserted[0].period)
        orders = by_period([inserted[0], *orders])
    if goes_on and not effort.is_met(problem, orders[0].period):
        more = effort.part(ON_SHARE, seed=effort.seed + 1)
        if of_template is not None and (of_insertion is None or of_template.promise < of_insertion):
            template = of_template.template
            begun = template.beginning
            own = _of_template(more, template)
            found = search(begun.problem, begun.orders, begun.policy, own)
            unfolded = template.unfold(problem, found, effort.deadline.part(UNFOLD_SHARE))
            orders = by_period([unfolded, *orders])
        elif inserted is not None and of_insertion is not None:
            orders = by_period([vary_insertion(problem, *inserted, more)[0], *orders])
    found = search(problem, orders, beginning.policy, effort.rest())
    kept = by_period([found, *orders])[:MOST_ORDERS]
    searched = replace(beginning, orders=kept, templates=templates, inserted=inserted, is_searched=True)
    return found, searched


class _Tried(NamedTuple):
    """A template before and after a search."""

    before: Template
    template: Template

    @property
    def promise(self) -> float:
        return _promise(self.before.unfolded.period, self.template.unfolded.period)


def _search_templates(problem: Problem, closest: Sequence[Template], effort: Effort) -> list[_Tried]:
    """Searches of templates: of each for a short time where there are several, and then of the best."""
    templates, tried = list(closest), list[_Tried]()
    least = LEAST_HEAT + HEAT_SECONDS * templates[0].beginning.problem.size
    is_short = effort.steps is None and TEMPLATE_HEAT * effort.deadline.left < least
    heats = 0 if is_short or len(templates) == 1 else len(templates)
    for turn in range(heats + 1):
        if turn and effort.is_met(problem, min(one.unfolded.period for one in templates)):
            break
        is_heat = turn < heats
        one = templates[turn] if is_heat or is_short else min(templates, key=_hope)
        share = TEMPLATE_HEAT if is_heat else 1 - heats * TEMPLATE_HEAT
        part = effort.part(share, 1 - turn * TEMPLATE_HEAT, seed=effort.seed + (turn > 0 and not is_heat))
        found, searched = search_from(one.beginning, _of_template(part, one))
        after = one
        if found.period < one.beginning.best.period:
            unfolded = one.unfold(problem, found, effort.deadline.part(UNFOLD_SHARE))
            after = replace(one, beginning=searched, unfolded=by_period([one.unfolded, unfolded])[0])
        templates = [after if other is one else other for other in templates]
        tried.append(_Tried(one, after))
    return tried


def _of_template(effort: Effort, template: Template) -> Effort:
    """The effort of a search of the template itself, whose period is not one of the whole."""
    return replace(effort, bound=max(effort.bound, closed_form(template.beginning.problem)), progress=None)


def _hope(template: Template) -> float:
    """The period that further search of a template may come to, as far as its own bound lets it."""
    least = closed_form(template.beginning.problem)
    return template.unfolded.period - HOPE * (template.unfolded.period - least)


def _promise(before: float, after: float) -> float:
    """The period that a search that got so far may come to in the same time again."""
    return after - (before - after) / 2


def _blocks(problem: Problem, effort: Effort) -> list[Incumbent]:
    """The best orders of blocks, of several periods, and of waves where workers host several chunks."""
    found: dict[float, Incumbent] = {}
    if problem.shape.chunks > 1:
        wave = best_wave(problem, effort.part(WAVE_SHARE))
        found[wave.period] = wave
    for one in block_incumbents(problem, effort, steps=BLOCK_STEPS):
        found.setdefault(one.period, one)
    return [found[period] for period in sorted(found)[:BLOCK_ORDERS]]
