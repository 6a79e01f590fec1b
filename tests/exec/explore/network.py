"""Sockets and selectors of simulated processes, with the interface of Python's."""

from __future__ import annotations

import errno
import os
import selectors
import struct
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from tests.exec.explore import kernel as machine
from tests.exec.explore.kernel import BREAK_SECONDS, Process, Waiting, current

AWAKE_SECONDS = 0.05
"""Longest time that an agent takes to read what has arrived; a busy one reads more at once."""


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
        self._arrival, self.is_deaf = 0.0, False
        self.watching: Waiting = []
        self.selectors: list[Selector] = []

    # What happens to it.

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox or self._accepted or self._has_ended or self.error or self._is_closed)

    def _changed(self) -> None:
        machine.KERNEL.wake(self.watching)
        for selector in self.selectors:
            selector.changed()

    def _arrive(self, data: bytes | None) -> None:
        if (self._is_closed or self.error) and self.process.is_alive:
            if data and (peer := self.peer) is not None:  # answered with a reset
                ends = self.process.host, peer.process.host
                machine.KERNEL.send(*ends, machine.KERNEL.delay(*ends), peer._lose)
            return
        if self.is_deaf:
            return
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
            if machine.KERNEL.detours is None:
                self.peer._arrive(data)
            else:
                machine.KERNEL.send(*ends, 0.0, partial(self.peer._arrive, data), channel)
            return
        self._arrival = max(self._arrival, machine.KERNEL.now + machine.KERNEL.delay(*ends))
        machine.KERNEL.send(*ends, self._arrival - machine.KERNEL.now, partial(self.peer._arrive, data), channel)

    def break_if(self, pair: frozenset[int], number: int) -> None:
        """The connection breaks here if a cut lasts."""
        if machine.KERNEL.cuts.get(pair) == number and not self._is_closed and self.error is None:
            self.error = TimeoutError(errno.ETIMEDOUT, "Connection timed out")
            self._changed()

    def vanish(self) -> None:
        """The host of this end is gone: the other one finds out by itself."""
        self._is_closed = True
        if self._name is not None:
            machine.KERNEL.listeners.pop(self._name, None)
        if (peer := self.peer) is not None:
            machine.KERNEL.after(machine.KERNEL.draw(*BREAK_SECONDS), peer._lose)

    def reset(self) -> None:
        """The connection breaks at both ends, and what is on its way is lost."""
        for end in (self, self.peer):
            if end is not None and not end._is_closed:
                end.is_deaf = True
                end._lose()

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
        machine.KERNEL.listeners[name] = self

    def listen(self, *_: object) -> None:
        self._accepted = []

    def getsockname(self) -> Any:
        return self._name

    def accept(self) -> tuple[Socket, None]:
        if not self._accepted:
            raise BlockingIOError
        return self._accepted.pop(0), None

    def connect(self, name: object) -> None:
        listener = machine.KERNEL.listeners.get(name)
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
        machine.KERNEL.count_effect()
        return len(data)

    def recv(self, size: int) -> bytes:
        while not self.is_readable:
            if self._timeout == 0.0:
                raise BlockingIOError
            if not machine.KERNEL.park(self.watching, self._timeout) and self._timeout is not None:
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
        for connection in self._accepted or ():
            connection.close()
        if self._name is not None:
            machine.KERNEL.listeners.pop(self._name, None)
        with suppress(ValueError):
            self.process.sockets.remove(self)


def create_server(address: tuple[str, int], backlog: int = 0) -> Socket:
    server = Socket()
    server.bind((address[0], address[1] or next(machine.KERNEL.ports)))
    server.listen()
    return server


def create_connection(address: tuple[str, int], timeout: float) -> Socket:
    own, listener = current().process, machine.KERNEL.listeners.get(address)
    until = machine.KERNEL.now + timeout
    host = int(address[0].removeprefix("node"))
    while machine.KERNEL.are_cut(own.host, host) or (listener is not None and not listener.process.is_alive):
        if machine.KERNEL.now >= until:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        machine.KERNEL.park(seconds=0.2)
    machine.KERNEL.park(seconds=machine.KERNEL.delay(own.host, host))
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
            machine.KERNEL.wake(waiting, AWAKE_SECONDS)

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
        if timeout != 0.0 and not self.is_readable:
            machine.KERNEL.park(self.waiting[0], timeout)
        ready = [(key, key.events) for key in self._keys.values() if key.fileobj.is_readable]  # type: ignore[union-attr]
        machine.KERNEL.draws.shuffle(ready)
        return ready

    def close(self) -> None:
        self._keys.clear()


def wait_for_sockets(ends: list[Socket], timeout: float) -> list[Socket]:
    if not ends[0].is_readable:
        machine.KERNEL.park(ends[0].watching, timeout)
    return [end for end in ends if end.is_readable]


def select_sockets(ends: list[Socket], *others: object) -> tuple[list[Socket], list[Socket], list[Socket]]:
    return wait_for_sockets(ends, others[-1]), [], []  # type: ignore[arg-type]
