"""Details of a selection (an operation, a gap or a worker), and the headline figures of a timeline.

`viz.analysis` computes slack and causes. A table without a timeline has details of operations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import EventGraph, event_graph
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import AsyncInstruction, is_kind
from recycle.ir.lower import lower
from recycle.ir.memory import activation_changes
from recycle.ir.simulate import TOLERANCE, Timeline, time_graph
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from viz.analysis.bubbles import CAUSE_TEXTS
from viz.analysis.memory import knows_bytes, limits_of_workers, memory_curve, micro_batches_held
from viz.kinds import describe, is_schedule_work
from viz.lane_cache import TimedLanes, TimelineContext
from viz.lanes import Flag
from viz.numbers import PLAN_UNIT, TimeUnit, bytes_text, percent, short

MAX_HELD = 24
"""Micro-batches that are listed individually."""


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


def details(entry: TimedLanes, choice: dict[str, Any]) -> Details | None:
    """Return the details of a selection from the browser; None if it is not in the table."""
    table = entry.table
    operation, lane = choice.get("operation"), choice.get("lane")
    if isinstance(operation, int) and 0 <= operation < len(table):
        return operation_details(entry, operation)
    if isinstance(lane, int) and 0 <= lane < table.lanes:
        start, end = choice.get("from"), choice.get("to")
        if isinstance(start, int | float) and isinstance(end, int | float):
            return gap_details(entry, lane, float(start), float(end))
        return worker_details(entry, lane)
    return None


def operation_details(entry: TimedLanes, operation: int) -> Details:
    table, context, unit = entry.table, entry.context, entry.unit
    title, *lines = describe(table, operation, table.lane_of(operation), unit)
    if context is None:
        return Details(title, lines)
    row, schedule, index = int(table.instruction_id[operation]), context.timeline.schedule, context.dependency_index
    inputs, total = index.inputs(row)
    needs, waited = [], -1
    for need in inputs:
        worker, slack = str(schedule.position(need.row)[0]), unit.amount(need.slack)
        if need is inputs[0] and need.slack <= context.timeline.makespan * TOLERANCE:
            slack, waited = "none: waited for this", table.operation_of(need.row)
        instruction, arrived = str(schedule.instruction(need.row)), unit.text(need.arrived)
        needs.append([instruction, worker, CAUSE_TEXTS[need.cause], arrived, slack])
    if total > len(inputs):
        lines.append(f"needs {total - len(inputs)} more inputs, which arrived earlier")
    values = [need.row for need in inputs if need.cause not in (Cause.ORDER, Cause.LANE)]
    rows = {"inputs": values, "outputs": index.outputs(row)}
    links = {name: [i for i in map(table.operation_of, ends) if i >= 0] for name, ends in rows.items()}
    return Details(title, lines, needs, {**links, "waited": waited})


def gap_details(entry: TimedLanes, lane: int, start: float, end: float) -> Details:
    """Return the causes of a gap of a worker, one line per part with a single cause."""
    table, unit = entry.table, entry.unit
    lines = [f"from {unit.text(start)} to {unit.text(end)}, {unit.amount(end - start)}"]
    if entry.context is not None:
        bubbles, slack = entry.context.bubbles, 1e-5 * table.span  # the browser's times are rounded to 24 bits
        lines += [bubbles.reason(gap, unit) for gap in bubbles.in_interval(lane, start + slack, end - slack)]
    return Details(f"Worker {table.labels[lane]} is idle", lines)


def worker_details(entry: TimedLanes, lane: int) -> Details:
    table, context = entry.table, entry.context
    operations = slice(int(table.offsets[lane]), int(table.offsets[lane + 1]))
    kinds, seconds = table.kind[operations], (table.end - table.start)[operations]
    busy, counted = float(seconds[~is_kind(kinds, AsyncInstruction)].sum()), is_schedule_work(kinds)
    instructions = f"{int(counted.sum()):,} instructions"
    lines = [f"{instructions}, busy {percent(busy / table.span)} of the time" if table.span else "idle"]
    if rerouted := int(table.has(Flag.REROUTED)[operations][counted].sum()):
        lines.append(f"{rerouted} of them re-routed to it")
    if table.failed[lane]:
        lines.append("has failed")
    if context is not None and (held := memory_of_workers(context)[lane]) is not None:
        timeline = context.timeline
        changes = activation_changes(timeline.schedule, timeline.profile, in_bytes=held.in_bytes)
        _, time, row = memory_curve(timeline, lane, changes).peak
        setter = f", from {timeline.schedule.instruction(row)} on" if row >= 0 else ""
        lines.append(f"holds at most {held}{'' if held.in_bytes else ' activations'}{setter}")
        if held_then := micro_batches_held(timeline, lane, time):
            omitted = f" and {len(held_then) - MAX_HELD} more" if len(held_then) > MAX_HELD else ""
            lines.append(f"holds then: {', '.join(held_then[:MAX_HELD])}{omitted}")
    return Details(f"Worker {table.labels[lane]}", lines)


class Figure(NamedTuple):
    """A figure of a timeline: its number in the unit of its text (a share for percents), and what it means."""

    name: str
    value: str
    meaning: str
    number: float


PERIOD = "Distance between two iterations in steady state, which throughput follows."
MAKESPAN = "From the first start to the last end of one iteration that begins idle."
EXECUTED = "From its first start to its last end, as executed."
BOUND = (
    "No schedule for these failures, times and limits has a shorter period; the gap is how far this one may be above"
    " the best."
)
CERTIFIED = " recycle verify proves this bound again from the plan file."
BUBBLES = "Share of the live workers' time in steady state in which they do not compute."
FROM_IDLE = "The same share within the makespan of one iteration that begins and ends idle."
PEAK = "Most memory of any worker, of all workers the one closest to its limit: in bytes where the profile states them,"
PEAK += " else in activations of a worker's whole part of the model."
RATIO = "Period divided by that of 1F1B with all workers, for the same times per layer."


def headline(entry: TimedLanes) -> list[Figure]:
    """Return the figures of cached lanes, of plans without those of one iteration from idle; [] without a timeline."""
    shown = figures(entry.context, entry.unit)
    return shown if entry.context and entry.context.executed else shown[:-2]


def figures_table(
    columns: Sequence[tuple[str, TimelineContext | None]], unit: TimeUnit = PLAN_UNIT
) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows of a table with the figures of several timelines, one column each."""
    shown = [{figure.name: figure.value for figure in figures(context, unit)} for _, context in columns]
    names = dict.fromkeys(name for values in shown for name in values)
    rows = [[name, *(values.get(name) for values in shown)] for name in names]
    return ["", *(title for title, _ in columns)], rows


def figures(context: TimelineContext | None, unit: TimeUnit) -> list[Figure]:
    """Return the figures of a timeline, the same on every page and in every table."""
    if context is None:
        return []
    timeline = context.timeline

    def time(name: str, seconds: float, meaning: str, suffix: str = "") -> Figure:
        return Figure(name, unit.text(seconds) + suffix, meaning, seconds * unit.scale)

    def share(name: str, value: float, meaning: str) -> Figure:
        return Figure(name, percent(value), meaning, value)

    from_idle = timeline.bubble_ratio
    if context.executed:
        return [time("makespan", timeline.makespan, EXECUTED), share("bubbles", from_idle, FROM_IDLE)]
    result = [time("period", timeline.period, PERIOD)]
    if context.bound is not None:
        bound, gap = context.bound
        certified = context.plan is not None and context.plan.certified_bound == bound
        meaning = BOUND + CERTIFIED * certified
        result.append(time("bound", bound, meaning, f" (gap {percent(gap)})" if gap > 1e-9 else " (optimal)"))
    if usual := one_f_one_b_period(timeline):
        ratio = timeline.period / usual
        result.append(Figure("1F1B", f"\N{MULTIPLICATION SIGN} {short(ratio)}", RATIO, ratio))
    busy = [seconds for seconds in timeline.busy if seconds is not None]
    idle = max(0.0, 1 - sum(busy) / (timeline.period * len(busy))) if busy and timeline.period else 0.0
    result.append(share("bubbles", idle, BUBBLES))
    if peaks := [held for held in memory_of_workers(context) if held is not None]:
        peak = max(peaks, key=lambda held: held.amount / (held.limit or 1.0))
        result.append(Figure("peak memory", str(peak), PEAK, peak.amount))
    return [*result, time("makespan", timeline.makespan, MAKESPAN), share("bubbles from idle", from_idle, FROM_IDLE)]


class HeldMemory(NamedTuple):
    """Most memory of a worker and its limit, in bytes or in activations of a worker's whole part of the model."""

    amount: float
    limit: float | None
    in_bytes: bool

    def __str__(self) -> str:
        text_of = bytes_text if self.in_bytes else short
        return text_of(self.amount) + ("" if self.limit is None else f" of {text_of(self.limit)}")


def memory_of_workers(context: TimelineContext) -> list[HeldMemory | None]:
    """Return the memory of each worker, None for failed ones; in bytes where the profile states them."""
    timeline, limits = context.timeline, limits_of_workers(context)
    in_bytes = knows_bytes(timeline.profile)
    unit = 1.0 if in_bytes else 1.0 / context.chunks
    held = timeline.peak_bytes if in_bytes else timeline.peak_activations
    return [
        None if peak is None else HeldMemory(peak * unit, limit, in_bytes)
        for peak, limit in zip(held, limits, strict=True)
    ]


def exceeds_limit(context: TimelineContext) -> bool:
    held = memory_of_workers(context)
    return any(each.limit is not None and each.amount > each.limit * (1 + TOLERANCE) for each in held if each)


def one_f_one_b_period(timeline: Timeline) -> float | None:
    """Return the period of fault-free 1F1B in the times of `timeline`; None for unequal workers, links or layers."""
    shape, profile = timeline.schedule.shape, timeline.profile
    grid = [[timeline.schedule.stages_of(Worker(k, r)) for r in range(shape.ranks)] for k in range(shape.pipelines)]
    whole = (row for row in grid if sorted(stage for stages in row for stage in stages) == list(range(shape.stages)))
    hosted = next(whole, None)
    if shape.cut or profile.speed or profile.links or hosted is None:
        return None
    times: dict[str, Any] = {}
    for name in ("forward", "backward_input", "backward_weight", "reduce", "step"):
        values = profile.per_stage(name, shape.stages)
        times[name] = [sum(values[s] for s in stages) for stages in hosted]
    message = max(profile.per_stage("message", shape.stages))
    usual = Profile(**times, latency=profile.latency, bandwidth=profile.bandwidth, message=message)
    return time_graph(_usual(shape.ranks, shape.micro_batches), usual).period


@lru_cache(8)
def _usual(ranks: int, micro_batches: int) -> EventGraph:
    return event_graph(lower(one_f_one_b(Shape(1, ranks, micro_batches))))
