"""When something was computed: on the host's clock, or on that of a device that runs behind its host.

A mark is a point behind all that the device was given to compute until then. Its time is when the device came to it,
in the host's monotonic seconds, so that times of all processes of a machine compare. On a CPU that is at once.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A point in what a device was given to compute."""

    def reached(self) -> bool:
        """Whether the device has come to it; returns at once. Raises RuntimeError when the device has failed."""

    def seconds(self) -> float:
        """When the device came to it, in monotonic seconds. Only of a mark that was reached."""


class ExecutedInstruction(NamedTuple):
    """An instruction that ran: its text, and the marks at which its stage began and ended it."""

    text: str
    began: Mark
    ended: Mark


class Clock(Protocol):
    """Makes marks.

    Attributes:
        runs_behind: whether the device may still have to do what it was given.
    """

    runs_behind: bool

    def mark(self) -> Mark:
        """A mark here; costs the host about as much as the launch of a kernel."""

    def set(self) -> None:
        """Wait until the device is idle, and hold its clock against the host's."""


class HostMark:
    """Where nothing runs behind the host, a mark is reached when it is made."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def reached(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class HostClock:
    """The host's own clock."""

    runs_behind = False

    def mark(self) -> HostMark:
        return HostMark()

    def set(self) -> None:
        return


def has_reached(mark: Mark) -> bool:
    """Whether the device has come to a mark; not where it has failed."""
    try:
        return mark.reached()
    except RuntimeError:
        return False


class CudaClock:
    """Marks are events of the stream that is current when they are made.

    The time between two events is a 32-bit number of milliseconds, so the clock is set every iteration.

    Args:
        device: the GPU.
    """

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.set()

    def mark(self) -> CudaMark:
        return CudaMark(self._record(), self._began, self._began_at)

    def set(self) -> None:
        self._began = self._record()
        self._began.synchronize()
        self._began_at = time.monotonic()

    def _record(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class CudaMark:
    """An event of a GPU, and one before it with the host's time of it."""

    __slots__ = ("_began", "_began_at", "_event")

    def __init__(self, event: Any, began: Any, began_at: float) -> None:
        self._event, self._began, self._began_at = event, began, began_at

    def reached(self) -> bool:
        return bool(self._event.query())

    def seconds(self) -> float:
        return self._began_at + float(self._began.elapsed_time(self._event)) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
