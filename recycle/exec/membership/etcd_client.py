"""Requests to an etcd cluster over its JSON gateway, through outages that are short enough.

Every request that the cluster cannot answer for the moment is made again, at each endpoint in turn, until the
patience is used up. All requests made here may be repeated: puts, deletes, reads, and transactions whose outcome is
read from the value that stands afterwards. What etcd refuses (a wrong password, a missing permission) is an error
at once. Needs etcd 3.4 or newer, whose gateway speaks `/v3/`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recycle.endpoints import Endpoints, parse_endpoints
from recycle.errors import JobError, RunError
from recycle.sections import MembershipSection

PASSWORD = "RECYCLE_ETCD_PASSWORD"
"""Environment variable that the password is taken from when no file is named."""
REQUEST_SECONDS = 5.0
PAUSE_SECONDS = (0.02, 0.5)
"""Between two attempts: at first, and after a while."""
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]
"""A host that vanished without a word ends a watch after eleven seconds; packets go out at once."""
_STALE = ("invalid auth token", "revision of auth store is old")
_PASSING = ("leader", "timed out", "closing", "too many requests")


class Disconnected(Exception):
    """A stream broke off; whoever follows it reads again and opens another."""


class EtcdClient:
    """A client for one thread. Several may exist per process.

    Args:
        endpoints: the cluster's members.
        settings: the job's `[membership]`; user, files of certificates, patience.
        password: of the user.

    Raises:
        JobError: the package is not installed.
    """

    def __init__(self, endpoints: Endpoints, settings: MembershipSection, password: str | None) -> None:
        try:
            import etcd3gw
            import requests
        except ImportError:
            raise JobError(
                f"[membership] store = \"{endpoints}\" needs a package more: pip install 'recycle-pipeline[etcd]'"
            ) from None
        self.endpoints, self._settings, self._password = endpoints, settings, password
        session = requests.Session()
        session.trust_env = False  # a proxy for the web is not the way to the cluster's store
        session.mount("http://", _adapter())
        session.mount("https://", _adapter())
        session.headers["Grpc-Metadata-hasleader"] = "true"  # a member that is cut off ends its watches
        self._clients = [
            etcd3gw.Etcd3Client(
                host,
                port,
                "https" if endpoints.tls else "http",
                timeout=REQUEST_SECONDS,
                api_path="/v3/",
                session=session,
            )
            for host, port in endpoints.members
        ]
        if settings.etcd_ca is not None:
            session.verify = settings.etcd_ca
        if settings.etcd_certificate is not None and settings.etcd_key is not None:
            session.cert = (settings.etcd_certificate, settings.etcd_key)
        self._session = session
        self._turn = 0
        self.requests = 0
        self._failures: tuple[type[Exception], ...] = (
            etcd3gw.exceptions.ConnectionFailedError,
            etcd3gw.exceptions.ConnectionTimeoutError,
            etcd3gw.exceptions.InternalServerError,
            requests.exceptions.RequestException,
            OSError,
        )
        self._error: type[Exception] = etcd3gw.exceptions.Etcd3Exception
        self._everything: tuple[type[Exception], ...] = (*self._failures, self._error)

    def clone(self) -> EtcdClient:
        """Another client of the same cluster, for another thread."""
        return EtcdClient(self.endpoints, self._settings, self._password)

    @property
    def addresses(self) -> set[tuple[str, int]]:
        """Numeric (address, port) of all endpoints."""
        found: set[tuple[str, int]] = set()
        for host, port in self.endpoints.members:
            with contextlib.suppress(OSError):
                found |= {(str(i[4][0]), int(i[4][1])) for i in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        return found

    def call(self, path: str, body: dict[str, Any], patience: float | None = None) -> dict[str, Any]:
        """Post a request; returns etcd's answer. Raises RunError when there is none within the patience."""
        deadline = time.monotonic() + (self._settings.store_timeout if patience is None else patience)
        pause, longest = PAUSE_SECONDS
        while True:
            client = self._clients[self._turn]
            self.requests += 1
            try:
                self._sign_in(client)
                answer: dict[str, Any] = client.post(client.get_url(path), json=body)
                return answer
            except self._failures as error:
                why = _why(error)
            except self._error as error:
                why = self._weigh(error)
            self._turn = (self._turn + 1) % len(self._clients)
            if time.monotonic() > deadline:
                raise RunError(f"{self.endpoints} does not answer any more: {why}")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def watch(self, start: str, end: str, revision: int) -> Watch:
        """All changes of keys from `start` to before `end`, from `revision` on. Raises Disconnected."""
        request = {"key": encoded(start), "range_end": encoded(end), "start_revision": revision, "fragment": True}
        client = self._clients[self._turn]
        self.requests += 1
        try:
            self._sign_in(client)
            response = self._session.post(
                client.get_url("/watch"), json={"create_request": request}, stream=True, timeout=(REQUEST_SECONDS, None)
            )
        except self._everything as error:
            raise Disconnected(_why(error)) from None
        return Watch(response, self._failures)

    def _sign_in(self, client: Any) -> None:
        user = self._settings.etcd_user
        if user is None or "Authorization" in self._session.headers:
            return
        answer = client.post(client.get_url("/auth/authenticate"), json={"name": user, "password": self._password})
        self._session.headers["Authorization"] = answer["token"]

    def _weigh(self, error: Any) -> str:
        """Why an answer is an error, when asking again may help. Raises RunError when it does not."""
        detail = _detail(error)
        if any(words in detail for words in _STALE):
            self._session.headers.pop("Authorization", None)
            return detail
        if any(words in detail for words in _PASSING):
            return detail
        raise RunError(f"{self.endpoints} refuses: {detail}")


class Watch:
    """An open stream of changes."""

    def __init__(self, response: Any, failures: tuple[type[Exception], ...]) -> None:
        self._response, self._failures = response, failures

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Results as etcd sends them. Raises Disconnected when the stream ends, whatever the reason."""
        try:
            for line in self._response.iter_lines(chunk_size=None):
                if not line:
                    continue
                message = json.loads(line)
                result = message.get("result")
                if result is None or result.get("canceled"):
                    raise Disconnected(line.decode(errors="replace"))
                yield result
        except self._failures as error:
            raise Disconnected(_why(error)) from None
        except (ValueError, AttributeError) as error:  # half a line; a response that was closed under this thread
            raise Disconnected(_why(error)) from None
        raise Disconnected("the stream ended")

    def close(self) -> None:
        """End the stream, also under a thread that waits for it."""
        with contextlib.suppress(Exception):
            self._response.raw.connection.sock.shutdown(socket.SHUT_RDWR)


def open_client(url: str, settings: MembershipSection) -> EtcdClient:
    """A client for `url` that has been answered once.

    Raises:
        JobError: the password's file cannot be read, or the store is open to the network without a secret.
        RunError: no answer.
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
    client = EtcdClient(endpoints, settings, password)
    client.call("/kv/range", {"key": encoded("/recycle/"), "count_only": True})
    return client


def read_password(settings: MembershipSection) -> str | None:
    """The password of `etcd_user`, from its file or the environment; None without a user. Raises JobError."""
    if settings.etcd_user is None:
        return None
    if settings.etcd_password_file is not None:
        try:
            return Path(settings.etcd_password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not text"
            raise JobError(f"[membership] etcd_password_file: {settings.etcd_password_file}: {why}") from None
    if PASSWORD not in os.environ:
        raise JobError(f"[membership] etcd_user: no password; give etcd_password_file or set ${PASSWORD}")
    return os.environ[PASSWORD]


def encoded(text: str | bytes) -> str:
    """Base64, as etcd's gateway wants keys and values."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: str) -> bytes:
    """What `encoded` was given."""
    return base64.b64decode(text)


def _adapter() -> Any:
    from requests.adapters import HTTPAdapter

    adapter = HTTPAdapter()
    adapter.init_poolmanager(10, 10, socket_options=_KEEPALIVE)
    return adapter


def _detail(error: Any) -> str:
    text = error.detail_text or str(error)
    with contextlib.suppress(ValueError, AttributeError):
        text = json.loads(text).get("error", text)
    return str(text)


def _why(error: BaseException) -> str:
    text = str(getattr(error, "detail_text", None) or error)
    return (text.splitlines() or [type(error).__name__])[0][-200:]
