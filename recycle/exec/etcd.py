"""A client of etcd over its JSON gateway, by the HTTP client of the standard library.

A request without an answer is repeated at the next member until `store_timeout` is over; etcd may carry out the first
one later. Every request may be repeated: reads, and transactions with conditions whose outcome is read back. A refusal
by etcd is an error at once. Needs etcd 3.4 or newer, for `/v3/`. Threads of gRPC clients would not survive a fork.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from recycle.errors import JobError, RunError
from recycle.job.endpoints import Endpoints, parse_endpoints
from recycle.job.sections import MembershipSection

PASSWORD = "RECYCLE_ETCD_PASSWORD"
"""Environment variable for the password, if no file is given."""
REQUEST_SECONDS = (0.5, 5.0)
"""Shortest and longest timeout of an attempt, seconds; see `EtcdClient`."""
PAUSE_SECONDS = (0.02, 0.5)
"""Shortest and longest pause between attempts, seconds."""
_KEEPALIVE = [  # a connection to a vanished host ends after eleven seconds
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
_SIGN_IN = "/auth/authenticate"
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
_TEMPORARY = (*_STALE_TOKEN, "leader", "timed out", "closing", "too many requests")
_NO_LEASE = "requested lease not found"
_CLIENTS = count()
_CONNECTION_ERRORS = (OSError, HTTPException, ValueError)
"""Errors of a connection, of an unavailable member, and of an answer that is not JSON."""

EtcdRequest = dict[str, Any]
"""A part of a transaction, in the gateway's format."""


class Unavailable(ConnectionError):
    """The member cannot answer for now."""


class LeaseEnded(RunError):
    """The lease of a key has ended; nothing was written."""

    code = "lease-ended"


class KeyValue(NamedTuple):
    """The value of a key, the revision of the key's creation, and how often the key was written since."""

    value: bytes
    created: int
    version: int


class EtcdClient:
    """A client for one thread, with one persistent connection; the clients of a process start at different members.

    The first attempts time out after a quarter of `dead_after`, later ones after up to half of `lease`.
    """

    def __init__(self, endpoints: Endpoints, settings: MembershipSection, password: str | None) -> None:
        self._endpoints, self._settings, self._password = endpoints, settings, password
        self._member = (os.getpid() + next(_CLIENTS)) % len(endpoints.members)
        self._connection: HTTPConnection | None = None
        # A member without a leader says so at once.
        self._headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        shortest, longest = REQUEST_SECONDS
        self._longest = min(longest, settings.lease / 2)
        self._shortest = min(max(shortest, settings.dead_after / 4), self._longest)

    def clone(self) -> EtcdClient:
        return EtcdClient(self._endpoints, self._settings, self._password)

    def call(self, path: str, body: dict[str, Any], patience: float | None = None) -> dict[str, Any]:
        """Post a request, with retries for `patience` seconds (None: `store_timeout`). Raises RunError."""
        deadline = time.monotonic() + (self._settings.store_timeout if patience is None else patience)
        pause, longest_pause = PAUSE_SECONDS
        seconds, attempts = self._shortest, 0
        while True:
            try:
                return self._post(path, body, seconds)
            except _CONNECTION_ERRORS as error:
                reason = _reason(error)
            self._rotate()
            attempts += 1
            if attempts % len(self._endpoints.members) == 0:
                seconds = min(2 * seconds, self._longest)
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self._endpoints} does not answer ({reason}); start etcd there, or correct the address"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)

    def _rotate(self) -> None:
        self._member = (self._member + 1) % len(self._endpoints.members)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read(self, name: str, patience: float | None = None) -> KeyValue | None:
        """Return the value of a key, or None if the key does not exist. Raises RunError, as `call`."""
        for pair in self.call("/kv/range", span(name), patience).get("kvs", []):
            return KeyValue(decoded(pair.get("value", "")), int(pair["create_revision"]), int(pair["version"]))
        return None

    def _post(self, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        user = self._settings.etcd_user
        if user is not None and "Authorization" not in self._headers and path != _SIGN_IN:
            answer = self._post(_SIGN_IN, {"name": user, "password": self._password}, self._longest)
            self._headers["Authorization"] = answer["token"]
        if self._connection is None or self._connection.sock is None:
            self._connection = self._connect(seconds)
        self._connection.sock.settimeout(seconds)
        deadline = time.monotonic() + seconds
        self._connection.response_class = lambda connection, **named: HTTPResponse(  # type: ignore[assignment]
            _AnswerWithin(deadline, connection),  # type: ignore[arg-type]
            **named,
        )
        self._connection.request("POST", f"/v3{path}", json.dumps(body), self._headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status < 400:
            content = json.loads(text)
            if not isinstance(content, dict):
                raise ValueError("not an object")
            return content
        detail = text.decode(errors="replace")
        with contextlib.suppress(ValueError, AttributeError):
            detail = str(json.loads(detail).get("error", detail))
        if any(words in detail for words in _STALE_TOKEN):
            self._headers.pop("Authorization", None)
        if _NO_LEASE in detail:
            raise LeaseEnded(f"{self._endpoints}: {detail}")
        if response.status < 500 and not any(words in detail for words in _TEMPORARY):
            raise RunError(f"{self._endpoints} refuses: {detail}")
        raise Unavailable(detail)

    def _connect(self, seconds: float) -> HTTPConnection:
        host, port = self._endpoints.members[self._member]
        connection = HTTPConnection(host, port, timeout=seconds)
        if self._endpoints.tls:  # read each time, because certificates are renewed
            connection = HTTPSConnection(host, port, timeout=seconds, context=_tls_context(self._settings))
        connection.connect()  # sets TCP_NODELAY
        for option in _KEEPALIVE:
            connection.sock.setsockopt(*option)
        return connection


class _AnswerWithin(io.RawIOBase):
    """The bytes of an answer until a deadline; the timeout of a socket alone is that of each read."""

    def __init__(self, deadline: float, connection: socket.socket) -> None:
        self._deadline, self._socket = deadline, connection

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        return self._socket.recv_into(buffer)


class Lease:
    """A lease that a thread renews three times per term; etcd deletes its keys when the lease ends.

    When it ends, or after `store_timeout` without an answer, the thread calls `lost` once. Only it may use `client`.
    `answered` is the time of the last renewal.
    """

    def __init__(self, client: EtcdClient, settings: MembershipSection, lost: Callable[[], None]) -> None:
        self._client, self._settings, self._lost = client, settings, lost
        self.id = str(client.call("/lease/grant", {"TTL": settings.lease})["ID"])
        self._closing, self.answered = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        third = self._settings.lease / 3
        pause = third
        while not self._closing.wait(pause):
            try:
                answer = self._client.call("/lease/keepalive", {"ID": self.id}, patience=third)
            except RunError:
                pause = min(third, PAUSE_SECONDS[1])
                if time.monotonic() - self.answered > self._settings.store_timeout:
                    break
                continue
            self.answered, pause = time.monotonic(), third
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                break
        if not self._closing.is_set():
            self._lost()

    def close(self) -> None:
        """Revoke the lease, which deletes its keys at once."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(RunError):
            self._client.call("/lease/revoke", {"ID": self.id}, patience=1.0)


def open_client(url: str, settings: MembershipSection) -> EtcdClient:
    """Return a client for `url`, after a first answer.

    Raises:
        JobError: a file of `[membership]` cannot be used, or the store is reached over the network without a secret.
        RunError: etcd does not answer.
    """
    endpoints = parse_endpoints(url)
    password = read_password(settings)
    secret = password is not None or settings.etcd_key is not None
    if not secret and not endpoints.loopback and not settings.insecure:
        raise JobError(
            f'[membership] store = "{endpoints}" is reached over the network without a secret: give etcd_user and a'
            f" password (etcd_password_file or ${PASSWORD}), or etcd_certificate and etcd_key;"
            " insecure = true goes without"
        )
    if endpoints.tls:
        try:
            _tls_context(settings)
        except OSError as error:
            reason = "not a certificate or key in PEM" if isinstance(error, ssl.SSLError) else error.strerror
            raise JobError(f"[membership] etcd_ca, etcd_certificate, etcd_key: {reason}") from None
    client = EtcdClient(endpoints, settings, password)
    client.read("/recycle/")
    return client


def _tls_context(settings: MembershipSection) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.etcd_ca)
    if settings.etcd_certificate is not None and settings.etcd_key is not None:
        context.load_cert_chain(settings.etcd_certificate, settings.etcd_key)
    return context


def read_password(settings: MembershipSection) -> str | None:
    """Return the password of `etcd_user` from its file or the environment; None without a user. Raises JobError."""
    if settings.etcd_user is None:
        return None
    if settings.etcd_password_file is not None:
        try:
            return Path(settings.etcd_password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            raise JobError(f"[membership] etcd_password_file: {settings.etcd_password_file}: {reason}") from None
    if PASSWORD not in os.environ:
        raise JobError(f"[membership] etcd_user: no password; give etcd_password_file or set ${PASSWORD}")
    return os.environ[PASSWORD]


def put(name: str, value: str | bytes, lease: str | None = None) -> EtcdRequest:
    return {"request_put": {"key": encoded(name), "value": encoded(value), **({"lease": lease} if lease else {})}}


def delete(start: str, end: str | None = None) -> EtcdRequest:
    """Return a request to delete the keys from `start` to before `end`, or only `start`."""
    return {"request_delete_range": span(start, end)}


def created_at(name: str, revision: int) -> EtcdRequest:
    """Return a condition: the key was created at this revision; 0: the key does not exist."""
    return {"key": encoded(name), "result": "EQUAL", "target": "CREATE", "create_revision": str(revision)}


def written_times(name: str, version: int) -> EtcdRequest:
    """Return a condition: the key was written so often since its creation; 0: the key does not exist."""
    return {"key": encoded(name), "result": "EQUAL", "target": "VERSION", "version": str(version)}


def span(start: str, end: str | None = None) -> EtcdRequest:
    """Return the fields for the keys from `start` to before `end`, or only `start`."""
    return {"key": encoded(start), **({} if end is None else {"range_end": encoded(end)})}


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: str) -> bytes:
    """Decode Base64; the inverse of `encoded`."""
    return base64.b64decode(text)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "TLS failed; check [membership] etcd_ca, etcd_certificate and etcd_key"
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionResetError | BrokenPipeError | IncompleteRead):
        return "the connection was closed"
    return (isinstance(error, OSError) and error.strerror) or "its answer is not etcd's"
