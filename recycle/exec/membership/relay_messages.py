"""What an agent's relay and the processes of its node say to each other: msgpack, each message behind its length."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
from msgspec import Struct

SCHEME = "agent"
"""Of the URL by which a process finds the relay."""
MOST_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")


class Put(Struct, frozen=True, tag=True, array_like=True):
    """Write a key; with `is_bundled` perhaps in one with those of other processes."""

    name: str
    value: bytes
    is_bundled: bool = False


class Swap(Struct, frozen=True, tag=True, array_like=True):
    """Write a key if it holds `expected`, None: if it was never written; answered by "1" if it now holds the text."""

    name: str
    expected: str | None
    text: str


class Read(Struct, frozen=True, tag=True, array_like=True):
    """The texts of these keys."""

    names: list[str]


class Delete(Struct, frozen=True, tag=True, array_like=True):
    """Forget these keys."""

    names: list[str]


class Follow(Struct, frozen=True, tag=True, array_like=True):
    """Send all keys that a process follows, and then every change: `Changes`, again and again."""


RelayRequest = Put | Swap | Read | Delete | Follow


class RelayAnswer(Struct, frozen=True, array_like=True):
    """The answer to a request, or why there is none."""

    texts: list[str | None] = []
    error: str = ""


class Changes(Struct, frozen=True, array_like=True):
    """Names with their new values, None where they were deleted; None in place of all when there will be no more."""

    changes: list[tuple[str, bytes | None]] | None


class Closed(Exception):
    """The other end has gone."""


def send(connection: socket.socket, message: Struct) -> None:
    """Send a message. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket, kind: Any) -> Any:
    """The next message, of this type. Raises Closed, OSError."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MOST_BYTES:
        raise Closed
    try:
        return msgspec.msgpack.decode(_exactly(connection, length), type=kind)
    except msgspec.DecodeError:
        raise Closed from None


def _exactly(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(1 << 20, length - len(received)))
        if not part:
            raise Closed
        received += part
    return bytes(received)
