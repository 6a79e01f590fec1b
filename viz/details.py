"""Details of a selection (an operation, a gap or a worker), and the headline figures of a timeline.

`viz.analysis` computes slack and causes; this file maps them to operations of a table, for the canvas to draw arrows. A
table without a timeline has details of operations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import EventGraph, event_graph
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Beside, is_kind
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import TOLERANCE, Timeline, time_graph
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from viz.analysis.bubbles import WHY
from viz.analysis.memory import memory_curve
from viz.kinds import describe, listed
from viz.lane_cache import CachedLanes, Explainer
from viz.lanes import Flag
from viz.numbers import PLAN_UNIT, TimeUnit, percent, short


@dataclass(frozen=True)
class Details:
    """Details of a selection.

    Attributes:
        title, lines: heading and text.
        needs: a row per input of an operation: text, worker, cause, arrival, slack.
        links: `inputs` and `outputs`, operations that the selection needs and that need it; `waited`, the operation
            that determined its start, or -1.
    """

    title: str
    lines: list[str]
    needs: list[list[str]] = field(default_factory=list)
    links: dict[str, Any] = field(default_factory=lambda: {"inputs": [], "outputs": [], "waited": -1})


def details(shown: CachedLanes, choice: dict[str, Any]) -> Details | None:
    """Return the details of a selection from the browser; None if it is not in the table."""
    table = shown.table
    operation, lane = choice.get("operation"), choice.get("lane")
    if isinstance(operation, int) and 0 <= operation < len(table):
        return of_operation(shown, operation)
    if isinstance(lane, int) and 0 <= lane < table.lanes:
        start, end = choice.get("from"), choice.get("to")
        if isinstance(start, int | float) and isinstance(end, int | float):
            return of_gap(shown, lane, float(start), float(end))
        return of_worker(shown, lane)
    return None


def of_operation(shown: CachedLanes, operation: int) -> Details:
    """Return an operation's description, inputs with slack, and consumers."""
    lane = int(np.searchsorted(shown.table.offsets, operation, side="right")) - 1
    title, *lines = describe(shown.table, operation, lane, shown.unit)
    explainer = shown.explainer
    if explainer is None:
        return Details(title, lines)
    row, schedule = explainer.row(shown.table, operation), explainer.timeline.schedule
    inputs, total = explainer.waits.inputs(row)
    decided = bool(inputs) and inputs[0].slack <= explainer.timeline.makespan * TOLERANCE
    unit, needs = shown.unit, []
    for place, need in enumerate(inputs):
        slack = "none: waited for this" if decided and not place else unit.amount(need.slack)
        worker, _ = schedule.position(need.row)
        instruction, arrived = str(schedule.instruction(need.row)), unit.text(need.arrived)
        needs.append([instruction, str(worker), WHY[need.cause], arrived, slack])
    if total > len(inputs):
        lines.append(f"needs {total - len(inputs)} more, which were there earlier")
    place_of = partial(explainer.operation, shown.table)
    values = [place_of(need.row) for need in inputs if need.cause not in (Cause.ORDER, Cause.LANE)]
    users = [place_of(user) for user in explainer.waits.outputs(row)]
    waited = place_of(inputs[0].row) if decided else -1
    drawn = {name: [i for i in found if i >= 0] for name, found in (("inputs", values), ("outputs", users))}
    return Details(title, lines, needs, {**drawn, "waited": waited})


def of_gap(shown: CachedLanes, lane: int, start: float, end: float) -> Details:
    """Return the causes of a gap of a worker, one line per part with a single cause."""
    table = shown.table
    unit = shown.unit
    title = f"Worker {table.labels[lane]} is idle"
    lines = [f"from {unit.text(start)} to {unit.text(end)}, {unit.amount(end - start)}"]
    worker = _worker(shown, lane)
    if worker is not None and shown.explainer is not None:
        bubbles, slack = shown.explainer.bubbles, 1e-5 * table.span  # the browser's times are rounded to 24 bits
        lines += [bubbles.reason(gap, unit) for gap in bubbles.between(worker, start + slack, end - slack)]
    return Details(title, lines)


def of_worker(shown: CachedLanes, lane: int) -> Details:
    """Return the totals of a worker."""
    table = shown.table
    mine = slice(int(table.offsets[lane]), int(table.offsets[lane + 1]))
    work = ~is_kind(table.kind[mine], Beside)
    busy = float((table.end[mine] - table.start[mine])[work].sum())
    counted = listed(table.kind[mine])
    said = f"{int(counted.sum()):,} instructions"
    lines = [f"{said}, busy {percent(busy / table.span)} of the time" if table.span else "idle"]
    away = int(((table.flags[mine] & Flag.REROUTED) != 0)[counted].sum())
    if away:
        lines.append(f"{away} of them re-routed to it")
    if table.failed[lane]:
        lines.append("has failed")
    worker, explainer = _worker(shown, lane), shown.explainer
    if worker is not None and explainer is not None and not table.failed[lane]:
        peak, _, row = memory_curve(explainer.timeline, worker).peak
        limit = f" of {short(explainer.limits[worker % len(explainer.limits)])}" if explainer.limits else ""
        setter = f", from {explainer.timeline.schedule.instruction(row)} on" if row >= 0 else ""
        lines.append(f"holds at most {short(peak)}{limit} activations{setter}")
    return Details(f"Worker {table.labels[lane]}", lines)


def _worker(shown: CachedLanes, lane: int) -> int | None:
    if shown.explainer is None:
        return None
    if shown.explainer.ids is None:
        return lane
    first = int(shown.table.offsets[lane])
    if first == shown.table.offsets[lane + 1]:
        return None
    return int(shown.explainer.timeline.schedule.columns.worker[shown.explainer.row(shown.table, first)])


class Figure(NamedTuple):
    """A headline figure."""

    name: str
    value: str
    meaning: str


PERIOD = "Distance between two iterations in steady state, which throughput follows."
MAKESPAN = "From the first start to the last end of one iteration that begins idle."
BOUND = (
    "No schedule for these failures, times and limits has a shorter period; the gap is how far this one may be above"
    " the best."
)
BUBBLES = "Share of the time of all live workers in which they do not compute."
PEAK = "Most activations, in chunks, that a worker holds at a time: of all workers, the one closest to its limit."
RATIO = "Period divided by that of 1F1B with all workers, for the same times per layer."


def headline(shown: CachedLanes) -> list[Figure]:
    """Return the figures of cached lanes, without a makespan equal to the period; [] without a timeline."""
    found = figures(shown.explainer, shown.unit)
    return [one for one in found if one is found[0] or (one.name, one.value) != ("makespan", found[0].value)]


def figures_beside(
    columns: Sequence[tuple[str, Explainer | None]], unit: TimeUnit = PLAN_UNIT
) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows of a table with the figures of several timelines, one column each."""
    found = [{one.name: one.value for one in figures(explainer, unit)} for _, explainer in columns]
    names = dict.fromkeys(name for each in found for name in each)
    return ["", *(title for title, _ in columns)], [[name, *(each.get(name) for each in found)] for name in names]


def figures(explainer: Explainer | None, unit: TimeUnit) -> list[Figure]:
    """Return the figures of a timeline; [] without a timeline."""
    if explainer is None:
        return []
    timeline, limits = explainer.timeline, explainer.limits
    bubbles = Figure("bubbles", percent(timeline.bubble_ratio), BUBBLES)
    makespan = unit.amount(timeline.makespan)
    if explainer.executed:
        return [Figure("makespan", makespan, "From its first start to its last end, as executed."), bubbles]
    found = [Figure("period", unit.amount(timeline.period), PERIOD)]
    if explainer.proven is not None:
        bound, gap = explainer.proven
        above = f"gap {percent(gap)}" if gap > 1e-9 else "optimal"
        found.append(Figure("bound", f"{unit.amount(bound)} ({above})", BOUND))
    found.append(bubbles)
    ranks = timeline.schedule.shape.ranks
    peaks = [(peak, w % ranks) for w, peak in enumerate(timeline.peak_activations) if peak is not None]
    if peaks:
        peak, rank = max(peaks, key=lambda one: one[0] / ((limits[one[1]] or 1.0) if limits else 1.0))
        found.append(Figure("peak memory", short(peak) + (f" of {short(limits[rank])}" if limits else ""), PEAK))
    if usual := usual_period(timeline):
        found.append(Figure("1F1B", f"× {short(timeline.period / usual)}", RATIO))
    return [*found, Figure("makespan", makespan, MAKESPAN)]


def usual_period(timeline: Timeline) -> float | None:
    """Return the period of fault-free 1F1B in the times of `timeline`; None for unequal workers, links or layers.

    The pipelines are equal and independent, so one of them has the period of all.
    """
    shape, profile = timeline.schedule.shape, timeline.profile
    hosted = _stages_per_rank(timeline.schedule)
    if shape.cut or profile.speed or profile.links or hosted is None:
        return None
    times = {name: profile.per_stage(name, shape.stages) for name in _TIMES}
    per_rank: dict[str, Any] = {name: [sum(of[s] for s in stages) for stages in hosted] for name, of in times.items()}
    message = max(profile.per_stage("message", shape.stages))
    usual = Profile(**per_rank, latency=profile.latency, bandwidth=profile.bandwidth, message=message)
    return time_graph(_usual(shape.ranks, shape.micro_batches), usual).period


@lru_cache(8)
def _usual(ranks: int, micro_batches: int) -> EventGraph:
    return event_graph(lower(one_f_one_b(Shape(1, ranks, micro_batches))))


def _stages_per_rank(schedule: Schedule) -> list[tuple[int, ...]] | None:
    shape = schedule.shape
    for pipeline in range(shape.pipelines):
        hosted = [schedule.stages_of(Worker(pipeline, rank)) for rank in range(shape.ranks)]
        if sorted(stage for stages in hosted for stage in stages) == list(range(shape.stages)):
            return hosted
    return None


_TIMES = "forward", "backward_input", "backward_weight", "reduce", "step"
