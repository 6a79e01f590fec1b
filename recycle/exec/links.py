"""Messages over sockets: length-prefixed msgpack frames, between processes of a node and between nodes.

On a node the sockets are in Linux' abstract namespace, which every local user can reach. So both ends ask the kernel
for the other's user. Between nodes both ends prove knowledge of the run's key by HMAC-SHA256 over both nonces. Every
frame between nodes carries a keyed BLAKE2b code that depends on its position in the stream.
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
"""Most bytes of a frame."""
MOST_UNSENT_BYTES = 1 << 28
"""Most bytes that wait for a reader; beyond, the connection is given up."""
MOST_PARTS = 64
"""Most buffers per system call."""
READ_BYTES = 1 << 16
"""Bytes per read from a connection, before other connections are served."""
ACCEPTS = 64
"""Connections to accept before open connections are served."""
HANDSHAKE_SECONDS = 5.0
"""Seconds for a whole handshake, however slowly its bytes arrive."""
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_CODE_BYTES, _NONCE_BYTES, _PROOF_BYTES = 16, 32, 32
_HANDSHAKE_BYTES = _NONCE_BYTES + _PROOF_BYTES
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),  # unacknowledged data also ends the connection
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class LinkClosed(Exception):
    """The other end is gone, or sent an invalid frame."""


class _Codes:
    """The authentication codes of the frames in one direction."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key, self._direction, self._count = key, direction, 0

    def next(self, body: bytes) -> bytes:
        self._count += 1
        text = self._direction + self._count.to_bytes(8, "big") + body
        return hashlib.blake2b(text, key=self._key, digest_size=_CODE_BYTES).digest()  # takes a third of HMAC's time


class Link:
    """One end of a connection. Between nodes it delivers no messages before the handshake is complete.

    Args:
        decode: type of the arriving messages.
        run_key: the run's key; None between processes of a node.
        is_server: whether this end accepted the connection; it sends its proof after the other end's.

    Attributes:
        owner: called with the link and the arrived messages; with None after it is closed.
        is_watched: `Hub.dispatch` waits for room to send.
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
        """Whether the other end has proved that it knows the run's key, if there is a key."""
        return self._run_key is None or self._sent_codes is not None

    def _shake_hands(self, run_key: bytes) -> None:
        peer_nonce, proof = bytes(self._received[:_NONCE_BYTES]), bytes(self._received[_NONCE_BYTES:_HANDSHAKE_BYTES])
        if len(peer_nonce) < _NONCE_BYTES:
            return
        nonces = self._nonce + peer_nonce if self._is_server else peer_nonce + self._nonce
        names = (b"leader", b"agent") if self._is_server else (b"agent", b"leader")
        own_proof, expected, key = (_proof(run_key, what, nonces) for what in (*names, b"frames"))
        is_proved = len(proof) == _PROOF_BYTES
        if is_proved and not hmac.compare_digest(proof, expected):
            raise LinkClosed
        if not self._has_proved and (is_proved or not self._is_server):
            self._has_proved = True
            self._put(own_proof)
            try:
                self._flush()
            except OSError as error:
                raise LinkClosed from error
        if is_proved:
            del self._received[:_HANDSHAKE_BYTES]
            sent, received = (b"<", b">") if self._is_server else (b">", b"<")
            self._sent_codes, self._received_codes = _Codes(key, sent), _Codes(key, received)

    def send(self, message: Any) -> None:
        """Send a message, or an encoded one; block if the socket blocks. Raises OSError."""
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
            self._unsent.clear()  # messages that arrived before the break can still be read
            self._unsent_bytes = 0
            raise

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def abandon(self) -> None:
        """Stop sending. Arrived messages can still be read, up to the end of the connection."""
        with self._lock, contextlib.suppress(OSError):
            self._unsent.clear()
            self._unsent_bytes = 0
            self.socket.shutdown(socket.SHUT_RDWR)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def read(self) -> list[Any]:
        """Return the arrived messages; wait for the next bytes if the socket is blocking. Raises LinkClosed."""
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
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends a read in another thread
        self.socket.close()


class Hub:
    """All connections of a process: reads arrived messages and sends buffered data."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `dispatch` has work."""
        return self._selector.fileno()

    def listen(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        """Call `accept` with each connection to a listening socket."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def add(self, link: Link) -> None:
        link.socket.setblocking(False)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def send(self, link: Link, message: Any = None) -> None:
        """Send a message, or buffered data if it is None, as soon as there is room; `dispatch` notices closed links."""
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
        """Pass arrived messages to the links' owners, one read per link; return whether anything arrived."""
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
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTS):
                accept(listener.accept()[0])

    def remove(self, end: Link | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(end.socket if isinstance(end, Link) else end)
        end.close()

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self.remove(key.data if isinstance(key.data, Link) else cast(socket.socket, key.fileobj))
        self._selector.close()


# On one node.


def listen_locally() -> tuple[socket.socket, str]:
    """Open a listening socket on this node with a random name; return the socket and its name."""
    name = f"recycle-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(4096)
    return listener, name


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the kernel reports the process at the other end as this user's."""
    return _user(connection) == os.getuid()


def _user(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def connect_locally(name: str, decode: Any, server: str) -> Link:
    """Connect to the socket `name` of this node, called `server` in errors. Raises RunError."""
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


def connect_to(host: str, port: int, run_key: bytes, decode: Any, seconds: float = HANDSHAKE_SECONDS) -> Link:
    """Connect to the leader's listening socket on another node. Raises OSError, LinkClosed."""
    deadline = time.monotonic() + seconds
    connection = socket.create_connection((host, port), seconds)
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
    return hmac.digest(run_key, what + b"\0" + nonces, hashlib.sha256)
