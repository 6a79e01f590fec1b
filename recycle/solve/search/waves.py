"""Waves: micro-batches enter a pipeline in groups, and operations are due when those would come by unhindered.

With little memory a worker holds few micro-batches, and most of the time these are away on other ranks. At equal
distances forwards meet backward passes at every rank, and each time one of them waits and holds its
memory meanwhile. A wave of some micro-batches close behind each other meets the wave that comes back as a whole, so
that less waits; and the first waves fill the memory at once. A wave follows the one before after the time that
work and memory of its micro-batches take, more or less.

The due times become an order by list scheduling. A few numbers say how (`Wave`); they are first tried on a grid, then
changed, some at a time, where that makes the period no longer. Waves of a single pipeline are a template; those of
several, all at once or one pipeline after another, let each micro-batch find its hosts at a time of their own.
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
from recycle.solve.effort import STEPS_OF_ORDER, Effort, Incumbent, by_period
from recycle.solve.problem import Order, Problem
from recycle.solve.problem_arrays import Floats, Operations
from recycle.solve.search.list_scheduling import schedule_by_priority
from recycle.solve.search.order_kernels import timed

SIZES, DISTANCES, SPACINGS = (0.0, 0.3, 0.5, 0.7, 1.0), (0.9, 1.05), (1.0, 0.0)
"""Of the grid: micro-batches of a wave, as a share of those whose forwards fill the memory; time from one wave to the
next, in shortest intervals of its micro-batches; `spacing`."""
CLIMBS = 4
"""The best of the grid from which the numbers are changed, in turn."""
CHANGES = (1, 1, 2, 3)
"""How many numbers are changed at a time; one of these."""


@dataclass(frozen=True)
class Wave:
    """How the micro-batches of each pipeline come in waves. Times are in typical operations' times, except `interval`.

    Attributes:
        size: micro-batches of a wave.
        interval: seconds from one wave to the next.
        spacing: from one micro-batch of a wave to the next, in longest forwards.
        patience, weight_patience: how long an F or I, and a W, stands back for what is more urgent and on its way.
        weight_delay: how long after its I a W is due.
        stretch: how much longer than unhindered the way of a micro-batch is taken to be.
        release: share of its due time before which no micro-batch begins.
        chunk_delay: how much later the forwards of each deeper chunk are due.
        phase: share of an interval over which the waves of all pipelines are spread, one pipeline after another.
        assignment: which of the choices of hosts is taken, counted around.
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
    """Orders and their periods, without end: those of the grid, then of changed waves, each no worse than the one it
    was changed from or given up.

    Args:
        hosts: some choices of the worker of each (stage, micro-batch), flat.
    """
    way = _unhindered(problem)

    def made(wave: Wave) -> Incumbent:
        return timed(problem, _order(problem, way, hosts[wave.assignment % len(hosts)], wave))

    tried: list[tuple[float, Wave]] = []
    for wave in _grid(problem):
        found = made(wave)
        tried.append((found.period, wave))
        yield found
    climbs = sorted(tried, key=lambda one: one[0])[:CLIMBS]
    draw = Random(seed)
    while True:
        for place, (period, wave) in enumerate(climbs):
            changed = _changed(problem, wave, draw)
            found = made(changed)
            if found.period <= period:
                climbs[place] = found.period, changed
            yield found


def best_wave(problem: Problem, effort: Effort) -> Incumbent:
    """The best order of waves; one is made at least."""
    waves = wave_orders(problem, [assignment.host for assignment in possible_assignments(problem)], effort.seed)
    effort.goes_on(problem, inf, STEPS_OF_ORDER)  # the first is made whatever is left
    best = next(waves)
    while effort.goes_on(problem, best.period, STEPS_OF_ORDER):
        best = by_period([best, next(waves)])[0]
    return best


def _grid(problem: Problem) -> Iterator[Wave]:
    """Sizes up to that whose forwards alone fill the memory."""
    interval, chunks, m = _shortest_interval(problem), problem.shape.chunks, problem.shape.micro_batches
    most = min(max(problem.cap), m * chunks) / chunks
    for size in sorted({min(m, max(1, round(share * most))) for share in SIZES}):
        for distance, spacing in product(DISTANCES, SPACINGS if size > 1 else SPACINGS[:1]):
            yield Wave(size, size * interval * distance, spacing)


def _shortest_interval(problem: Problem) -> float:
    """The shortest interval that load and memory could admit, if operations could overlap, from one micro-batch of
    every pipeline to the next."""
    shape, longest = problem.shape, 0.0
    times = problem.times.reshape(3, shape.stages)
    for rank, hosts in enumerate(problem.hosts[: shape.ranks]):
        f, i, w = times[:, rank :: shape.ranks] * problem.fastest[rank]
        way_back = np.array(problem.way_back)[rank :: shape.ranks]
        held = f + i + way_back + (problem.stash * w if problem.split else 0.0)
        pace = sum(problem.fastest[rank] / problem.speed[worker] for worker in hosts)
        slots = sum(problem.cap[worker] for worker in hosts)
        longest = max(longest, float((f + i + w).sum()) / pace, float(held.sum()) / slots)
    return shape.pipelines * longest


def _unhindered(problem: Problem) -> Floats:
    """[kinds, stages], when each operation of a lone micro-batch starts on the fastest hosts; a W right after its I."""
    stages = problem.shape.stages
    starts, now = np.zeros((problem.kinds, stages)), 0.0
    times = problem.times.reshape(3, stages) * np.array(problem.fastest)
    for kind, way in ((0, range(stages)), (1, range(stages)[::-1])):
        for turn, s in enumerate(way):
            now += problem.hop if turn else 0.0
            starts[kind, s] = now
            now += times[kind, s]
            if kind == 1 and problem.split:
                starts[2, s] = now
    return starts


def _order(problem: Problem, way: Floats, host: Operations, wave: Wave) -> Order:
    shape = problem.shape
    pipeline, index = np.divmod(np.arange(problem.micro_batches), shape.micro_batches)
    number, place = np.divmod(index, wave.size)
    enters = (number + wave.phase * pipeline / shape.pipelines) * wave.interval
    enters = enters + place * wave.spacing * max(problem.forward)
    due = (wave.stretch * way)[:, :, None] + enters
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
    """A usual value, or sometimes any up to the most."""
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
"""How each number but `size` is drawn anew, given what it is."""
_NAMES = tuple(field.name for field in fields(Wave))
