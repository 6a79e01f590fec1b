"""Where a search begins: the best order of the policy portfolio and, where peers are alike, the template's order."""

from __future__ import annotations

from recycle.solve.assignment import assign
from recycle.solve.deadline import Deadline, Pace
from recycle.solve.incumbent import Incumbent, Progress, is_met
from recycle.solve.problem import Problem
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import Policy, default_policy, portfolio, schedule_by_policy
from recycle.solve.search.timing import time_order
from recycle.solve.template import copied_to_all, one_pipeline

TEMPLATE_SHARE, PORTFOLIO_SHARE = 0.3, 0.5
"""Of the time that is left, what each may take at most."""
ALL_POLICIES = 1 << 30


def initial_orders(
    problem: Problem, bound: float, deadline: Deadline, most: int = ALL_POLICIES, progress: Progress | None = None
) -> tuple[list[Incumbent], Policy]:
    """Orders to begin with, one at least, the best first; and the policy that did best on the whole problem.

    Args:
        bound: a proven lower bound; an order that meets it ends the search.
        most: policies to try.
    """
    found: list[Incumbent] = []
    if problem.dead and problem.peers_are_alike and problem.shape.chunks == 1:
        found.append(_from_template(problem, deadline.part(TEMPLATE_SHARE), most))
        if progress:
            progress("constructing", found[0].period)
        if is_met(problem, found[0].period, bound):
            return found, default_policy(problem)
    order, policy = best_of_portfolio(problem, bound, deadline.part(PORTFOLIO_SHARE), most, progress)
    return sorted([*found, order], key=lambda one: one.period), policy


def _from_template(problem: Problem, deadline: Deadline, most: int) -> Incumbent:
    assignment = assign(problem)
    template = one_pipeline(problem, assignment.slots)
    best, _ = best_of_portfolio(template, 0.0, deadline, most)
    order = copied_to_all(problem, assignment, template, best.order)
    return Incumbent(order, time_order(problem, order).period)


def best_of_portfolio(
    problem: Problem, bound: float, deadline: Deadline, most: int = ALL_POLICIES, progress: Progress | None = None
) -> tuple[Incumbent, Policy]:
    """The best of the policy portfolio; stops at the bound, at the deadline (one policy at least) or after `most`."""
    best: Incumbent | None = None
    chosen = default_policy(problem)
    load_if_worth_it(problem, 100, deadline)
    pace = Pace(deadline)
    for count, policy in enumerate(portfolio(problem)):
        is_late = pace.is_over()
        if best is not None and (is_late or count >= most or is_met(problem, best.period, bound)):
            break
        order = schedule_by_policy(problem, policy)
        period = time_order(problem, order).period
        if best is None or period < best.period:
            best, chosen = Incumbent(order, period), policy
            if progress:
                progress("constructing", period)
    assert best is not None
    return best, chosen
