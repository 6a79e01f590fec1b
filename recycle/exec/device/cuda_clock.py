"""The clock of a GPU, by timed events on its current stream."""

from __future__ import annotations

import time
from typing import Any

import torch

from recycle.exec.device.clock import Clock, HostClock


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
