"""What is told of a selection: an operation with its inputs and what it waited for, a gap with its cause, a worker.

Times and causes come from the timeline that a planned table was made of; of an executed table only the operation
itself is known. `Links` are operations of the table, for the arrows on the canvas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recycle.ir.gaps import GapCause
from recycle.ir.instruction import RECV_KINDS, TRANSFER_KINDS, Kind, is_kind
from recycle.ir.simulate import Timeline
from viz.figures.boxes import describe, time_unit
from viz.lanes import Flag, LaneTable
from viz.shelf import Shown

MOST_GAP_ROWS = 1_000_000
"""Rows of a schedule up to which the causes of its gaps are worked out on a click: about a second."""


@dataclass(frozen=True)
class Links:
    """Operations that the selection needed (`waited` decided its start, -1 when none did), and that need it."""

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    waited: int = -1


@dataclass(frozen=True)
class Need:
    """One thing that an instruction needed: its text, its worker, when it was there, how long it lay there unused."""

    instruction: str
    worker: str
    arrived: float
    slack: float
    decided: bool


@dataclass(frozen=True)
class Details:
    """A heading, lines of text, and what was needed."""

    title: str
    lines: list[str]
    needs: list[Need] = field(default_factory=list)
    links: Links = field(default_factory=Links)


def details(shown: Shown, choice: dict[str, Any]) -> Details | None:
    """The details of what the browser says was chosen; None when that is not in the table."""
    table = shown.table
    operation, lane = choice.get("operation"), choice.get("lane")
    if isinstance(operation, int) and 0 <= operation < len(table):
        return of_operation(shown, operation)
    if isinstance(lane, int) and 0 <= lane < table.lanes:
        start = choice.get("from")
        if isinstance(start, int | float) and not isinstance(start, bool):
            return of_gap(shown, lane, float(start), float(choice.get("to", start)))
        return of_worker(table, lane)
    return None


def of_operation(shown: Shown, operation: int) -> Details:
    """An operation: what it is, what it needed with slack, and what needs it."""
    table, timeline = shown.table, shown.timeline
    lane = int(np.searchsorted(table.offsets, operation, side="right")) - 1
    title, *lines = describe(table, operation, lane)
    if timeline is None:
        return Details(title, lines)
    row = int(table.instruction_id[operation])
    needed = list(_needed(timeline, row))
    decisive = max(needed, key=lambda made: timeline.end[made[1]], default=None)
    decided = decisive is not None and bool(np.isclose(timeline.end[decisive[1]], timeline.start[row]))
    needs = [
        Need(
            str(timeline.schedule.instruction(made)),
            str(timeline.schedule.position(made)[0]),
            float(timeline.end[brought]),
            float(timeline.start[row] - timeline.end[brought]),
            decided and (made, brought) == decisive,
        )
        for made, brought in needed
    ]
    before = int(timeline.last[row])
    if not decided and 0 <= before < len(timeline.end):
        lines.append(f"began when its worker was free, after {timeline.schedule.instruction(before)}")
    inputs = [_operation(shown, timeline, made) for made, _ in needed]
    outputs = [_operation(shown, timeline, user) for user in _users(timeline, row)]
    waited = _operation(shown, timeline, decisive[0]) if decided and decisive is not None else -1
    links = Links([i for i in inputs if i >= 0], [i for i in outputs if i >= 0], waited)
    return Details(title, lines, needs, links)


def _operation(shown: Shown, timeline: Timeline, row: int) -> int:
    """The operation of a row of the schedule, -1 where none is drawn of it."""
    table = shown.table
    worker = int(np.searchsorted(timeline.schedule.columns.offsets, row, side="right")) - 1
    lane = slice(int(table.offsets[worker]), int(table.offsets[worker + 1]))
    found = np.flatnonzero(table.instruction_id[lane] == row)
    return lane.start + int(found[0]) if len(found) else -1


def _needed(timeline: Timeline, row: int) -> Iterator[tuple[int, int]]:
    """(row that made it, row that brought it) of each thing that `row` needs; the same row where nothing brought it."""
    graph, kind = timeline.dependencies, timeline.schedule.columns.kind
    offsets, sources = graph.by_target
    for source in sources[offsets[row] : offsets[row + 1]].tolist():
        if source >= graph.rows:  # a join: all that a reduce or step waits for; the last of it tells enough
            last = int(timeline.last[source])
            if 0 <= last < graph.rows:
                yield last, last
        elif kind[source] in RECV_KINDS:
            send = int(graph.sends[source])
            made = sources[offsets[send] : offsets[send + 1]].tolist() if send >= 0 else []
            for producer in made or [source]:
                yield producer, send if send >= 0 else source
        else:
            yield source, source


def _users(timeline: Timeline, row: int) -> list[int]:
    """The computes that need what `row` makes, through their transfers."""
    graph, kind = timeline.dependencies, timeline.schedule.columns.kind
    users: list[int] = []
    waiting = [row]
    while waiting:
        for user in graph.target[graph.source == waiting.pop()].tolist():
            if user >= graph.rows:
                continue
            (waiting if is_kind(kind[user : user + 1], TRANSFER_KINDS)[0] else users).append(user)
    return users


def of_gap(shown: Shown, lane: int, start: float, end: float) -> Details:
    """A gap of a worker: why it is idle, in each part that has one cause."""
    table, timeline = shown.table, shown.timeline
    scale, unit = time_unit(table, table.span)

    def time(value: float) -> str:
        return f"{value * scale:.6g}{unit and ' ' + unit}"

    title = f"Worker {table.labels[lane]} is idle"
    lines = [f"from {time(start)} to {time(end)}, {time(end - start)}"]
    if timeline is None:
        return Details(title, lines)
    if len(timeline.end) > MOST_GAP_ROWS:
        lines.append(f"its cause is not worked out: the schedule has more than {MOST_GAP_ROWS:,} instructions")
        return Details(title, lines)
    gaps = timeline.gaps()
    slack = 1e-5 * table.span
    inside = np.flatnonzero((gaps.worker == lane) & (gaps.start > start - slack) & (gaps.end < end + slack))
    instruction = timeline.schedule.instruction
    for place in inside.tolist():
        cause, row, awaited, ready = (
            int(getattr(gaps, name)[place]) for name in ("cause", "row", "waits_for", "ready")
        )
        text = f"{time(gaps.start[place])} to {time(gaps.end[place])}: {_CAUSES[GapCause(cause)]}"
        names = {
            "row": str(instruction(row)) if row >= 0 else "",
            "awaited": f"{instruction(awaited)} of worker {timeline.schedule.position(awaited)[0]}"
            if awaited >= 0
            else "",
            "ready": str(instruction(ready)) if ready >= 0 else "",
        }
        lines.append(text.format(**names))
    return Details(title, lines)


_CAUSES = {
    GapCause.INPUT: "{row} needs what {awaited} has not made yet",
    GapCause.TRANSFER: "{row} needs what {awaited} brings: it is made, and under way",
    GapCause.REDUCE: "{row} waits for other workers, last for {awaited}",
    GapCause.MEMORY: "{ready} could run, but memory is at its limit",
    GapCause.ORDER: "{ready} could run, but the program's order puts {row} first",
    GapCause.NOTHING_LEFT: "the program has ended",
}


def of_worker(table: LaneTable, lane: int) -> Details:
    """A worker: what it does in all."""
    mine = slice(int(table.offsets[lane]), int(table.offsets[lane + 1]))
    work = ~is_kind(table.kind[mine], TRANSFER_KINDS)
    busy = float((table.end[mine] - table.start[mine])[work].sum())
    lines = [f"{int(work.sum())} instructions, busy {busy / table.span:.1%} of the time" if table.span else "idle"]
    away = int(((table.flags[mine] & Flag.REROUTED) != 0)[work].sum())
    if table.failed[lane]:
        lines.append("has failed")
    if away:
        lines.append(f"{away} of them re-routed to it")
    reduces = table.kind[mine] == Kind.REDUCE_GRADIENTS
    if reduces.any():
        lines.append(f"stages {', '.join(map(str, np.unique(table.stage[mine][reduces]).tolist()))}")
    return Details(f"Worker {table.labels[lane]}", lines)
