"""Search from a beginning: the template first, as a step there costs a part of one on the whole, then the whole.

Where workers host several chunks waves are tried before single operations; where insertion does well, other manners of
it.
"""

from __future__ import annotations

from recycle.solve.bounds import closed_form
from recycle.solve.effort import Effort, Incumbent, by_period
from recycle.solve.search.initial_orders import Beginning
from recycle.solve.search.insertion import vary_insertion
from recycle.solve.search.walks import search
from recycle.solve.search.waves import best_wave

LARGE = 10_000
"""Operations from which a search of the whole problem gains less than one of its template."""
TEMPLATE_SHARE, LARGE_TEMPLATE_SHARE, NEAR = 0.4, 0.65, 1.2
"""Of the time, or of the steps, what the search of the template may take at most; and of the best period, what the
template's may be for a search to pay."""
UNFOLD_SHARE = 0.1
"""Of the time that is left then, what unfolding its order may take."""
INSERTION_SHARE, CLOSE = 0.3, 1.15
"""Of the time, or of the steps, what manners of insertion may take at most; and of the best period, what the one to
begin with may have for this to pay."""
ALONE_SHARE = 0.08
"""What either may take of a smaller single pipeline with one chunk per worker, where annealing gains more."""
WAVE_SHARE = 0.35
"""Of the time, or of the steps, that is left after the template, what waves get where workers host several chunks."""
WAVE_SECONDS = 1e-5
"""Seconds per operation that must be left for waves of all pipelines to be tried: some orders' worth."""


def search_from(beginning: Beginning, effort: Effort) -> Incumbent:
    """The best order found, never worse than the best of the beginning."""
    problem, orders, template = beginning.problem, beginning.orders, beginning.template
    if effort.is_met(problem, orders[0].period):
        return orders[0]
    is_large, shape = problem.size > LARGE, problem.shape
    is_alone = shape.pipelines == shape.chunks == 1 and not is_large
    if template is not None and template.unfolded.period <= NEAR * orders[0].period:
        begun = template.beginning
        bound = max(effort.bound, closed_form(begun.problem))
        share = LARGE_TEMPLATE_SHARE if is_large else TEMPLATE_SHARE
        found = search_from(begun, effort.part(share, bound=bound, progress=None))
        if found.period < begun.best.period:
            orders = by_period([template.unfold(problem, found, effort.deadline.part(UNFOLD_SHARE)), *orders])
    effort.report("searching", orders[0].period)
    is_time_left = effort.deadline.left > WAVE_SECONDS * problem.size
    if shape.chunks > 1 and is_time_left and not effort.is_met(problem, orders[0].period):
        orders = by_period([best_wave(problem, effort.part(WAVE_SHARE)), *orders])
        effort.report("searching", orders[0].period)
    inserted = beginning.inserted
    if inserted is not None and inserted[0].period <= CLOSE * orders[0].period:
        part = effort.part(ALONE_SHARE if is_alone else INSERTION_SHARE)
        orders = by_period([vary_insertion(problem, *inserted, part), *orders])
    return search(problem, orders, beginning.policy, effort.rest())
