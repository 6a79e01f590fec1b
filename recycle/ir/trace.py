"""Traces: the instructions that a run executed, with times, over all steps.

Lanes are processes, named by the position they started in. `role` is the position in the plan that a process played;
workers inside instructions (`@1.0`) are roles too. Times are seconds since the start of the run on one clock. A posted
receive counts as arrived at the end of its send, or at the start of its consumer if that worker was idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from statistics import median_low
from typing import Any

import numpy as np

from recycle.errors import ScheduleError
from recycle.ir.clocks import clocks_of
from recycle.ir.columns import Columns, Flags, Floats, Ints, Rows, compute_order, offsets_of
from recycle.ir.dependencies import Dependencies, dependencies
from recycle.ir.event_graph import event_edges
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    Transfer,
    WeightPart,
    parse_instruction,
)
from recycle.ir.lower import buckets_of
from recycle.ir.schedule import Placement, Schedule, loop_placement
from recycle.ir.simulate import Timeline
from recycle.job.profile import Link, Profile
from recycle.job.shape import Shape, Worker


@dataclass(frozen=True, eq=False)
class Trace:
    """The instructions that the processes of a run executed, with their times.

    Attributes:
        shape: size of the job.
        columns: one row per instruction, grouped by process in execution order, over all steps.
        role: worker index in the plan that the process played, per row.
        generation, step: generation and iteration of each row. Of a repeated iteration the last generation counts.
        start, end: seconds since the start of the run, float64.
        events: the lines of `events.jsonl` (fault, detected, generation, recovered, rejoined, ...), in order.
        batch: batch of an evaluation, per row; -1 in iterations.
        evaluations: rows of the evaluations, `step` being the step before each; None without evaluations.
    """

    shape: Shape
    columns: Columns
    role: Ints
    generation: Ints
    step: Ints
    start: Floats
    end: Floats
    events: tuple[Mapping[str, Any], ...] = ()
    batch: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    evaluations: Trace | None = None

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def process(self) -> Ints:
        """Worker index of the process, by its starting position, per row."""
        return self.columns.worker

    @cached_property
    def steps(self) -> list[int]:
        """The steps with executed instructions, ascending."""
        return [int(step) for step in np.unique(self.step)]

    @cached_property
    def _executed(self) -> Schedule:
        return Schedule(self.shape, self.columns, loop_placement(self.shape))

    def instruction(self, row: int) -> Instruction:
        """Return the instruction of row `row`."""
        return self._executed.instruction(row)

    def generations_of(self, step: int) -> list[int]:
        """Return the generations that executed instructions of `step`, ascending; the last one counts."""
        return self._generations.get(step, [])

    @cached_property
    def _generations(self) -> dict[int, list[int]]:
        pairs = np.unique(np.stack([self.step, self.generation], axis=1), axis=0)
        by_step: dict[int, list[int]] = {}
        for step, generation in pairs.tolist():
            by_step.setdefault(step, []).append(generation)
        return by_step

    def period(self, first: int, last: int) -> float | None:
        """Return the median seconds between the first starts of consecutive steps on each worker.

        For a single step: from its first start to its last end. None if the steps have no rows.
        """
        steps = np.array([step for step in self.steps if first <= step <= last], dtype=np.int64)
        counted = np.array([self.generations_of(step)[-1] for step in steps.tolist()], dtype=np.int64)
        if not len(steps):
            return None
        rows = np.flatnonzero((self.step >= first) & (self.step <= last))
        place = np.searchsorted(steps, self.step[rows])
        kept = self.generation[rows] == counted[place]
        rows, place = rows[kept], place[kept]
        if len(steps) == 1:
            return float(self.end[rows].max() - self.start[rows].min())
        begins = np.full((self.shape.worker_count, len(steps)), np.inf)
        np.minimum.at(begins, (self.process[rows], place), self.start[rows])
        both = np.isfinite(begins[:, 1:]) & np.isfinite(begins[:, :-1])
        return float(np.median(begins[:, 1:][both] - begins[:, :-1][both])) if both.any() else None

    def window(self, first: int, last: int, generation: int | None = None) -> Trace:
        """Return the rows of steps `first` to `last` inclusive, optionally of one generation, without evaluations."""
        keep = (self.step >= first) & (self.step <= last)
        if generation is not None:
            keep &= self.generation == generation
        return self._kept(keep)

    def without(self, generations: Iterable[int]) -> Trace:
        """Return the rows of all other generations, without evaluations."""
        return self._kept(~np.isin(self.generation, list(generations)))

    def _kept(self, keep: Flags) -> Trace:
        rows = np.flatnonzero(keep)
        columns = self.columns.take(rows)
        kept = {name: getattr(self, name)[rows] for name in _PER_ROW}
        return replace(self, columns=columns, evaluations=None, **kept)

    def evaluation(self, step: int) -> Trace | None:
        """Return the rows of the evaluation after `step`, in the generation that counts; None without any."""
        if self.evaluations is None or step not in self.evaluations.steps:
            return None
        return self.evaluations.window(step, step, self.evaluations.generations_of(step)[-1])


_PER_ROW = ("role", "generation", "step", "start", "end", "batch")


def away_from(columns: Columns, pipeline: Ints) -> Flags:
    """Return whether each row works on a micro-batch (for a pair: either) of another pipeline than `pipeline`."""
    homes = (columns.pipeline, columns.pipeline2)
    return np.asarray(sum(((home >= 0) & (home != pipeline) for home in homes), np.zeros(len(columns), np.bool_)))


class TraceBuilder:
    """Collects executed instructions in any order of processes and builds a Trace."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.codes: dict[str, int] = {}
        self.vocabulary: list[Instruction] = []
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.times: list[tuple[float, float]] = []

    def add(
        self,
        process: Worker,
        role: Worker,
        generation: int,
        step: int,
        text: str,
        start: float,
        end: float,
        batch: int | None = None,
    ) -> None:
        """Add one executed instruction, of `batch` in an evaluation. Raises ScheduleError or JobError."""
        code = self.codes.get(text)
        if code is None:
            instruction = parse_instruction(text, self.shape.pipelines == 1)
            if isinstance(instruction, Transfer):
                self.shape.require(instruction.peer, text)
            code = self.codes[text] = len(self.vocabulary)
            self.vocabulary.append(instruction)
        index = self.shape.worker_index
        self.rows.append((index(process), index(role), generation, step, code, -1 if batch is None else batch))
        self.times.append((start, end))

    def build(self, events: Iterable[Mapping[str, Any]]) -> Trace:
        """Build the trace of all added instructions, with the lines of `events.jsonl`."""
        # Parse each text once, into one program; rows are copied from its columns.
        parsed = Schedule.build(self.shape, {Worker(0, 0): self.vocabulary}).columns
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, 6)
        times = np.array(self.times, dtype=np.float64).reshape(-1, 2)
        order = np.argsort(rows[:, 0], kind="stable")
        rows, times = rows[order], times[order]

        def trace(which: Flags, **more: Any) -> Trace:
            chosen, seconds = rows[which], times[which]
            columns = parsed.take(chosen[:, 4], offsets_of(chosen[:, 0], self.shape.worker_count))
            role, generation, step, batch = (chosen[:, i].astype(np.int32) for i in (1, 2, 3, 5))
            start, end = seconds[:, 0].copy(), seconds[:, 1].copy()
            return Trace(self.shape, columns, role, generation, step, start, end, batch=batch, **more)

        evaluates = rows[:, 5] >= 0
        evaluations = trace(evaluates) if evaluates.any() else None
        return trace(~evaluates, events=tuple(events), evaluations=evaluations)


def executed_schedule(ran: Trace) -> tuple[Schedule, Rows]:
    """Return (programs executed in role names, row of `ran` of each of their rows), for one generation of one step."""
    shape = ran.shape
    rows = np.argsort(ran.role, kind="stable")
    columns = ran.columns.take(rows, offsets_of(ran.role, shape.worker_count))
    failed = frozenset(shape.worker_at(w) for w in np.flatnonzero(np.diff(columns.offsets) == 0).tolist())
    placement = _placement_of(shape, columns)
    gathers = bool((columns.kind == GatherParameters.kind).any())
    return Schedule(shape, columns, placement, failed, buckets=buckets_of(columns), gathers=gathers), rows


def _placement_of(shape: Shape, columns: Columns) -> Placement:
    """Return the stages of each worker; a worker without instructions gets the stages of its first live peer."""
    usual, stages_of = loop_placement(shape), dict[int, tuple[int, ...]]()
    for w, (first, end) in enumerate(pairwise(columns.offsets.tolist())):
        if first < end:
            stages = np.unique(columns.stage[first:end])
            stages_of[w] = tuple(stages[stages < shape.stages].tolist())
    of_rank = {w % shape.ranks: stages for w, stages in reversed(stages_of.items())}
    return tuple(stages_of.get(w, of_rank.get(w % shape.ranks, usual[w])) for w in range(shape.worker_count))


_NAMES = {
    Forward.kind: "forward",
    BackwardInput.kind: "backward_input",
    BackwardWeight.kind: "backward_weight",
    Backward.kind: "backward",
    OptimizerStep.kind: "step",
}


def executed_timeline(ran: Trace, profile: Profile) -> Timeline:
    """Convert one generation of one step (`Trace.window`) to a timeline, in role names and seconds, on one clock.

    The times of `profile` are not used. The period is the makespan, since one iteration does not determine the next.
    """
    schedule, rows = executed_schedule(ran)
    origin = float(ran.start.min()) if len(ran) else 0.0
    start, end = ran.start[rows] - origin, ran.end[rows] - origin
    graph = dependencies(schedule)
    clocks = clocks_of(schedule, graph, start, end)
    late = clocks.shift[schedule.columns.worker]
    late -= (start + late).min(initial=np.inf)
    start, end = start + late, end + late
    end = _with_arrivals(schedule.columns, graph, start, end)
    span = float(end.max()) if len(end) else 0.0
    source, target, _ = event_edges(schedule.columns, graph)
    return Timeline(schedule, profile, start, end, _awaited(graph, source, target, end), graph, span, clocks)


def _with_arrivals(columns: Columns, graph: Dependencies, start: Floats, end: Floats) -> Floats:
    """Return `end` with each receive moved to the end of its send and to the start of a consumer that waited."""
    receives = np.flatnonzero(graph.sends >= 0)
    arrived = end.copy()
    arrived[receives] = np.maximum(end[receives], end[graph.sends[receives]])
    before, after = compute_order(columns)
    idle_from = np.zeros(len(end))
    idle_from[after] = end[before]
    received, consumers = graph.received
    waited = start[consumers] > idle_from[consumers]
    np.maximum.at(arrived, received[waited], start[consumers[waited]])
    return arrived


def _awaited(graph: Dependencies, source: Rows, target: Rows, end: Floats) -> Rows:
    ends = np.append(end, np.zeros(graph.nodes - graph.rows))
    into_join = target >= graph.rows  # joins wait for rows only
    np.maximum.at(ends, target[into_join], ends[source[into_join]])
    order = np.lexsort((ends[source], target))
    final = order[np.append(np.diff(target[order]) != 0, True)] if len(order) else order
    last = np.full(graph.nodes, -1, dtype=np.int64)
    last[target[final]] = source[final]
    return last


WorkerTimes = Mapping[tuple[str, int, int], float]
"""(name in a profile or "backward", stage, worker index) -> median seconds."""


def worker_times(ran: Trace, stages: int) -> WorkerTimes:
    """Return the median duration of the instructions of each stage on each worker. W parts count as their sum."""
    c, seconds, buckets = ran.columns, ran.end - ran.start, buckets_of(ran.columns)
    medians: dict[tuple[str, int, int], float] = {}
    for stage, kind in product(range(stages), (*_NAMES, WeightPart.kind)):
        rows = np.flatnonzero((c.stage == stage) & (c.kind == kind))
        for worker in np.unique(ran.process[rows]).tolist():
            took = seconds[rows[ran.process[rows] == worker]]
            if kind == WeightPart.kind:
                medians.setdefault(("backward_weight", stage, worker), buckets * float(took.mean()))
            else:
                medians[_NAMES[kind], stage, worker] = float(np.median(took))
    return medians


def stage_times(times: WorkerTimes, stage: int, profile: Profile, stages: int) -> dict[str, float]:
    """Return the lower median over hosts of each duration of a stage. A whole B is split in the ratio of `profile`."""
    usual = {
        name: median_low(seconds)
        for name in _NAMES.values()
        if (seconds := [t for (n, s, _), t in times.items() if (n, s) == (name, stage)])
    }
    if "backward_input" not in usual and "backward" in usual:
        halves = [profile.per_stage(name, stages)[stage] for name in ("backward_input", "backward_weight")]
        share = halves[0] / sum(halves) if sum(halves) else 0.5  # without known durations, assume equal halves
        usual["backward_input"] = usual["backward"] * share
        usual["backward_weight"] = usual["backward"] - usual["backward_input"]
    return usual


def executed_profile(ran: Trace, step: int, name: str) -> Profile:
    """Measure a profile in seconds: medians over all iterations, links from the iteration `step`.

    Durations include waits inside instructions. A transfer lasts from the later start of its ends to the later end. A
    trace has no bytes, so transfers count as latency. Raises ScheduleError if a stage lacks its forward or backward.
    """
    stages, times = ran.shape.stages, worker_times(ran, ran.shape.stages)
    columns: dict[str, list[float]] = {key: [] for key in ("forward", "backward_input", "backward_weight", "step")}
    for stage in range(stages):
        usual = {"step": 0.0, **stage_times(times, stage, Profile(), stages)}
        if (missing := next((key for key in columns if key not in usual), None)) is not None:
            raise ScheduleError(f"{name}: stage {stage} ran no {missing}, without which a profile is not whole")
        for key, values in columns.items():
            values.append(round(usual[key], 12))
    pairs = ran.columns.kind == OverlappedPair.kind
    links = _links(ran.window(step, step, ran.generations_of(step)[-1]))
    return Profile(
        columns["forward"],
        columns["backward_input"],
        columns["backward_weight"],
        step=columns["step"],
        overlapped_pair=float(np.median((ran.end - ran.start)[pairs])) if pairs.any() else None,
        latency=float(np.median([link.latency for link in links.values()])) if links else 0.0,
        links=links,
        measured={"trace": name, "iterations": len(ran.steps)},
    )


def _links(ran: Trace) -> dict[str, Link]:
    executed = executed_timeline(ran, Profile())
    start, end, columns = executed.start, executed.end, executed.schedule.columns
    sends = executed.dependencies.sends[: len(columns)]
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
