"""Measures what a process and its device have done: marks, clocks, streams, and progress for the heartbeat.

A mark is a point after all work given to a device so far. Its time is when the device reached it, in the host's
monotonic seconds. On a CPU a mark is reached at once. A GPU runs behind its host, so its completed operations are
counted, and each kind is compared with its longest recent duration (`DeviceProgress`).

DualPipe's pair hides the communication of one half with the computation of the other (DeepSeek-V3, arXiv 2412.19437,
section 3.2). autograd runs a backward on the stream of its forward, so the pair's forward uses the other stream. Work
on it starts after all earlier work, and work after the pair waits for both halves. Only tensors passed to it are
recorded on it.

Copies of the state run on a separate stream (`CopyStream`), which never waits for another process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from recycle.exec.protocol import Heartbeat


class Mark(Protocol):
    """A point in the work given to a device."""

    def reached(self) -> bool:
        """Return at once whether the device has reached the mark. Raises RuntimeError if the device has failed."""

    def seconds(self) -> float:
        """Return when the device reached the mark, in monotonic seconds; only for a reached mark."""


class ExecutedInstruction(NamedTuple):
    """An instruction that ran: its text, and the marks at its begin and end."""

    text: str
    began: Mark
    ended: Mark


class Clock(Protocol):
    """Makes marks; `runs_behind` says whether the device may still have work when a call returns."""

    runs_behind: bool

    def mark(self) -> Mark:
        """Mark the present place in the device's work; costs the host about as much as a kernel launch."""

    def set(self) -> None:
        """Wait until the device is idle, and synchronize its clock with the host's."""


class HostMark:
    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def reached(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class HostClock:
    runs_behind = False

    def mark(self) -> HostMark:
        return HostMark()

    def set(self) -> None:
        return


def has_reached(mark: Mark) -> bool:
    """Return whether the device has reached a mark; False if the device has failed."""
    try:
        return mark.reached()
    except RuntimeError:
        return False


class CudaClock:
    """Makes marks that are events of the current stream.

    The time between two events is a 32-bit number of milliseconds, so the clock is set every iteration.
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
    __slots__ = ("_began", "_began_at", "_event")

    def __init__(self, event: Any, began: Any, began_at: float) -> None:
        self._event, self._began, self._began_at = event, began, began_at

    def reached(self) -> bool:
        return bool(self._event.query())

    def seconds(self) -> float:
        return self._began_at + float(self._began.elapsed_time(self._event)) / 1000


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


DECAY = 0.9
"""Share of an operation's longest time that is kept when another operation of its kind ends."""


@dataclass(frozen=True)
class DeviceState:
    """The progress of a device that runs behind its host.

    Attributes:
        done: number of completed operations.
        operation: kind of the first incomplete operation; empty if there is none.
        longest: longest recent duration of that kind, seconds; None before the first.
        waits: whether the device has reached an operation that waits for another process.
    """

    done: int = 0
    operation: str = ""
    longest: float | None = None
    waits: bool = False


@dataclass(frozen=True)
class _Queued:
    operation: str
    began: Mark
    ended: Mark


class DeviceProgress:
    """Tracks the operations given to the device by the main thread; read by the heartbeat's thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._queued: deque[_Queued] = deque()
        self._done = 0
        self._longest: dict[str, float] = {}

    def record_queued(self, operation: str, began: Mark, ended: Mark) -> None:
        if not self.clock.runs_behind:
            return
        with self._lock:
            self._queued.append(_Queued(operation, began, ended))

    def forget(self) -> None:
        with self._lock:
            self._queued.clear()

    def state(self) -> DeviceState:
        with self._lock, contextlib.suppress(RuntimeError):  # failed: the main thread meets the same error
            while self._queued and self._queued[0].ended.reached():
                finished = self._queued.popleft()
                self._done += 1
                seconds = finished.ended.seconds() - finished.began.seconds()
                self._longest[finished.operation] = max(seconds, DECAY * self._longest.get(finished.operation, 0.0))
            if self._queued:
                operation = self._queued[0].operation
                return DeviceState(self._done, operation, self._longest.get(operation))
        return DeviceState(self._done)


class Streams(Protocol):
    """The main stream, and another stream for concurrent work."""

    def on_other_stream(self, tensors: Sequence[torch.Tensor | None]) -> AbstractContextManager[object]:
        """Run the work launched inside, which reads these tensors, on the other stream, after all earlier work."""

    def join(self) -> None:
        """Let later work wait for the work on the other stream."""


class CudaStreams:
    """The streams of a GPU. Not yet run on one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_other_stream(self, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._side)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


def streams_of(device: torch.device) -> Streams | None:
    return CudaStreams(device) if device.type == "cuda" else None


class CopyStream(Protocol):
    """Copies between tensors, one after the other, concurrent with the computation.

    A copy reads its source at some time between the last `follow` before it and the end of the first wait for it.
    """

    def follow(self) -> None:
        """Let later copies wait for all work given to the device so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def mark(self) -> Callable[[], None]:
        """Return a function that lets later work wait for the copies so far."""

    def settle(self) -> None:
        """Wait until all copies so far have ended."""


class HostCopies:
    """Copies on a CPU, which have ended when `copy` returns."""

    def follow(self) -> None:
        return

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        return self.follow

    settle = follow


class CudaCopies(CudaStreams):
    """Copies on a separate stream. Not yet run on a GPU."""

    def follow(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        copied = self._side.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def settle(self) -> None:
        self._side.synchronize()


def copy_stream_of(device: torch.device) -> CopyStream:
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class Progress:
    """The progress of a process: its current operation, and whether it waits for another process.

    While a device behind its host computes, the process does not wait, even if its main thread does.
    """

    def __init__(self, device: Callable[[], DeviceState] = DeviceState) -> None:
        self._device = device
        self.count = 0
        self.waiting = True
        self.operation = "start"
        self._longest: dict[str, float] = {}
        self._default_longest: float | None = None
        self._worked, self._since = 0.0, time.monotonic()

    def begin_operation(self, operation: str, warms_up: bool = True) -> None:
        """Start an operation of this kind (a word); with `warms_up`, the first may compile or load."""
        self.operation, self.waiting = operation, False
        self._default_longest = None if warms_up else max(self._longest.values(), default=None)
        self._worked, self._since = 0.0, time.monotonic()
        self.count += 1

    def end_operation(self) -> None:
        """End the operation and record its duration, without waits, for its kind."""
        self.set_waiting(False)
        self._longest[self.operation] = max(self._worked, DECAY * self._longest.get(self.operation, 0.0))

    def set_waiting(self, waiting: bool) -> None:
        now = time.monotonic()
        if not self.waiting:
            self._worked += now - self._since
        self.waiting, self._since = waiting, now
        self.count += 1

    def heartbeat(self, beats: int) -> Heartbeat:
        device = self._device()
        if device.operation and not device.waits:
            operation, longest, waiting = device.operation, device.longest, False
        else:
            operation, longest = self.operation, self._longest.get(self.operation, self._default_longest)
            waiting = self.waiting or device.waits
        rounded = None if longest is None else float(f"{longest:.2g}")
        return Heartbeat(beats, self.count + device.done, waiting, operation, rounded)
