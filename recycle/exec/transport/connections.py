"""TCP connections of this process: detecting dead peers, and finding and cutting connections between two processes.

The kernel of a live machine answers for its processes, even if they compute, wait or are stopped. `give_up_after` sets
a keepalive every second (RFC 9293 section 3.8.4). The kernel then breaks a connection without an answer within the user
timeout (RFC 5482). Linux only.

Sockets of other libraries are accessed through a duplicate of the descriptor, under a lock.
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
"""BPF_RET | BPF_K: returning 0 bytes drops the packet."""


_DUPLICATION = threading.RLock()


@contextlib.contextmanager
def _socket_of(descriptor: int) -> Iterator[socket.socket]:
    with _DUPLICATION:
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
        return f"{self.other}-{self.own}"


def own_connections(descriptors: Collection[int]) -> list[Connection]:
    connections = []
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _socket_of(descriptor) as end:
            if end.family == socket.AF_UNIX:
                continue  # to the agent of this node
            own, other = ("{}:{}".format(*address[:2]) for address in (end.getsockname(), end.getpeername()))
            connections.append(Connection(own, other, descriptor))
    return sorted(connections)


def open_sockets() -> dict[str, int]:
    """The sockets of this process: identity -> file descriptor."""
    sockets: dict[str, int] = {}
    with _DUPLICATION:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    sockets[target] = int(name)
    return sockets


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    ports = set()
    for descriptor in open_sockets().values():
        with contextlib.suppress(OSError), _socket_of(descriptor) as end:
            if end.family != socket.AF_UNIX and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(end.getsockname()[1])
    return ports


def give_up_after(connection: Connection, seconds: float) -> None:
    """Make the kernel break a connection that gets no answer for `seconds`, unless it is closed."""
    with contextlib.suppress(OSError), _socket_of(connection.descriptor) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * seconds)))


def cut(other_ends: Collection[str]) -> int:
    """Drop all packets that arrive on this process's connections to the given ends; returns their number.

    Its own packets and new connections are not cut. Raises RunError if the system does not allow it.
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
