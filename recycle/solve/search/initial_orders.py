"""Where a search begins: the best orders of the policy portfolio, templates, insertion and the schedule families.

Templates differ in how many pipelines run a micro-batch in each slot: as many as the poorest stage has live workers, or
as many as a richer one has, which pays where memory and not work limits the iteration.

A worker that holds up its peers more than it helps them is best left without work. Leaving it out as if it were dead
makes the others alike, so that slots and the template apply, and every order of what is left is one of the whole
problem, with the same period. Which workers are best left out is not known beforehand: all that are slower than the
median of their peers, and each of them alone, are begun beside the whole problem. What has the best order is searched.

A schedule family fits a problem where all workers are alive and chunk c of rank r is on stage c * P + r, where its
memory is admitted, and where it does not split the backward pass although the problem keeps it whole. Where the problem
splits it, a whole B is an I that its W follows at once; its gradient leaves earlier then, so that nothing gets later.
Greedy 1F1B is made by the list scheduler, so it fits any dead workers and any assignment. A search that begins with
these orders never ends with a worse one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import median_low

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.families import BUILT_IN, FAMILIES, TWO_CHUNKS
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward
from recycle.ir.schedule import Schedule
from recycle.solve.assignment import Assignment, by_slots, possible_assignments
from recycle.solve.effort import Effort, Incumbent, Pace, by_period
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import FORWARD, INPUT, WEIGHT
from recycle.solve.search.insertion import Manner, insertion_orders
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import (
    Policy,
    portfolio,
    schedule_by_policy,
    schedule_by_priority,
    warm_up,
)
from recycle.solve.search.order_kernels import timed
from recycle.solve.template import one_pipeline, unfold

TEMPLATE_SHARE, PORTFOLIO_SHARE = 0.15, 0.2
"""Of the time that is left, what each may take at most."""
SIMPLE_SHARE = 0.25
"""Of the time that is left, what greedy 1F1B, insertion and the families may take where workers host several chunks: a
search of waves gains more then."""
MOST_TEMPLATES = 4
"""Templates that are begun at most."""
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
class Beginning:
    """Where the search for an order of a problem begins.

    Attributes:
        problem: the one to be searched.
        best: the best order.
        policy: the one that did best on this problem.
        inserted: the best order by insertion and its manner; None where none was made.
    """

    problem: Problem
    best: Incumbent
    policy: Policy
    inserted: tuple[Incumbent, Manner] | None = None


def begin_all(problem: Problem, effort: Effort, most: int = ALL_POLICIES) -> Beginning:
    """The best beginning with the problem and with it less slow workers.

    Args:
        most: policies to try with each.
    """
    smaller = _without_slow(problem)
    best = initial_orders(problem, effort.part(BEGINNING_SHARE if smaller else 1.0), most)
    pace = Pace(effort.deadline)
    for turn, one in enumerate(smaller):
        if pace.is_over() or effort.is_met(problem, best.best.period):
            break
        begun = initial_orders(one, effort.part(LESS_SHARE if turn else NO_SLOW_SHARE), most)
        best = min(best, begun, key=lambda one: one.best.period)
    return best


def _without_slow(problem: Problem) -> list[Problem]:
    """The problem without all slow workers, then without each; empty where none is slow or nothing is re-routed."""
    if problem.peers_are_alike or not problem.reroute:
        return []
    ranks = problem.hosts[: problem.shape.ranks]
    slow = [w for hosts in ranks for w in hosts if problem.speed[w] > median_low([problem.speed[v] for v in hosts])]
    slow.sort(key=lambda w: (-problem.speed[w], w))
    left_out = [slow, *([w] for w in slow[:MOST_LEFT_OUT] if len(slow) > 1)] if slow else []
    return [replace(problem, dead=problem.dead | {problem.shape.worker_at(w) for w in out}) for out in left_out]


def initial_orders(problem: Problem, effort: Effort, most: int = ALL_POLICIES) -> Beginning:
    """The best of a few orders, one at least, and the policy that did best on the whole problem.

    Args:
        most: policies to try.
    """
    deadline = effort.deadline
    assignments = possible_assignments(problem)
    found: list[Incumbent] = []
    first: list[Policy] = []
    if problem.dead or not problem.peers_are_alike:
        unfolded, policy = _best_template(problem, effort, most)
        found, first = [unfolded], [replace(policy, assignment=assignment) for assignment in assignments]
        most = min(most, max(BESIDE_TEMPLATE, BESIDE_OPERATIONS // problem.size))
        is_late = OPERATION_SECONDS * problem.size > TOO_LATE * max(0.0, deadline.left)
        if is_late or effort.is_met(problem, unfolded.period):
            return Beginning(problem, unfolded, first[0])
    order, policy = _best_of_portfolio(problem, effort.part(PORTFOLIO_SHARE), most, assignments, first)
    found.append(order)
    pace = Pace(deadline.part(SIMPLE_SHARE) if problem.shape.chunks > 1 else deadline)
    ways: list[Iterator[tuple[Order, Manner | None]]] = [
        ((greedy_1f1b(problem, assignment), None) for assignment in assignments),
        insertion_orders(problem, assignments) if problem.size <= INSERTION_UP_TO else iter(()),
        ((one, None) for one in family_orders(problem)),
    ]
    simple = chain.from_iterable(islice(way, most) for way in ways)
    best = by_period(found)[0]
    inserted: tuple[Incumbent, Manner] | None = None
    while not (pace.is_over() or effort.is_met(problem, best.period)) and (made := next(simple, None)) is not None:
        one, manner = timed(problem, made[0]), made[1]
        best = by_period([best, one])[0]
        if manner is not None and (inserted is None or one.period < inserted[0].period):
            inserted = one, manner
    return Beginning(problem, best, policy, inserted)


def _best_template(problem: Problem, effort: Effort, most: int) -> tuple[Incumbent, Policy]:
    """(the best order that a template gives, the policy that did best on that template)."""
    best: tuple[Incumbent, Policy] | None = None
    for running in _running(problem)[:most]:
        part = effort.part(TEMPLATE_SHARE, bound=0.0, progress=None)
        assignment = by_slots(problem, running)
        template = one_pipeline(problem, assignment.slots, running)
        begun = initial_orders(template, part, most)
        unfolded = unfold(problem, assignment, template, begun.best.order, part.deadline, most)
        if best is None or unfolded.period < best[0].period:
            best = unfolded, begun.policy
            effort.report("constructing", unfolded.period)
        if effort.is_met(problem, unfolded.period):
            break
    assert best is not None
    return best


def _running(problem: Problem) -> list[int]:
    """The numbers of live workers that stages have, the least first; not all of them where they are many."""
    counts = sorted({len(hosts) for hosts in problem.hosts})
    step = max(1.0, (len(counts) - 1) / (MOST_TEMPLATES - 1))
    return [counts[round(place * step)] for place in range(min(len(counts), MOST_TEMPLATES))]


def _best_of_portfolio(
    problem: Problem, effort: Effort, most: int, assignments: Sequence[Assignment], first: Sequence[Policy]
) -> tuple[Incumbent, Policy]:
    """The best of the policies in `first` and the portfolio: a few with each assignment, all others with the best."""
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


def family_orders(problem: Problem) -> Iterator[Order]:
    """The orders of all families of the package that fit; none where workers are dead."""
    for name in BUILT_IN:
        if problem.dead or name in TWO_CHUNKS:  # those are on the V
            continue
        try:
            order = order_of(problem, FAMILIES[name](problem.shape))
        except ScheduleError:
            continue
        if order is not None and problem.is_within_caps(order):
            yield order


def order_of(problem: Problem, schedule: Schedule) -> Order | None:
    """A compute-only schedule of the problem's shape and placement as an order; None where only that one is split."""
    c = schedule.columns
    operation = c.stage * problem.micro_batches + c.pipeline * problem.shape.micro_batches + c.index
    operation = operation.astype(np.int64)
    plane = problem.shape.stages * problem.micro_batches
    worker = np.asarray(c.worker, dtype=np.int64)
    kinds = {Forward.kind: (FORWARD,), Backward.kind: (INPUT, WEIGHT) if problem.split else (INPUT,)}
    if problem.split:
        kinds |= {BackwardInput.kind: (INPUT,), BackwardWeight.kind: (WEIGHT,)}
    if not np.isin(c.kind, list(kinds)).all():
        return None
    place, stands_for = [], []
    for kind, codes in kinds.items():
        rows = np.flatnonzero(c.kind == kind)
        for code in codes:
            place.append(2 * rows + (code == 2))
            stands_for.append(operation[rows] + code * plane)
    line = np.argsort(np.concatenate(place), kind="stable")
    operations = np.concatenate(stands_for)[line]
    ends = np.cumsum(np.bincount(worker[np.concatenate(place)[line] // 2], minlength=problem.shape.worker_count))
    return [program.tolist() for program in np.split(operations, ends[:-1])]


def greedy_1f1b(problem: Problem, assignment: Assignment) -> Order:
    """Greedy 1F1B on the live workers: a backward pass whenever one is there, its W at once, and no more micro-batches
    in flight than 1F1B (with chunks: interleaved 1F1B) has before its first backward."""
    n, m, stages = problem.micro_batches, problem.shape.micro_batches, problem.shape.stages
    turn = np.tile(np.arange(n) % m * problem.shape.pipelines + np.arange(n) // m, stages)
    priority = np.concatenate([turn + 2 * n, turn + n, turn][: problem.kinds])
    return schedule_by_priority(problem, assignment.host, priority.astype(np.float64), hold=warm_up(problem))
