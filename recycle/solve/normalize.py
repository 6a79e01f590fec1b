"""Failure normalization: map any set of dead workers to a vector with a good plan.

If peers are alike, only the vector (k_0 ... k_{P-1}) of a set of dead workers matters, and a live worker may change its
stage (`plans/roles.py`), so every vector with the same number of dead workers is reachable. A threshold on the bounds
of `StageBounds` gives the maximum number of dead workers per stage; a dynamic program over the stages (state: dead
workers used) finds the cheapest vector within. The list scheduler plans several candidates. The best has the least
period plus copy seconds per iteration until the next change, then the fewest moves and affected stages. Limits: the
list scheduler's periods are a few per cent above a search's, so close decisions may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans import Move, Vector, arrange, dead_roles, failure_vector, moves_needed, touched
from recycle.solve.bounds import closed_form
from recycle.solve.effort import Effort
from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.search.initial_orders import find_initial_order

POLICIES, OPERATIONS = 4, 50_000
"""Minimum number of policies per candidate, and operations of all candidates up to which more are tried."""
FRONTIER = 3
"""Number of candidates with the best bounds, and with the fewest moves, that are planned."""
_LEAN = 1e-6
_FIRST = float(1 << 20)
"""Weight of the first of two costs; larger than the number of dead workers of any vector."""


class Normalization(NamedTuple):
    """Result of normalizing a set of dead workers.

    Attributes:
        vector: dead workers of each rank after all moves.
        vacant: positions without a worker after all moves.
        moves: workers that change stage; empty if moving does not pay.
        seconds: time until all copies are made, in the profile's unit of time.
        period: period of the list scheduler for the vector.
    """

    vector: Vector
    vacant: frozenset[Worker]
    moves: tuple[Move, ...]
    seconds: float
    period: float


class StageBounds:
    """Lower bound on the period with k dead workers in one rank, for every rank and k.

    If workers are alike, the bound of a vector is the maximum over its ranks. Rows end before the first bound over
    `above`.
    """

    def __init__(self, job: PricedJob, failures: int, above: float = float("inf")) -> None:
        whole = Problem.from_job(job)
        base = float(closed_form(whole))
        self.rows: list[list[float]] = []
        for rank in range(job.shape.ranks):
            row = [base]
            for k in range(1, min(failures, job.shape.pipelines - 1) + 1):
                dead = frozenset(Worker(p, rank) for p in range(job.shape.pipelines - k, job.shape.pipelines))
                bound = float(closed_form(replace(whole, dead=dead)))
                if bound > above + TOLERANCE:
                    break
                row.append(max(row[-1], bound))
            self.rows.append(row)

    def bound_of(self, vector: Sequence[int]) -> float:
        return max(row[k] for row, k in zip(self.rows, vector, strict=True))

    def room(self, period: float) -> list[int]:
        """Return the maximum number of dead workers per rank with a bound of at most `period`."""
        return [sum(bound <= period + TOLERANCE for bound in row) - 1 for row in self.rows]

    def thresholds(self, failures: int) -> list[float]:
        """Return the bounds that allow at least `failures` dead workers, ascending."""
        values = sorted({bound for row in self.rows for bound in row})
        return [value for value in values if sum(self.room(value)) >= failures]


def cheapest(room: Sequence[int], failures: int, cost: Callable[[int, int], float]) -> Vector | None:
    """Return the vector of `failures` dead workers within `room` with the least sum of costs; None if none fits."""
    best: dict[int, tuple[float, Vector]] = {0: (0.0, ())}
    for rank, most in enumerate(room):
        reached: dict[int, tuple[float, Vector]] = {}
        for used, (spent, vector) in best.items():
            for dead in range(min(most, failures - used) + 1):
                total = spent + cost(rank, dead)
                if used + dead not in reached or total < reached[used + dead][0]:
                    reached[used + dead] = (total, (*vector, dead))
        best = reached
    return best[failures][1] if failures in best else None


def normal_vectors(bounds: StageBounds, failures: int) -> list[Vector]:
    """Return the vectors of least bound: the most even one, and the one with the fewest affected stages."""
    thresholds = bounds.thresholds(failures)
    if not thresholds:
        return []
    room = bounds.room(thresholds[0])
    costs = [
        _leaning(lambda rank, dead: float(dead * dead), _LEAN),
        _leaning(lambda rank, dead: _FIRST * (dead > 0) + dead * dead, _LEAN),
    ]
    vectors = [cheapest(room, failures, cost) for cost in costs]
    return list(dict.fromkeys(vector for vector in vectors if vector is not None))


def normalize(job: PricedJob, failed: Iterable[Worker]) -> Normalization:
    """Return the vector to plan for after `failed`, and the moves that lead to it.

    No worker moves without `[planner] move`, or if peers differ in speed or links.

    Raises:
        PlanError: a stage has no live worker, re-routing is off, or a cap is too small.
    """
    failed = frozenset(failed)
    present, profile = failure_vector(job.shape, failed), job.prices
    problem, bound = _bounded(job, present)
    best = Normalization(present, failed, (), 0.0, _period(problem, bound))
    if not failed or not job.planner.move or not profile.are_peers_alike:
        return best
    candidates = []
    for vector in _candidates(job, present, bound):
        candidate, its_bound = _bounded(job, vector)
        if its_bound <= bound + TOLERANCE:
            arrangement = arrange(job.shape, failed, vector, profile)
            spread = arrangement.seconds / job.planner.iterations_between_changes
            order = (its_bound + spread, len(arrangement.moves), touched(vector), vector)
            candidates.append((order, spread, arrangement, candidate, its_bound))
    score = best.period
    for (least, *_, vector), spread, (vacant, moves, seconds), candidate, its_bound in sorted(
        candidates, key=lambda candidate_order: candidate_order[0]
    ):
        if least < score - TOLERANCE:
            period = _period(candidate, its_bound)
            if period + spread < score - TOLERANCE:
                best, score = Normalization(vector, vacant, moves, seconds, period), period + spread
    return best


def _bounded(job: PricedJob, vector: Vector) -> tuple[Problem, float]:
    problem = Problem.from_job(job, dead_roles(job.shape, vector))
    return problem, closed_form(problem)


def _period(problem: Problem, bound: float) -> float:
    return find_initial_order(problem, Effort(bound), max(POLICIES, OPERATIONS // problem.size)).best.period


def _candidates(job: PricedJob, present: Vector, bound: float) -> list[Vector]:
    failures = sum(present)
    bounds = StageBounds(job, failures, bound)
    least_moves: dict[int, list[int]] = {}
    for threshold in bounds.thresholds(failures):
        room = bounds.room(threshold)
        least_moves.setdefault(moves_needed(present, room), room)
    rooms = list(least_moves.values())

    def moves_first(rank: int, dead: int) -> float:
        return _FIRST * max(0, present[rank] - dead) + (dead > 0)

    def touched_first(rank: int, dead: int) -> float:
        return _FIRST * (dead > 0) + max(0, present[rank] - dead)

    costs = [
        _leaning(cost, lean) for cost in (moves_first, touched_first) for lean in (_LEAN, -_LEAN)
    ]  # towards early stages, then towards late stages
    wanted = dict.fromkeys(tuple(room) for room in rooms[:FRONTIER] + rooms[-FRONTIER:])
    vectors = [cheapest(room, failures, cost) for room in wanted for cost in costs]
    return [vector for vector in dict.fromkeys(vectors) if vector is not None and vector != present]


def _leaning(cost: Callable[[int, int], float], lean: float) -> Callable[[int, int], float]:
    return lambda rank, dead: cost(rank, dead) + lean * rank * dead
