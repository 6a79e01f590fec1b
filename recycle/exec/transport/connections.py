"""TCP connections of processes, by their two ends: to notice that one is dead, to find and to cut that between two.

A connection whose peer has vanished without a word is told from a slow one by the kernel of the other side: that
answers, for a process that computes, waits or is stopped as well. `give_up_after` has the kernel ask, every second
also where nothing is sent (keepalive, RFC 9293 section 3.8.4), and break the connection when nothing comes back for
that long (the user timeout of RFC 5482). Linux only.

A socket of another library is reached through a duplicate of its descriptor. Duplicates exist, and descriptors are
listed, one thread at a time: else a thread would take another's duplicate, gone in a moment, for a socket of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from typing import NamedTuple

from recycle.errors import RunError

_ATTACH_FILTER = 26
_RETURN = 0x06
"""BPF_RET | BPF_K: with 0 bytes to keep, a packet is dropped."""


_DUPLICATES = threading.RLock()


@contextlib.contextmanager
def _socket_of(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor. Raises OSError when it is none, or not open any more."""
    with _DUPLICATES:
        duplicate = os.dup(descriptor)
        try:
            end = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        with end:
            yield end


class Connection(NamedTuple):
    """An end of a connection: its own and the other end's address, and its descriptor."""

    own: str
    other: str
    descriptor: int

    def __str__(self) -> str:
        return f"{self.own}-{self.other}"

    @property
    def mirrored(self) -> str:
        """The text of the other end."""
        return f"{self.other}-{self.own}"


def own_connections(descriptors: Collection[int]) -> list[Connection]:
    """Those of this process's sockets that are connected."""
    found = []
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _socket_of(descriptor) as end:
            if end.family == socket.AF_UNIX:
                continue  # to the agent of this node
            own, other = ("{}:{}".format(*address[:2]) for address in (end.getsockname(), end.getpeername()))
            found.append(Connection(own, other, descriptor))
    return sorted(found)


def open_sockets() -> dict[str, int]:
    """The sockets of this process: identity -> file descriptor."""
    found: dict[str, int] = {}
    with _DUPLICATES:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[target] = int(name)
    return found


def shut_sockets(keep: set[str]) -> None:
    """Shut every connected socket of this process but those in `keep`."""
    for identity, descriptor in open_sockets().items():
        if identity in keep:
            continue
        with contextlib.suppress(OSError), _socket_of(descriptor) as connection:
            if connection.family != socket.AF_UNIX:
                connection.getpeername()  # fails where it is not connected
                connection.shutdown(socket.SHUT_RDWR)


def give_up_after(connection: Connection, seconds: float) -> None:
    """Have the kernel break a connection of this process that gets no answer for `seconds`, unless it is closed."""
    with contextlib.suppress(OSError), _socket_of(connection.descriptor) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * seconds)))


def cut(other_ends: Collection[str]) -> int:
    """Drop every packet that arrives at this process on the connections that it has to these ends.

    A socket filter that keeps no packet is put on this process's end, so that it receives nothing, not even that the
    other end closes. Have the other process do likewise for a silence of both. New connections are not cut.

    Args:
        other_ends: texts of the ends of the other process.

    Returns:
        How many connections were cut.

    Raises:
        RunError: the system does not allow it.
    """
    ends = [end for end in own_connections(open_sockets().values()) if end.mirrored in other_ends]
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    filters = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    try:
        for end in ends:
            with _socket_of(end.descriptor) as connection:
                connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filters)
    except OSError as error:
        raise RunError(f"the connections of this process cannot be cut: {error.strerror}") from None
    return len(ends)
