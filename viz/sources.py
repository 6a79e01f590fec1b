"""Sources of the viewer, recognized by their path: run directories, schedule files, folders of traces, comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from recycle.errors import RecycleError, ScheduleError
from recycle.files import read_whole
from recycle.ir import formats
from recycle.ir.check import Finding, Findings, check
from recycle.ir.columns import Rows
from recycle.ir.families import FAMILIES
from recycle.ir.formats.schedule_input import ScheduleInput
from recycle.ir.lower import lowered_graph
from recycle.ir.rules.rule import ProgramPosition
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline, time_graph
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.runs.logs import TRACE
from viz.lane_cache import Limits, TimedLanes, TimelineContext, release_memory
from viz.lanes import NO_MARKS, LaneTable, Marks, Panel
from viz.run import Choices, Run
from viz.run_files import describe_folder, is_run_directory, load_run, runs_in

LARGE = 50_000
"""Instructions of a schedule from which memory is released between the steps of reading it."""
Place = tuple[int, float, float]
"""(lane of a drawn table, start and end in the table's time)."""


@dataclass(frozen=True, eq=False)
class ScheduleFile:
    """A schedule, and its timeline if it has one.

    Attributes:
        timeline: None when the order deadlocks; `lanes` then shows it until the deadlock.
        origin: row of the lowered schedule -> row of `schedule`, -1 for instructions added by lowering; None if equal.
        chunk_time: time of each of F, I and W of a chunk, if no times are stated and the page's files differ in chunks
            per worker (see `equal_work_times`); else None.
        executed: whether the timeline was executed, in seconds.
        left_out: a line per part of the file that could not be read and is not in `schedule`.
    """

    path: Path
    schedule: Schedule
    timeline: Timeline | None
    lanes: LaneTable
    findings: Findings
    origin: Rows | None = None
    chunk_time: float | None = None
    executed: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def context(self) -> TimelineContext | None:
        if self.timeline is None:
            return None
        share = 1.0 if self.chunk_time is None else self.chunk_time
        return replace(TimelineContext.of_plan(self.timeline), executed=self.executed, share=share)

    def panels(self) -> list[Panel]:
        """Return the timeline as panels; [] if no instruction takes time."""
        period = self.timeline.period if self.timeline is not None else None
        title = f"{self.name}: deadlocks; drawn up to the deadlock" if self.timeline is None else self.name
        return [Panel(title, self.lanes, period=period)] if len(self.lanes) else []

    @cached_property
    def timed(self) -> TimedLanes:
        """The lanes and their timeline, with the number of findings next to the name of each worker."""
        counts = Counter(finding.worker for finding in self.findings)
        labels = tuple(
            f"{label} ▲{counts[str(worker)]}" if str(worker) in counts else label
            for label, worker in zip(self.lanes.labels, self.lanes.workers, strict=True)
        )
        return TimedLanes(replace(self.lanes, labels=labels) if counts else self.lanes, self.context)

    def choices(self, place: int) -> Choices:
        return {} if self.timeline is None else {f"file/{place}": (self.name, lambda: self.timed)}

    def places(self, finding: Finding) -> list[Place]:
        """Return the places of a finding's instruction, then of conflicting instructions; [] without a place."""
        placed = [(finding.worker, finding.position), *((each.worker, each.position) for each in finding.others)]
        return [self._place(worker, position) for worker, position in placed if worker is not None]

    def _place(self, worker: str, position: int | None) -> Place:
        w, lanes = self.schedule.shape.worker_index(Worker.parse(worker)), self.lanes
        rows = lanes.instruction_id if self.origin is None else self.origin[lanes.instruction_id]
        row = -2 if position is None else int(self.schedule.columns.offsets[w]) + position
        for i in np.flatnonzero(rows == row)[:1].tolist():  # drawn, see `schedule_source`
            return w, float(lanes.start[i]), float(lanes.end[i])
        return w, 0.0, lanes.span


Source = Run | ScheduleFile


def schedule_source(
    path: Path,
    schedule: Schedule,
    profile: Profile | None = None,
    limits: Limits = None,
) -> ScheduleFile:
    """Check and time a schedule as if read from `path`, and mark violations in its lanes."""
    profile, is_large = profile or Profile.uniform(), len(schedule.columns) >= LARGE
    graph = lowered_graph(schedule)
    findings = check(schedule, profile=profile, limits=limits, graph=graph)
    if is_large:
        release_memory()
    origin: Any = None
    marks = NO_MARKS
    if findings:
        begins, index, origin = schedule.columns.offsets, schedule.shape.worker_index, graph.origin

        def rows_of(places: Iterable[Finding | ProgramPosition]) -> Any:
            placed = [(p.worker, p.position) for p in places if p.worker is not None and p.position is not None]
            broken = [int(begins[index(Worker.parse(worker))]) + position for worker, position in placed]
            return np.flatnonzero(np.isin(origin, broken)).tolist()

        marks = Marks(rows_of(findings), rows_of(other for finding in findings for other in finding.others))
    timeline = None
    try:
        timeline = time_graph(graph, profile)
        lanes = LaneTable.from_timeline(timeline, marks=marks)
    except RecycleError:  # a deadlock, which the findings explain
        lanes = LaneTable.until_deadlock(graph, profile, marks)
    del graph
    if is_large:
        release_memory()
    return ScheduleFile(path, schedule, timeline, lanes, findings, origin)


def executed_source(path: Path, source: ScheduleInput) -> ScheduleFile | None:
    """Return the executed, checked schedule of a trace at `path`; None without executed times."""
    executed = source.executed()
    if executed is None:
        return None
    lanes = LaneTable.from_timeline(executed, "s")
    return ScheduleFile(path, source.schedule, executed, lanes, check(source.schedule), executed=True)


Prices = Callable[[Path, Schedule], Profile | None]
"""(path, schedule) -> prices of its instructions; None if unknown."""


def load_sources(paths: Sequence[Path], prices: Prices | None = None) -> list[Source]:
    """Load the run directories and schedule files at `paths`, for one page.

    Args:
        prices: prices of schedule files; None: NAME.profile.json next to NAME.json. Without either, traces and
            timelines have their own times, and other files the times of `equal_work_times`.

    Raises RecycleError if a path is neither.
    """
    return _priced([(path, _run_or_schedule(path)) for path in paths], prices or _profile_next_to)


def _priced(read: Sequence[tuple[Path, Run | ScheduleInput]], prices: Prices | None) -> list[Source]:
    sources: dict[int, Source] = {}
    unpriced: dict[int, Schedule] = {}
    for place, (path, source) in enumerate(read):
        if isinstance(source, Run):
            sources[place] = source
        elif (profile := (prices and prices(path, source.schedule)) or source.planned) is not None:
            sources[place] = schedule_source(path, source.schedule, profile)
        elif (executed := executed_source(path, source)) is not None:
            sources[place] = executed
        else:
            unpriced[place] = source.schedule
    for (place, schedule), time in zip(unpriced.items(), equal_work_times(list(unpriced.values())), strict=True):
        profile = None if time is None else Profile.uniform(time, time, time)
        sources[place] = replace(schedule_source(read[place][0], schedule, profile), chunk_time=time)
    return [sources[place] for place in range(len(read))]


def family_sources(shape: Shape, prices: Prices | None = None) -> list[Source]:
    """Build every family that fits, with two chunks per worker if supported; priced as in `load_sources`.

    Raises ScheduleError if no family takes this shape.
    """
    schedules: dict[Path, Schedule] = {}
    error_text = ""
    for name, family in FAMILIES.items():
        for chunks in (2, 1):
            try:
                schedules[Path(name)] = family(replace(shape, chunks=chunks))
                break
            except RecycleError as error:
                error_text = str(error)
    if not schedules:
        raise ScheduleError(f"no schedule family supports {shape}; the last error is: {error_text}")
    return _priced([(path, ScheduleInput(path.name, schedule)) for path, schedule in schedules.items()], prices)


def equal_work_times(schedules: Sequence[Schedule]) -> list[float | None]:
    """Return the time of each of F, I and W of a chunk in each schedule, such that workers have equal work in all.

    A worker's part of the model counts 1, so each of V chunks 1/V. None for all schedules if their numbers of chunks
    are equal: each chunk may then take 1.
    """
    chunks = [1 if schedule.shape.cut else schedule.shape.chunks for schedule in schedules]
    return [1 / count if len(set(chunks)) > 1 else None for count in chunks]


def _run_or_schedule(path: Path) -> Run | ScheduleInput:
    if is_run_directory(path):
        return load_run(path.parent / path.readlink() if path.is_symlink() else path)
    if path.is_dir() and runs_in(path):
        raise RecycleError(f"{path}: {describe_folder(path)}")
    if not path.exists():
        raise RecycleError(f"{path}: no such file or run directory")
    if path.name == TRACE and is_run_directory(path.parent):
        raise RecycleError(f"{path}: is the trace of a run: view its folder, recycle view {path.parent}")
    try:
        return formats.read_input(path)
    except ScheduleError as error:
        if path.is_dir():
            raise RecycleError(f"{error}; it is not a run directory either") from None
        raise


def _profile_next_to(path: Path, _: Schedule) -> Profile | None:
    file = path.with_name(f"{path.stem}.profile.json")
    return Profile.load(file) if file.is_file() else None


FORMAT = "recycle-comparison"
_MAX_BYTES = 256 << 20
_HEAD_BYTES = 80


class RateChange(Struct, frozen=True):
    """A transition of a system.

    Attributes:
        time: seconds from the start of the trace.
        pause: seconds until training resumes, unless another change comes first.
        rate: samples per second afterwards.
    """

    time: float
    event: str
    pause: float
    rate: float


class Misfit(Struct, frozen=True):
    reason: str


class SystemResult(Struct, frozen=True):
    """A system on a trace; times in seconds, rates in samples per second. `lost` is by cause."""

    name: str
    trace: str
    fits: bool
    goodput: float
    fault_free: float
    seconds: float
    lost: dict[str, float]
    timeline: list[RateChange]
    layout: str = ""
    misfit: Misfit | None = None


class ReferenceGoodput(Struct, frozen=True):
    """A fault-free schedule on all nodes."""

    goodput: float
    layout: str


class TraceSummary(Struct, frozen=True):
    """A failure trace; `alive` is (time, nodes alive from then on)."""

    name: str
    nodes: int
    failures: int
    seconds: float
    live: float
    alive: list[tuple[float, int]]
    references: dict[str, ReferenceGoodput]


class Table(Struct, frozen=True):
    title: str
    head: list[str]
    rows: list[list[str]]


class SystemComparison(Struct, frozen=True):
    """All systems on all traces, as `recycle compare --json` prints them; `tables` are those of `recycle advise`."""

    format: str
    shape: str
    traces: list[TraceSummary]
    systems: list[SystemResult]
    assumptions: list[str] = []
    tables: list[Table] = []

    def results(self, place: int) -> list[SystemResult]:
        """Return the systems on the trace with index `place`; results are ordered by trace."""
        count = len(self.systems) // len(self.traces) if self.traces else 0
        return self.systems[place * count : (place + 1) * count]


def is_comparison(path: Path) -> bool:
    """Return whether a file declares itself a comparison; pipes are not read, because they may block."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def load_comparison(path: Path) -> SystemComparison:
    try:
        comparison = msgspec.json.decode(read_whole(path, RecycleError, _MAX_BYTES), type=SystemComparison)
    except msgspec.DecodeError as error:
        raise RecycleError(
            f"{path}: is not a complete comparison ({error}); write it again with recycle compare"
        ) from None
    if len(comparison.systems) != len(comparison.traces) * len({system.name for system in comparison.systems}):
        raise RecycleError(f"{path}: results of some systems are missing for some traces; run recycle compare again")
    return comparison
