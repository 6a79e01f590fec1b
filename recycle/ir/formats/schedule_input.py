"""What a file says of a schedule: its order, and its times where it holds any, planned or executed; what it may cost
before it is parsed; and what formats that hold the order of one pipeline alone refuse and leave out.

Its cost are its bytes once unzipped, and the number of its values. A value of two or three bytes costs up to three
hundred in memory, and gzip packs a thousand bytes of such text into one. A file up to `SMALL` bytes, zipped or not, is
read and checked in less than 1 GB; what a larger one may hold grows with its size.
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
"""Bytes of a small file."""


@dataclass(frozen=True)
class Allowance:
    """How much of something a file may hold: in a small file, per byte of a larger one, and at most."""

    small: int
    per_byte: int
    most: int

    def of_size(self, size: int) -> int:
        """How much a file of `size` bytes may hold."""
        return self.small if size <= SMALL else min(self.most, self.per_byte * size)


UNZIPPED = Allowance(2**26, 64, MOST_BYTES)
"""Bytes. Schedules and traces have 4 to 30 in one of gzip."""
INSTRUCTIONS = Allowance(2**19, 1, 2**32)
"""Schedules have less than half an instruction in a byte of gzip."""
VALUES = {
    "JSON objects": (b"{", Allowance(2**19, 2, 2**24)),
    "JSON arrays": (b"[", Allowance(2**20, 2, 2**24)),
    "values": (b",", Allowance(2**21, 4, 2**31)),
}
"""Name -> the character that there is one of for each. A timeline has 1.2 commas in a byte of gzip."""
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Unpacked:
    """The content of a file.

    Attributes:
        text: its bytes, unzipped.
        most: instructions that a file of this size may hold.
    """

    text: bytes
    most: int


def is_gzip(content: bytes) -> bool:
    """Whether a file that begins so is gzip."""
    return content.startswith(_GZIP)


def unpack(content: bytes, name: str) -> Unpacked:
    """The content of a file, unzipped if it is gzip, not yet parsed.

    Raises:
        ScheduleError: it is not whole, or holds too much for its size; begins with `name`.
    """
    size = len(content)
    text = _unzipped(content, UNZIPPED.of_size(size), name) if is_gzip(content) else content
    for what, (mark, allowance) in VALUES.items():
        if (count := text.count(mark)) > (allowed := allowance.of_size(size)):
            raise ScheduleError(
                f"{name}: too large: {count:,} {what}, at most {allowed:,} in {size:,} bytes: write or trace"
                " fewer iterations"
            )
    return Unpacked(text, most_instructions(size))


def most_instructions(size: int) -> int:
    """How many instructions files of `size` bytes in all may hold."""
    return min(columns.MOST_INSTRUCTIONS, INSTRUCTIONS.of_size(size))


def _unzipped(content: bytes, most: int, name: str) -> bytes:
    """The text of a gzip file, of all its members: what is appended to such a file is one more."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            text = stream.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ScheduleError(f"{name}: not a whole gzip file: {error}") from None
    if len(text) > most:
        raise ScheduleError(f"{name}: too large: unzipped it has more than {most:,} bytes")
    if is_gzip(text):
        raise ScheduleError(f"{name}: is gzip inside gzip: unzip it once")
    return text


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrderOnly:
    """A format of this kind.

    Attributes:
        name: such as "a torch CSV".
        ranks: what of it stands for ranks.
        alive: why no rank can have failed.
    """

    name: str
    ranks: str
    alive: str

    def refusal(self, what: str, why: str) -> ScheduleError:
        """The error that the format cannot hold `what`."""
        return ScheduleError(f"{self.name} cannot hold {what}: {why}")

    def require_one_pipeline(self, schedule: Schedule) -> None:
        """Raise ScheduleError at failed workers, several pipelines, and ties."""
        pipelines = schedule.shape.pipelines
        if schedule.failed:
            raise self.refusal(f"failed workers ({', '.join(map(str, sorted(schedule.failed)))})", self.alive)
        if pipelines > 1:
            raise self.refusal(f"{pipelines} pipelines", f"its {self.ranks}, so build it with D = 1")
        if schedule.ties:
            raise self.refusal(f"ties (stages {schedule.ties[0]} reduce together)", "untie them")

    def require_programs(
        self, schedule: Schedule, right: Schedule, whose: str, kinds: tuple[type[Instruction], ...] = (Instruction,)
    ) -> None:
        """Raise ScheduleError at the first instruction of these kinds that is another one in `right`."""
        for worker in schedule.shape.workers():
            program = schedule.program(worker)
            positions = [position for position, one in enumerate(program) if isinstance(one, kinds)]
            difference = first_difference([program[position] for position in positions], right.program(worker))
            if difference is not None:
                place, one, wanted = difference
                position = [*positions, len(program)][place]
                raise self.refusal(f"{one} on worker {worker} (position {position})", f"{whose} {wanted}")

    def warn(self, schedule: Schedule, *more: str) -> None:
        """Log what is left out: what is not in the order, the shape or the placement, and `more`."""
        named = [f"metadata ({', '.join(schedule.metadata)})"] if schedule.metadata else []
        if schedule.optimizer != "staggered":
            named.append(f'optimizer = "{schedule.optimizer}"')
        if schedule.buckets > 1:
            named.append(f"buckets = {schedule.buckets}")
        if schedule.gathers:
            named.append("gathers")
        if schedule.forward_only:
            named.append("forward_only, without which its backwards are missing")
        if named := [*named, *more]:
            _log.warning("%s cannot hold, and leaves out: %s", self.name, ", ".join(named))


def first_difference(found: Sequence[object], wanted: Sequence[object]) -> tuple[int, object, object] | None:
    """(place, what is found there, what is wanted there) of the first difference, None when there is none."""
    pairs = enumerate(zip_longest(found, wanted, fillvalue="the end"))
    return next(((place, one, other) for place, (one, other) in pairs if one != other), None)


_log = logging.getLogger(__name__)
_MOST_PERIODS = 64


@dataclass(frozen=True, eq=False)
class ScheduleInput:
    """The content of a schedule file or folder of traces.

    Attributes:
        name: of the file or folder, for warnings.
        schedule: its order.
        planned: the profile that the times of a planned timeline follow from; None in a file without one.
        trace: all iterations that a trace holds with whole times; None in any other file.
        step, generation: the iteration of `trace` that `schedule` is made from.
        warnings: what a reader should know who uses the order alone.
        timed_warnings: what a reader should know who uses the times too.
    """

    name: str
    schedule: Schedule
    planned: Profile | None = None
    trace: Trace | None = None
    step: int = 0
    generation: int = 0
    warnings: tuple[str, ...] = ()
    timed_warnings: tuple[str, ...] = ()

    def order(self) -> Schedule:
        """The schedule alone; logs what it leaves out."""
        for message in self.warnings:
            _log.warning("%s: %s", self.name, message)
        return self.schedule

    def executed(self) -> Timeline | None:
        """The iteration that ran, in seconds; None where the file holds no executed times. Logs what it leaves out.

        Its period is the median distance of the iterations, of the last `_MOST_PERIODS` where the trace holds many.
        """
        if self.trace is None or not _is_in_shape(self.trace):
            return None
        for message in self.timed_warnings:
            _log.warning("%s: %s", self.name, message)
        ran = executed_timeline(self.trace.window(self.step, self.step, self.generation), Profile.uniform())
        steps = self.trace.steps[-_MOST_PERIODS - 1 :]
        period = self.trace.period(steps[0], steps[-1]) if len(steps) > 1 else None
        return ran if period is None else replace(ran, period=period)

    def profile(self) -> Profile | None:
        """What the instructions take: as planned, else as medians of what ran; None where the file holds no times.

        Raises:
            ScheduleError: a stage lacks its forward or its backward.
        """
        if self.trace is None or not _is_in_shape(self.trace):
            return self.planned
        return executed_profile(self.trace, self.step, self.name)


def _is_in_shape(ran: Trace) -> bool:
    """Whether all stages and micro-batches of a trace are there in its shape: else `check` says what is wrong."""
    columns, shape = ran.columns, ran.shape
    limits = {"stage": shape.stages, "pipeline": shape.pipelines, "index": shape.micro_batches}
    return all(
        int(getattr(columns, column).max(initial=-1)) < limit
        for name, limit in limits.items()
        for column in (name, f"{name}2")
    )
