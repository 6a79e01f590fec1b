"""Where a search begins: the best order of the policy portfolio and, where peers are alike, the template's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from recycle.solve.assignment import Deal, deals
from recycle.solve.deadline import Deadline, Pace
from recycle.solve.incumbent import Incumbent, Progress, is_met
from recycle.solve.problem import Problem
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import Policy, portfolio, schedule_by_policy
from recycle.solve.search.timing import time_order
from recycle.solve.template import copied_to_all, one_pipeline

TEMPLATE_SHARE, PORTFOLIO_SHARE = 0.3, 0.5
"""Of the time that is left, what each may take at most."""
ALL_POLICIES = 1 << 30
OF_EACH_DEAL = 4
"""Policies tried with each deal before the rest is tried with the best of them."""


@dataclass(frozen=True)
class Template:
    """Where the search for the order of one pipeline begins, and the deal by whose slots all pipelines follow it."""

    beginning: Beginning
    deal: Deal


@dataclass(frozen=True)
class Beginning:
    """Where the search for an order of a problem begins.

    Attributes:
        problem: the one to be searched.
        orders: one at least, the best first.
        policy: the one that did best on this problem.
        template: of this problem, where its peers are alike and some are dead.
    """

    problem: Problem
    orders: list[Incumbent]
    policy: Policy
    template: Template | None = None

    @property
    def best(self) -> Incumbent:
        return self.orders[0]

    def copied(self, found: Incumbent) -> Incumbent:
        """An order of the template's problem as one of this problem. There must be a template."""
        assert self.template is not None
        template = self.template.beginning.problem
        order = copied_to_all(self.problem, self.template.deal, template, found.order)
        return Incumbent(order, time_order(self.problem, order).period, found.steps)


def initial_orders(
    problem: Problem, bound: float, deadline: Deadline, most: int = ALL_POLICIES, progress: Progress | None = None
) -> Beginning:
    """Orders to begin with, one at least, and the policy that did best on the whole problem.

    Args:
        bound: a proven lower bound; an order that meets it ends the search.
        most: policies to try.
    """
    dealt = deals(problem)
    if not problem.dead or dealt[0].slot is None:
        order, policy = best_of_portfolio(problem, bound, deadline.part(PORTFOLIO_SHARE), most, progress, dealt)
        return Beginning(problem, [order], policy)
    one = one_pipeline(problem, dealt[0].slots)
    order, policy = best_of_portfolio(one, 0.0, deadline.part(TEMPLATE_SHARE), most)
    template = Template(Beginning(one, [order], policy), dealt[0])
    first = replace(policy, deal=dealt[0])
    found = Beginning(problem, [], first, template)
    copied = found.copied(order)
    if progress:
        progress("constructing", copied.period)
    if is_met(problem, copied.period, bound):
        return replace(found, orders=[copied])
    order, policy = best_of_portfolio(problem, bound, deadline.part(PORTFOLIO_SHARE), most, progress, dealt, [first])
    return replace(found, orders=sorted([copied, order], key=lambda one: one.period), policy=policy)


def best_of_portfolio(
    problem: Problem,
    bound: float,
    deadline: Deadline,
    most: int = ALL_POLICIES,
    progress: Progress | None = None,
    dealt: Sequence[Deal] | None = None,
    first: Sequence[Policy] = (),
) -> tuple[Incumbent, Policy]:
    """The best of the policy portfolio; stops at the bound, at the deadline (one policy at least) or after `most`.

    Args:
        dealt: a few policies are tried with each of these deals, all others with the best; `deals` when left out.
        first: policies to try before.
    """
    dealt = dealt or deals(problem)
    best: Incumbent | None = None
    chosen: Policy | None = None
    portfolios = [portfolio(problem, deal) for deal in dealt]

    def policies() -> Iterator[Policy]:
        yield from chain(first, *zip(*(islice(one, OF_EACH_DEAL) for one in portfolios), strict=True))
        yield from portfolios[dealt.index(chosen.deal) if chosen else 0]

    load_if_worth_it(problem, 100, deadline)
    pace = Pace(deadline)
    for count, policy in enumerate(policies()):
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
    assert chosen is not None
    return best, chosen
