"""Initial orders of a search: policies, templates, insertion and schedule families.

Templates differ in the number of pipelines that run a micro-batch in each slot. A slow worker may hold up its peers
more than it helps, so the search first starts without all workers slower than the median of their peers, and without
each of these. A schedule family fits a problem if all workers are alive, chunk c of rank r is on stage c * P + r, and
memory suffices. In a split problem a whole B is an I directly followed by its W.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from operator import attrgetter
from statistics import median_low

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.families import BUILT_IN, FAMILIES, TWO_CHUNKS, memory_capped
from recycle.ir.instruction import BackwardInput, BackwardWeight
from recycle.ir.kinds import is_kind
from recycle.ir.schedule import Schedule
from recycle.solve.assignment import Assignment, assign_by_slots, possible_assignments
from recycle.solve.bounds import even_load
from recycle.solve.constants import (
    FIRST_ORDERS,
    FIRST_SECONDS,
    FIRST_WAVES,
    INSERTION_UP_TO,
    MOST_LEFT_OUT,
    MOST_TEMPLATES,
    MOVED_RATIO,
    MOVED_UP_TO,
    MOVED_WEIGHTS,
    MUCH_WORK,
    OPERATION_SECONDS,
    OPERATIONS_AFTER_TEMPLATE,
    POLICIES_PER_ASSIGNMENT,
    PORTFOLIO_SHARE,
    SIMPLE_SHARE,
    TEMPLATE_SHARE,
    TOO_LATE,
    UNFOLD_RATIO,
    VEE_SHARE,
)
from recycle.solve.effort import Effort, Incumbent, Pace, shortest
from recycle.solve.problem import TOLERANCE, Order, Problem, programs_of
from recycle.solve.search.insertion import InsertionParameters, insertion_orders
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import (
    Policy,
    default_policy,
    move_weights,
    portfolio,
    schedule_by_policy,
)
from recycle.solve.search.order_kernels import evaluate
from recycle.solve.search.waves import wave_orders
from recycle.solve.template import template_problem, unfold

ALL_POLICIES = 1 << 30


Templates = tuple[tuple[Incumbent, Assignment, "SearchStart"], ...]
"""(unfolded order, assignment, start on the template), shortest first; none if all workers are alive and alike."""


@dataclass(frozen=True)
class SearchStart:
    """Start of a search: a problem and its best order.

    Attributes:
        policy: the best policy on this problem.
        inserted: the best order by insertion and its parameters; None without insertion.
    """

    problem: Problem
    best: Incumbent
    policy: Policy
    inserted: tuple[Incumbent, InsertionParameters] | None = None
    templates: Templates = ()


def find_starts(problem: Problem, effort: Effort, most: int = ALL_POLICIES) -> list[SearchStart]:
    """Return starts without the slow workers, without each of them and with all; best first.

    Without a deadline each problem gets `most` policies. Otherwise a single one gets them: the problem without all slow
    workers, or if these do much of the work, the best after one policy each. The others get the default policy, that
    with all workers first if time is short. Problems whose work is longer than the best period are left out. Of equal
    plans the one with more workers is better, because only the times of a worker that works show that it is no longer
    slow.
    """
    problems = [problem, *_without_slow(problem)]
    if len(problems) == 1:
        return [find_initial_order(problem, effort, most)]
    without, by_work = problems[1], sorted(problems, key=even_load)
    pace, seconds, order_seconds = Pace(effort.deadline), effort.deadline.seconds_left, OPERATION_SECONDS * problem.size
    is_late, is_short = FIRST_ORDERS * order_seconds > seconds, order_seconds * len(problems) < FIRST_SECONDS
    starts: dict[Problem, SearchStart] = {}
    period = attrgetter("best.period")

    def turns() -> Iterator[tuple[Problem, int]]:
        first = without
        if is_late:
            yield problem, 0
        elif seconds < inf and even_load(without) > MUCH_WORK * even_load(problem):
            yield from ((each, 1) for each in dict.fromkeys((without, *by_work)))
            first = min(starts.values(), key=period).problem
        yield first, most
        made = {first, problem} if is_late else {first}
        yield from ((each, most if seconds == inf else 0) for each in by_work if each not in made)

    for each, policies in turns():
        best = min(map(period, starts.values()), default=inf)
        is_over = len(starts) > is_late and pace.is_over() and (policies or not is_short)
        if starts and (is_over or effort.is_met(problem, best)):
            break
        if even_load(each) < best - TOLERANCE:
            start = find_initial_order(each, effort.part(1.0), policies) if policies else _default_start(each)
            starts[each] = min(starts.get(each, start), start, key=period)
    return sorted(starts.values(), key=lambda start: (round(period(start) / TOLERANCE), len(start.problem.dead)))


def _default_start(problem: Problem) -> SearchStart:
    policy = default_policy(problem)
    return SearchStart(problem, evaluate(problem, schedule_by_policy(problem, policy)), policy)


def _without_slow(problem: Problem) -> list[Problem]:
    if not problem.reroute:
        return []
    ranks = problem.hosts[: problem.shape.ranks]
    slow = [w for hosts in ranks for w in hosts if problem.speed[w] > median_low([problem.speed[v] for v in hosts])]
    slow.sort(key=lambda w: (-problem.speed[w], w))
    left_out = [slow, *([w] for w in slow[:MOST_LEFT_OUT] if len(slow) > 1)] if slow else []
    return [replace(problem, dead=problem.dead | {problem.shape.worker_at(w) for w in out}) for out in left_out]


def find_initial_order(problem: Problem, effort: Effort, most: int = ALL_POLICIES) -> SearchStart:
    """Return the best initial order of a problem, and the best of `most` policies on the whole problem."""
    deadline = effort.deadline
    assignments = possible_assignments(problem)
    orders: list[Incumbent] = []
    first: list[Policy] = []
    templates: Templates = ()
    if problem.dead or not problem.peers_are_alike:
        by_slots = assignments[0 if problem.peers_are_alike else -1]
        templates = _unfolded_templates(problem, effort, most, by_slots)
        unfolded, _, begun = templates[0]
        orders, first = [unfolded], [replace(begun.policy, assignment=assignment) for assignment in assignments]
        most = min(most, OPERATIONS_AFTER_TEMPLATE // problem.size)
        is_late = OPERATION_SECONDS * problem.size > TOO_LATE * max(0.0, deadline.seconds_left)
        if is_late or effort.is_met(problem, unfolded.period):
            return SearchStart(problem, unfolded, first[0], templates=templates)
    is_vee = problem.shape.placement == "v" and not problem.dead
    pace = Pace(deadline.part(VEE_SHARE))
    for incumbent in islice(family_incumbents(problem), most) if is_vee else ():
        orders.append(incumbent)
        if pace.is_over() or effort.is_met(problem, incumbent.period):
            break
    policies = min(most, POLICIES_PER_ASSIGNMENT) if is_vee else most
    order, policy = _best_of_portfolio(problem, effort.part(PORTFOLIO_SHARE), policies, assignments, first)
    orders.append(order)
    pace = Pace(deadline.part(SIMPLE_SHARE) if problem.shape.chunks > 1 else deadline)
    is_inserted = problem.size <= INSERTION_UP_TO and (not is_vee or may_exchange(problem))
    waves = () if is_vee or templates or problem.shape.chunks == 1 else wave_orders(problem, [assignments[0].host])
    simple: Iterator[tuple[Incumbent, InsertionParameters | None]] = chain(
        ((incumbent, None) for incumbent in islice(waves, min(most, FIRST_WAVES))),
        (
            (evaluate(problem, order), by)
            for order, by in islice(insertion_orders(problem, assignments), most * is_inserted)
        ),
        ((incumbent, None) for incumbent in islice(family_incumbents(problem), most * (not is_vee))),
    )
    best = shortest(orders)
    inserted: tuple[Incumbent, InsertionParameters] | None = None
    while not (pace.is_over() or effort.is_met(problem, best.period)) and (generated := next(simple, None)):
        incumbent, parameters = generated
        best = shortest([best, incumbent])
        if parameters is not None and (inserted is None or incumbent.period < inserted[0].period):
            inserted = incumbent, parameters
    for moved in orders_with_moved_weights(problem, best.order) if problem.size <= MOVED_UP_TO else ():
        best = shortest([best, evaluate(problem, moved)])
    return SearchStart(problem, best, policy, inserted, templates)


def may_exchange(problem: Problem) -> bool:
    """Return whether pipelines may gain by running second chunks of each other on the V: at a limit of 3 somewhere.

    A rank holds both chunks of a micro-batch while it holds the second one. With three places a pipeline alone leaves
    one empty, and two such places of peers hold a further micro-batch. At a limit of 5 no gain was found.
    """
    shape, is_odd = problem.shape, any(3 <= cap < 4 for cap in problem.cap)
    return shape.placement == "v" and shape.pipelines > 1 and problem.reroute and is_odd


def _unfolded_templates(problem: Problem, effort: Effort, most: int, by_slots: Assignment) -> Templates:
    templates = list[tuple[Incumbent, Assignment, SearchStart]]()
    pace, best = Pace(effort.deadline), inf
    for running in _running(problem)[:most]:
        if templates and pace.is_over():
            break
        part = effort.part(TEMPLATE_SHARE, bound=0.0, progress=None)
        assignment = assign_by_slots(problem, running) if templates else by_slots
        begun = find_initial_order(template_problem(problem, assignment.slots, running), part, most)
        if begun.best.period < UNFOLD_RATIO * best:
            unfolded = unfold(problem, assignment, begun.problem, begun.best.order, part.deadline, most)
            templates.append((unfolded, assignment, begun))
            best = min(best, unfolded.period)
            effort.report("constructing", best)
    return tuple(sorted(templates, key=lambda template: template[0].period))


def _running(problem: Problem) -> list[int]:
    counts = sorted({len(hosts) for hosts in problem.hosts})
    return [counts[place] for place in np.linspace(0, len(counts) - 1, min(len(counts), MOST_TEMPLATES), dtype=int)]


def _best_of_portfolio(
    problem: Problem, effort: Effort, most: int, assignments: Sequence[Assignment], first: Sequence[Policy]
) -> tuple[Incumbent, Policy]:
    best: Incumbent | None = None
    chosen: Policy | None = None
    portfolios = [portfolio(problem, assignment) for assignment in assignments]

    def policies() -> Iterator[Policy]:
        yield from chain(
            first, *zip(*(islice(policies_of, POLICIES_PER_ASSIGNMENT) for policies_of in portfolios), strict=True)
        )
        yield from portfolios[assignments.index(chosen.assignment) if chosen else 0]

    pace = Pace(effort.deadline)
    for count, policy in enumerate(policies()):
        is_late = pace.is_over()
        if best is not None and (is_late or count >= most or effort.is_met(problem, best.period)):
            break
        if count == POLICIES_PER_ASSIGNMENT:  # the first policies never wait for compiled kernels
            load_if_worth_it(problem, 100, effort.deadline, is_search=False)
        candidate = evaluate(problem, schedule_by_policy(problem, policy))
        if best is None or candidate.period < best.period:
            best, chosen = candidate, policy
            effort.report("constructing", best.period)
    assert best
    assert chosen
    return best, chosen


def family_incumbents(problem: Problem) -> Iterator[Incumbent]:
    """Yield the orders of all schedule families that fit, the best also with moved W; none if a worker is dead."""
    best = inf
    for schedule in () if problem.dead else _families(problem):
        order = order_from_schedule(problem, schedule)
        if order and problem.is_within_caps(order):
            yield (incumbent := evaluate(problem, order))
            best = min(best, incumbent.period)
            if incumbent.period < MOVED_RATIO * best:
                yield from (evaluate(problem, moved) for moved in orders_with_moved_weights(problem, order))


def orders_with_moved_weights(problem: Problem, order: Order) -> Iterator[Order]:
    """Yield the order with its W in other waits, if the backward pass is split."""
    for idleness in MOVED_WEIGHTS if problem.split else ():
        moved = move_weights(problem, order, idleness)
        if moved:
            yield moved


def _families(problem: Problem) -> Iterator[Schedule]:
    shape = problem.shape
    is_vee = shape.placement == "v"
    if is_vee:
        times = (sum(problem.forward), sum(problem.backward), sum(problem.weight))
        cap = min(*problem.cap, shape.chunks * shape.micro_batches)
        yield from memory_capped.under_cap(shape, int(cap), times)
    for name in BUILT_IN:
        if (name in TWO_CHUNKS) == is_vee:
            with contextlib.suppress(ScheduleError):
                yield FAMILIES[name](shape)


def order_from_schedule(problem: Problem, schedule: Schedule) -> Order | None:
    """Convert a compute-only schedule into an order; None if only the schedule splits the backward pass."""
    if not problem.split and is_kind(schedule.columns.kind, (BackwardInput, BackwardWeight)).any():
        return None
    operations, _, worker = problem.operations_in(schedule)
    return programs_of(operations, worker, problem.shape.worker_count)
