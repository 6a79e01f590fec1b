"""A simulated accelerator: streams run queued kernels asynchronously.

It has the properties of CUDA that a CPU lacks, on which the code must not rely:

- a launch only queues; a full queue blocks the host; an error in a kernel appears in all later calls;
- the first use of a kernel waits until the whole device is idle, unless modules are loaded eagerly;
- streams share a few work queues of the hardware, in which a waiting one blocks the others;
- streams of libraries come from a pool, in turn, whether they are in use or not;
- a kernel holds multiprocessors while it runs, and waits until there are enough; one that spins keeps them;
- communicators take memory, and one that is made soon after many others may hang;
- memory is freed, and pinned memory allocated, only when the whole device is idle; pinning takes time for each byte.

A kernel is a Python function that runs in its stream's thread and computes with torch on the CPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from recycle.exec.transport.base import TransportError
from recycle.job.footprint import COMMUNICATORS

QUEUE = 1024
"""Kernels that a stream takes before a launch blocks the host."""
CONNECTIONS = 8
"""Work queues of the hardware by default."""
MULTIPROCESSORS = 132
"""Of an H100."""
QUICK_SECONDS = 1.0
"""Time within which communicators count as made in quick succession."""
Kernel = Callable[[], object]


@dataclass(frozen=True)
class Limits:
    """What a device has, and how it fails.

    Attributes:
        streams: of the pool of libraries.
        communicators: that its memory has room for.
        hangs: probability that a communicator hangs which is made soon after `many` others.
        pin_seconds: per byte of pinned memory.
    """

    streams: int = 32
    multiprocessors: int = MULTIPROCESSORS
    communicators: int = COMMUNICATORS
    hangs: float = 0.0
    many: int = 4
    pin_seconds: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))


class Connection:
    """A work queue of the hardware: streams that share one start their kernels in the order of their launch.

    Attributes:
        streams: how many share it.
    """

    def __init__(self):
        self.streams = 0
        self._lock = threading.Lock()
        self._last = threading.Event()
        self._last.set()

    def queue(self) -> tuple[threading.Event, threading.Event]:
        """Events for the start of the previous kernel and of the new one."""
        with self._lock:
            before, self._last = self._last, threading.Event()
            return before, self._last


class Stream:
    """Runs kernels in the order of their launch.

    Args:
        device: takes their errors.
        connection: that its kernels reach the device by.
        length: of the launch queue.
    """

    def __init__(self, device: Device, name: str, connection: Connection, length: int = QUEUE):
        self._device, self.connection, self.length = device, connection, length
        self._queue = deque()
        self._changed = threading.Condition()
        self._is_idle = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def launch(self, kernel: Kernel, waits=False, blocks=1) -> threading.Event:
        """Queue a kernel; the returned event is set when it has run or failed. Blocks while the queue is full.

        Args:
            waits: a wait for another stream, which blocks its connection until it ends.
            blocks: multiprocessors that it holds.
        """
        self._device.check()
        done = threading.Event()
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            self._changed.wait_for(lambda: len(self._queue) < self.length)
            self._queue.append((kernel, done, 0 if waits else blocks, *self.connection.queue()))
            self._is_idle = False
            self._changed.notify_all()
        return done

    def drain(self):
        """Wait until all launched kernels have run."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle)

    @property
    def is_current(self) -> bool:
        """Whether the caller is a kernel of this stream."""
        return threading.current_thread() is self._thread

    def _run(self):
        while True:
            with self._changed:
                self._is_idle = not self._queue
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue))
                kernel, done, blocks, before, started = self._queue[0]
            before.wait()
            self._device.occupy(blocks)
            if blocks:
                started.set()
            try:
                if not self._device.failed:
                    kernel()
            except TransportError:  # a layer's sum between tensor ranks, which the host queues
                self._device.abort()
            except Exception as error:
                self._device.fail(f"{type(error).__name__}: {error}")
            del kernel  # and with it the tensors that it used
            self._device.occupy(-blocks)
            started.set()
            done.set()
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()


class DeviceMark:
    """A kernel that records its time."""

    def __init__(self, device: Device):
        self._device, self._seconds = device, 0.0
        if device.compute.is_current:
            raise AssertionError("a mark is made by the host")
        self._done = device.compute.launch(self._note)

    def _note(self):
        self._seconds = time.monotonic()

    def reached(self) -> bool:
        self._device.check()
        return self._done.is_set()

    def seconds(self) -> float:
        assert self._done.is_set()
        return self._seconds


class DeviceClock:
    """The clock of an accelerator."""

    runs_behind = True

    def __init__(self, device: Device):
        self._device = device

    def mark(self) -> DeviceMark:
        return DeviceMark(self._device)

    def set(self):
        self._device.synchronize()


class Device:
    """One accelerator, with a stream for computations; communicators take theirs from a pool.

    Args:
        queue: length of the launch queues.
        eager: whether all kernels are loaded at the start; by default from CUDA's environment variable.
        connections: number shared by the streams; by default from CUDA's environment variable.
    """

    def __init__(
        self, queue: int = QUEUE, eager: bool | None = None, connections: int | None = None, limits: Limits = Limits()
    ):
        self.queue, self.limits = queue, limits
        self.occupied, self._freed = 0, threading.Condition()
        self._made = deque[float]()
        self._drawn, self.communicators, self.hung = 0, 0, 0
        self._eager = os.environ.get("CUDA_MODULE_LOADING") == "EAGER" if eager is None else eager
        count = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)) if connections is None else connections
        self._connections = [Connection() for _ in range(count)]
        self._error = None
        self._computes_garbage = False
        self._loaded = set()
        self._streams = []
        self.compute = self._stream("compute")
        self._pool = [self._stream(f"pool {number}") for number in range(limits.streams)]

    def draw(self) -> Stream:
        """The next stream of the pool."""
        with self._freed:
            self._drawn += 1
            return self._pool[self._drawn % len(self._pool)]

    def occupy(self, blocks: int):
        """Take multiprocessors, as soon as there are enough, or give them back."""
        with self._freed:
            self._freed.wait_for(lambda: self.occupied + blocks <= self.limits.multiprocessors)
            self.occupied += blocks
            self._freed.notify_all()

    def make_communicator(self):
        """Take the memory of a communicator. Raises RuntimeError if there is none; may hang."""
        with self._freed:
            now = time.monotonic()
            self._made.append(now)
            while self._made[0] < now - QUICK_SECONDS:
                self._made.popleft()
            hangs = len(self._made) > self.limits.many and self.limits.random.random() < self.limits.hangs
            if not hangs:
                self.communicators += 1
                if self.communicators > self.limits.communicators:
                    raise RuntimeError("accelerator error: out of memory for communicators")
        if hangs:
            self.hung += 1
            threading.Event().wait()

    def free_communicator(self):
        self.drain()
        with self._freed:
            self.communicators -= 1

    def pin(self, size: int):
        """Allocate pinned memory of `size` bytes."""
        self.drain()
        time.sleep(size * self.limits.pin_seconds)

    def _stream(self, name: str) -> Stream:
        connection = min(self._connections, key=lambda connection: connection.streams)
        connection.streams += 1
        stream = Stream(self, name, connection, self.queue)
        self._streams.append(stream)
        return stream

    def launch(self, kernel: Kernel, name=""):
        """Queue a computation; inside another one it runs at once. The first with each `name` loads it."""
        if self.compute.is_current:
            kernel()
            return
        if name not in self._loaded and not self._eager:
            self.drain()
        self._loaded.add(name)
        self.compute.launch(kernel)

    def wait(self, event: threading.Event):
        """Let later computations wait for `event`; returns at once."""
        if self.compute.is_current:
            event.wait()
        elif not event.is_set():
            self.compute.launch(event.wait, waits=True)

    def reached(self) -> threading.Event:
        """Event that is set when all computations until now are done."""
        if self.compute.is_current:
            event = threading.Event()
            event.set()
            return event
        return self.compute.launch(lambda: None)

    def synchronize(self):
        """Wait until the device is idle. Raises RuntimeError if it has ever failed."""
        self.drain()
        self.check()
        self._computes_garbage = False

    def drain(self):
        """Wait until the device is idle."""
        for stream in tuple(self._streams):
            stream.drain()

    def check(self):
        """Raise RuntimeError when the device has failed."""
        if self._error is not None:
            raise RuntimeError(f"accelerator error: {self._error}")

    def fail(self, error: str):
        """Fail: nothing runs any more, and every later call raises an error."""
        if not self._computes_garbage:
            self._error = self._error or error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def abort(self):
        """Abort a communicator: queued kernels continue with undefined buffers, which is not an error.

        A real kernel computes garbage; the checks of an emulated stage would raise an exception.
        """
        self._computes_garbage = True
