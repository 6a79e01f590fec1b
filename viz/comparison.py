"""A comparison of resilience systems: the file that `recycle compare` writes, read for the page that draws it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from recycle.errors import RecycleError
from recycle.files import read_whole

FORMAT = "recycle-comparison"
_MOST_BYTES = 256 << 20
_HEAD_BYTES = 80


class RateChange(Struct, frozen=True):
    """What a system went over to.

    Attributes:
        time: seconds from the start of the trace.
        event: what the system did, in a word or two.
        pause: seconds until it trains again, unless another change comes first.
        rate: samples per second then.
    """

    time: float
    event: str
    pause: float
    rate: float


class Misfit(Struct, frozen=True):
    """Why a system does not fit into memory."""

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


class SystemComparison(Struct, frozen=True):
    """All systems on all traces, as `recycle compare --json` prints them."""

    format: str
    shape: str
    traces: list[TraceSummary]
    systems: list[SystemResult]
    assumptions: list[str] = []

    def of(self, place: int) -> list[SystemResult]:
        """The systems on the trace at that place: they stand trace by trace, all of one after all of another."""
        each = len(self.systems) // len(self.traces) if self.traces else 0
        return self.systems[place * each : (place + 1) * each]


def is_comparison(path: Path) -> bool:
    """Whether a file says of itself that it is one; a pipe, which may never say anything, is not asked."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def load_comparison(path: Path) -> SystemComparison:
    """Read a comparison. Raises RecycleError when it is broken."""
    try:
        found = msgspec.json.decode(read_whole(path, RecycleError, _MOST_BYTES), type=SystemComparison)
    except msgspec.DecodeError as error:
        raise RecycleError(
            f"{path}: is no complete comparison ({error}); write it again with recycle compare"
        ) from None
    if len(found.systems) != len(found.traces) * len({system.name for system in found.systems}):
        raise RecycleError(f"{path}: some system is missing on some trace; repeat recycle compare")
    return found
