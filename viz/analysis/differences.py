"""Differences between two iterations, planned or executed: by instruction, and by part of the time.

Instructions match if they do the same work: forward, redundant forward, input or weight gradient of a stage and
micro-batch on any worker; reduces and steps by stage and worker. A whole backward counts as its input gradient, and its
later part as the weight gradient if the other iteration splits the backward. A pair counts as both of its halves.
Instructions of only one iteration stay unmatched.

The makespan splits exactly: each live worker is always at work or in a gap with a cause (`recycle.ir.gaps`). The mean
work and the mean time per cause add up to the makespan, and their differences to the difference of the makespans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from recycle.errors import RecycleError
from recycle.ir.columns import Flags, Floats, Rows
from recycle.ir.kinds import Compute, Instruction, StageWide, ValueKind, per_kind
from recycle.ir.operations import operations_of
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import TOLERANCE, Timeline
from recycle.job.shape import Shape, Worker
from viz.analysis.bubbles import IDLE_TITLES, instruction_name, range_statistics
from viz.numbers import PLAN_UNIT, TimeUnit

_GRADIENTS = ValueKind.INPUT_GRADIENT, ValueKind.WEIGHT_GRADIENT


def _role(cls: type[Instruction]) -> int:
    if not issubclass(cls, Compute | StageWide):
        return -1
    return int(cls.row.produces[0]) if cls.row.produces else len(ValueKind) + cls.kind


@dataclass(frozen=True, eq=False)
class Matches:
    """Instructions that two schedules share.

    Attributes:
        first, second: rows of either schedule, pairwise; by `time`.
        time: start in the first schedule, seconds; for the weight gradient of a whole backward, the start of that part.
        delta: start in the second schedule minus `time`.
        moved: whether another worker runs the instruction.
    """

    first: Rows
    second: Rows
    time: Floats
    delta: Floats
    moved: Flags
    only_first: Rows
    only_second: Rows


def is_weight_half(first: Timeline, matches: Matches) -> Any:
    """Return which matches are of the weight gradient of a whole backward in the first timeline."""
    return matches.time > first.start[matches.first] + TOLERANCE * max(first.makespan, 1e-300)


def match(first: Timeline, second: Timeline) -> Matches:
    """Match the instructions of two timelines; none if their stages hold different layers. O(n log n)."""
    shapes = first.schedule.shape, second.schedule.shape
    extent = _extent(shapes)
    keys, other_keys = (_keys(each.schedule, extent) for each in (first, second))
    a, b = _work_items(first, keys, other_keys, extent), _work_items(second, other_keys, keys, extent)
    matchable = b.key if _have_same_layers(*shapes) else b.key[:0]
    _, in_a, in_b = np.intersect1d(a.key, matchable, assume_unique=True, return_indices=True)
    order = np.lexsort((a.row[in_a], a.start[in_a]))
    in_a, in_b = in_a[order], in_b[order]
    return Matches(
        a.row[in_a],
        b.row[in_b],
        a.start[in_a],
        b.start[in_b] - a.start[in_a],
        a.worker[in_a] != b.worker[in_b],
        np.setdiff1d(a.row, a.row[in_a]),
        np.setdiff1d(b.row, b.row[in_b]),
    )


def durations(first: Timeline, second: Timeline, matches: Matches) -> tuple[Rows, Floats, Floats]:
    """Return (row of the second, time in the first, time in the second) of matched instructions of one kind."""
    kinds = [t.schedule.columns.kind[r] for t, r in ((first, matches.first), (second, matches.second))]
    rows, others = (rows[kinds[0] == kinds[1]] for rows in (matches.first, matches.second))
    return others, (first.end - first.start)[rows], (second.end - second.start)[others]


def _have_same_layers(first: Shape, second: Shape) -> bool:
    ends, other_ends = (np.cumsum(shape.stage_sizes) / sum(shape.stage_sizes) for shape in (first, second))
    return first.stages == second.stages and bool(np.allclose(ends, other_ends))


class _WorkItems(NamedTuple):
    key: Rows
    row: Rows
    worker: Rows
    start: Floats


def _work_items(timeline: Timeline, keys: _Keys, others: _Keys, extent: tuple[int, ...]) -> _WorkItems:
    """Return the keyed instructions, and the weight halves of whole backwards that `others` have on their own."""
    c, stages = timeline.schedule.columns, timeline.schedule.shape.stages
    key, row, worker = keys
    weight_key = key + math.prod(extent)
    is_whole = per_kind(lambda cls: cls.row.produces == _GRADIENTS, np.bool_)[c.kind[row]]
    whole = np.flatnonzero(is_whole & np.isin(weight_key, others[0], assume_unique=True))
    halves = [np.array(timeline.profile.per_stage(f"backward_{half}", stages)) for half in ("input", "weight")]
    input_share = (halves[0] / np.maximum(halves[0] + halves[1], 1e-300))[c.stage[row[whole]]]
    begin, end = timeline.start[row[whole]], timeline.end[row[whole]]
    return _WorkItems(
        np.append(key, weight_key[whole]),
        np.append(row, row[whole]),
        np.append(worker, worker[whole]),
        np.append(timeline.start[row], begin + input_share * (end - begin)),
    )


def _extent(shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return the maximum numbers of stages, pipelines, and micro-batches or ranks."""
    return tuple(np.max([(s.stages, s.pipelines, max(s.micro_batches, s.ranks)) for s in shapes], axis=0).tolist())


_Keys = tuple[Rows, Rows, Rows]
"""(keys of instructions, ascending, their rows and workers)."""


def _keys(schedule: Schedule, extent: tuple[int, ...]) -> _Keys:
    work_rows, shape = operations_of(schedule), schedule.shape
    role = per_kind(_role, np.int64)[work_rows.kind]
    keyed = np.flatnonzero((role >= 0) & work_rows.valid)
    place, micro_batch = np.divmod(work_rows.worker[keyed], shape.ranks), work_rows.micro_batch[keyed]
    home = np.where(micro_batch < 0, place, np.divmod(micro_batch, shape.micro_batches))
    key = role[keyed] * math.prod(extent) + np.ravel_multi_index((work_rows.stage[keyed], *home), extent)
    # An invalid schedule may run something twice; compare the first time.
    key, first = np.unique(key, return_index=True)
    return key, work_rows.row[keyed][first], np.ravel_multi_index(place, extent[1:])[first]


def split(timeline: Timeline, limits: Sequence[float] | None = None) -> dict[Any, float]:
    """Return the seconds of each part of the makespan, as mean over the live workers; they add up to the makespan."""
    statistics = range_statistics(timeline, timeline.gaps(limits), 0.0, timeline.makespan)
    rerouted = statistics.rerouted
    seconds: dict[Any, float] = {"own work": sum(statistics.work.values()) - rerouted, "re-routed work": rerouted}
    seconds |= {part: lost for part, (lost, _) in statistics.idle.items()}
    return {part: seconds.get(part, 0.0) / max(1, statistics.workers) for part in PART_TITLES}


PART_TITLES: dict[Any, str] = {"own work": "own work", "re-routed work": "extra work (re-routed)", **IDLE_TITLES}
"""Part of `split` -> its name."""


class Divergence(NamedTuple):
    """A point from which two iterations differ.

    Attributes:
        first, second: the rows, -1 if an iteration has no instruction there.
    """

    time: float
    text: str
    first: int
    second: int


def first_order_divergence(first: Timeline, second: Timeline) -> Divergence | None:
    """Return the earliest point, on the first clock, from which a worker runs other instructions, or None.

    Workers are compared by name; whole backwards and their input halves are equal.
    """
    extent = _extent([first.schedule.shape, second.schedule.shape])
    a, b = (_programs(timeline, extent) for timeline in (first, second))
    divergences = []
    for worker in sorted(a.keys() | b.keys()):
        programs = zip_longest(a.get(worker, ()), b.get(worker, ()), fillvalue=(-1, -1))
        row, other = next(((one[1], two[1]) for one, two in programs if one[0] != two[0]), (-1, -1))
        if max(row, other) >= 0:
            time = float(first.start[row]) if row >= 0 else float(second.start[other])
            words = (_run_text(*end, worker) for end in ((first, row), (second, other)))
            divergences.append(
                Divergence(time, "worker {}: the first {}, the second {}".format(worker, *words), row, other)
            )
    return min(divergences, default=None, key=lambda divergence: divergence.time)


def _programs(timeline: Timeline, extent: tuple[int, ...]) -> dict[Worker, list[tuple[int, int]]]:
    """Return the key and row of each instruction of each worker, in the order of its program."""
    keys, rows, _ = _keys(timeline.schedule, extent)
    order, schedule = np.argsort(rows, kind="stable"), timeline.schedule
    items = list(zip(keys[order].tolist(), rows[order].tolist(), strict=True))
    begins = np.searchsorted(schedule.columns.worker[rows[order]], np.arange(schedule.shape.worker_count + 1)).tolist()
    return {schedule.shape.worker_at(w): items[low:high] for w, (low, high) in enumerate(pairwise(begins))}


def _run_text(timeline: Timeline, row: int, worker: Worker) -> str:
    schedule = timeline.schedule
    if row >= 0:
        return f"runs {schedule.instruction(row)}"
    if worker in schedule.failed:
        return "runs nothing, as the worker has failed"
    return "runs nothing more" if worker in schedule.live else "has no such worker"


def first_start_difference(
    first: Timeline, second: Timeline, matches: Matches, tolerance: float, unit: TimeUnit = PLAN_UNIT
) -> Divergence | None:
    """Return the earliest match whose starts differ by more than `tolerance` seconds; its text is in `unit`."""
    differing = np.flatnonzero(np.abs(matches.delta) > tolerance)
    if not len(differing):
        return None
    place = int(differing[0])
    row, other, delta = int(matches.first[place]), int(matches.second[place]), float(matches.delta[place])
    half = "the weight half of " if is_weight_half(first, matches)[place] else ""
    direction = "later" if delta > 0 else "earlier"
    text = f"{half}{instruction_name(first, row)} starts {unit.amount(abs(delta))} {direction} in the second"
    if matches.moved[place]:
        text += f", on {second.schedule.position(other)[0]}"
    return Divergence(float(matches.time[place]), text, row, other)


def align(plan: Timeline, executed_step: Timeline, seconds_per_unit: float | None = None) -> tuple[float, str]:
    """Put a plan and its execution (`executed_timeline`) on one axis, both from their first start.

    Args:
        seconds_per_unit: seconds per unit of the plan's times; None: the ratio of the matched instructions' work.

    Returns (executed seconds per unit of the plan's time, description of the method). Raises RecycleError if
    nothing of the plan ran.
    """
    begin = "both from their first start"
    if seconds_per_unit is not None:
        return seconds_per_unit, f"{begin}; the profile says seconds"
    planned, executed = (
        float(seconds.sum()) for seconds in durations(plan, executed_step, match(plan, executed_step))[1:]
    )
    if not planned or not executed:
        raise RecycleError("plan and trace share no instruction that takes time: the trace is of another plan")
    return executed / planned, f"{begin}; one unit of the plan is as long as it took on average"


def scale_timeline(timeline: Timeline, scale: float) -> Timeline:
    """Return a timeline in another unit of time, with its profile."""
    start, end = scale * timeline.start, scale * timeline.end
    period, profile = scale * timeline.period, timeline.profile.scaled(scale)
    return replace(timeline, profile=profile, start=start, end=end, period=period)
