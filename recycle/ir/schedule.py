"""Schedules: an order of instructions per worker, immutable. Times are always derived, never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, Unpack

import numpy as np

from recycle.errors import ScheduleError, errors_as
from recycle.files import write_whole
from recycle.ir import native
from recycle.ir.columns import MOST_INSTRUCTIONS, Columns, columns_of, require_few
from recycle.ir.instruction import (
    KIND_CLASSES,
    Backward,
    Compute,
    Forward,
    Instruction,
    OverlappedPair,
    Transfer,
    is_kind,
    make_instruction,
)
from recycle.ir.native import parse, render, words
from recycle.job.profile import Profile
from recycle.job.shape import MOST_BUCKETS, MicroBatch, Placing, Shape, Worker

Optimizer = Literal["staggered", "barrier"]
Value = TypeVar("Value")
Placement = tuple[tuple[int, ...], ...]
"""The stages that each worker hosts, by worker index."""


def placement_of(shape: Shape) -> Placement:
    """Return the placement by the rule of the shape; nothing is placed if the shape has a cut."""
    return tuple(map(shape.stages_of_rank, range(shape.ranks))) * shape.pipelines


def loop_placement(shape: Shape) -> Placement:
    """Place chunk c of rank r on stage c * P + r, whatever the rule of the shape, as files leave it out."""
    return placement_of(replace(shape, placement="loop"))


class _Options(TypedDict, total=False):
    placement: Placement | Mapping[Worker | str, Sequence[int]] | None
    failed: Iterable[Worker | str]
    optimizer: Optimizer
    ties: Iterable[Sequence[int]]
    buckets: int
    gathers: bool
    forward_only: bool
    metadata: Mapping[str, Any] | None


@dataclass(frozen=True)
class Schedule:
    """An order of typed instructions for every live worker of a job. Comparison ignores the metadata.

    Attributes:
        shape: size of the job.
        columns: the programs.
        placement: stages hosted by each worker.
        failed: dead workers; they have no program.
        optimizer: "staggered" (each stage steps when it is ready) or "barrier" (all stages step together).
        ties: groups of stages that share a weight and therefore reduce together.
        buckets: number of buckets in which the gradients of each stage are reduced.
        gathers: whether each host steps a part of its stages and gathers the other parameters from its peers.
        forward_only: whether the schedule evaluates: forwards only, no reduce and no step.
        metadata: family or planner, parameters, parent; JSON values only.
        drawn_by, read_by: functions that draw a schedule and read a file, set by the public API.
    """

    drawn_by: ClassVar[Callable[[Schedule, Profile | None, str], Any]]
    read_by: ClassVar[Callable[[str | Path], Schedule]]

    shape: Shape
    columns: Columns
    placement: Placement
    failed: frozenset[Worker] = frozenset()
    optimizer: Optimizer = "staggered"
    ties: tuple[tuple[int, ...], ...] = ()
    buckets: int = 1
    gathers: bool = False
    forward_only: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls,
        shape: Shape,
        programs: Mapping[Worker, Iterable[Instruction]] | Mapping[str, Iterable[Instruction]],
        **options: Unpack[_Options],
    ) -> Schedule:
        """Build a schedule from the instructions of each worker; `options` as in `from_columns`.

        Raises:
            ScheduleError: a program, placement, peer or failed worker lies outside the shape, or a program contains
                something other than instructions.
        """
        return cls.from_columns(shape, columns_of(shape, _by_worker(shape, programs, "programs")), **options)

    @classmethod
    def from_columns(
        cls,
        shape: Shape,
        columns: Columns,
        *,
        placement: Placement | Mapping[Worker | str, Sequence[int]] | None = None,
        failed: Iterable[Worker | str] = (),
        optimizer: Optimizer = "staggered",
        ties: Iterable[Sequence[int]] = (),
        buckets: int = 1,
        gathers: bool = False,
        forward_only: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Build a schedule from columns.

        Args:
            placement: stages per worker; None for chunk c of rank r on stage c * P + r. A mapping may omit workers.
            failed: dead workers; their programs are kept for `check` to report.
            optimizer, ties, buckets, gathers, forward_only, metadata: the attributes of the schedule.

        Raises ScheduleError if an option has the wrong type or lies outside the shape.
        """
        if isinstance(failed, str | Worker) or not isinstance(failed, Iterable):
            raise ScheduleError(f"failed workers: {failed!r} is not a list of workers: write for example ['0.1']")
        dead = frozenset(_worker(shape, worker, "failed workers") for worker in failed)
        if optimizer not in ("staggered", "barrier"):
            raise ScheduleError(f"optimizer must be 'staggered' or 'barrier', got {optimizer!r}")
        if not isinstance(buckets, int) or not 1 <= buckets <= MOST_BUCKETS:
            raise ScheduleError(f"buckets must be a whole number from 1 to {MOST_BUCKETS}, got {buckets!r}")
        for name, flag in (("gathers", gathers), ("forward_only", forward_only)):
            if not isinstance(flag, bool):
                raise ScheduleError(f"{name} must be true or false, got {flag!r}")
        placed = _placement(shape, placement)
        if buckets > 1 and sum(map(len, placed)) * buckets > MOST_INSTRUCTIONS:
            raise ScheduleError(
                f"buckets: {buckets} of every stage of every worker are more than {MOST_INSTRUCTIONS:,} sums: use fewer"
            )
        return cls(
            shape,
            columns,
            placed,
            dead,
            optimizer,
            _ties(ties),
            buckets,
            gathers,
            forward_only,
            _metadata(metadata),
        )

    @classmethod
    def from_text(
        cls,
        shape: Shape,
        programs: Mapping[str, str],
        **options: Unpack[_Options],
    ) -> Schedule:
        """Build a schedule from text: worker -> instructions separated by blanks.

        Raises ScheduleError, with worker and position, for what cannot be parsed or lies outside the shape.
        """
        texts = _by_worker(shape, programs, "programs")
        for worker, text in texts.items():
            if not isinstance(text, str):
                raise ScheduleError(f"programs: worker {worker}: {text!r} is not text: write for example '0F0.0 0B0.0'")
        return cls.from_columns(shape, parse(shape, texts), **options)

    def text(self) -> dict[str, str]:
        """Return the programs of the live workers as text, for `from_text`."""
        return dict(self._texts())

    def _texts(self) -> Iterator[tuple[str, str]]:
        for worker, text in zip(self.shape.workers(), render(self.shape, self.columns), strict=True):
            if text or worker not in self.failed:
                yield str(worker), text

    @cached_property
    def _programs(self) -> dict[Worker, tuple[Instruction, ...]]:
        return {}

    def program(self, worker: Worker) -> tuple[Instruction, ...]:
        """Return the instructions of `worker`, in order. Raises ScheduleError for a worker outside the shape."""
        if worker not in self._programs:
            worker = _worker(self.shape, worker, "program")
            w = self.shape.worker_index(worker)
            rows = range(int(self.columns.offsets[w]), int(self.columns.offsets[w + 1]))
            self._programs[worker] = tuple(self.instruction(row) for row in rows)
        return self._programs[worker]

    def instruction(self, row: int) -> Instruction:
        """Return the instruction in row `row` of the columns."""
        c = self.columns
        cls = KIND_CLASSES[int(c.kind[row])]
        stage, micro_batch = int(c.stage[row]), MicroBatch(int(c.pipeline[row]), int(c.index[row]))
        if cls is OverlappedPair:
            second = MicroBatch(int(c.pipeline2[row]), int(c.index2[row]))
            return OverlappedPair(Forward(stage, micro_batch), Backward(int(c.stage2[row]), second))
        peer = self.shape.worker_at(c.peer[row]) if issubclass(cls, Transfer) else None
        return make_instruction(cls, stage=stage, micro_batch=micro_batch, peer=peer, bucket=int(c.bucket[row]))

    def words(self) -> list[str]:
        """Return the text of each row's instruction, without building instruction objects."""
        return words(self.shape, self.columns)

    def position(self, row: int) -> tuple[Worker, int]:
        """Return the worker of row `row` and the position in its program."""
        w = int(np.searchsorted(self.columns.offsets, row, side="right")) - 1
        return self.shape.worker_at(w), int(row - self.columns.offsets[w])

    @property
    def live(self) -> list[Worker]:
        """Workers that have not failed, by pipeline, then rank."""
        return [worker for worker in self.shape.workers() if worker not in self.failed]

    def stages_of(self, worker: Worker) -> tuple[int, ...]:
        return self.placement[self.shape.worker_index(worker)]

    @property
    def placing(self) -> Placing | None:
        """Rule that gives the rank of each stage; None if the placement follows no rule."""
        rules: tuple[Placing, ...] = ("loop", "v")
        if self.shape.cut:
            return None
        shape, placed = self.shape, self.placement
        return next((rule for rule in rules if placement_of(replace(shape, placement=rule)) == placed), None)

    def unit_runs(self, worker: Worker) -> tuple[tuple[int, int], ...]:
        """Return the units of the model that a worker hosts, as the fewest (first, end) ranges; empty without a cut."""
        cut, runs = self.shape.cut, list[tuple[int, int]]()
        for stage in sorted(self.stages_of(worker)) if cut else ():
            begin = sum(cut[:stage])
            first = runs.pop()[0] if runs and runs[-1][1] == begin else begin
            runs.append((first, begin + cut[stage]))
        return tuple(runs)

    def hosts(self, stage: int) -> list[Worker]:
        """Return the live workers that host `stage`."""
        return [worker for worker in self.live if stage in self.stages_of(worker)]

    @property
    def is_lowered(self) -> bool:
        """Whether the programs contain transfers, reduces or steps."""
        return bool((~is_kind(self.columns.kind, (Compute, OverlappedPair))).any())

    def failure_vector(self) -> tuple[int, ...]:
        """Return the number of dead workers of each rank."""
        dead = [0] * self.shape.ranks
        for worker in self.failed:
            dead[worker.rank] += 1
        return tuple(dead)

    def with_metadata(self, **metadata: Any) -> Schedule:
        """Return the schedule with these metadata entries added or replaced."""
        return replace(self, metadata={**self.metadata, **metadata})

    def dumps(self) -> str:
        """Return the text of the native file (see recycle.ir.native). Raises ScheduleError for non-JSON metadata."""
        return "".join(native.encode(self.native_head(), self._texts()))

    def native_head(self) -> native.NativeFile:
        """Return the native file without its programs."""
        usual = self.placement == loop_placement(self.shape)
        placement = {str(w): list(stages) for w, stages in zip(self.shape.workers(), self.placement, strict=True)}
        return native.NativeFile(
            shape=self.shape.to_json(),
            optimizer=self.optimizer,
            failed=[str(worker) for worker in sorted(self.failed)],
            placement=None if usual else placement,
            ties=[list(group) for group in self.ties],
            buckets=self.buckets,
            gathers=self.gathers,
            forward_only=self.forward_only,
            metadata=dict(self.metadata),
            programs={},
        )

    @classmethod
    def loads(cls, text: str | bytes, name: str = "schedule", most: int = MOST_INSTRUCTIONS) -> Schedule:
        """Parse the text of a native file; `name` begins every error message.

        Raises:
            ScheduleError: the text is not a schedule, or has more than `most` instructions, before or after lowering.
        """
        with errors_as(ScheduleError, name):
            file = native.decode(text, most)
            options: Any = {name: getattr(file, name) for name in _Options.__annotations__}
            schedule = cls.from_text(Shape.from_json(file.shape), file.programs, **options)
            schedule.require_small(most)
            return schedule

    def require_small(self, most: int) -> None:
        """Raise ScheduleError if the schedule describes more than a file of `most` instructions may contain."""
        chunks = max(self.shape.stages * self.shape.pipelines, sum(map(len, self.placement)))
        if chunks > most:
            raise ScheduleError(
                f"shape: {self.shape} is too large: {chunks:,} chunks, a file of this size may hold {most:,}"
            )
        if self.buckets > 1 and not (self.columns.bucket >= 0).any():  # lowering writes the reduces
            require_few(len(self.columns) + self.buckets * chunks, f"buckets: {self.buckets} for each chunk: ", most)

    def save(self, path: str | Path) -> None:
        """Write the native file atomically."""
        write_whole(path, native.encode(self.native_head(), self._texts()))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule file of any format, or a folder of traces. Raises ScheduleError with the file and place."""
        return cls.read_by(path)

    def show(self, profile: Profile | None = None, title: str = "") -> Any:
        """Draw the lanes as a picture for notebooks (see `viz.notebook.Picture`), timed by `profile`."""
        return self.drawn_by(profile, title)

    def __repr__(self) -> str:
        dead = f", failed {' '.join(map(str, sorted(self.failed)))}" if self.failed else ""
        does = "forward only" if self.forward_only else self.optimizer
        return f"<Schedule {self.shape}, {len(self.columns)} instructions, {does}{dead}>"


def _worker(shape: Shape, worker: Worker | str, where: str) -> Worker:
    with errors_as(ScheduleError):
        return shape.require(Worker.parse(worker) if isinstance(worker, str) else worker, where)


def _by_worker(shape: Shape, given: Mapping[Any, Value], where: str) -> dict[Worker, Value]:
    if not isinstance(given, Mapping):
        raise ScheduleError(f"{where}: {given!r} is not a mapping from workers: write {{'0.0': ...}}")
    by_worker: dict[Worker, Value] = {}
    for name, value in given.items():
        worker = _worker(shape, name, where)
        if worker in by_worker:
            raise ScheduleError(f"{where}: worker {worker} is listed twice")
        by_worker[worker] = value
    return by_worker


def _placement(shape: Shape, placement: Placement | Mapping[Worker | str, Sequence[int]] | None) -> Placement:
    full: list[Sequence[int]] = list(loop_placement(shape))
    if isinstance(placement, Mapping):
        for worker, stages in _by_worker(shape, placement, "placement").items():
            full[shape.worker_index(worker)] = stages
    elif isinstance(placement, Iterable):
        full = list(placement)
    elif placement is not None:
        raise ScheduleError(f"placement: {placement!r} is not a mapping from workers: write {{'0.0': [0]}}")
    if len(full) != shape.worker_count:
        raise ScheduleError(f"placement: lists {len(full)} workers, the shape has {shape.worker_count}")
    return tuple(_hosted(shape, worker, stages) for worker, stages in zip(shape.workers(), full, strict=True))


def _ties(ties: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(map(index, group)) for group in ties)
    except TypeError:
        raise ScheduleError(f"ties: {ties!r} is not a list of groups of stages: write for example [[0, 3]]") from None


def _metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ScheduleError(f"metadata: {metadata!r} is not a mapping: write for example {{'note': 'by hand'}}")
    return dict(metadata or {})


def _hosted(shape: Shape, worker: Worker, stages: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(stages, Iterable):
        raise ScheduleError(f"placement: worker {worker}: {stages!r} is not a list of stages: write [{stages!r}]")
    hosted = []
    for stage in stages:
        try:
            hosted.append(index(stage))
        except TypeError:
            hosted.append(-1)
        if not 0 <= hosted[-1] < shape.stages:
            raise ScheduleError(f"placement: worker {worker}: {stage!r} is not a stage (0 to {shape.stages - 1})")
    if len(set(hosted)) < len(hosted):
        raise ScheduleError(f"placement: worker {worker} hosts a stage twice: {' '.join(map(str, hosted))}")
    return tuple(hosted)
