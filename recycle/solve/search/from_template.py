"""Search from a beginning: the template first, as a step there costs a part of one on the whole, then the whole."""

from __future__ import annotations

from dataclasses import replace

from recycle.solve.bounds import closed_form
from recycle.solve.deadline import Deadline
from recycle.solve.incumbent import Incumbent, Progress, is_met
from recycle.solve.search.initial_orders import Beginning
from recycle.solve.search.walks import search

TEMPLATE_SHARE = 0.4
"""Of the time, or of the steps, what the search of the template may take at most."""


def search_from(
    beginning: Beginning,
    bound: float,
    *,
    steps: int | None,
    seed: int,
    deadline: Deadline,
    processes: int = 1,
    progress: Progress | None = None,
) -> Incumbent:
    """The best order found; never worse than the best of the beginning. Arguments as in `walks.search`."""
    problem, orders, template = beginning.problem, beginning.orders, beginning.template
    spent = 0
    if template is not None and not is_met(problem, orders[0].period, bound):
        one = template.beginning
        found = search(
            one.problem,
            one.orders,
            one.policy,
            max(bound, closed_form(one.problem)),
            steps=None if steps is None else int(steps * TEMPLATE_SHARE),
            seed=seed,
            deadline=deadline.part(TEMPLATE_SHARE),
            processes=processes,
        )
        spent = found.steps
        if found.period < one.best.period:
            orders = sorted([beginning.copied(found), *orders], key=lambda order: order.period)
            if progress:
                progress("searching", orders[0].period)
    found = search(
        problem,
        orders,
        beginning.policy,
        bound,
        steps=None if steps is None else max(1, steps - spent),
        seed=seed,
        deadline=deadline,
        processes=processes,
        progress=progress,
    )
    return replace(found, steps=spent + found.steps)
