"""How far a process and its device are, and when something was computed: marks, streams, progress for the heartbeat.

A mark is a point behind all that a device was given to compute until then. Its time is when the device came to it, in
the host's monotonic seconds, so that times of all processes of a machine compare. On a CPU that is at once.

A GPU runs behind its host: the host may have given it everything and wait, while one kernel of it never ends. So the
device's own progress is counted, by the operations that it has done, and each kind is held against the longest time
that the device took for one lately (`DeviceProgress`), as `Progress` does on the host.

A forward and a backward fill a device better together than in turn: DualPipe's pair hides the tensor-parallel and
expert-parallel communication of the one behind the products of the other (DeepSeek-V3, arXiv 2412.19437, section 3.2).
The host launches both; that they run together is for the device. autograd runs a backward on the stream that its
forward ran on, so a pair's forward goes to the stream on which the pair's backward does not run. What is launched
beside begins after all that was launched before, and what comes after the pair after both halves. So memory that one
stream gives back is not written by the other while it is still read; only what an instruction is handed, which comes
from the first stream, has to be told of the other.
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


KEPT = 0.9
"""Share of an operation's longest time that is kept when another of its kind ends."""


@dataclass(frozen=True)
class DeviceState:
    """How far a device is that runs behind its host.

    Attributes:
        done: operations that it has done.
        doing: the kind of the first operation that it has been given and has not done; empty when there is none.
        longest: seconds that the device took lately at most for one of the kind; None before the first.
        waits: whether it has come to an operation that waits for another process.
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
    """Operations that the main thread gives to the device, and how far it is; asked by the heartbeat's thread.

    Args:
        clock: of the device.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._given: deque[_Given] = deque()
        self._done = 0
        self._longest: dict[str, float] = {}

    def record_given(self, doing: str, began: Mark, ended: Mark) -> None:
        """The device was given an operation between two marks."""
        if not self.clock.runs_behind:
            return
        with self._lock:
            self._given.append(_Given(doing, began, ended))

    def forget(self) -> None:
        """The generation is over, and nothing of what the device was given counts any more."""
        with self._lock:
            self._given.clear()

    def state(self) -> DeviceState:
        """What the device has done, and the first operation that it has not."""
        with self._lock, contextlib.suppress(RuntimeError):  # it has failed; the main thread meets the same error
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
    """The stream on which everything runs, and one beside it."""

    def on_other_stream(self, tensors: Sequence[torch.Tensor | None]) -> AbstractContextManager[object]:
        """What is launched inside, with these tensors, runs on the other stream, after all that was launched before."""

    def join(self) -> None:
        """What is launched from now on runs after what was launched beside."""


class CudaStreams:
    """Those of a GPU. Not yet run on one.

    Args:
        device: the GPU.
    """

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
    """The streams of a device; None where the host computes, one instruction after the other."""
    return CudaStreams(device) if device.type == "cuda" else None


class Progress:
    """How far the process is, what it does, and whether it waits for another process.

    Of each kind of operation the longest recent time is kept; it decays by a tenth whenever one of the kind ends.

    A device that runs behind its host makes progress of its own. While it computes, the process does not wait, whatever
    its main thread waits for; while it waits for another process, so does the main thread perhaps, without a word,
    where the device takes no more launches.

    Args:
        device: how far the process's device is.
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
        """The main thread is at an operation of this kind, a word without spaces.

        Args:
            warms_up: the first of its kind may compile or load something; else it takes about as long as any other.
        """
        self.doing, self.waiting = doing, False
        self._usual = None if warms_up else max(self._longest.values(), default=None)
        self._worked, self._since = 0.0, time.monotonic()
        self.count += 1

    def ended(self) -> None:
        """The operation is done, and its time, without its waits, is what the next of its kind is held against."""
        self.set_waiting(False)
        self._longest[self.doing] = max(self._worked, KEPT * self._longest.get(self.doing, 0.0))

    def set_waiting(self, waiting: bool) -> None:
        now = time.monotonic()
        if not self.waiting:
            self._worked += now - self._since
        self.waiting, self._since = waiting, now
        self.count += 1

    def heartbeat(self, beats: int) -> Heartbeat:
        """What is sent as the heartbeat behind `beats` others."""
        device = self._device()
        if device.doing and not device.waits:
            doing, longest, waiting = device.doing, device.longest, False
        else:
            doing, longest = self.doing, self._longest.get(self.doing, self._usual)
            waiting = self.waiting or device.waits
        rounded = None if longest is None else float(f"{longest:.2g}")
        return Heartbeat(beats, self.count + device.done, waiting, doing, rounded)
