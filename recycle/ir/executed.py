"""An executed iteration as a Timeline: the same questions (gaps, inputs, memory) for what ran as for what was planned.

What each instruction waited for follows from the dependency rule and the recorded times: of all that it needs, what
ended last. An executor announces a receive and goes on, so a recorded receive says nothing of the arrival; it counts
as arrived when its send ended, or, where its consumer's worker sat idle until the consumer began, then. What an
executor does between arrival and start is part of that wait.
Times count from the first start. Limits: the times must be of one clock (see `first_impossible`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recycle.ir.chains import compute_order
from recycle.ir.columns import Columns, Floats, Rows
from recycle.ir.dependencies import Dependencies, dependencies
from recycle.ir.simulate import Timeline, event_edges
from recycle.ir.trace import Trace, executed_schedule
from recycle.profile import Profile


def executed_timeline(ran: Trace, profile: Profile) -> Timeline:
    """The timeline of one generation of one step (`Trace.window`), in role names and seconds.

    Args:
        profile: gives bytes and the share of an activation that is kept between I and W; its times are not used.

    Returns:
        A timeline whose `period` is its makespan: one iteration says nothing of the next.
    """
    schedule, rows = executed_schedule(ran)
    origin = float(ran.start.min()) if len(ran) else 0.0
    start, end = ran.start[rows] - origin, ran.end[rows] - origin
    graph = dependencies(schedule)
    end = _with_arrivals(schedule.columns, graph, start, end)
    span = float(end.max()) if len(end) else 0.0
    source, target, _ = event_edges(schedule.columns, graph)
    return Timeline(schedule, profile, start, end, _awaited(graph, source, target, end), span, graph)


def _with_arrivals(columns: Columns, graph: Dependencies, start: Floats, end: Floats) -> Floats:
    """`end`, that of each receive moved to the end of its send, and to the start of a consumer that sat waiting."""
    receives = np.flatnonzero(graph.sends >= 0)
    arrived = end.copy()
    arrived[receives] = np.maximum(end[receives], end[graph.sends[receives]])
    before, after = compute_order(columns)
    idle_from = np.zeros(len(end))
    idle_from[after] = end[before]
    edges = np.flatnonzero((graph.source < graph.rows) & (graph.target < graph.rows))
    edges = edges[graph.sends[graph.source[edges]] >= 0]
    edges = edges[start[graph.target[edges]] > idle_from[graph.target[edges]]]
    np.maximum.at(arrived, graph.source[edges], start[graph.target[edges]])
    return arrived


def _awaited(graph: Dependencies, source: Rows, target: Rows, end: Floats) -> Rows:
    """For each node the one of its predecessors that ended last, -1 where it has none."""
    ends = np.append(end, np.zeros(graph.nodes - graph.rows))
    into_join = target >= graph.rows  # joins wait for rows only
    np.maximum.at(ends, target[into_join], ends[source[into_join]])
    order = np.lexsort((ends[source], target))
    final = order[np.append(np.diff(target[order]) != 0, True)] if len(order) else order
    last = np.full(graph.nodes, -1, dtype=np.int64)
    last[target[final]] = source[final]
    return last


class Impossible(NamedTuple):
    """A consumer that began before what it uses was sent: the two clocks do not agree.

    Attributes:
        producer, consumer: rows of the send and of who uses what it carries.
        seconds: by how much at least the clocks disagree.
    """

    producer: int
    consumer: int
    seconds: float


def first_impossible(timeline: Timeline) -> Impossible | None:
    """The worst violation of cause and effect in an executed timeline, None when there is none.

    A value can be used only after its send has begun. Traces of several machines whose clocks were not aligned break
    that, and every picture of them together would look plausible and be wrong.
    """
    sends, consumers = _transfers(timeline)
    if not len(sends):
        return None
    ahead = timeline.start[sends] - timeline.start[consumers]
    worst = int(ahead.argmax())
    return Impossible(int(sends[worst]), int(consumers[worst]), float(ahead[worst])) if ahead[worst] > 0 else None


def transfer_leads(timeline: Timeline) -> Floats:
    """Seconds from the start of each send to the start of who uses what it carries."""
    sends, consumers = _transfers(timeline)
    return timeline.start[consumers] - timeline.start[sends]


def _transfers(timeline: Timeline) -> tuple[Rows, Rows]:
    """(send, consumer) of each use of a transferred value."""
    graph = timeline.dependencies
    edges = np.flatnonzero((graph.source < graph.rows) & (graph.target < graph.rows))
    edges = edges[graph.sends[graph.source[edges]] >= 0]
    return graph.sends[graph.source[edges]], graph.target[edges]
