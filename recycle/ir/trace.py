"""Trace: what really ran, and when. The executed counterpart of a Timeline, over all steps of a run.

Lanes are processes, named by the position they started in; `role` is the position in the plan that a process played,
and the workers inside instructions (`@1.0`) are roles as well. Times are seconds since the start of the run on one
machine's `time.monotonic()`: traces of several machines are not aligned here. `recycle.runs.logs` reads the trace of a
run directory, `recycle.ir.formats.run_trace` the file that keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.ir.columns import Columns, Floats, Ints, Rows, offsets_of
from recycle.ir.instruction import GatherParameters, Instruction, Transfer, parse_instruction
from recycle.ir.lower import buckets_of
from recycle.ir.schedule import Placement, Schedule, loop_placement
from recycle.job.shape import Shape, Worker


@dataclass(frozen=True, eq=False)
class Trace:
    """The instructions that the processes of a run executed, with their times.

    Attributes:
        shape: size of the job.
        columns: the instructions, a row each, grouped by process in the order of execution, over all steps.
        role: worker index in the plan that the process played, per row.
        generation, step: membership and iteration that the row belongs to. A repeated iteration has several
            generations; the last one is what counted.
        start, end: seconds since the start of the run, float64.
        events: the lines of `events.jsonl` (fault, detected, generation, recovered, rejoined, ...), in order.
        batch: of an evaluation, per row; -1 in iterations.
        evaluations: what was executed of the evaluations that follow steps, `step` saying which; None for none.
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
        """Worker index of the process, by the position it started in, per row."""
        return self.columns.worker

    @cached_property
    def processes(self) -> list[Worker]:
        """The processes that executed anything, by pipeline, then rank."""
        return [self.shape.worker_at(int(index)) for index in np.flatnonzero(np.diff(self.columns.offsets))]

    @cached_property
    def steps(self) -> list[int]:
        """The steps of which anything was executed, ascending."""
        return [int(step) for step in np.unique(self.step)]

    @cached_property
    def rerouted(self) -> npt.NDArray[np.bool_]:
        """Whether each row works on a micro-batch whose home is another pipeline than its role's."""
        return away_from(self.columns, self.role // self.shape.ranks)

    @cached_property
    def _executed(self) -> Schedule:
        return Schedule(self.shape, self.columns, loop_placement(self.shape))

    def instruction(self, row: int) -> Instruction:
        """The instruction of row `row`."""
        return self._executed.instruction(row)

    def generations_of(self, step: int) -> list[int]:
        """The generations that executed anything of `step`, ascending; the last is the one that counted."""
        return self._generations.get(step, [])

    @cached_property
    def _generations(self) -> dict[int, list[int]]:
        pairs = np.unique(np.stack([self.step, self.generation], axis=1), axis=0)
        found: dict[int, list[int]] = {}
        for step, generation in pairs.tolist():
            found.setdefault(step, []).append(generation)
        return found

    def period(self, first: int, last: int) -> float | None:
        """Median seconds from one of the steps `first` to `last` to the next, in the generations that counted.

        Between the first starts of a worker, over all workers: neighbouring stages may be in different steps. Of one
        step alone: from its first start to its last end. None when nothing of these steps was executed.
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
        """The rows of the steps `first` to `last` inclusive, of one generation only if it is given; no evaluations."""
        keep = (self.step >= first) & (self.step <= last)
        if generation is not None:
            keep &= self.generation == generation
        return self._kept(keep)

    def without(self, generations: Iterable[int]) -> Trace:
        """The rows of all other generations; no evaluations."""
        return self._kept(~np.isin(self.generation, list(generations)))

    def _kept(self, keep: npt.NDArray[np.bool_]) -> Trace:
        rows = np.flatnonzero(keep)
        columns = self.columns.take(rows)
        kept = {name: getattr(self, name)[rows] for name in _PER_ROW}
        return replace(self, columns=columns, evaluations=None, **kept)

    def evaluation(self, step: int) -> Trace | None:
        """What was executed of the evaluation after `step`, in the generation that counted; None when nothing was."""
        if self.evaluations is None or step not in self.evaluations.steps:
            return None
        return self.evaluations.window(step, step, self.evaluations.generations_of(step)[-1])


_PER_ROW = ("role", "generation", "step", "start", "end", "batch")


def away_from(columns: Columns, pipeline: Ints) -> npt.NDArray[np.bool_]:
    """Whether each row works on a micro-batch (of a pair: either) whose home is not the `pipeline` of that row."""
    homes = (columns.pipeline, columns.pipeline2)
    return np.asarray(sum(((home >= 0) & (home != pipeline) for home in homes), np.zeros(len(columns), np.bool_)))


class TraceBuilder:
    """Collects executed instructions in any order of processes, and builds the Trace that holds them all."""

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
        """Add one executed instruction, of a batch of an evaluation if one is given.

        Raises:
            ScheduleError: `text` is no instruction.
            JobError: the instruction names a peer outside the shape.
        """
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
        """The trace of all that was added, with the lines of `events.jsonl`."""
        # Each text is parsed once; the rows then are copies of the rows of one program that holds every text once.
        parsed = Schedule.build(self.shape, {Worker(0, 0): self.vocabulary}).columns
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, 6)
        times = np.array(self.times, dtype=np.float64).reshape(-1, 2)
        order = np.argsort(rows[:, 0], kind="stable")
        rows, times = rows[order], times[order]

        def trace(which: npt.NDArray[np.bool_], **more: Any) -> Trace:
            of, at = rows[which], times[which]
            columns = parsed.take(of[:, 4], offsets_of(of[:, 0], self.shape.worker_count))
            role, generation, step, batch = (of[:, i].astype(np.int32) for i in (1, 2, 3, 5))
            start, end = at[:, 0].copy(), at[:, 1].copy()
            return Trace(self.shape, columns, role, generation, step, start, end, batch=batch, **more)

        evaluates = rows[:, 5] >= 0
        evaluations = trace(evaluates) if evaluates.any() else None
        return trace(~evaluates, events=tuple(events), evaluations=evaluations)


def executed_schedule(ran: Trace) -> tuple[Schedule, Rows]:
    """(the programs that ran, in role names; the row of `ran` of each of their rows), of one generation of one step."""
    shape = ran.shape
    rows = np.argsort(ran.role, kind="stable")
    columns = ran.columns.take(rows, offsets_of(ran.role, shape.worker_count))
    failed = frozenset(shape.worker_at(w) for w in np.flatnonzero(np.diff(columns.offsets) == 0).tolist())
    placement = _placement_of(shape, columns)
    gathers = bool((columns.kind == GatherParameters.kind).any())
    return Schedule(shape, columns, placement, failed, buckets=buckets_of(columns), gathers=gathers), rows


def _placement_of(shape: Shape, columns: Columns) -> Placement:
    """The stages that each worker worked for; of one without instructions those of its first live peer."""
    usual, found = loop_placement(shape), dict[int, tuple[int, ...]]()
    for w, (first, end) in enumerate(pairwise(columns.offsets.tolist())):
        if first < end:
            stages = np.unique(columns.stage[first:end])
            found[w] = tuple(stages[stages < shape.stages].tolist())
    of_rank = {w % shape.ranks: stages for w, stages in reversed(found.items())}
    return tuple(found.get(w, of_rank.get(w % shape.ranks, usual[w])) for w in range(shape.worker_count))
