"""Lower bound from a linear program: an iteration as a fluid through a few stages and back.

For some hosts of a stage, `done(kind, t)` is the number of operations of a kind processed by time t, including parts of
running ones. Every schedule gives such functions, for any assignment and order, and they satisfy

    rate       the sum over the kinds and chunks of a host of time * (done(t') - done(t)) is at most hosts * (t' - t)
    order      next(t) <= done(t - gap - min(time, next's time)) for a dependency that ends `gap` earlier
    memory     forwards(t) <= slots + (1 - stash) * inputs(t - min(F, I)) + stash * weights(t - min(F, W)): the rule
               started F - freed <= slots, averaged over the shortest F before t; chunks of a host share its slots
    sharing    of n equal hosts one gets at least ceil(units / n), a unit being a micro-batch in a chunk
    heads      done(t) = 0 until a micro-batch can arrive from the first of the chosen stages
    tails      all operations are done when their successors must begin to end in time

Between the chosen stages a micro-batch travels on the fastest hosts. Time 0 is the first start at the first of them
(with the barrier: at stage 0). If no such fluid completes all units by T - update_seconds, the period exceeds T.

On a grid, a function is replaced by its value at the next grid point, and lags are rounded down; both only weaken the
rows. A grid that is fine in warm-up and drain comes first, then for few stages a grid aligned to the lags. A solver
proposes multipliers; the proof is weak duality, so the solver's tolerances and limits cannot make a bound wrong.

Limits: omits the windows of the other ranks with the staggered optimizer, and transfers that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil, floor, inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.solve.bounds.bound import Bound, rounded_down
from recycle.solve.constants import (
    FINE_COLUMNS,
    GRID_POINTS,
    GRID_STEPS,
    LARGER_TAKES,
    LEAST_POINTS,
    MOST_ITERATIONS,
    MOST_PROGRAMS,
    NEAR_ENOUGH,
    WIDEST_STEP,
)
from recycle.solve.effort import Deadline, Pace
from recycle.solve.linear import solver_of
from recycle.solve.problem import TOLERANCE, Problem
from recycle.solve.problem_arrays import Floats

Integers = npt.NDArray[np.int64]


def rising_bounds(
    problem: Problem, bound: Bound, chains: Iterable[tuple[int, ...]], deadline: Deadline | None = None
) -> Iterator[Bound]:
    """Yield `bound`, then the bounds raised by the fluid through each chain of stages, on each grid.

    Args:
        chains: stages as in `FluidRelaxation`; with the barrier only chains from stage 0 count.
        deadline: no linear program is begun that would end after it.
    """
    yield bound
    pace = Pace(deadline or Deadline(None))
    chains = [stages for stages in chains if problem.staggered or stages[0] == 0]
    columns = {  # per grid point
        stages: problem.kinds * sum(len(crew.stages) for crew in _crews(problem, stages)) for stages in chains
    }
    latest = inf
    for stages in chains:
        bound = _raise_bound(problem, bound, stages, None, pace, LARGER_TAKES if columns[stages] > latest else 1.0)
        latest = columns[stages]
        yield bound
    for stages in chains if not is_exact(problem, bound) else ():
        points = FINE_COLUMNS // columns[stages]
        if points >= LEAST_POINTS:
            bound = _raise_bound(problem, bound, stages, points, pace, LARGER_TAKES)
            yield bound


def _raise_bound(
    problem: Problem, bound: Bound, stages: tuple[int, ...], points: int | None, pace: Pace, longer: float
) -> Bound:
    whole, n = problem.is_integral, problem.micro_batches
    step = max(1.0, floor(problem.unit / 8)) if whole else problem.unit / 8
    infeasible = -1 if whole else 0
    feasible: int | None = None
    proof: FluidRelaxation | None = None
    k = infeasible + 1
    stride = 0
    for turn in range(MOST_PROGRAMS):
        if pace.is_over(1.0 if turn else longer):
            break
        window = bound + k * step
        fluid = FluidRelaxation(problem, window, stages, points)
        missing = n - fluid.solve(pace.deadline)
        if missing > 1e-6:
            infeasible, proof = k, fluid
            stride = max(1, 2 * stride, int(missing / n * window / step))
            k += stride
        else:
            feasible = k
        if feasible is not None:
            if feasible - infeasible <= 1 or (feasible - infeasible) * step <= NEAR_ENOUGH * bound:
                break
            k = (infeasible + feasible) // 2
    return bound if proof is None else Bound(proof.window + whole, proof.window, proof.proof)


class _Crew(NamedTuple):
    """Hosts of one rank, which take the fastest host's time; and their maximum units (micro-batches in chunks)."""

    stages: list[int]
    hosts: list[int]
    units: int
    number: int = 0


class FluidRelaxation:
    """The linear program, with columns goal and (group, kind, grid point); a group is a crew at one of the stages.

    Args:
        window: time from the first start at the first of the stages to the end of the rank's step.
        stages: ascending; the first is the first chunk of its rank, with the barrier stage 0.
        points: maximum number of points of an aligned grid; None for a grid that is fine at both ends.
    """

    def __init__(self, problem: Problem, window: float, stages: Sequence[int], points: int | None) -> None:
        self.problem, self.stages, self.window = problem, stages, window
        rank_of = problem.shape.rank_of
        counted = [s for s in stages if rank_of(s) == rank_of(stages[0])] if problem.staggered else stages
        self.ends = {s: window - problem.update_seconds[s] for s in counted}
        end = max(max(self.ends.values()), problem.unit)
        self.crews = _crews(problem, stages)
        self.groups = [(s, crew) for crew in self.crews for s in crew.stages]
        self.times = aligned(problem, end, points, self._lags()) if points else fine_at_ends(problem, end)
        self.points = len(self.times)
        self.entries: list[tuple[Integers, Integers, Floats]] = []
        self.limits: list[Floats] = []
        self.row_count = 0
        self.blocks: list[tuple[str, tuple[int, ...], int, int]] = []
        self.multipliers = np.zeros(0)
        self.add_crews()
        self.add_paths()
        self.add_goal()

    def add_crews(self) -> None:
        """Add the rows of each crew: monotone, order, rate, memory, its share of the units."""
        problem, n = self.problem, self.problem.micro_batches
        points = np.arange(self.points)
        for crew in self.crews:
            groups = [(g, s) for g, (s, group_crew) in enumerate(self.groups) if group_crew is crew]
            rate = []
            for g, s in groups:
                for kind in range(problem.kinds):
                    earlier, later = self._column(g, kind, points[:-1]), self._column(g, kind, points[1:])
                    self._add_rows("grow", (s, crew.number, kind), [(earlier, 1.0), (later, -1.0)], 0.0)
                    time = float(problem.times[kind * problem.shape.stages + s])
                    rate += [(later, time), (earlier, -time)]
                if problem.split:
                    lag = min(self._time(s, 1), self._time(s, 2))
                    self._add_dependency("order", (s, crew.number, 2), [(g, 2)], [(g, 1, 1.0, lag)], 0.0)
            place = groups[0][1], crew.number
            self._add_rows("rate", place, rate, np.diff(self.times) * sum(1 / problem.speed[w] for w in crew.hosts))
            if crew.units < n * len(groups):
                last = [(self._column(g, 0, points[-1:]), 1.0) for g, _ in groups]
                self._add_rows("share", place, last, crew.units)
            self._add_memory(crew, groups)

    def _add_memory(self, crew: _Crew, groups: list[tuple[int, int]]) -> None:
        problem = self.problem
        stash = problem.stash if problem.split else 0.0
        caps = [min(problem.cap[w], float(crew.units)) for w in crew.hosts]
        slots = sum(floor(cap + TOLERANCE) for cap in caps) if stash in (0.0, 1.0) else sum(caps)
        if slots < crew.units:
            shortest = min(self._time(s, 0) for _, s in groups)
            freed = [
                (g, kind, share, min(shortest, self._time(s, kind)))
                for g, s in groups
                for kind, share in ((1, 1 - stash), (2, stash))
                if share
            ]
            self._add_dependency("memory", (groups[0][1], crew.number), [(g, 0) for g, _ in groups], freed, slots)

    def _turn(self, stage: int) -> float:
        return self.problem.return_path[stage] + min(self._time(stage, 0), self._time(stage, 1))

    def add_paths(self) -> None:
        """Add the paths of forwards between chosen stages, of inputs back, and through the rest of the model."""
        for near, far in pairwise(self.stages):
            near_groups, far_groups = self._groups_of(near), self._groups_of(far)
            for kind, source, target in ((0, near_groups, far_groups), (1, far_groups, near_groups)):
                lag = self._lag(near, far, kind)
                sources = [(g, kind, 1.0, lag) for g in source]
                self._add_dependency("path", (near, far, kind), [(g, kind) for g in target], sources, 0.0)
        for g, (s, crew) in enumerate(self.groups):
            self._add_dependency("order", (s, crew.number, 1), [(g, 1)], [(g, 0, 1.0, self._turn(s))], 0.0)

    def _lags(self) -> list[float]:
        held = [
            self._turn(s) + self._time(s, 1) + (self._time(s, 2) if self.problem.split else 0.0) for s in self.stages
        ]
        return held + [self._lag(near, far, kind) for near, far in pairwise(self.stages) for kind in (0, 1)]

    def _lag(self, near: int, far: int, kind: int) -> float:
        hops = self.problem.remaining_hops
        between = hops[near] - hops[far] + sum(self._time(s, kind) for s in range(near + 1, far))
        return between + min(self._time(near, kind), self._time(far, kind))

    def add_goal(self) -> None:
        """Limit the goal to the operations of each kind that every chosen stage has done at its last end."""
        goal, last = np.array([0]), np.array([self.points - 1])
        for s in self.stages:
            groups = self._groups_of(s)
            done = [(self._column(g, 0, last), 1.0) for g in groups]
            self._add_rows("share", (s, len(groups)), done, self.problem.micro_batches)
        for (kind, s), end in self._tails().items():
            at = np.minimum(np.searchsorted(self.times, [end - TOLERANCE]), last)
            done = [(self._column(g, kind, at), -1.0) for g in self._groups_of(s)]
            self._add_rows("end", (s, kind), [(goal, 1.0), *done], 0.0)

    def _head(self, stage: int, kind: int) -> float:
        (out, _), hops, first = self.problem.remaining_path, self.problem.remaining_hops, self.stages[0]
        forward = out[first] - out[stage] + hops[first] - hops[stage]
        backward = forward + self._time(stage, 0) + self.problem.return_path[stage]
        return (forward, backward, backward + self._time(stage, 1))[kind]

    def _tails(self) -> dict[tuple[int, int], float]:
        problem, hops, end = self.problem, self.problem.hop_after, inf
        tails: dict[tuple[int, int], float] = {}
        for s in range(self.stages[0], problem.shape.stages):
            if s in self.ends:
                end = min(end, self.ends[s] - (self._time(s, 2) if problem.split else 0.0))
            tails[1, s], tails[2, s] = end, self.ends.get(s, inf)
            end -= self._time(s, 1) + hops[s]
        end = inf
        for s in range(problem.shape.stages - 1, self.stages[0] - 1, -1):
            end = min(end, tails[1, s] - self._time(s, 1))
            tails[0, s] = end
            end -= self._time(s, 0) + hops[s - 1]
        chosen = {(kind, s): tails[kind, s] for s in self.stages for kind in range(problem.kinds)}
        return {place: end for place, end in chosen.items() if end < inf}

    def solve(self, deadline: Deadline) -> float:
        """Return an upper bound on the goal by weak duality, from the solver's multipliers at the deadline."""
        import highspy

        rows, columns, coefficients = map(np.concatenate, zip(*self.entries, strict=True))
        limits = np.concatenate(self.limits)
        count = 1 + len(self.groups) * self.problem.kinds * self.points
        highest = np.full(count, float(self.problem.micro_batches))
        for g, (s, crew) in enumerate(self.groups):
            for kind in range(self.problem.kinds):
                idle = np.searchsorted(self.times, self._head(s, kind) + TOLERANCE)
                highest[self._column(g, kind, np.arange(self.points))] = min(crew.units, self.problem.micro_batches)
                highest[self._column(g, kind, np.arange(idle))] = 0
        gain = np.zeros(count)
        gain[0] = 1.0
        bounds = np.full(self.row_count, -inf), limits
        for presolve in ("on", "off"):  # presolve sometimes returns useless multipliers
            solver = solver_of(
                -gain,
                highest,
                bounds,
                (rows, columns, coefficients),
                presolve=presolve,
                solver="ipx",
                run_crossover="off",
                ipm_iteration_limit=MOST_ITERATIONS,
                time_limit=max(0.0, deadline.seconds_left),
            )
            solver.run()
            if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
                break
        multipliers = np.maximum(0.0, -np.array(solver.getSolution().row_dual))
        if len(multipliers) != self.row_count:
            return float(highest[0])
        self.multipliers = multipliers
        reduced_gain = gain - np.bincount(columns, weights=coefficients * multipliers[rows], minlength=count)
        return float(limits @ multipliers + np.maximum(0.0, reduced_gain) @ highest)

    def proof(self, digits: int) -> dict[str, Any]:
        """Return rows, stages and grid of the certificate, from the multipliers of `solve` to so many digits."""
        rows: list[Any] = []
        for rule, place, first, count in self.blocks:
            multipliers = self.multipliers[first : first + count]
            scale = self.problem.unit if rule == "rate" else 1.0
            points = np.flatnonzero(multipliers * scale > 0.1**digits)
            if len(points):
                rounded = [float(f"{m:.{digits}g}") for m in multipliers[points]]
                rows.append((rule, list(place), points.tolist(), rounded))
        return {"rows": rows, "stages": list(self.stages), "grid": _pieces(self.times)}

    def _groups_of(self, stage: int) -> list[int]:
        return [g for g, (s, _) in enumerate(self.groups) if s == stage]

    def _column(self, group: int, kind: int, point: Integers) -> Integers:
        return 1 + (group * self.problem.kinds + kind) * self.points + point

    def _time(self, stage: int, kind: int) -> float:
        return float(self.problem.times[kind * self.problem.shape.stages + stage]) * self.problem.fastest[stage]

    def _add_dependency(
        self,
        rule: str,
        place: tuple[int, ...],
        nexts: list[tuple[int, int]],
        before: list[tuple[int, int, float, float]],
        more: float,
    ) -> None:
        points = np.arange(self.points)
        terms = [(self._column(g, kind, points), 1.0) for g, kind in nexts]
        for g, kind, share, lag in before:  # nothing is done at the first point
            earlier = np.searchsorted(self.times, self.times - lag - TOLERANCE)
            terms.append((self._column(g, kind, earlier), -share))
        self._add_rows(rule, place, terms, more)

    def _add_rows(
        self, rule: str, place: tuple[int, ...], terms: list[tuple[Integers, float]], limits: float | Floats
    ) -> None:
        count = len(terms[0][0])
        rows = self.row_count + np.arange(count)
        self.entries += [(rows, columns, np.full(count, coefficient)) for columns, coefficient in terms]
        self.limits.append(np.full(count, limits, dtype=np.float64))
        self.blocks.append((rule, place, self.row_count, count))
        self.row_count += count


def _crews(problem: Problem, stages: Sequence[int]) -> list[_Crew]:
    rank_of, crews = problem.shape.rank_of, list[_Crew]()
    for rank in dict.fromkeys(map(rank_of, stages)):
        chunks = [s for s in stages if rank_of(s) == rank]
        hosts, units = problem.hosts[rank], problem.micro_batches * len(chunks)
        if len(problem.kinds_of_host[rank]) > 1 or units % len(hosts) == 0:
            crews.append(_Crew(chunks, hosts, units))
        else:
            fewer = units - ceil(units / len(hosts))
            crews += [_Crew(chunks, hosts[:1], units), _Crew(chunks, hosts[1:], fewer, 1)]
    return crews


def fine_at_ends(problem: Problem, end: float) -> Floats:
    """Return times from 0 to `end`, dense in warm-up and drain, sparse between."""
    step = max(_shortest(problem), problem.shape.stages * problem.unit / GRID_POINTS)
    if problem.is_integral:
        step = max(1.0, ceil(step - TOLERANCE))
    if 2 * GRID_POINTS * step >= end:
        return np.append(np.arange(0, end - TOLERANCE, step), end)
    near = np.arange(GRID_POINTS) * step
    between = np.linspace(near[-1], end - near[-1], GRID_POINTS)[1:-1]
    if problem.is_integral:
        between = np.round(between)  # a lag from a point ends on a point, also with the 12 digits of a certificate
    return np.unique(np.concatenate([near, between, end - near[::-1]]))


def _pieces(times: Floats) -> list[tuple[float, float, int]]:
    """Return (first, step, count) of equidistant parts. Lags remain multiples of the first step: it is rounded down."""
    pieces = list[tuple[float, float, int]]()
    for part in np.split(times[:-1], np.flatnonzero(np.abs(np.diff(times[:-1], 2)) > TOLERANCE) + 2):
        step = float(part[1] - part[0]) if len(part) > 1 else 1.0
        rounded = rounded_down(step)
        is_piece = part[0] == 0 or step - rounded < 1e-14 * step
        pieces += [(float(part[0]), rounded, len(part))] if is_piece else [(time, 0.0, 1) for time in part.tolist()]
    return [*pieces, (float(times[-1]), 0.0, 1)]


def is_exact(problem: Problem, end: float) -> bool:
    """Return whether a grid that is fine at the ends contains every whole time of a window, with whole times."""
    return problem.is_integral and float(np.diff(fine_at_ends(problem, end)).max(initial=0.0)) <= 1.0


def aligned(problem: Problem, end: float, points: int, lags: list[float]) -> Floats:
    """Return at most `points` equidistant times to `end` for which rounding these lags down loses little."""
    least = 1.0 if problem.is_integral else _shortest(problem)
    if end <= least * points:
        return np.append(np.arange(0, end - TOLERANCE, least), end)
    steps = np.linspace(1.0, WIDEST_STEP, GRID_STEPS) * end / (points - 1)
    exact = np.array([lag for lag in lags if lag > 0])[:, None]
    lost = exact - np.floor(exact / steps + TOLERANCE) * steps
    step = float(steps[np.argmin((lost / exact).sum(axis=0))])
    return np.append(np.arange(0, end - TOLERANCE, step), end)


def _shortest(problem: Problem) -> float:
    return min((t for t in problem.times.tolist() if t > 0), default=1.0) / 4
