"""The content of schedule files: size limits before parsing, and the order, times and warnings after parsing.

Files up to `SMALL` bytes, zipped or not, are read and checked in less than 1 GB; larger files have larger limits.
"""

from __future__ import annotations

import gzip
import io
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from recycle.errors import ScheduleError
from recycle.files import MOST_BYTES
from recycle.ir import columns
from recycle.ir.instruction import Instruction
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import Timeline
from recycle.ir.trace import Trace, executed_profile, executed_timeline
from recycle.job.profile import Profile

SMALL = 2**20


@dataclass(frozen=True)
class Allowance:
    """A size limit: for a small file, per byte of a larger file, and absolute."""

    small: int
    per_byte: int
    most: int

    def of_size(self, size: int) -> int:
        """Return the limit for a file of `size` bytes."""
        return self.small if size <= SMALL else min(self.most, self.per_byte * size)


UNZIPPED = Allowance(2**26, 64, MOST_BYTES)
"""Unzipped bytes. Schedules and traces have 4 to 30 per byte of gzip."""
INSTRUCTIONS = Allowance(2**19, 1, 2**32)
"""Schedules have less than half an instruction per byte of gzip."""
VALUES = {
    "JSON objects": (b"{", Allowance(2**19, 2, 2**24)),
    "JSON arrays": (b"[", Allowance(2**20, 2, 2**24)),
    "values": (b",", Allowance(2**21, 4, 2**31)),
}
"""Name -> the character that counts the values. A timeline has 1.2 commas per byte of gzip."""
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Unpacked:
    """The unzipped bytes of a file, and the maximum number of instructions for a file of its size."""

    text: bytes
    most: int


def is_gzip(content: bytes) -> bool:
    """Return whether a file with this beginning is gzip."""
    return content.startswith(_GZIP)


def unpack(content: bytes, name: str) -> Unpacked:
    """Unzip the content of a file if needed. Raises ScheduleError if it is truncated or too large for its size."""
    size = len(content)
    text = _unzipped(content, UNZIPPED.of_size(size), name) if is_gzip(content) else content
    for noun, (mark, allowance) in VALUES.items():
        if (count := text.count(mark)) > (allowed := allowance.of_size(size)):
            raise ScheduleError(
                f"{name}: too large: {count:,} {noun}, at most {allowed:,} in {size:,} bytes: write or trace"
                " fewer iterations"
            )
    return Unpacked(text, most_instructions(size))


def most_instructions(size: int) -> int:
    """Return the maximum number of instructions for files of `size` bytes in total."""
    return min(columns.MOST_INSTRUCTIONS, INSTRUCTIONS.of_size(size))


def _unzipped(content: bytes, most: int, name: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            text = stream.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ScheduleError(f"{name}: is not a complete gzip file: {error}") from None
    if len(text) > most:
        raise ScheduleError(f"{name}: too large: unzipped it has more than {most:,} bytes")
    if is_gzip(text):
        raise ScheduleError(f"{name}: is gzip inside gzip: unzip it once")
    return text


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrderOnly:
    """A format with the order of one pipeline only; `alive` is the reason that no rank can have failed."""

    name: str
    alive: str

    def refusal(self, content: str, reason: str) -> ScheduleError:
        """Return the error that the format cannot represent `content`."""
        return ScheduleError(f"{self.name} cannot hold {content}: {reason}")

    def require_one_pipeline(self, schedule: Schedule) -> None:
        """Raise ScheduleError for failed workers, several pipelines, and ties."""
        pipelines = schedule.shape.pipelines
        if schedule.failed:
            raise self.refusal(f"failed workers ({', '.join(map(str, sorted(schedule.failed)))})", self.alive)
        if pipelines > 1:
            raise self.refusal(f"{pipelines} pipelines", "the format describes one: build the schedule with D = 1")
        if schedule.ties:
            raise self.refusal(f"ties (stages {schedule.ties[0]} reduce together)", "untie them")

    def require_programs(
        self,
        schedule: Schedule,
        expected: Schedule,
        expected_by: str,
        kinds: tuple[type[Instruction], ...] = (Instruction,),
    ) -> None:
        """Raise ScheduleError for the first instruction of these kinds that differs from `expected`."""
        for worker in schedule.shape.workers():
            program = schedule.program(worker)
            positions = [position for position, instruction in enumerate(program) if isinstance(instruction, kinds)]
            difference = first_difference([program[position] for position in positions], expected.program(worker))
            if difference is not None:
                place, instruction, expected_instruction = difference
                position = [*positions, len(program)][place]
                raise self.refusal(
                    f"{instruction} on worker {worker} (position {position})", f"{expected_by} {expected_instruction}"
                )

    def warn(self, schedule: Schedule, *more: str) -> None:
        """Log the omissions: everything except order, shape and placement, and `more`."""
        named = [f"metadata ({', '.join(schedule.metadata)})"] if schedule.metadata else []
        if schedule.optimizer != "staggered":
            named.append(f'optimizer = "{schedule.optimizer}"')
        if schedule.buckets > 1:
            named.append(f"buckets = {schedule.buckets}")
        if schedule.gathers:
            named.append("gathers")
        if schedule.forward_only:
            named.append("forward_only, without which the backwards count as missing")
        if named := [*named, *more]:
            _log.warning("%s cannot hold, and leaves out: %s", self.name, ", ".join(named))


def first_difference(actual: Sequence[object], expected: Sequence[object]) -> tuple[int, object, object] | None:
    """Return (index, found item, wanted item) of the first difference, None without one."""
    pairs = enumerate(zip_longest(actual, expected, fillvalue="the end"))
    return next(((place, item, other) for place, (item, other) in pairs if item != other), None)


_MOST_PERIODS = 64


@dataclass(frozen=True, eq=False)
class ScheduleInput:
    """The content of a schedule file or folder of traces.

    Attributes:
        name: file or folder name, for warnings.
        planned: profile of a planned timeline; None without one.
        trace: all iterations of a trace with complete times; None for other files.
        step, generation: the iteration of `trace` that `schedule` comes from.
        warnings: what the schedule leaves out or assumes.
    """

    name: str
    schedule: Schedule
    planned: Profile | None = None
    trace: Trace | None = None
    step: int = 0
    generation: int = 0
    warnings: tuple[str, ...] = ()

    def order(self) -> Schedule:
        """Return the schedule without times; logs omissions."""
        has_times = self.trace is not None or self.planned not in (None, Profile())
        self._warn("left out the times" if has_times else "")
        return self.schedule

    def _warn(self, *more: str) -> None:
        for message in filter(None, (*self.warnings, *more)):
            _log.warning("%s: %s", self.name, message)

    def executed(self) -> Timeline | None:
        """Return the executed iteration, in seconds, and the median period; None without times. Logs omissions."""
        if self.trace is None or not _is_in_shape(self.trace):
            return None
        self._warn()
        ran = executed_timeline(self.trace.window(self.step, self.step, self.generation), Profile.uniform())
        steps = self.trace.steps[-_MOST_PERIODS - 1 :]
        period = self.trace.period(steps[0], steps[-1]) if len(steps) > 1 else None
        return ran if period is None else replace(ran, period=period)

    def profile(self) -> Profile | None:
        """Return the planned profile, or the medians of the executed times; None without times.

        Raises ScheduleError if a stage lacks its forward or its backward.
        """
        if self.trace is None or not _is_in_shape(self.trace):
            return self.planned
        return executed_profile(self.trace, self.step, self.name)


def _is_in_shape(ran: Trace) -> bool:
    columns, shape = ran.columns, ran.shape
    limits = {"stage": shape.stages, "pipeline": shape.pipelines, "index": shape.micro_batches}
    return all(
        int(getattr(columns, column).max(initial=-1)) < limit
        for name, limit in limits.items()
        for column in (name, f"{name}2")
    )
