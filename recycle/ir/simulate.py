"""The simulator: order + profile -> Timeline.

Every instruction starts as soon as what it needs is there and its worker (a transfer: its lane) is free (see
`recycle.ir.event_graph`).

The period is the distance of two iterations in steady state when the schedule is repeated for ever (`graph.period_of`).

`slack` says how much later each instruction could start without the iteration taking longer. The longest chain behind
an instruction is found by the walk that found the earliest starts, on the graph turned round. What has no slack lies on
a critical path, of which there may be many; `Timeline.critical_path` is one of them. Limits: nothing else moves along,
and the period is not looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from recycle.errors import JobError, ScheduleError, ScheduleWarning
from recycle.ir.columns import Floats
from recycle.ir.dependencies import Cause
from recycle.ir.event_graph import (
    EventGraph,
    Times,
    durations,
    earliest,
    earliest_ranked,
    event_graph,
    group_edges,
    period_of,
)
from recycle.ir.gaps import Gaps, find_gaps
from recycle.ir.instruction import KIND_CLASSES, Beside, Compute, OverlappedPair, Send, StageWide, is_kind
from recycle.ir.lower import lowered_graph
from recycle.ir.memory import TOLERANCE as TOLERANCE
from recycle.ir.memory import held_activations, static_bytes
from recycle.ir.pieces import incomplete_count
from recycle.ir.schedule import Schedule
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile

T = TypeVar("T")
_MOST_SECONDS = 1e100
"""All times of a schedule together; sums of more may be infinite."""
DRAWN = 32
"""Workers up to which commands draw a grid."""


@dataclass(frozen=True, eq=False)
class Timeline(Times):
    """When everything happens in one iteration from idle, and how often iterations can follow each other.

    Attributes:
        period: seconds between two iterations in steady state.
    """

    period: float

    def _per_worker(self, values: Sequence[T]) -> list[T | None]:
        dead = self.schedule.failed
        return [None if w in dead else v for w, v in zip(self.schedule.shape.workers(), values, strict=True)]

    @cached_property
    def _occupied(self) -> list[tuple[float, float, float]]:
        """(busy, first start, last end) of each worker's compute rows."""
        c, workers = self.schedule.columns, self.schedule.shape.worker_count
        rows = np.flatnonzero(~is_kind(c.kind, Beside))
        worker, seconds = c.worker[rows], self.end[rows] - self.start[rows]
        is_work = ~is_kind(c.kind[rows], StageWide)
        # What a worker does for the whole stage counts only where it does nothing else.
        spans = is_work | (np.bincount(worker[is_work], minlength=workers) == 0)[worker]
        first, last = np.full(workers, np.inf), np.zeros(workers)
        np.minimum.at(first, worker[spans], self.start[rows[spans]])
        np.maximum.at(last, worker[spans], self.end[rows[spans]])
        first[np.isinf(first)] = 0.0
        # Row by row of each worker, as a sum over its own rows is.
        begin = np.searchsorted(worker, np.arange(workers + 1))
        busy = [float(seconds[begin[w] : begin[w + 1]].sum()) for w in range(workers)]
        return list(zip(busy, first.tolist(), last.tolist(), strict=True))

    @cached_property
    def busy(self) -> list[float | None]:
        """Seconds of work per worker (None for a failed one)."""
        return self._per_worker([busy for busy, _, _ in self._occupied])

    @cached_property
    def bubble(self) -> list[float | None]:
        """Makespan minus busy time, per worker."""
        return self._per_worker([self.makespan - busy for busy, _, _ in self._occupied])

    @cached_property
    def inner_bubble(self) -> list[float | None]:
        """(Last end - first start of the worker's work) minus busy time, per worker."""
        return self._per_worker([max(0.0, last - first - busy) for busy, first, last in self._occupied])

    @cached_property
    def bubble_ratio(self) -> float:
        """Share of the live workers' time in the makespan that is bubble."""
        live = [b for b in self.bubble if b is not None]
        return sum(live) / (self.makespan * len(live)) if live and self.makespan else 0.0

    @cached_property
    def peak_activations(self) -> list[float | None]:
        """Most activations (in chunks) held at once, per worker: from the start of F to the end of W (or B)."""
        return self._per_worker(held_activations(self.schedule, self.profile, in_bytes=False)[0])

    @cached_property
    def _held_bytes(self) -> tuple[list[float], list[int]]:
        return held_activations(self.schedule, self.profile, in_bytes=True)

    @cached_property
    def peak_bytes(self) -> list[float | None]:
        """Most bytes held at once, per worker: activations and what its stages need whatever the order."""
        fixed = static_bytes(self.schedule, self.profile)
        return self._per_worker([peak + own for peak, own in zip(self._held_bytes[0], fixed, strict=True)])

    @cached_property
    def peak_row(self) -> list[int | None]:
        """The row at whose start `peak_bytes` is first reached, per worker; None where nothing is ever held."""
        return self._per_worker([row if peak else None for peak, row in zip(*self._held_bytes, strict=True)])

    @cached_property
    def critical_path(self) -> list[int]:
        """Rows of one longest chain of waits that ends last, in time order."""
        nodes = len(self.end)
        node = int(self.end.argmax()) if nodes else -1
        path: list[int] = []
        seen: set[int] = set()
        while node >= 0 and node not in seen:  # recorded times of an impossible order lead back to where they began
            seen.add(node)
            if node < nodes:
                path.append(node)
            node = int(self.last[node])
        return path[::-1]

    @cached_property
    def critical_causes(self) -> list[Cause | None]:
        """Why each row of the critical path waited for what comes before it; None for the first."""
        graph, kind = self.dependencies, self.schedule.columns.kind
        rows = np.array(self.critical_path, dtype=np.int64)
        before = self.last[rows]
        edges = np.flatnonzero(np.isin(graph.target, rows))
        edges = edges[self.last[graph.target[edges]] == graph.source[edges]]
        cause_of = dict(zip(graph.target[edges].tolist(), graph.cause[edges].tolist(), strict=True))
        sends = is_kind(kind[rows], Send)
        return [
            None if node < 0 else Cause(cause_of.get(row, Cause.LANE if is_send else Cause.ORDER))
            for row, node, is_send in zip(rows.tolist(), before.tolist(), sends.tolist(), strict=True)
        ]

    def gaps(self, limits: Sequence[float] | None = None, byte_limit: float | None = None) -> Gaps:
        """What every worker waits for whenever it does nothing; arguments and errors as of `gaps.find_gaps`."""
        return find_gaps(self, limits, byte_limit)

    def text(self, width: int = 120) -> str:
        """The timeline drawn as text, a lane of at most `width` characters per worker (see `text_grid`)."""
        return text_grid(self.schedule, self.start, self.end, width)

    def show(self, width: int = 120) -> str:
        """Print the timeline as text, a lane per worker, and return it; a notebook does not print it a second time."""
        text = _Printed(self.text(width))
        print(text)
        return text

    def _repr_svg_(self) -> str | None:
        """The lanes, for notebooks; None where there are too many operations for a picture."""
        drawn: str | None = self.schedule.show(self.profile)._repr_svg_()
        return drawn

    def __repr__(self) -> str:
        return f"<Timeline of {self.schedule!r}: makespan {self.makespan:g}, period {self.period:g}>"


class _Printed(str):
    """Text that has been printed, so that a notebook which ends with it shows nothing more."""

    def _ipython_display_(self) -> None:
        return None


def simulate(schedule: Schedule, profile: Profile | None = None, *, serialised: bool = False) -> Timeline:
    """Time a schedule. Warns with a `ScheduleWarning` where some forward or backward is missing: the figures then are
    those of the rest.

    Args:
        schedule: lowered or compute-only; transfers, reduces and steps that are missing are implied, as `lower` writes
            them.
        profile: seconds and bytes; one unit for each of F, I and W when left out.
        serialised: each worker carries one transfer at a time, unbuffered, in program order.

    Raises:
        JobError, ScheduleError: as `timeline_of`.
    """
    timeline = timeline_of(schedule, profile, serialised=serialised)
    if count := incomplete_count(schedule):
        shape = schedule.shape
        warnings.warn(
            f"the schedule is incomplete: {count} of {shape.stages * shape.global_micro_batches} pairs of stage and"
            " micro-batch lack their forward or a part of their backward, so its times are those of the rest;"
            " recycle.check says which",
            ScheduleWarning,
            stacklevel=2,
        )
    return timeline


def timeline_of(schedule: Schedule, profile: Profile | None = None, *, serialised: bool = False) -> Timeline:
    """What `simulate` gives, without its warning: for callers who tell what is missing in their own way.

    Raises:
        JobError: the times add up to what no number holds, or do not fit the schedule (see `durations`).
        ScheduleError: the order has a cycle and could never finish (`check` shows where).
    """
    return time_graph(lowered_graph(schedule, serialised), profile or Profile.uniform())


def time_graph(graph: EventGraph, profile: Profile) -> Timeline:
    """The timeline of an event graph; one graph serves any number of profiles.

    Raises:
        JobError, ScheduleError: as `timeline_of`.
    """
    profile = profile_of_cut(profile, graph.schedule.shape)
    if not graph.is_acyclic:
        stuck = np.setdiff1d(np.arange(graph.dependencies.rows), graph.order)
        worker, position = graph.schedule.position(int(stuck[0]))
        raise ScheduleError(
            f"the schedule deadlocks: {len(stuck)} instructions wait for each other, among them"
            f" {graph.schedule.instruction(int(stuck[0]))} on worker {worker} at position {position};"
            f" `recycle check` shows the cycle"
        )
    rows, nodes = graph.dependencies.rows, graph.dependencies.nodes
    seconds = np.zeros(nodes)
    seconds[:rows] = durations(graph.schedule, profile)
    if seconds.max(initial=0.0) > _MOST_SECONDS / max(nodes, 1):
        raise JobError(f"the times add up to more than {_MOST_SECONDS:g}: state them in another unit")
    placed, release = seconds[graph.order], np.zeros(nodes)
    by_place = earliest_ranked(graph.ranked, placed, release)
    start, last = graph.ranked.by_node(*by_place, release)
    period = period_of(graph.ranked, graph.repeats, placed, *by_place) if rows else 0.0
    return Timeline(graph.schedule, profile, start[:rows], (start + seconds)[:rows], last, graph.dependencies, period)


def text_grid(schedule: Schedule, start: Floats, end: Floats, width: int = 120) -> str:
    """A schedule drawn with at most `width` characters per lane; `start` and `end` are the seconds of its rows.

    Each instruction begins with its letter (F, B, I, W, R, X for an overlapped pair) and its micro-batch index, as far
    as its length allows; a letter is small in any stage but the first that the worker hosts. `·` is idle time, `x` a
    failed worker. A re-routed instruction carries a `'`.
    """
    makespan = float(end.max() - start.min()) if len(end) else 0.0
    c = schedule.columns
    compute = is_kind(c.kind, (Compute, OverlappedPair))
    shortest = float((end - start)[compute & (end > start)].min(initial=np.inf))
    columns = min(width - 6, max(1, round(makespan / shortest) * 3))
    scale = columns / makespan if makespan else 1.0
    lines = [f"{'':6}0{'':{max(columns - 12, 1)}}{makespan:>10g}"]
    for w, worker in enumerate(schedule.shape.workers()):
        cells = ["x" if worker in schedule.failed else "·"] * columns
        first = min(schedule.stages_of(worker), default=-1)
        for row in range(int(c.offsets[w]), int(c.offsets[w + 1])):
            if not compute[row]:
                continue
            begin, stop = round(start[row] * scale), round(end[row] * scale)
            cls = KIND_CLASSES[c.kind[row]]
            letter = "X" if cls is OverlappedPair else cls.row.letter or cls.token
            letter = letter if c.stage[row] == first else letter.lower()
            mark = "'" if c.pipeline[row] != worker.pipeline else ""
            label = f"{letter}{c.index[row]}{mark}".ljust(stop - begin, "-")[: stop - begin]
            cells[begin:stop] = label
        lines.append(f"{worker!s:>5} " + "".join(cells[:columns]))
    return "\n".join(lines)


def slack(timeline: Timeline) -> Floats:
    """Seconds that each row of `timeline.schedule` may start later; at least 0, O(n log n).

    Of a simulated timeline without serialised transports: its order and dependencies decide.
    """
    graph = timeline.dependencies
    rows, nodes = graph.rows, graph.nodes
    if not rows:
        return np.zeros(0)
    events = event_graph(timeline.schedule, graph=graph)
    source, target = events.edges
    offsets, followers = group_edges(target, source, nodes)
    seconds = np.zeros(nodes)
    seconds[:rows] = timeline.end - timeline.start
    behind, _ = earliest(events.order[::-1].copy(), offsets, followers, seconds, np.zeros(nodes))
    return np.maximum(float(timeline.end.max()) - timeline.end - behind[:rows], 0.0)
