"""Messages between processes of one user on one machine: msgpack, each after its length, over sockets without a file.

Such a socket (Linux' abstract namespace) can be reached by every user of the machine, so both ends ask the kernel whose
process the other end is, and talk to their own user only. Its name is random: nobody can take it beforehand.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from recycle.errors import RunError

MOST_BYTES = 1 << 30
PAUSE_SECONDS = 0.1
"""Before the next try to accept a connection where one failed, for want of file descriptors."""
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


class Closed(Exception):
    """The other end has gone."""


class LocalServer:
    """Accepts connections of this user's processes, until it is closed.

    Args:
        serve: called with each connection, in a thread of its own; has to close it.

    Attributes:
        name: that `connect` takes.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve, self._is_closed = serve, False
        self.name = f"recycle-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(4096)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    if self._is_closed:
                        return
                    time.sleep(PAUSE_SECONDS)
                    continue
                if user_of(connection) == os.getuid():
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def close(self) -> None:
        """Accept no further connections; those that are open stay so."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which a close does not


def connect(name: str, server: str) -> socket.socket:
    """A connection to the `LocalServer` of this name.

    Args:
        server: what messages call it.

    Raises:
        RunError: it does not answer, or is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
        user = user_of(connection)
    except OSError as error:
        connection.close()
        raise RunError(f"{server} does not answer ({error.strerror})") from None
    if user != os.getuid():
        connection.close()
        raise RunError(f"{server} runs as another user (uid {user}) and only answers that user")
    return connection


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def send(connection: socket.socket, message: msgspec.Struct) -> None:
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
