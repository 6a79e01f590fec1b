"""Where a search begins: the best orders of the policy portfolio, templates, insertion and the schedule families.

Templates differ in how many pipelines run a micro-batch in each slot: as many as the poorest stage has live workers, or
as many as a richer one has, which pays where memory and not work limits the iteration. Where peers are not alike, the
workers of a template are as slow as the slowest of their rank, or have its mean pace.

A worker that holds up its peers more than it helps them is best left without work. Leaving it out as if it were dead
makes the others alike, so that slots and the template apply, and every order of what is left is one of the whole
problem, with the same period. Which workers are best left out is not known beforehand: all that are slower than the
median of their peers, and each of them alone, are begun beside the whole problem. What has the best order is searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from statistics import median_low

from recycle.solve.assignment import Assignment, by_slots, possible_assignments
from recycle.solve.effort import Deadline, Effort, Incumbent, Pace, by_period
from recycle.solve.problem import Order, Problem
from recycle.solve.search.family_orders import family_orders, greedy_1f1b
from recycle.solve.search.insertion import Manner, insertion_orders
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import Policy, portfolio, schedule_by_policy
from recycle.solve.search.timing import timed
from recycle.solve.template import one_pipeline, unfold

TEMPLATE_SHARE, PORTFOLIO_SHARE = 0.15, 0.2
"""Of the time that is left, what each may take at most."""
SIMPLE_SHARE = 0.25
"""Of the time that is left, what greedy 1F1B, insertion and the families may take where workers host several chunks: a
search of waves gains more then."""
MOST_TEMPLATES = 4
"""Templates that are begun at most."""
MOST_ORDERS = 4
"""Orders with which a search begins at most."""
ALL_POLICIES = 1 << 30
BESIDE_TEMPLATE, BESIDE_OPERATIONS = 60, 600_000
"""Policies tried on the whole problem where all of them have been tried on its template, and operations that these may
schedule together where the problem is so small that more policies fit."""
OPERATION_SECONDS, TOO_LATE = 1e-5, 4.0
"""What a policy takes on the whole problem per operation; it is left out where that is so many times the time left and
a template's order is there."""
INSERTION_UP_TO = 200_000
"""Operations up to which orders are made by insertion."""
OF_EACH_DEAL = 4
"""Policies tried with each assignment before the rest is tried with the best of them."""
BEGINNING_SHARE, NO_SLOW_SHARE, LESS_SHARE = 0.25, 0.3, 0.1
"""Of the time that is left, what beginning with the whole problem, without all slow workers, and without each may take.
"""
MOST_LEFT_OUT = 4
"""Slow workers that are left out alone, the slowest first."""


@dataclass(frozen=True)
class Template:
    """Where the search for the order of one pipeline begins, and the assignment by whose slots all pipelines follow it.

    Attributes:
        beginning: of the search of one pipeline.
        assignment: by slots.
        unfolded: the best order of the beginning as one of the whole problem.
    """

    beginning: Beginning
    assignment: Assignment
    unfolded: Incumbent

    @classmethod
    def of(cls, problem: Problem, running: int, is_mean: bool, effort: Effort, most: int) -> Template:
        """The template with so many pipelines running in each slot, with workers of the mean pace or as the slowest."""
        assignment = by_slots(problem, running)
        beginning = initial_orders(one_pipeline(problem, assignment.slots, running, is_mean), effort, most)
        order = beginning.best.order
        return cls(beginning, assignment, unfold(problem, assignment, beginning.problem, order, effort.deadline, most))

    def unfold(self, problem: Problem, found: Incumbent, deadline: Deadline) -> Incumbent:
        """An order of the template as one of the problem whose template it is."""
        return unfold(problem, self.assignment, self.beginning.problem, found.order, deadline)


@dataclass(frozen=True)
class Beginning:
    """Where the search for an order of a problem begins.

    Attributes:
        problem: the one to be searched.
        orders: one at least, the best first.
        policy: the one that did best on this problem.
        template: the best one of this problem, where some workers are dead or slow.
        inserted: the best order by insertion and its manner; None where none was made.
    """

    problem: Problem
    orders: list[Incumbent]
    policy: Policy
    template: Template | None = None
    inserted: tuple[Incumbent, Manner] | None = None

    @property
    def best(self) -> Incumbent:
        return self.orders[0]


def initial_orders(problem: Problem, effort: Effort, most: int = ALL_POLICIES) -> Beginning:
    """Orders to begin with, one at least, and the policy that did best on the whole problem.

    Args:
        most: policies to try.
    """
    deadline = effort.deadline
    assignments = possible_assignments(problem)
    copied: list[Incumbent] = []
    first: list[Policy] = []
    templates: list[Template] = []
    if problem.dead or not problem.peers_are_alike or problem.may_spread:
        paces = (False,) if problem.peers_are_alike else (True, False)
        for running, is_mean in islice(product(_running(problem), paces), most):
            part = effort.part(TEMPLATE_SHARE, bound=0.0, progress=None)
            templates.append(Template.of(problem, running, is_mean, part, most))
            effort.report("constructing", templates[-1].unfolded.period)
            if effort.is_met(problem, templates[-1].unfolded.period):
                break
        templates.sort(key=lambda one: one.unfolded.period)
        copied = [one.unfolded for one in templates]
        first = [replace(templates[0].beginning.policy, assignment=assignment) for assignment in assignments]
        most = min(most, max(BESIDE_TEMPLATE, BESIDE_OPERATIONS // problem.size))
        is_late = OPERATION_SECONDS * problem.size > TOO_LATE * max(0.0, deadline.left)
        if is_late or effort.is_met(problem, copied[0].period):
            return Beginning(problem, copied, first[0], templates[0])
    order, policy = best_of_portfolio(problem, effort.part(PORTFOLIO_SHARE), most, assignments, first)
    found, inserted = [*copied, order], None
    pace = Pace(deadline.part(SIMPLE_SHARE) if problem.shape.chunks > 1 else deadline)
    ways: list[Iterator[tuple[Order, Manner | None]]] = [
        ((greedy_1f1b(problem, assignment), None) for assignment in assignments),
        insertion_orders(problem, assignments) if problem.size <= INSERTION_UP_TO else iter(()),
        ((one, None) for one in family_orders(problem)),
    ]
    simple = chain.from_iterable(islice(way, most) for way in ways)
    while not (pace.is_over() or effort.is_met(problem, min(one.period for one in found))):
        made, manner = next(simple, (None, None))
        if made is None:
            break
        found.append(timed(problem, made))
        if manner is not None and (inserted is None or found[-1].period < inserted[0].period):
            inserted = found[-1], manner
    template = templates[0] if templates else None
    return Beginning(problem, by_period(found)[:MOST_ORDERS], policy, template, inserted)


def _running(problem: Problem) -> list[int]:
    """The numbers of live workers that stages have, the least first; not all of them where they are many."""
    counts = sorted({len(hosts) for hosts in problem.hosts})
    step = max(1.0, (len(counts) - 1) / (MOST_TEMPLATES - 1))
    return [counts[round(place * step)] for place in range(min(len(counts), MOST_TEMPLATES))]


def best_of_portfolio(
    problem: Problem,
    effort: Effort,
    most: int = ALL_POLICIES,
    assignments: Sequence[Assignment] | None = None,
    first: Sequence[Policy] = (),
) -> tuple[Incumbent, Policy]:
    """The best of the policy portfolio; stops at the bound, at the deadline (one policy at least) or after `most`.

    Args:
        assignments: a few policies are tried with each of these, all others with the best; `possible_assignments` when
            left out.
        first: policies to try before.
    """
    assignments = assignments or possible_assignments(problem)
    best: Incumbent | None = None
    chosen: Policy | None = None
    portfolios = [portfolio(problem, assignment) for assignment in assignments]

    def policies() -> Iterator[Policy]:
        yield from chain(first, *zip(*(islice(one, OF_EACH_DEAL) for one in portfolios), strict=True))
        yield from portfolios[assignments.index(chosen.assignment) if chosen else 0]

    load_if_worth_it(problem, 100, effort.deadline, is_search=False)
    pace = Pace(effort.deadline)
    for count, policy in enumerate(policies()):
        is_late = pace.is_over()
        if best is not None and (is_late or count >= most or effort.is_met(problem, best.period)):
            break
        found = timed(problem, schedule_by_policy(problem, policy))
        if best is None or found.period < best.period:
            best, chosen = found, policy
            effort.report("constructing", best.period)
    assert best is not None
    assert chosen is not None
    return best, chosen


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
