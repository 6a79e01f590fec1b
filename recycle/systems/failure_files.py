"""Read failure traces from files in the public formats, detected by their content.

    event CSV     t_ms, add|remove, node [, cause]     with causes, faults of one node may overlap
    count CSV     t_ms, running nodes
    count log     date, time, running nodes            sorted by stamp, because public logs step back in time
    fault JSON    [{node_id, event_time (days), event_type: fault_start|fault_end, fault_type: {Class}}]

Counts give the number of lost nodes, not their names; a seeded choice selects running nodes. A loss and a gain between
two samples cancel, so rates from counts are lower bounds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from recycle.errors import TraceError
from recycle.files import read_whole
from recycle.systems.failures import FailureTrace, Row, trace_from_rows

POPULATIONS = {"fault_trace.json": 400, "infinitehbd_events.csv": 400}
"""Servers of public traces, from their descriptions (InfiniteHBD); servers without faults have no row."""
NOTES = {
    "scale_gcp-trace.csv": "not a GCP trace: bamboo/g4dn-trace.csv (EC2) rescaled to 15 to 30 nodes",
    "scale_p3-trace.csv": "bamboo/p3-trace.csv rescaled to 15 to 30 nodes: not independent evidence",
    "p3.csv": "running count of bamboo/p3-trace.csv: not independent evidence",
}
_DAY = 86400.0
_MOST_BYTES, _MOST_NODES, _MOST_DAYS = 2**27, 2**20, 36525
_MOST_MILLISECONDS = int(_MOST_DAYS * _DAY * 1000)


def read_trace(path: str | Path, *, population: int | None = None, seed: int = 0) -> FailureTrace:
    """Read a failure trace in any of the formats.

    Args:
        population: number of nodes, if more than have rows; known by name for public traces.
        seed: seed for the choice of nodes in count traces.

    Raises:
        TraceError: the file cannot be read or is not a trace; the message names the file and the line.
    """
    path = Path(path)
    content = read_whole(path, TraceError, _MOST_BYTES)
    population = POPULATIONS.get(path.name) if population is None else population
    notes = [NOTES[path.name]] if path.name in NOTES else []
    counted = False
    if content.lstrip()[:1] in (b"[", b"{"):
        rows, counted = _fault_rows(content, path), True
    else:
        lines = _lines(content, path)
        columns = len(lines[0].cells)
        if columns in (3, 4) and lines[0].cells[1] in ("add", "remove"):
            rows, counted = [_event_row(line) for line in lines], columns == 4
        elif columns in (2, 3):
            counts = [(line.number, *_count(line)) for line in lines]
            if columns == 3:
                ordered = sorted(counts, key=lambda row: row[1])
                notes += ["times go back: rows are sorted by time"] if ordered != counts else []
                counts = [(number, seconds - ordered[0][1], count) for number, seconds, count in ordered]
            rows = list(_count_rows(counts, random.Random(seed)))
            notes.append("counts only: the seed chooses the nodes that fail; gains cancel losses between two samples")
        else:
            raise TraceError(
                f"{lines[0].where}: {columns} columns are not a trace: write t_ms,add|remove,node[,cause], or"
                " t_ms,count, or date, time, count"
            )
    trace = trace_from_rows(rows, str(path), population=population, counted=counted)
    if trace.failures and not any(change.joined for change in trace.changes[1:]):
        notes.append("no node returns: shows degradation only")
    return replace(trace, name=path.name, notes=tuple(notes))


class _Line(NamedTuple):
    number: int
    where: str
    cells: list[str]


def _lines(content: bytes, path: Path) -> list[_Line]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}, line {number}: is not UTF-8 text") from None
    lines = [
        _Line(number, f"{path}, line {number}", [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    if not lines:
        raise TraceError(f"{path}: is empty: write lines such as 480000,add,node1 (milliseconds, event, node)")
    for line in lines:
        if len(line.cells) != len(lines[0].cells):
            raise TraceError(
                f"{line.where}: has {len(line.cells)} columns, line {lines[0].number} has {len(lines[0].cells)}"
            )
    return lines


def _event_row(line: _Line) -> Row:
    time, what, name, *cause = line.cells
    if what not in ("add", "remove") or not name:
        raise TraceError(f"{line.where}: {what},{name} is not an event: write add or remove, then a node")
    return Row(line.number, _parse_integer(time, line, _MOST_MILLISECONDS) / 1000, what == "remove", name, *cause)


def _count(line: _Line) -> tuple[float, int]:
    nodes = _parse_integer(line.cells[-1], line, _MOST_NODES)
    if len(line.cells) == 2:
        return _parse_integer(line.cells[0], line, _MOST_MILLISECONDS) / 1000, nodes
    try:
        stamp = datetime.strptime(" ".join(line.cells[:2]), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        raise TraceError(
            f"{line.where}: {', '.join(line.cells[:2])} is not a date and time: write 2021-12-11, 11:11:30"
        ) from None
    return (stamp - datetime(1970, 1, 1)).total_seconds(), nodes


def _parse_integer(text: str, line: _Line, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise TraceError(f"{line.where}: {text!r} is not a whole number from 0 to {most}")
    return int(text)


def _count_rows(counts: list[tuple[int, float, int]], choice: random.Random) -> Iterator[Row]:
    running: list[str] = []
    created = 0
    for number, seconds, count in counts:
        while len(running) > count:
            yield Row(number, seconds, True, running.pop(choice.randrange(len(running))))
        while len(running) < count:
            created += 1
            running.append(f"node{created}")
            yield Row(number, seconds, False, running[-1])


class _Fault(msgspec.Struct):
    node_id: str
    event_time: Annotated[float, Meta(ge=0, le=_MOST_DAYS)]
    event_type: Literal["fault_start", "fault_end"]
    fault_type: dict[str, str] = {}


def _fault_rows(content: bytes, path: Path) -> list[Row]:
    try:
        faults = msgspec.json.decode(content, type=list[_Fault])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: is not a list of faults: {error}") from None
    # four digits of a day: round to whole milliseconds, as derived files do
    return [
        Row(
            number,
            round(fault.event_time * _DAY * 1000) / 1000,
            fault.event_type == "fault_start",
            fault.node_id,
            fault.fault_type.get("Class", ""),
        )
        for number, fault in enumerate(faults, 1)
    ]
