"""Waves: micro-batches enter a pipeline in groups, with due times as if each group ran unhindered.

With little memory, evenly spaced forwards meet a backward pass at every rank; one of the two waits and holds memory. A
wave of close micro-batches meets a returning wave as a whole, so less waits. List scheduling turns due times into an
order. The parameters (`Wave`) are tried on a grid, then changed at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf
from random import Random
from typing import Any

import numpy as np

from recycle.solve.assignment import possible_assignments
from recycle.solve.constants import CHANGES, WAVE_CLIMBS, WAVE_DISTANCES, WAVE_SIZES, WAVE_SPACINGS
from recycle.solve.effort import STEPS_OF_ORDER, Effort, Incumbent, shortest
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import Floats, Operations
from recycle.solve.search.list_scheduling import schedule_by_priority
from recycle.solve.search.order_kernels import evaluate


@dataclass(frozen=True)
class Wave:
    """Parameters of waves. Times are in typical operation times, except `interval`.

    Attributes:
        size: micro-batches per wave.
        interval: seconds between waves.
        spacing: between micro-batches of a wave, in longest forwards.
        patience, weight_patience: time that an F or I, and a W, waits for a more urgent operation that is on its way.
        weight_delay: due time of a W after its I.
        stretch: factor on the unhindered duration of a micro-batch.
        release: share of the due time before which no micro-batch begins.
        chunk_delay: additional due time of forwards for each deeper chunk.
        phase: share of an interval over which the pipelines' waves are staggered.
        assignment: index of the choice of hosts, modulo their number.
    """

    size: int
    interval: float
    spacing: float
    patience: float = 0.5
    weight_patience: float = 0.5
    weight_delay: float = 3.0
    stretch: float = 1.0
    release: float = 1.0
    chunk_delay: float = 0.0
    phase: float = 0.0
    assignment: int = 0


def wave_orders(problem: Problem, hosts: Sequence[Operations], seed: int = 0) -> Iterator[Incumbent]:
    """Yield orders and their periods without end: first the grid, then changed waves, on choices of hosts."""
    unhindered = _unhindered(problem)

    def evaluate_wave(wave: Wave) -> Incumbent:
        return evaluate(problem, _order(problem, unhindered, hosts[wave.assignment % len(hosts)], wave))

    tried: list[tuple[float, Wave]] = []
    for wave in _grid(problem):
        result = evaluate_wave(wave)
        tried.append((result.period, wave))
        yield result
    climbs = sorted(tried, key=lambda trial: trial[0])[:WAVE_CLIMBS]
    draw = Random(seed)
    while True:
        for place, (period, wave) in enumerate(climbs):
            changed = _changed(problem, wave, draw)
            result = evaluate_wave(changed)
            if result.period <= period:
                climbs[place] = result.period, changed
            yield result


def best_wave(problem: Problem, effort: Effort) -> Incumbent:
    """Return the best order of waves; at least one is made."""
    waves = wave_orders(problem, [assignment.host for assignment in possible_assignments(problem)], effort.seed)
    effort.claim_order(problem, inf, STEPS_OF_ORDER)  # make the first order regardless of the remaining time
    best = next(waves)
    while effort.claim_order(problem, best.period, STEPS_OF_ORDER):
        best = shortest([best, next(waves)])
    return best


def _grid(problem: Problem) -> Iterator[Wave]:
    interval, chunks, m = _shortest_interval(problem), problem.shape.chunks, problem.shape.micro_batches
    most = min(max(problem.cap), m * chunks) / chunks
    for size in sorted({min(m, max(1, round(share * most))) for share in WAVE_SIZES}):
        for distance, spacing in product(WAVE_DISTANCES, WAVE_SPACINGS if size > 1 else WAVE_SPACINGS[:1]):
            yield Wave(size, size * interval * distance, spacing)


def _shortest_interval(problem: Problem) -> float:
    shape, longest = problem.shape, 0.0
    times = problem.times.reshape(3, shape.stages)
    for rank, hosts in enumerate(problem.hosts[: shape.ranks]):
        stages = list(shape.stages_of_rank(rank))
        f, i, w = times[:, stages] * problem.fastest[rank]
        return_path = np.array(problem.return_path)[stages]
        held = f + i + return_path + (problem.stash * w if problem.split else 0.0)
        pace = sum(problem.fastest[rank] / problem.speed[worker] for worker in hosts)
        slots = sum(problem.cap[worker] for worker in hosts)
        longest = max(longest, float((f + i + w).sum()) / pace, float(held.sum()) / slots)
    return shape.pipelines * longest


def _unhindered(problem: Problem) -> Floats:
    stages = problem.shape.stages
    starts, now = np.zeros((problem.kinds, stages)), 0.0
    times = problem.times.reshape(3, stages) * np.array(problem.fastest)
    for kind, unhindered in ((0, range(stages)), (1, range(stages)[::-1])):
        for s in unhindered:
            now += problem.hop_after[s] if kind else 0.0
            starts[kind, s] = now
            now += times[kind, s] + (0.0 if kind else problem.hop_after[s])
            if kind == 1 and problem.split:
                starts[2, s] = now
    return starts


def _order(problem: Problem, unhindered: Floats, host: Operations, wave: Wave) -> Order:
    shape = problem.shape
    pipeline, index = np.divmod(np.arange(problem.micro_batches), shape.micro_batches)
    number, place = np.divmod(index, wave.size)
    enters = (number + wave.phase * pipeline / shape.pipelines) * wave.interval
    enters = enters + place * wave.spacing * max(problem.forward)
    due = (wave.stretch * unhindered)[:, :, None] + enters
    due[0] += (np.arange(shape.stages) // shape.ranks * wave.chunk_delay * problem.unit)[:, None]
    if problem.split:
        due[2] += wave.weight_delay * problem.unit
    return schedule_by_priority(
        problem,
        host,
        due.ravel(),
        patience=wave.patience * problem.unit,
        weight_patience=wave.weight_patience * problem.unit,
        release=wave.release * enters,
    )


def _changed(problem: Problem, wave: Wave, draw: Random) -> Wave:
    for _ in range(draw.choice(CHANGES)):
        name = draw.choice(_NAMES)
        if name == "size":
            size = max(1, min(problem.shape.micro_batches, wave.size + draw.choice((-1, 1))))
            wave = replace(wave, size=size, interval=wave.interval * size / wave.size)
        elif name == "assignment":
            wave = replace(wave, assignment=wave.assignment + 1)
        else:
            drawn: dict[str, Any] = {name: _DRAWN[name](draw, getattr(wave, name))}
            wave = replace(wave, **drawn)
    return wave


def _one_of(*usual: float, most: float) -> Callable[[Random, float], float]:
    return lambda draw, _: draw.choice((*usual, draw.uniform(0.0, most)))


_DRAWN: dict[str, Callable[[Random, float], float]] = {
    "interval": lambda draw, now: now * draw.uniform(0.93, 1.07),
    "spacing": _one_of(0.0, 0.5, 1.0, 1.5, 2.0, most=3.0),
    "patience": _one_of(0.0, 0.5, 1.0, most=3.0),
    "weight_patience": _one_of(0.0, 0.5, 1.0, most=2.0),
    "weight_delay": _one_of(0.0, 1.0, 3.0, 6.0, 10.0, most=15.0),
    "stretch": lambda draw, now: max(0.5, min(2.0, now * draw.uniform(0.9, 1.1))),
    "release": _one_of(0.0, 0.5, 0.9, 1.0, most=1.0),
    "chunk_delay": lambda draw, _: draw.uniform(-8.0, 8.0),
    "phase": _one_of(0.0, 1.0, most=1.0),
}
"""How each parameter except `size` is drawn, given its value."""
_NAMES = tuple(field.name for field in fields(Wave))
