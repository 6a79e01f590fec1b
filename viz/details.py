"""What the page says of a selection: an operation with its inputs and what it waited for, a gap's cause, a worker.

Slack and causes come from `viz.analysis`; here they meet the operations of a table, which the canvas draws
arrows between. Of a table without a timeline only the operation itself is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from recycle.ir.dependencies import Cause
from recycle.ir.instruction import Beside, is_kind
from recycle.ir.simulate import TOLERANCE
from viz.analysis.memory import memory_curve
from viz.analysis.waits import WHY
from viz.labels import describe, listed
from viz.lane_cache import CachedLanes
from viz.lanes import Flag
from viz.numbers import percent, short


@dataclass(frozen=True)
class Details:
    """What is said of a selection.

    Attributes:
        title, lines: a heading and what stands below it.
        needs: a row for each thing that an operation needed: its text, its worker, why, when it was there, its slack.
        inputs, outputs: operations that the selection needed, and that need it.
        waited: the operation that decided its start, -1 when none did.
    """

    title: str
    lines: list[str]
    needs: list[list[str]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    waited: int = -1


def details(shown: CachedLanes, choice: dict[str, Any]) -> Details | None:
    """The details of what the browser says was chosen; None when that is not in the table."""
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
    """An operation: what it is, what it needed with slack, and what needs it."""
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
    users = [place_of(user.row) for user in explainer.waits.outputs(row)]
    waited = place_of(inputs[0].row) if decided else -1
    return Details(title, lines, needs, _drawn(values), _drawn(users), waited)


def _drawn(operations: list[int]) -> list[int]:
    return [operation for operation in operations if operation >= 0]


def of_gap(shown: CachedLanes, lane: int, start: float, end: float) -> Details:
    """A gap of a worker: why it is idle, a line for each part that has one cause."""
    table = shown.table
    unit = shown.unit
    title = f"Worker {table.labels[lane]} is idle"
    lines = [f"from {unit.text(start)} to {unit.text(end)}, {unit.amount(end - start)}"]
    worker = _worker(shown, lane)
    if worker is not None and shown.explainer is not None:
        bubbles = shown.explainer.bubbles
        slack = 1e-5 * table.span  # the browser's times are rounded to 24 bits
        gap = bubbles.at(worker, start + slack) if end - start > 2 * slack else None
        while gap is not None and gap.start < end - slack:
            lines.append(bubbles.reason(gap, unit))
            gap = bubbles.next(worker, gap.start)
    return Details(title, lines)


def of_worker(shown: CachedLanes, lane: int) -> Details:
    """A worker: what it does in all."""
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
    """Index of the lane's worker in the timeline: itself in a plan, the role that it played in what ran."""
    if shown.explainer is None:
        return None
    if shown.explainer.ids is None:
        return lane
    first = int(shown.table.offsets[lane])
    if first == shown.table.offsets[lane + 1]:
        return None
    return int(shown.explainer.timeline.schedule.columns.worker[shown.explainer.row(shown.table, first)])
