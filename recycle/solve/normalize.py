"""Failure normalization: from any set of dead workers to a vector whose plan is worth having.

Peers are alike, so a set of dead workers is its vector (k_0 ... k_{P-1}): same vector, same plan, nothing copied.
Beyond that a live worker may change stage (`plans/roles.py`). Every vector with the same number of dead is within reach
then, and the most-hit stage rules the period, through ceil(D m / (D - k)) and the round trip of early stages.

`StageBounds` holds a lower bound on the period for every stage and number of dead. A threshold on the period then says
how many dead each stage may have; below it a dynamic program over the stages (state: dead used so far) finds the
vector that costs least. Even is not always best: where the ceilings agree, each stage that is touched disturbs the
schedule. So candidates are planned by the list scheduler, and the best counts: its period, plus the seconds of copying
spread over the iterations until the next change. Ties go to fewest moves, then fewest touched stages; without
a gain no worker moves.
Limits: the list scheduler's periods are a few per cent above what a search finds, so that a close call may fall
either way; vectors with a worse bound than staying put are never taken.
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
from recycle.solve.search.initial_orders import initial_orders

POLICIES, OPERATIONS = 4, 50_000
"""Of the portfolio, how many at least for each candidate; more while they are within so many operations in all."""
FRONTIER = 3
"""Candidates with the best bounds, and with the fewest moves, that are planned."""
_LEAN = 1e-6
_FIRST = float(1 << 20)
"""Weight of the first of two costs; no vector has as many dead workers."""


class Normalized(NamedTuple):
    """What becomes of a set of dead workers.

    Attributes:
        vector: dead workers of each rank once all moves are made.
        vacant: positions without a worker then; a set with that vector.
        moves: the workers that change stage; empty where that does not pay.
        seconds: until all copies are made, in the profile's unit of time.
        period: that the list scheduler reaches with the vector.
    """

    vector: Vector
    vacant: frozenset[Worker]
    moves: tuple[Move, ...]
    seconds: float
    period: float


class StageBounds:
    """Lower bound on the period with k workers of one rank dead and all others alive, for every rank and k.

    The bound of a vector is the largest over its ranks, where all workers are alike: each term of `closed_form` looks
    at the hosts of one stage.

    Args:
        above: rows end before the first k whose bound exceeds it.
    """

    def __init__(self, job: PricedJob, failures: int, above: float = float("inf")) -> None:
        whole = Problem.of(job)
        base = closed_form(whole)
        self.rows: list[list[float]] = []
        for rank in range(job.shape.ranks):
            row = [base]
            for k in range(1, min(failures, job.shape.pipelines - 1) + 1):
                dead = frozenset(Worker(p, rank) for p in range(job.shape.pipelines - k, job.shape.pipelines))
                bound = closed_form(replace(whole, dead=dead))
                if bound > above + TOLERANCE:
                    break
                row.append(max(row[-1], bound))
            self.rows.append(row)

    def of(self, vector: Sequence[int]) -> float:
        """The largest of a vector's bounds."""
        return max(row[k] for row, k in zip(self.rows, vector, strict=True))

    def room(self, period: float) -> list[int]:
        """How many dead each rank may have without a bound above `period`."""
        return [sum(bound <= period + TOLERANCE for bound in row) - 1 for row in self.rows]

    def thresholds(self, failures: int) -> list[float]:
        """The bounds within which so many dead find room, ascending."""
        values = sorted({bound for row in self.rows for bound in row})
        return [value for value in values if sum(self.room(value)) >= failures]


def cheapest(room: Sequence[int], failures: int, cost: Callable[[int, int], float]) -> Vector | None:
    """The vector with so many dead, within `room`, whose sum of `cost(rank, dead)` is least; None when none fits."""
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
    """The vectors worth planning for a number of dead when any of them can be reached: of the least bound, the one
    with fewest touched stages and the most even one. Empty when the stages cannot bear so many."""
    thresholds = bounds.thresholds(failures)
    if not thresholds:
        return []
    room = bounds.room(thresholds[0])
    costs = [
        _leaning(lambda rank, dead: float(dead * dead), _LEAN),
        _leaning(lambda rank, dead: _FIRST * (dead > 0) + dead * dead, _LEAN),
    ]
    found = [cheapest(room, failures, cost) for cost in costs]
    return list(dict.fromkeys(vector for vector in found if vector is not None))


def normalize(job: PricedJob, failed: Iterable[Worker]) -> Normalized:
    """The vector to plan for when `failed` are dead, and the moves that lead there.

    Without `[planner] move`, or where peers differ in speed or links, no worker moves.

    Raises:
        PlanError: a stage has no live worker, re-routing is off, or a cap is too small.
    """
    failed = frozenset(failed)
    here, profile = failure_vector(job.shape, failed), job.prices
    problem, bound = _bounded(job, here)
    best = Normalized(here, failed, (), 0.0, _period(problem, bound))
    if not failed or not job.planner.move or not profile.are_peers_alike:
        return best
    candidates = []
    for vector in _candidates(job, here, bound):
        candidate, its_bound = _bounded(job, vector)
        if its_bound <= bound + TOLERANCE:
            arrangement = arrange(job.shape, failed, vector, profile)
            spread = arrangement.seconds / job.planner.iterations_between_changes
            order = (its_bound + spread, len(arrangement.moves), touched(vector), vector)
            candidates.append((order, spread, arrangement, candidate, its_bound))
    score = best.period
    for (least, *_, vector), spread, (vacant, moves, seconds), candidate, its_bound in sorted(
        candidates, key=lambda one: one[0]
    ):
        if least < score - TOLERANCE:
            period = _period(candidate, its_bound)
            if period + spread < score - TOLERANCE:
                best, score = Normalized(vector, vacant, moves, seconds, period), period + spread
    return best


def _bounded(job: PricedJob, vector: Vector) -> tuple[Problem, float]:
    problem = Problem.of(job, dead_roles(job.shape, vector))
    return problem, closed_form(problem)


def _period(problem: Problem, bound: float) -> float:
    """What the list scheduler reaches; a fixed number of policies, so that no clock decides about moves."""
    return initial_orders(problem, Effort(bound), max(POLICIES, OPERATIONS // problem.size)).best.period


def _candidates(job: PricedJob, here: Vector, bound: float) -> list[Vector]:
    """Vectors with as many dead and no worse bound: those with the best bounds, and those with the fewest moves."""
    failures = sum(here)
    bounds = StageBounds(job, failures, bound)
    least_moves: dict[int, list[int]] = {}
    for threshold in bounds.thresholds(failures):
        room = bounds.room(threshold)
        least_moves.setdefault(moves_needed(here, room), room)
    rooms = list(least_moves.values())

    def moves_first(rank: int, dead: int) -> float:
        return _FIRST * max(0, here[rank] - dead) + (dead > 0)

    def touched_first(rank: int, dead: int) -> float:
        return _FIRST * (dead > 0) + max(0, here[rank] - dead)

    costs = [
        _leaning(cost, lean) for cost in (moves_first, touched_first) for lean in (_LEAN, -_LEAN)
    ]  # towards early stages, towards late ones
    wanted = dict.fromkeys(tuple(room) for room in rooms[:FRONTIER] + rooms[-FRONTIER:])
    found = [cheapest(room, failures, cost) for room in wanted for cost in costs]
    return [vector for vector in dict.fromkeys(found) if vector is not None and vector != here]


def _leaning(cost: Callable[[int, int], float], lean: float) -> Callable[[int, int], float]:
    return lambda rank, dead: cost(rank, dead) + lean * rank * dead
