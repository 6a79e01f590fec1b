"""An executed iteration as a Timeline: the same questions (gaps, inputs, memory) for what ran as for what was planned;
and what instructions took, as a profile.

What each instruction waited for follows from the dependency rule and the recorded times: of all that it needs, what
ended last. An executor announces a receive and goes on, so a recorded receive says nothing of the arrival; it counts
as arrived when its send ended, or, where its consumer's worker sat idle until the consumer began, then. What an
executor does between arrival and start is part of that wait.
Times count from the first start. Limits: the times must be of one clock (see `first_impossible`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from statistics import median_low
from typing import NamedTuple

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.columns import Columns, Floats, Rows, compute_order
from recycle.ir.dependencies import Dependencies, dependencies
from recycle.ir.event_graph import event_edges
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    OverlappedPair,
    WeightPart,
)
from recycle.ir.lower import buckets_of
from recycle.ir.simulate import Timeline
from recycle.ir.trace import Trace, executed_schedule
from recycle.job.profile import Link, Profile

_NAMES = {
    Forward.kind: "forward",
    BackwardInput.kind: "backward_input",
    BackwardWeight.kind: "backward_weight",
    Backward.kind: "backward",
    OptimizerStep.kind: "step",
}


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
    return Timeline(schedule, profile, start, end, _awaited(graph, source, target, end), graph, span)


def _with_arrivals(columns: Columns, graph: Dependencies, start: Floats, end: Floats) -> Floats:
    """`end`, that of each receive moved to the end of its send, and to the start of a consumer that sat waiting."""
    receives = np.flatnonzero(graph.sends >= 0)
    arrived = end.copy()
    arrived[receives] = np.maximum(end[receives], end[graph.sends[receives]])
    before, after = compute_order(columns)
    idle_from = np.zeros(len(end))
    idle_from[after] = end[before]
    received, consumers = _consumed(graph)
    waited = start[consumers] > idle_from[consumers]
    np.maximum.at(arrived, received[waited], start[consumers[waited]])
    return arrived


def _consumed(graph: Dependencies) -> tuple[Rows, Rows]:
    """(receive, consumer) of each use of a transferred value."""
    edges = graph.between_rows
    edges = edges[graph.sends[graph.source[edges]] >= 0]
    return graph.source[edges], graph.target[edges]


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
    receives, consumers = _consumed(timeline.dependencies)
    return timeline.dependencies.sends[receives], consumers


WorkerTimes = Mapping[tuple[str, int, int], float]
"""(name in a profile or "backward", stage, worker index) -> median seconds."""


def worker_times(ran: Trace, stages: int) -> WorkerTimes:
    """What each worker took for the instructions of each stage; a W that ran in parts counts as their sum."""
    c, seconds, buckets = ran.columns, ran.end - ran.start, buckets_of(ran.columns)
    found: dict[tuple[str, int, int], float] = {}
    for stage, kind in product(range(stages), (*_NAMES, WeightPart.kind)):
        rows = np.flatnonzero((c.stage == stage) & (c.kind == kind))
        for worker in np.unique(ran.process[rows]).tolist():
            took = seconds[rows[ran.process[rows] == worker]]
            if kind == WeightPart.kind:
                found.setdefault(("backward_weight", stage, worker), buckets * float(took.mean()))
            else:
                found[_NAMES[kind], stage, worker] = float(np.median(took))
    return found


def stage_times(times: WorkerTimes, stage: int, profile: Profile, stages: int) -> dict[str, float]:
    """What a stage takes by name: of its hosts the lower median. A B that ran whole is split as `profile` says."""
    usual = {
        name: median_low(seconds)
        for name in _NAMES.values()
        if (seconds := [t for (n, s, _), t in times.items() if (n, s) == (name, stage)])
    }
    if "backward_input" not in usual and "backward" in usual:
        halves = [profile.per_stage(name, stages)[stage] for name in ("backward_input", "backward_weight")]
        share = halves[0] / sum(halves) if sum(halves) else 0.5  # without a known unit, parts are taken to be alike
        usual["backward_input"] = usual["backward"] * share
        usual["backward_weight"] = usual["backward"] - usual["backward_input"]
    return usual


def executed_profile(ran: Trace, step: int, name: str) -> Profile:
    """What the instructions of a trace took, in seconds: medians over all its iterations, links over one.

    Times are those that the trace states, waits inside them included. A transfer lasts from when both of its ends have
    begun until both have ended; its bytes are not in a trace, so that it is all latency.

    Args:
        step: the iteration that tells the links.
        name: of the trace, for error messages.

    Raises:
        ScheduleError: a stage lacks its forward or its backward.
    """
    stages, times = ran.shape.stages, worker_times(ran, ran.shape.stages)
    found: dict[str, list[float]] = {key: [] for key in ("forward", "backward_input", "backward_weight", "step")}
    for stage in range(stages):
        usual = {"step": 0.0, **stage_times(times, stage, Profile(), stages)}
        if (missing := next((key for key in found if key not in usual), None)) is not None:
            raise ScheduleError(f"{name}: stage {stage} ran no {missing}, without which a profile is not whole")
        for key, values in found.items():
            values.append(round(usual[key], 12))
    pairs = ran.columns.kind == OverlappedPair.kind
    links = _links(ran.window(step, step, ran.generations_of(step)[-1]))
    return Profile(
        found["forward"],
        found["backward_input"],
        found["backward_weight"],
        step=found["step"],
        overlapped_pair=float(np.median((ran.end - ran.start)[pairs])) if pairs.any() else None,
        latency=float(np.median([link.latency for link in links.values()])) if links else 0.0,
        links=links,
        measured={"trace": name, "iterations": len(ran.steps)},
    )


def _links(ran: Trace) -> dict[str, Link]:
    """The median transfer of each directed pair of workers in one iteration."""
    schedule, rows = executed_schedule(ran)
    start, end, columns = ran.start[rows], ran.end[rows], schedule.columns
    sends = dependencies(schedule).sends[: len(columns)]
    receives = np.flatnonzero(sends >= 0)
    sent = sends[receives]
    seconds = np.maximum(end[receives], end[sent]) - np.maximum(start[receives], start[sent])
    pair = columns.worker[sent].astype(np.int64) * ran.shape.worker_count + columns.worker[receives]
    workers = list(map(str, ran.shape.workers()))
    return {
        f"{workers[each // len(workers)]}>{workers[each % len(workers)]}": Link(
            max(0.0, float(np.median(seconds[pair == each])))
        )
        for each in np.unique(pair).tolist()
    }
