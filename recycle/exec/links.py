"""Messages over sockets: msgpack frames, each after its length, between processes of a node and between nodes.

On a node the sockets are in Linux' abstract namespace, which every user of the machine can reach: both ends ask the
kernel whose process the other end is. Between nodes both ends prove that they know the run's key, by HMAC-SHA256 over
nonces of both, and every frame carries a keyed BLAKE2b code that depends on its place in the stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, cast

import msgspec

from recycle.errors import RunError

MOST_BYTES = 1 << 30
"""Of a frame."""
MOST_UNSENT_BYTES = 1 << 28
"""That wait for an end which does not read, before the connection is given up."""
MOST_PARTS = 64
"""Of frames that are handed to the kernel at once."""
READ_BYTES = 1 << 16
"""That one read takes from a connection before others have their turn."""
ACCEPTS = 64
"""Connections that are accepted before those that are open have their turn."""
HANDSHAKE_SECONDS = 5.0
"""Of a whole handshake, however slowly its bytes come."""
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_CODE_BYTES, _NONCE_BYTES, _PROOF_BYTES = 16, 32, 32
_HANDSHAKE_BYTES = _NONCE_BYTES + _PROOF_BYTES
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),  # what was sent and is not acknowledged ends it, too
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class LinkClosed(Exception):
    """The other end has gone, or sends what is not a frame."""


class _Codes:
    """The authentication codes of the frames of one direction.

    Args:
        key: of the connection.
        direction: tells both directions apart.
    """

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key, self._direction, self._count = key, direction, 0

    def next(self, body: bytes) -> bytes:
        """The code of the next frame."""
        self._count += 1
        text = self._direction + self._count.to_bytes(8, "big") + body
        return hashlib.blake2b(text, key=self._key, digest_size=_CODE_BYTES).digest()  # a third of HMAC's time


class Link:
    """One end of a connection. Between nodes it has no messages before the handshake is done.

    Args:
        connection: the socket.
        decode: type of the messages that arrive.
        run_key: of the run; None between processes of a node.
        is_server: whether this end has accepted the connection; it proves nothing before the other end has.

    Attributes:
        owner: called with the link and the messages that have arrived; with None once it is closed.
        name: of the other end, for the owner.
        is_watched: `Hub.dispatch` sends what could not be sent before.
    """

    def __init__(
        self, connection: socket.socket, decode: Any, run_key: bytes | None = None, is_server: bool = False
    ) -> None:
        self.socket, self.name, self.is_watched = connection, "", False
        self.owner: Callable[[Link, list[Any] | None], None] = lambda link, messages: None
        self._decoder = msgspec.msgpack.Decoder(decode)
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._received = bytearray()
        self._lock = threading.Lock()
        self._sent_codes: _Codes | None = None
        self._received_codes: _Codes | None = None
        self._run_key, self._is_server, self._has_proved = run_key, is_server, False
        if run_key is not None:
            for option in _KEEPALIVE:
                connection.setsockopt(*option)
            self._nonce = secrets.token_bytes(_NONCE_BYTES)
            self._put(self._nonce)
            self._flush()

    @property
    def is_trusted(self) -> bool:
        """Whether the other end has proved that it knows the run's key, where there is one."""
        return self._run_key is None or self._sent_codes is not None

    def _shake_hands(self, run_key: bytes) -> None:
        """Go on with the handshake. Raises LinkClosed where the other end does not know the run's key."""
        theirs, proof = bytes(self._received[:_NONCE_BYTES]), bytes(self._received[_NONCE_BYTES:_HANDSHAKE_BYTES])
        if len(theirs) < _NONCE_BYTES:
            return
        nonces = self._nonce + theirs if self._is_server else theirs + self._nonce
        names = (b"leader", b"agent") if self._is_server else (b"agent", b"leader")
        ours, expected, key = (_proof(run_key, what, nonces) for what in (*names, b"frames"))
        is_proved = len(proof) == _PROOF_BYTES
        if is_proved and not hmac.compare_digest(proof, expected):
            raise LinkClosed
        if not self._has_proved and (is_proved or not self._is_server):
            self._has_proved = True
            self._put(ours)
            try:
                self._flush()
            except OSError as error:
                raise LinkClosed from error
        if is_proved:
            del self._received[:_HANDSHAKE_BYTES]
            sent, received = (b"<", b">") if self._is_server else (b">", b"<")
            self._sent_codes, self._received_codes = _Codes(key, sent), _Codes(key, received)

    def send(self, message: Any) -> None:
        """Send a message, or bytes that are one; blocks where the socket does.

        Raises OSError, also where the other end does not read what it is sent.
        """
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        with self._lock:
            code = b"" if self._sent_codes is None else self._sent_codes.next(body)
            self._put(_LENGTH.pack(len(code) + len(body)) + code)
            self._put(body)
            self._flush()
            if self._unsent_bytes > MOST_UNSENT_BYTES:
                raise OSError("the other end does not read")

    def _put(self, part: bytes) -> None:
        self._unsent.append(part)
        self._unsent_bytes += len(part)

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.sendmsg(islice(self._unsent, MOST_PARTS))
                self._unsent_bytes -= sent
                while sent and len(self._unsent[0]) <= sent:
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = memoryview(self._unsent[0])[sent:]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # what the other end has said before it went can still be read
            self._unsent_bytes = 0
            raise

    def flush(self) -> None:
        """Send what could not be sent before. Raises OSError."""
        with self._lock:
            self._flush()

    def abandon(self) -> None:
        """Send nothing more. What has arrived can still be read, up to the end of the connection."""
        with self._lock, contextlib.suppress(OSError):
            self._unsent.clear()
            self._unsent_bytes = 0
            self.socket.shutdown(socket.SHUT_RDWR)

    @property
    def has_unsent(self) -> bool:
        """Whether the socket took less than was to be sent."""
        return bool(self._unsent)

    def read(self) -> list[Any]:
        """The messages that have arrived; waits for the next bytes where the socket blocks. Raises LinkClosed."""
        try:
            part = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkClosed from error
        if not part:
            raise LinkClosed
        self._received += part
        if self._run_key is not None and self._sent_codes is None:
            self._shake_hands(self._run_key)
        return self._messages() if self.is_trusted else []

    def _messages(self) -> list[Any]:
        messages, received, start = [], self._received, 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MOST_BYTES:
                raise LinkClosed
            end = start + _LENGTH.size + length
            if end > len(received):
                break
            with memoryview(received) as view:
                frame = bytes(view[start + _LENGTH.size : end])
            messages.append(self._message(frame))
            start = end
        del received[:start]
        return messages

    def _message(self, frame: bytes) -> Any:
        if self._received_codes is not None:
            code, frame = frame[:_CODE_BYTES], frame[_CODE_BYTES:]
            if not hmac.compare_digest(code, self._received_codes.next(frame)):
                raise LinkClosed
        try:
            return self._decoder.decode(frame)
        except msgspec.DecodeError:
            raise LinkClosed from None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends a read of another thread
        self.socket.close()


class Hub:
    """All connections of a process: reads what has arrived, sends what could not be sent before."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """A descriptor that is readable when `dispatch` has something to do."""
        return self._selector.fileno()

    def listen(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        """Call `accept` with each connection that is made to a listening socket."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def add(self, link: Link) -> None:
        """Serve a link."""
        link.socket.setblocking(False)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def send(self, link: Link, message: Any = None) -> None:
        """Send a message, or what could not be sent before, as soon as the connection takes it.

        `dispatch` notices a link that is closed.
        """
        try:
            link.flush() if message is None else link.send(message)
        except OSError:
            link.abandon()
        if link.has_unsent == link.is_watched:
            return
        link.is_watched = link.has_unsent
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.is_watched else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(link.socket, events, link)

    def dispatch(self, seconds: float = 0.0) -> bool:
        """Give what has arrived to the owners of the links, a read of each; whether anything had."""
        has_arrived = False
        for key, events in self._selector.select(seconds):
            if not isinstance(link := key.data, Link):
                self._accept_all(key.fileobj, key.data)
                has_arrived = True
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    self.send(link)
                if events & selectors.EVENT_READ and (messages := link.read()):
                    has_arrived = True
                    link.owner(link, messages)
            except LinkClosed:
                has_arrived = True
                self.remove(link)
                link.owner(link, None)
        return has_arrived

    def _accept_all(self, listener: Any, accept: Callable[[socket.socket], None]) -> None:
        """Accept the connections that wait; of very many some."""
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTS):
                accept(listener.accept()[0])

    def remove(self, end: Link | socket.socket) -> None:
        """Close a link or a listener."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(end.socket if isinstance(end, Link) else end)
        end.close()

    def close(self) -> None:
        """Close all links and listeners."""
        for key in list(self._selector.get_map().values()):
            self.remove(key.data if isinstance(key.data, Link) else cast(socket.socket, key.fileobj))
        self._selector.close()


# On one node.


def listen_locally() -> tuple[socket.socket, str]:
    """A listening socket of this node with a random name, and the name."""
    name = f"recycle-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(4096)
    return listener, name


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, as the kernel knows it."""
    return _user(connection) == os.getuid()


def _user(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def connect_locally(name: str, decode: Any, server: str) -> Link:
    """A link to a socket of this node.

    Args:
        server: what messages call it.

    Raises:
        RunError: it does not answer, or is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
        user = _user(connection)
    except OSError as error:
        connection.close()
        raise RunError(f"{server} does not answer ({error.strerror})") from None
    if user != os.getuid():
        connection.close()
        raise RunError(f"{server} runs as another user (uid {user}) and only answers that user")
    return Link(connection, decode)


# Between nodes.


def connect_to(host: str, port: int, run_key: bytes, decode: Any) -> Link:
    """A link to the leader's listening socket on another node. Raises OSError, LinkClosed."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    connection = socket.create_connection((host, port), HANDSHAKE_SECONDS)
    try:
        link = Link(connection, decode, run_key)
        while not link.is_trusted:
            if not wait([connection], max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError("timed out")
            link.read()
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return link


def _proof(run_key: bytes, what: bytes, nonces: bytes) -> bytes:
    """What tells that this end has the key.

    Args:
        nonces: of the server and the client.
    """
    return hmac.digest(run_key, what + b"\0" + nonces, hashlib.sha256)
