"""Where a search begins: the best of the policy portfolio and, where peers are alike, the template's order."""

from __future__ import annotations

from recycle.solve.construct import Policy, construct, default_policy, portfolio
from recycle.solve.deadline import Deadline
from recycle.solve.deal import deal
from recycle.solve.found import Found, Progress, is_met, worth_compiling
from recycle.solve.problem import Problem
from recycle.solve.template import one_pipeline, spread
from recycle.solve.timing import time_order

TEMPLATE_SHARE, PORTFOLIO_SHARE = 0.3, 0.5
"""Of the time that is left, what each may take at most."""


def starts(
    problem: Problem, bound: float, deadline: Deadline, most: int = 1 << 30, progress: Progress | None = None
) -> tuple[list[Found], Policy]:
    """Orders to begin with, one at least, the best first; and the policy that did best on the whole problem.

    Args:
        bound: a proven lower bound; an order that meets it ends the search.
        most: policies to try.
    """
    found: list[Found] = []
    if problem.dead and problem.peers_are_alike and problem.shape.chunks == 1:
        found.append(_copied(problem, deadline.part(TEMPLATE_SHARE), most))
        if progress:
            progress("constructing", found[0].period)
        if is_met(problem, found[0].period, bound):
            return found, default_policy(problem)
    order, policy = first(problem, bound, deadline.part(PORTFOLIO_SHARE), most, progress)
    return sorted([*found, order], key=lambda one: one.period), policy


def _copied(problem: Problem, deadline: Deadline, most: int) -> Found:
    dealt = deal(problem)
    template = one_pipeline(problem, dealt.slots)
    order = spread(problem, dealt, template, first(template, 0.0, deadline, most)[0].order)
    return Found(order, time_order(problem, order, worth_compiling(problem, 1, deadline)).period)


def first(
    problem: Problem, bound: float, deadline: Deadline, most: int = 1 << 30, progress: Progress | None = None
) -> tuple[Found, Policy]:
    """The best of the policy portfolio; stops at the bound, at the deadline (one policy at least) or after `most`."""
    best: Found | None = None
    chosen = default_policy(problem)
    often = worth_compiling(problem, 100, deadline)
    for count, policy in enumerate(portfolio(problem)):
        if best is not None and (deadline.is_over or count >= most or is_met(problem, best.period, bound)):
            break
        order = construct(problem, policy, often=often)
        period = time_order(problem, order, often).period
        if best is None or period < best.period:
            best, chosen = Found(order, period), policy
            if progress:
                progress("constructing", period)
    assert best is not None
    return best, chosen
