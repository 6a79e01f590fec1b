"""A schedule file that somebody dropped on the page: read from its bytes, checked and drawn as far as it can be.

Nothing of it is trusted: it is not run, not written anywhere, shown as text only, and refused before it is read when
it is larger than any schedule that the page could show, or says that it is.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recycle.errors import RecycleError, ScheduleError
from recycle.files import entries
from recycle.ir import formats, native
from recycle.ir.check import Finding, Findings, check
from recycle.ir.formats import chrome_trace
from recycle.ir.formats.schedule_input import ScheduleInput, unpack
from recycle.ir.instruction import Transfer, parse_instruction
from recycle.ir.lower import lower_with_origin
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from viz.lanes import LaneTable
from viz.sources import executed_source, timed

MOST_BYTES = 2**25
MOST_INSTRUCTIONS, MOST_WORKERS, MOST_CHUNKS, MOST_CELLS = 1_000_000, 8192, 2**18, 2**22
"""What is checked at once for a page; `recycle check` takes more."""
_SEPARATORS, _MOST_SEPARATORS = (b",", b" ", b"\n", b"\r"), MOST_INSTRUCTIONS * 3 // 2
"""What lies between them becomes objects while a file is read."""
_LONGEST_NAME = 120
_MOST_LEFT_OUT = 1000
"""Beyond that a file is no schedule with mistakes but something else."""


@dataclass(frozen=True, eq=False)
class Dropped:
    """A dropped file as far as it could be read.

    Attributes:
        name: as a line of printable text.
        schedule: None when it could not be read; `problem` then says why.
        findings: what the checker says.
        timeline: None when the order cannot finish; `lanes` then shows it as far as it runs.
        lanes: what can be drawn, None when there is no schedule.
        problem: what could not be done, "" when all could.
        left_out: what could not be read of it and is not in `schedule`, a line each.
        origin: row of `lanes` instructions -> row of the schedule as dropped, -1 for what lowering added.
        executed: whether the timeline is what ran, in seconds.
    """

    name: str
    schedule: Schedule | None
    findings: Findings
    timeline: Timeline | None
    lanes: LaneTable | None
    problem: str
    left_out: tuple[str, ...] = ()
    origin: np.ndarray | None = None
    executed: bool = False

    def places(self, finding: Finding) -> list[tuple[int, float, float]]:
        """(lane, start, end) of the instruction that a finding points at, then of those that it is at odds with; none
        when it points nowhere."""
        if self.schedule is None or self.lanes is None or finding.worker is None:
            return []
        others = [self._place(other.worker, other.position) for other in finding.others]
        return [self._place(finding.worker, finding.position), *others]

    def _place(self, worker: str, position: int | None) -> tuple[int, float, float]:
        assert self.schedule is not None
        assert self.lanes is not None
        w, lanes = self.schedule.shape.worker_index(Worker.parse(worker)), self.lanes
        # A transfer that takes no time is not drawn: the first instruction after it is, or the last of this worker.
        mine = np.arange(lanes.offsets[w], lanes.offsets[w + 1])
        if position is None or not len(mine):
            return w, 0.0, lanes.span
        row = int(self.schedule.columns.offsets[w]) + position
        rows = self._rows()[mine]
        after = np.flatnonzero(rows >= row)
        at = int(mine[after[rows[after].argmin()]]) if len(after) else int(mine[-1])
        return w, float(lanes.start[at]), float(lanes.end[at])

    def _rows(self) -> np.ndarray:
        assert self.lanes is not None
        ids = self.lanes.instruction_id.astype(np.int64)
        return ids if self.origin is None else self.origin[ids]


def read_dropped(contents: str, name: str) -> Dropped:
    """A dropped file as the browser sends it, read, checked and timed.

    Args:
        contents: `data:…;base64,…` as `dcc.Upload` gives it.
        name: of the file, which may be anything.
    """
    name = _printable(name)
    try:
        return inspect(_content(contents, name), name)
    except RecycleError as error:
        return Dropped(name, None, Findings(), None, None, str(error))


def inspect(content: bytes, name: str) -> Dropped:
    """Read, check and time a file's content. Raises RecycleError when it is no schedule, or is too large."""
    unpacked = unpack(content, name)
    text = unpacked.text
    is_trace = chrome_trace.recognises(text)
    if not is_trace and sum(text.count(separator) for separator in _SEPARATORS) > _MOST_SEPARATORS:
        raise ScheduleError(
            f"{name}: has more cells, words or lines than a schedule that the page shows: use recycle check"
        )
    stated = None if is_trace else _stated_shape(text)
    if stated is not None:
        _refuse_large(stated, 0, name)
    left_out: list[str] = []
    most = min(unpacked.most, MOST_INSTRUCTIONS)
    try:
        source = formats.load_unpacked(replace(unpacked, most=most), name)
    except ScheduleError:
        saved = _salvage(text, name, most)
        if saved is None:
            raise
        schedule, left_out = saved
        source = ScheduleInput(name, schedule)
    schedule = source.schedule
    _refuse_large(schedule.shape, len(schedule.columns), name)
    if (ran := executed_source(Path(name), source)) is not None:
        return Dropped(name, schedule, ran.findings, ran.timeline, ran.lanes, "", executed=True)
    profile = source.planned or Profile.uniform()
    findings = check(schedule, profile=profile)
    violations = [
        int(schedule.columns.offsets[schedule.shape.worker_index(Worker.parse(f.worker))]) + f.position
        for f in findings
        if f.worker is not None and f.position is not None
    ]
    _, origin = lower_with_origin(schedule)
    lowered = np.flatnonzero(np.isin(origin, violations)).tolist()
    return Dropped(name, schedule, findings, *timed(schedule, profile, lowered), tuple(left_out), origin)


def _salvage(content: bytes, name: str, most: int) -> tuple[Schedule, list[str]] | None:
    """(what can be read of a native schedule file, what was left out: a line each); None when more than that is wrong.

    The file's frame must be whole: JSON with a shape. Positions in what is left count without what is left out.
    """
    if not native.recognises(content):
        return None
    try:
        file: dict[str, Any] = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        shape = Shape.from_json(msgspec.json.decode(file["shape"]))
        programs = msgspec.json.decode(file["programs"])
        left_out: list[str] = []
        kept = {}
        for worker, text in programs.items():
            try:
                shape.require(Worker.parse(worker), "programs")
            except RecycleError as error:
                left_out.append(str(error))
                continue
            kept[worker] = " ".join(_readable(shape, worker, text, left_out))
        return Schedule.loads(msgspec.json.encode({**file, "programs": kept}), name, most), left_out
    except (RecycleError, msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError, UnicodeError):
        return None


def _readable(shape: Shape, worker: str, text: str, left_out: list[str]) -> list[str]:
    words = []
    for position, word in enumerate(text.split()):
        try:
            instruction = parse_instruction(word, shape.pipelines == 1)
            if isinstance(instruction, Transfer):
                shape.require(instruction.peer, word)
            words.append(word)
        except RecycleError as error:
            left_out.append(f"worker {worker}, position {position}: {error}")
            if len(left_out) > _MOST_LEFT_OUT:
                raise
    return words


def _content(contents: str, name: str) -> bytes:
    head, _, encoded = contents.partition(",")
    if not head.startswith("data:") or "base64" not in head:
        raise ScheduleError(f"{name}: the browser sent no file")
    if len(encoded) > MOST_BYTES * 4 // 3 + 4:
        raise ScheduleError(
            f"{name}: too large for the page (at most {MOST_BYTES // 2**20} MB): use recycle check {name}"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ScheduleError(f"{name}: the browser sent only a part of the file") from None


def _stated_shape(content: bytes) -> Shape | None:
    """The shape that a native file says it has; None where it does not say, or wrongly: reading it then tells."""
    try:
        return Shape.from_json(
            msgspec.json.decode(entries(content, ScheduleError)["shape"], type=dict[str, int | list[int]])
        )
    except (RecycleError, KeyError, TypeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _refuse_large(shape: Shape, instructions: int, name: str) -> None:
    cells = shape.stages * max(shape.global_micro_batches, shape.worker_count)
    is_large = shape.worker_count > MOST_WORKERS or shape.stages * shape.pipelines > MOST_CHUNKS or cells > MOST_CELLS
    if is_large or instructions > MOST_INSTRUCTIONS:
        raise ScheduleError(
            f"{name}: {shape} with {instructions:,} instructions is too large for the page (at most"
            f" {MOST_INSTRUCTIONS:,} instructions, {MOST_WORKERS:,} workers, {MOST_CHUNKS:,} chunks): use recycle check"
        )


def _printable(name: str) -> str:
    line = str(RecycleError(name.replace("\\", "/").rsplit("/", 1)[-1])) or "file"
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 12]}…{line[-11:]}"
