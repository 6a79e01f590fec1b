"""A machine in which time is a number: processes, threads, locks, sockets and selectors, all of one Python thread.

`virtual()` gives the modules of recycle.exec this clock, these threads and these sockets in place of Python's, so the
code that runs is the real one. A thread is a greenlet: it runs until it waits, and then the kernel runs what is
next in virtual time. Every choice is drawn from one generator, so a seed repeats a run to the message.

Limits: threads change at waits, at locks and at events only, not between any two lines. Sockets have endless buffers.
Files are real, and take no time.
"""

from __future__ import annotations

import concurrent.futures
import errno
import heapq
import multiprocessing.connection
import os
import queue
import random
import select
import selectors
import socket
import struct
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import count
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from recycle.job.shape import Worker

EPOCH = 1.7e9
BREAK_SECONDS = (5.0, 8.0)
"""Seconds after which a connection without an answer breaks (`links._KEEPALIVE`)."""
Waiting = list[tuple["Thread", object]]


class Process:
    """A process of a host, perhaps of a worker. `how` says how it ended; a parent's end ends its children."""

    def __init__(
        self, kernel: Kernel, name: str, host: int, parent: Process | None = None, worker: Worker | None = None
    ) -> None:
        self.kernel, self.name, self.host, self.parent, self.worker = kernel, name, host, parent, worker
        self.is_alive, self.is_stopped, self.how = True, False, ""
        self.code: int | None = None
        self.effects = 0
        self.sockets: list[Socket] = []
        self.at_end: list[Callable[[], None]] = []
        self.held: list[Callable[[], None]] = []
        kernel.processes.append(self)

    def run(self, function: Callable[[], Any], delay: float = 0.0) -> None:
        """Run a function in the main thread, and end with it."""

        def main() -> None:
            function()
            self.end("", 0)

        Thread(main, process=self).start(delay)

    def end(self, how: str, code: int, is_seen: bool = True) -> None:
        """End at once; what it has sent arrives. Its peers see no end if the whole host is gone (`is_seen`)."""
        if not self.is_alive:
            return
        self.is_alive, self.how, self.code = False, how, code
        self.kernel.log(f"{self.name} ends: {how or code}")
        self.kernel.deliver_locally(self)
        for end in list(self.sockets):
            end.close() if is_seen else end.vanish()
        for child in [child for child in self.kernel.processes if child.parent is self and child.is_alive]:
            self.kernel.after(0.0, partial(child.end, "its agent is gone", -9, is_seen))
        for call in list(self.at_end):
            call()
        self.kernel.processes.remove(self)

    def stop(self, seconds: float) -> None:
        """Run nothing for a while, as after SIGSTOP."""
        if self.is_stopped:
            return
        self.is_stopped = True
        self.kernel.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self.is_stopped, held, self.held = False, self.held, []
        for call in held if self.is_alive else ():
            call()


Channel = tuple[str, str]
"""Who sends, and who receives."""
DETOUR_SECONDS = 1.0
"""Longest time for which a message waits for one of another sender."""


class Kernel:
    """What happens next.

    Attributes:
        cuts: pairs of hosts between which nothing arrives.
        detours: numbers of messages that arrive after the next one that their receiver gets on another channel. All
            messages take the same time then. None for drawn times.
        arrivals: (time, number, channel) of messages, in order, if not drawn.
    """

    def __init__(self, draws: random.Random, trace: Callable[[str], None] | None = None) -> None:
        self.now, self.draws, self.processes = 0.0, draws, list[Process]()
        self.slow_messages = 0.0
        self._trace = trace
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self.ports = count(), count(1000)
        self.hub = getcurrent()
        self.threads: set[Thread] = set()
        self.listeners: dict[object, Socket] = {}
        self.cuts: dict[frozenset[int], int] = {}
        self._held: dict[frozenset[int], list[Callable[[], None]]] = {}
        self.crashes: set[tuple[str, int]] = set()
        self.detours: frozenset[int] | None = None
        self.arrivals: list[tuple[float, int, Channel]] = []
        self._messages, self._delayed = count(), dict[str, tuple[Channel, list[Callable[[], None]]]]()
        self.effects: dict[str, int] = {}
        self.error: Exception | None = None
        self.is_finished = self.is_over = False

    def count_effect(self) -> None:
        """A process has done what others can see; it may be its last effect."""
        if not isinstance(getcurrent(), _Greenlet):
            return
        process = current().process
        process.effects += 1
        key = process.name, process.effects
        self.effects[process.name] = max(self.effects.get(process.name, 0), process.effects)
        if key in self.crashes:
            self.crashes.discard(key)
            process.end("killed by SIGKILL", -9)
            self.park()

    def log(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.3f} {text}")

    def draw(self, low: float, high: float) -> float:
        return low + (high - low) * self.draws.random()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, seconds: float) -> None:
        """Go on until `is_finished`, or at most until a time. Raises what a thread raised."""
        events = self._events
        while not self.is_finished and events and events[0][0] <= seconds and self.error is None:
            self.now, _, call = heapq.heappop(events)
            call()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End all threads."""
        self.is_over = True
        for thread in list(self.threads):
            with suppress(BaseException):
                thread.greenlet.throw(GreenletExit)

    def park(self, waiting: Waiting | None = None, seconds: float | None = None) -> bool:
        """Wait to be woken, or for some seconds at most. Returns whether it was woken."""
        if self.is_over:
            raise GreenletExit
        thread, ticket = current(), object()
        thread.ticket = ticket
        if waiting is not None:
            waiting.append((thread, ticket))
        if seconds is not None:
            self.after(max(0.0, seconds), partial(self._resume, thread, ticket, False))
        return bool(self.hub.switch())

    def wake(self, waiting: Waiting) -> None:
        for thread, ticket in waiting:
            soon = self.draws.random() if self.detours is None else 0.0
            self.after(0.0 if soon < 0.5 else 0.002 * (soon - 0.5), partial(self._resume, thread, ticket, True))
        waiting.clear()

    def _resume(self, thread: Thread, ticket: object, is_woken: bool) -> None:
        if thread.ticket is not ticket:
            return
        process = thread.process
        if process.is_stopped:
            process.held.append(partial(self._resume, thread, ticket, is_woken))
        elif process.is_alive:
            thread.ticket = None
            thread.greenlet.switch(is_woken)

    def yield_now(self) -> None:
        """Another thread may run here."""
        if isinstance(getcurrent(), _Greenlet) and self.draws.random() < 0.05:
            self.park(seconds=self.draws.random() * 0.001)

    # The network.

    def delay(self, first: int, second: int) -> float:
        if self.detours is not None:
            return 0.002
        if self.draws.random() < self.slow_messages:
            return self.draw(0.2, 3.0)
        return self.draw(0.0002, 0.004)

    def send(
        self, first: int, second: int, seconds: float, call: Callable[[], None], channel: Channel | None = None
    ) -> None:
        """Have something arrive at a host, once nothing is cut."""
        pair = frozenset((first, second))
        if self.detours is not None and channel is not None:
            call = partial(self._arrive, next(self._messages), channel, first == second, call)

        def arrive() -> None:
            if pair in self.cuts:
                self._held.setdefault(pair, []).append(call)
            else:
                call()

        self.after(seconds, arrive)

    def _arrive(self, number: int, channel: Channel, is_local: bool, call: Callable[[], None]) -> None:
        delayed, receiver = self._delayed.get(channel[1]), channel[1]
        if delayed is not None and delayed[0] == channel:
            delayed[1].append(call)
            return
        may_wait = not is_local or any(process.name == channel[0] for process in self.processes)
        if delayed is None and self.detours and number in self.detours and may_wait:
            self._delayed[receiver] = delayed = channel, [call]
            self.after(DETOUR_SECONDS, partial(self._deliver, receiver, delayed))
            return
        self.arrivals.append((self.now, number, channel))
        call()
        if delayed is not None:
            self._deliver(receiver, delayed)

    def _deliver(self, receiver: str, delayed: tuple[Channel, list[Callable[[], None]]]) -> None:
        if self._delayed.get(receiver) is delayed:
            del self._delayed[receiver]
            for call in delayed[1]:
                call()

    def deliver_locally(self, sender: Process) -> None:
        """What a process has sent to another one of its host is there before it ends."""
        for process in self.processes:
            delayed = self._delayed.get(process.name)
            if delayed is not None and process.host == sender.host and delayed[0][0] == sender.name:
                self._deliver(process.name, delayed)

    def races(self) -> Iterator[int]:
        """Numbers of messages that their receiver could get after a later one of another channel.

        Messages to different receivers commute, and one that finds no other in `DETOUR_SECONDS` changes nothing.
        """
        later: dict[str, list[tuple[float, Channel]]] = {}
        for moment, number, channel in reversed(self.arrivals):
            others = later.setdefault(channel[1], [])
            if any(at - moment <= DETOUR_SECONDS and other != channel for at, other in reversed(others[-20:])):
                yield number
            others.append((moment, channel))

    def cut(self, first: int, second: int, seconds: float) -> None:
        pair, number = frozenset((first, second)), next(self._numbers)
        self.cuts[pair] = number

        def heal() -> None:
            if self.cuts.get(pair) == number:
                del self.cuts[pair]
                for call in self._held.pop(pair, []):
                    call()

        self.after(seconds, heal)
        for process in self.processes:
            for end in list(process.sockets):
                if end.peer is not None and {process.host, end.peer.process.host} == set(pair):
                    self.after(self.draw(*BREAK_SECONDS), partial(end.break_if, pair, number))

    def are_cut(self, first: int, second: int) -> bool:
        return frozenset((first, second)) in self.cuts


KERNEL: Kernel
"""The one of the run."""


def current() -> Thread:
    found = getcurrent()
    assert isinstance(found, _Greenlet), "only threads of processes wait"
    return found.thread


class _Greenlet(greenlet):  # type: ignore[misc]
    thread: Thread


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: Iterable[Any] = (),
        daemon: bool = True,
        name: str = "",
        process: Process | None = None,
    ) -> None:
        self.process = process or current().process
        self.ticket: object = None
        self._target, self._args, self._done = target, args, False
        self._joining: Waiting = []
        self.greenlet = _Greenlet(self._run, KERNEL.hub)
        self.greenlet.thread = self

    def start(self, delay: float = 0.0) -> None:
        kernel = self.process.kernel
        kernel.threads.add(self)
        self.ticket = ticket = object()
        kernel.after(delay, partial(kernel._resume, self, ticket, True))

    def _run(self, *_: object) -> None:
        try:
            self._target(*self._args)
        except GreenletExit:
            pass
        except Exception as error:
            if not self.process.kernel.is_over:
                self.process.kernel.error = error
        self._done = True
        self.process.kernel.threads.discard(self)
        self.process.kernel.wake(self._joining)

    def join(self, timeout: float | None = None) -> None:
        if not self._done:
            KERNEL.park(self._joining, timeout)


class Lock:
    """As `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0
        self._waiting: Waiting = []

    def acquire(self) -> bool:
        if not isinstance(getcurrent(), _Greenlet):
            return True
        KERNEL.yield_now()
        thread = current()
        while self._owner not in (None, thread):
            KERNEL.park(self._waiting)
        self._owner, self._count = thread, self._count + 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            KERNEL.wake(self._waiting)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """As `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        assert lock is None
        super().__init__()
        self._notified: Waiting = []

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        is_woken = KERNEL.park(self._notified, timeout)
        self.acquire()
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else KERNEL.now + timeout
        while not (result := predicate()) and (until is None or KERNEL.now < until):
            self.wait(None if until is None else until - KERNEL.now)
        return result

    def notify_all(self) -> None:
        KERNEL.wake(self._notified)

    notify = notify_all


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: Waiting = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        KERNEL.wake(self._waiting)
        KERNEL.yield_now()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else KERNEL.now + timeout
        while not self._is_set and (until is None or KERNEL.now < until):
            KERNEL.park(self._waiting, None if until is None else until - KERNEL.now)
        return self._is_set


class Future:
    """As `concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._is_done = self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.waiting: Waiting = []
        self._calls: list[Callable[[Any], Any]] = []

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def done(self) -> bool:
        return self._is_done

    def cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> bool:
        if not self._is_done:
            self._is_cancelled = True
            self._finish(None, concurrent.futures.CancelledError())
        return self._is_cancelled

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._is_done, self._result, self._error = True, result, error
        for call in self._calls:
            call(self)
        KERNEL.wake(self.waiting)

    def set_result(self, result: Any) -> None:
        self._finish(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._finish(None, error)

    def add_done_callback(self, call: Callable[[Any], Any]) -> None:
        call(self) if self._is_done else self._calls.append(call)

    def result(self, timeout: float | None = None) -> Any:
        until = None if timeout is None else KERNEL.now + timeout
        while not self._is_done and (until is None or KERNEL.now < until):
            KERNEL.park(self.waiting, None if until is None else until - KERNEL.now)
        if not self._is_done:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with suppress(BaseException):
            self.result(timeout)
        return self._error


class Executor:
    """As `ThreadPoolExecutor` with one thread, whose work may be slow to begin."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._work: list[tuple[Future, Callable[[], Any]]] = []
        self._is_running = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future = Future()
        self._work.append((future, partial(call, *args)))
        if not self._is_running:
            self._is_running = True
            Thread(self._run).start()
        return future

    def _run(self) -> None:
        while self._work:
            future, call = self._work.pop(0)
            if future.done():
                continue
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._is_running = False

    def map(self, call: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        for future in [self.submit(call, item) for item in items]:
            yield future.result()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._work:
                future.cancel()
        while wait and self._is_running:
            KERNEL.park(seconds=0.001)


def wait_for_futures(futures: Iterable[Future], timeout: float | None = None) -> None:
    until = None if timeout is None else KERNEL.now + timeout
    for future in futures:
        with suppress(BaseException):
            future.result(None if until is None else max(0.0, until - KERNEL.now))


class Queue:
    """As `queue.Queue`."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items, self._most, self._waiting = deque[Any](), maxsize, Waiting()

    def full(self) -> bool:
        return 0 < self._most <= len(self._items)

    def put_nowait(self, item: Any) -> None:
        if self.full():
            raise queue.Full
        self._items.append(item)
        KERNEL.wake(self._waiting)

    def put(self, item: Any, timeout: float | None = None) -> None:
        self.put_nowait(item)

    def get(self) -> Any:
        while not self._items:
            KERNEL.park(self._waiting)
        return self._items.popleft()


class Socket:
    """A stream, or a listening socket, of AF_UNIX or AF_INET."""

    def __init__(self, *_: object, process: Process | None = None) -> None:
        self.process = process or current().process
        self.process.sockets.append(self)
        self.peer: Socket | None = None
        self.error: OSError | None = None
        self._inbox, self._has_ended, self._is_closed = bytearray(), False, False
        self._timeout: float | None = None
        self._accepted: list[Socket] | None = None
        self._name: object = None
        self._arrival = 0.0
        self.watching: Waiting = []
        self.selectors: list[Selector] = []

    # What happens to it.

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox or self._accepted or self._has_ended or self.error or self._is_closed)

    def _changed(self) -> None:
        KERNEL.wake(self.watching)
        for selector in self.selectors:
            selector.changed()

    def _arrive(self, data: bytes | None) -> None:
        if data is None:
            self._has_ended = True
        else:
            self._inbox += data
        self._changed()

    def _transmit(self, data: bytes | None) -> None:
        assert self.peer is not None
        ends = self.process.host, self.peer.process.host
        channel = self.process.name, self.peer.process.name
        if ends[0] == ends[1]:  # the kernel of a host has what was sent at once
            if KERNEL.detours is None:
                self.peer._arrive(data)
            else:
                KERNEL.send(*ends, 0.0, partial(self.peer._arrive, data), channel)
            return
        self._arrival = max(self._arrival, KERNEL.now + KERNEL.delay(*ends))
        KERNEL.send(*ends, self._arrival - KERNEL.now, partial(self.peer._arrive, data), channel)

    def break_if(self, pair: frozenset[int], number: int) -> None:
        """The connection breaks here if a cut lasts."""
        if KERNEL.cuts.get(pair) == number and not self._is_closed and self.error is None:
            self.error = TimeoutError(errno.ETIMEDOUT, "Connection timed out")
            self._changed()

    def vanish(self) -> None:
        """The host of this end is gone: the other one finds out by itself."""
        self._is_closed = True
        if self._name is not None:
            KERNEL.listeners.pop(self._name, None)
        if (peer := self.peer) is not None:
            KERNEL.after(KERNEL.draw(*BREAK_SECONDS), peer._lose)

    def _lose(self) -> None:
        self.error = self.error or TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        self._changed()

    # What recycle calls.

    def fileno(self) -> int:
        return id(self)

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockopt(self, *_: object) -> bytes:
        return struct.pack("3i", 1, os.getuid(), 0)

    def setblocking(self, blocks: bool) -> None:
        self._timeout = None if blocks else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def bind(self, name: object) -> None:
        self._name = name
        KERNEL.listeners[name] = self

    def listen(self, *_: object) -> None:
        self._accepted = []

    def getsockname(self) -> Any:
        return self._name

    def accept(self) -> tuple[Socket, None]:
        if not self._accepted:
            raise BlockingIOError
        return self._accepted.pop(0), None

    def connect(self, name: object) -> None:
        listener = KERNEL.listeners.get(name)
        if listener is None or listener._accepted is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        other = Socket(process=listener.process)
        self.peer, other.peer = other, self
        listener._accepted.append(other)
        listener._changed()

    def sendmsg(self, parts: Iterable[bytes | memoryview]) -> int:
        data = b"".join(parts)
        if self.error is not None:
            raise self.error
        if self._is_closed or self._has_ended or self.peer is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._transmit(data)
        KERNEL.count_effect()
        return len(data)

    def recv(self, size: int) -> bytes:
        while not self.is_readable:
            if self._timeout == 0.0:
                raise BlockingIOError
            if not KERNEL.park(self.watching, self._timeout) and self._timeout is not None:
                raise TimeoutError
        data = bytes(self._inbox[:size])
        del self._inbox[:size]
        if not data and self.error is not None:
            raise self.error
        return data

    def shutdown(self, _: int) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.peer is not None and self.error is None:
                self._transmit(None)
            self._changed()

    def close(self) -> None:
        self.shutdown(0)
        if self._name is not None:
            KERNEL.listeners.pop(self._name, None)
        with suppress(ValueError):
            self.process.sockets.remove(self)


def create_server(address: tuple[str, int], backlog: int = 0) -> Socket:
    server = Socket()
    server.bind((address[0], address[1] or next(KERNEL.ports)))
    server.listen()
    return server


def create_connection(address: tuple[str, int], timeout: float) -> Socket:
    own, listener = current().process, KERNEL.listeners.get(address)
    until = KERNEL.now + timeout
    host = int(address[0].removeprefix("node"))
    while KERNEL.are_cut(own.host, host) or (listener is not None and not listener.process.is_alive):
        if KERNEL.now >= until:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        KERNEL.park(seconds=0.2)
    KERNEL.park(seconds=KERNEL.delay(own.host, host))
    connection = Socket()
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


class Selector:
    """As `selectors.DefaultSelector`; it is its own descriptor."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.waiting: list[Waiting] = [[]]

    def fileno(self) -> Any:
        return self

    def changed(self) -> None:
        for waiting in self.waiting:
            KERNEL.wake(waiting)

    def register(self, end: Any, events: int, data: Any = None) -> None:
        self._keys[id(end)] = selectors.SelectorKey(end, id(end), events, data)
        end.selectors.append(self)
        if end.is_readable:
            self.changed()

    def modify(self, end: Any, events: int, data: Any = None) -> None:
        self._keys[id(end)] = selectors.SelectorKey(end, id(end), events, data)

    def unregister(self, end: Any) -> None:
        del self._keys[id(end)]
        end.selectors.remove(self)

    def get_map(self) -> dict[int, selectors.SelectorKey]:
        return self._keys

    @property
    def is_readable(self) -> bool:
        return any(key.fileobj.is_readable for key in self._keys.values())  # type: ignore[union-attr]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.is_readable and timeout != 0.0:
            KERNEL.park(self.waiting[0], timeout)
        ready = [(key, key.events) for key in self._keys.values() if key.fileobj.is_readable]  # type: ignore[union-attr]
        KERNEL.draws.shuffle(ready)
        return ready

    def close(self) -> None:
        self._keys.clear()


def wait_for_sockets(ends: list[Socket], timeout: float) -> list[Socket]:
    if not ends[0].is_readable:
        KERNEL.park(ends[0].watching, timeout)
    return [end for end in ends if end.is_readable]


def _select(ends: list[Socket], *others: object) -> tuple[list[Socket], list[Socket], list[Socket]]:
    return wait_for_sockets(ends, others[-1]), [], []  # type: ignore[arg-type]


def _sleep(seconds: float) -> None:
    KERNEL.park(seconds=seconds)


def stand_in(real: types.ModuleType, **names: Any) -> types.ModuleType:
    """A module with some names replaced."""
    module = types.ModuleType(real.__name__)
    module.__getattr__ = partial(getattr, real)  # type: ignore[method-assign]
    vars(module).update(names)
    return module


_MODULES = {
    time: stand_in(time, monotonic=lambda: KERNEL.now + 1000.0, time=lambda: EPOCH + KERNEL.now, sleep=_sleep),
    threading: stand_in(threading, Thread=Thread, Lock=Lock, RLock=Lock, Condition=Condition, Event=Event),
    socket: stand_in(socket, socket=Socket, create_server=create_server, create_connection=create_connection),
    selectors: stand_in(selectors, DefaultSelector=Selector),
    queue: stand_in(queue, Queue=Queue),
    select: stand_in(select, select=_select),
    random: stand_in(random, random=lambda: KERNEL.draws.random()),
}
_NAMES = {
    concurrent.futures.ThreadPoolExecutor: Executor,
    concurrent.futures.Future: Future,
    concurrent.futures.wait: wait_for_futures,
    multiprocessing.connection.wait: wait_for_sockets,
}


@cache
def _wanted(_: int) -> list[tuple[types.ModuleType, str, Any]]:
    """What is replaced in the modules that are imported now."""
    by_identity = {id(real): stand_in for real, stand_in in (*_MODULES.items(), *_NAMES.items())}
    return [
        (module, name, by_identity[id(value)])
        for path, module in list(sys.modules.items())
        if path.startswith("recycle.exec")
        for name, value in list(vars(module).items())
        if id(value) in by_identity
    ]


@contextmanager
def virtual(kernel: Kernel, others: Iterable[tuple[types.ModuleType, str, Any]]) -> Iterator[None]:
    """Give all modules of recycle.exec this kernel's clock, threads and sockets, and some modules other names."""
    global KERNEL
    KERNEL, replaced = kernel, list[tuple[types.ModuleType, str, Any]]()
    try:
        for module, name, value in (*_wanted(len(sys.modules)), *others):
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        kernel.close()
        for module, name, value in reversed(replaced):
            setattr(module, name, value)
