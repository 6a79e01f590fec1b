"""Measures what a process and its device have done: marks, clocks, streams, and progress for the heartbeat.

A mark is a point after all work given to a device so far. Its time is when the device reached it, in the host's
monotonic seconds, so that times of all processes of a machine compare. On a CPU a mark is reached at once.

A GPU runs behind its host: the host may wait while one of its kernels never ends. So completed operations of the device
are counted, and each kind is compared with its longest recent duration (`DeviceProgress`), as `Progress` does on the
host.

A forward and a backward fill a device better together: DualPipe's pair hides the tensor-parallel and expert-parallel
communication of one half behind the compute of the other (DeepSeek-V3, arXiv 2412.19437, section 3.2). autograd runs a
backward on the stream of its forward, so the pair's forward uses the other stream. Work on the other stream starts
after all earlier work, and work after the pair waits for both halves. So memory freed by one stream is not overwritten
while the other still reads it. Only tensors passed from the first stream must be recorded on the other.
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
    """A mark without a device behind the host: reached when made."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def reached(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class HostClock:
    """The host's clock."""

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
    """A GPU event, and an earlier event with its host time."""

    __slots__ = ("_began", "_began_at", "_event")

    def __init__(self, event: Any, began: Any, began_at: float) -> None:
        self._event, self._began, self._began_at = event, began, began_at

    def reached(self) -> bool:
        return bool(self._event.query())

    def seconds(self) -> float:
        return self._began_at + float(self._began.elapsed_time(self._event)) / 1000


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


KEPT = 0.9
"""Share of an operation's longest time that is kept when another operation of its kind ends."""


@dataclass(frozen=True)
class DeviceState:
    """The progress of a device that runs behind its host.

    Attributes:
        done: number of completed operations.
        doing: kind of the first incomplete operation; empty if there is none.
        longest: longest recent duration of that kind, seconds; None before the first.
        waits: whether the device has reached an operation that waits for another process.
    """

    done: int = 0
    doing: str = ""
    longest: float | None = None
    waits: bool = False


@dataclass(frozen=True)
class _Given:
    doing: str
    began: Mark
    ended: Mark


class DeviceProgress:
    """Tracks the operations given to the device by the main thread; read by the heartbeat's thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._given: deque[_Given] = deque()
        self._done = 0
        self._longest: dict[str, float] = {}

    def record_given(self, doing: str, began: Mark, ended: Mark) -> None:
        """Note that the device was given an operation between two marks."""
        if not self.clock.runs_behind:
            return
        with self._lock:
            self._given.append(_Given(doing, began, ended))

    def forget(self) -> None:
        """Forget all given operations, because their generation is over."""
        with self._lock:
            self._given.clear()

    def state(self) -> DeviceState:
        """Return the completed operations, and the first incomplete operation."""
        with self._lock, contextlib.suppress(RuntimeError):  # failed: the main thread meets the same error
            while self._given and self._given[0].ended.reached():
                one = self._given.popleft()
                self._done += 1
                seconds = one.ended.seconds() - one.began.seconds()
                self._longest[one.doing] = max(seconds, KEPT * self._longest.get(one.doing, 0.0))
            if self._given:
                doing = self._given[0].doing
                return DeviceState(self._done, doing, self._longest.get(doing))
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
    """Return the streams of a device; None for a CPU, which runs instructions one by one."""
    return CudaStreams(device) if device.type == "cuda" else None


class Progress:
    """The progress of a process: its current operation, and whether it waits for another process.

    The longest recent duration of each kind of operation is kept, and decays by a tenth at each end of that kind. While
    a device behind its host computes, the process does not wait, even if its main thread does. While the device waits
    for another process, the main thread may block too, if the launch queue is full.
    """

    def __init__(self, device: Callable[[], DeviceState] = DeviceState) -> None:
        self._device = device
        self.count = 0
        self.waiting = True
        self.doing = "start"
        self._longest: dict[str, float] = {}
        self._usual: float | None = None
        self._worked, self._since = 0.0, time.monotonic()

    def begins(self, doing: str, warms_up: bool = True) -> None:
        """Start an operation of this kind (a word); with `warms_up`, the first may compile or load."""
        self.doing, self.waiting = doing, False
        self._usual = None if warms_up else max(self._longest.values(), default=None)
        self._worked, self._since = 0.0, time.monotonic()
        self.count += 1

    def ended(self) -> None:
        """End the operation and record its duration, without waits, for its kind."""
        self.set_waiting(False)
        self._longest[self.doing] = max(self._worked, KEPT * self._longest.get(self.doing, 0.0))

    def set_waiting(self, waiting: bool) -> None:
        now = time.monotonic()
        if not self.waiting:
            self._worked += now - self._since
        self.waiting, self._since = waiting, now
        self.count += 1

    def heartbeat(self, beats: int) -> Heartbeat:
        """Return the heartbeat after `beats` earlier heartbeats."""
        device = self._device()
        if device.doing and not device.waits:
            doing, longest, waiting = device.doing, device.longest, False
        else:
            doing, longest = self.doing, self._longest.get(self.doing, self._usual)
            waiting = self.waiting or device.waits
        rounded = None if longest is None else float(f"{longest:.2g}")
        return Heartbeat(beats, self.count + device.done, waiting, doing, rounded)
