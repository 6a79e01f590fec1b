"""Requests to an etcd cluster over its JSON gateway, through outages that are short enough.

Every request that the cluster cannot answer for the moment is made again, at each endpoint in turn, until the
patience is used up: at first with little time for an answer, so that a member that hangs costs nobody a heartbeat, then
with more. Clients begin at endpoints of their own. All requests made here may be repeated: puts, deletes, reads, and
transactions whose outcome is read from the value that stands afterwards. What etcd refuses (a wrong password, a missing
permission) is an error at once. Needs etcd 3.4 or newer, whose gateway speaks `/v3/`. Plain HTTP, because the client
libraries on gRPC start threads, which do not survive a fork.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from recycle.endpoints import Endpoints, parse_endpoints
from recycle.errors import JobError, RunError
from recycle.sections import MembershipSection

PASSWORD = "RECYCLE_ETCD_PASSWORD"
"""Environment variable that the password is taken from when no file is named."""
REQUEST_SECONDS = (0.5, 5.0)
"""That a request may take at least and at most; `EtcdClient` says where between."""
WATCH_SECONDS = 10.0
"""How long a watch may be silent: then another member is watched, because this one may hang."""
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
NOT_ETCD = "its answer is not one of etcd"
_PASSING = (*_STALE, "leader", "timed out", "closing", "too many requests")

EtcdRequest = dict[str, Any]
"""A part of a transaction, as the gateway takes it."""


class Disconnected(Exception):
    """A stream broke off; whoever follows it reads again and opens another."""


class Silent(Disconnected):
    """Nothing has come for `WATCH_SECONDS`: either nothing has changed, or the member hangs."""


class LeaseEnded(RunError):
    """The lease that a key was to hang on is not there any more; nothing was written."""


class Found(NamedTuple):
    """A key's value, and the revision that it was made at."""

    value: bytes
    created: int


class EtcdClient:
    """A client for one thread. Several may exist per process.

    The first attempt of a request has a quarter of `dead_after` for its answer, later ones up to half of the lease's
    term.

    Args:
        endpoints: the cluster's members.
        settings: the job's `[membership]`; user, files of certificates, patience.
        password: of the user.

    Raises:
        JobError: the package is not installed.
    """

    def __init__(self, endpoints: Endpoints, settings: MembershipSection, password: str | None) -> None:
        try:
            import requests
            from requests.adapters import HTTPAdapter
        except ImportError:
            raise JobError(
                f"[membership] store = \"{endpoints}\" needs one more package: pip install 'recycle-pipeline[etcd]'"
            ) from None
        self.endpoints, self._settings, self._password = endpoints, settings, password
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy for the web is not the way to the cluster's store
        adapter = HTTPAdapter()
        adapter.init_poolmanager(10, 10, socket_options=_KEEPALIVE)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        self._session.headers["Grpc-Metadata-hasleader"] = "true"  # a member that is cut off ends its watches
        if settings.etcd_ca is not None:
            self._session.verify = settings.etcd_ca
        if settings.etcd_certificate is not None and settings.etcd_key is not None:
            self._session.cert = (settings.etcd_certificate, settings.etcd_key)
        scheme = "https" if endpoints.tls else "http"
        hosts = [(f"[{host}]" if ":" in host else host, port) for host, port in endpoints.members]
        self._urls = [f"{scheme}://{host}:{port}/v3" for host, port in hosts]
        self._turn = (os.getpid() + next(_CLIENTS)) % len(self._urls)
        least, most = REQUEST_SECONDS
        self._most = min(most, settings.lease / 2)
        self._least = min(max(least, settings.dead_after / 4), self._most)
        self.requests = 0

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
        seconds, attempts = self._least, 0
        while True:
            try:
                answer: dict[str, Any] = self._post(path, body, seconds).json()
                return answer
            except Disconnected as error:
                why = str(error)
            except ValueError:
                why = NOT_ETCD
            self.rotate()
            attempts += 1
            if attempts % len(self._urls) == 0:
                seconds = min(2 * seconds, self._most)
            if time.monotonic() > deadline:
                raise RunError(f"{self.endpoints} does not answer ({why}); start etcd there, or correct the address")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def rotate(self) -> None:
        """Ask the next endpoint from now on."""
        self._turn = (self._turn + 1) % len(self._urls)

    def range(self, start: str, end: str | None = None) -> tuple[dict[str, Found], int]:
        """The keys from `start` to before `end`, or only `start`, and the cluster's revision."""
        answer = self.call("/kv/range", _span(start, end))
        found = {
            decoded(kv["key"]).decode(): Found(decoded(kv.get("value", "")), int(kv["create_revision"]))
            for kv in answer.get("kvs", [])
        }
        return found, int(answer["header"]["revision"])

    def watch(self, start: str, end: str, revision: int) -> Watch:
        """All changes of keys from `start` to before `end`, from `revision` on. Raises Disconnected, RunError."""
        request = {**_span(start, end), "start_revision": revision, "fragment": True}
        return Watch(self._post("/watch", {"create_request": request}, WATCH_SECONDS, stream=True))

    def _post(self, path: str, body: dict[str, Any], seconds: float, stream: bool = False) -> Any:
        """One request to the present endpoint.

        Raises:
            Disconnected: no answer, or one that says to ask again.
            RunError: etcd refuses.
        """
        import requests

        user, url = self._settings.etcd_user, self._urls[self._turn]
        if user is not None and "Authorization" not in self._session.headers and path != _SIGN_IN:
            signed = self._post(_SIGN_IN, {"name": user, "password": self._password}, self._most)
            self._session.headers["Authorization"] = signed.json()["token"]
        self.requests += 1
        try:
            response = self._session.post(
                url + path, json=body, stream=stream, timeout=(min(seconds, self._most), seconds)
            )
            if response.ok:
                return response
            detail = str(response.text)
        except (requests.exceptions.RequestException, OSError) as error:
            raise Disconnected(failure_reason(error)) from None
        with contextlib.suppress(ValueError, AttributeError):
            detail = str(json.loads(detail).get("error", detail))
        if any(words in detail for words in _STALE):
            self._session.headers.pop("Authorization", None)
        if _NO_LEASE in detail:
            raise LeaseEnded(f"{self.endpoints}: {detail}")
        if response.status_code < 500 and not any(words in detail for words in _PASSING):
            raise RunError(f"{self.endpoints} refuses: {detail}")
        raise Disconnected(detail)


_CLIENTS = count()
_NO_LEASE = "requested lease not found"
_SIGN_IN = "/auth/authenticate"


class Watch:
    """An open stream of changes."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Results as etcd sends them. Raises Disconnected when the stream ends, whatever the reason."""
        import requests

        heard = time.monotonic()
        try:
            for line in self._response.iter_lines(chunk_size=None):
                heard = time.monotonic()
                if not line:
                    continue
                message = json.loads(line)
                result = message.get("result")
                if result is None or result.get("canceled"):
                    raise Disconnected(line.decode(errors="replace"))
                yield result
        # ValueError: half a line. AttributeError: the response was closed under this thread.
        except (requests.exceptions.RequestException, OSError, ValueError, AttributeError) as error:
            is_silent = time.monotonic() - heard >= WATCH_SECONDS
            raise (Silent if is_silent else Disconnected)(failure_reason(error)) from None
        raise Disconnected("the stream ended")

    def close(self) -> None:
        """End the stream, also under a thread that waits for it."""
        with contextlib.suppress(Exception):
            self._response.raw.connection.sock.shutdown(socket.SHUT_RDWR)


class Lease:
    """A lease, with keys that vanish soon after their owner does, that a thread keeps alive, three times per term.

    An etcd that does not answer ends no lease: it is asked again until it says whether the lease still stands, or until
    it counts as gone.

    Args:
        client: of its own.
        settings: the term, and when an etcd that does not answer is gone.
        lost: called from the thread, once, when the lease has ended.

    Attributes:
        failures: attempts to renew it that were not answered.
    """

    def __init__(self, client: EtcdClient, settings: MembershipSection, lost: Callable[[], None]) -> None:
        self._client, self._settings, self._lost = client, settings, lost
        self.failures = 0
        self.id = str(client.call("/lease/grant", {"TTL": settings.lease})["ID"])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        third = self._settings.lease / 3
        answered, pause = time.monotonic(), third
        while not self._closing.wait(pause):
            try:
                answer = self._client.call("/lease/keepalive", {"ID": self.id}, patience=third)
            except RunError:
                self.failures, pause = self.failures + 1, min(third, PAUSE_SECONDS[1])
                if time.monotonic() - answered > self._settings.store_timeout:
                    break
                continue
            answered, pause = time.monotonic(), third
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                break
        if not self._closing.is_set():
            self._lost()

    def close(self) -> None:
        """Give the lease back: its keys vanish at once."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(RunError):
            self._client.call("/lease/revoke", {"ID": self.id}, patience=1.0)


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
    client.range("/recycle/")
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


def put(name: str, value: str | bytes, lease: str | None = None) -> EtcdRequest:
    """Write a key."""
    return {"request_put": {"key": encoded(name), "value": encoded(value), **({"lease": lease} if lease else {})}}


def delete(start: str, end: str | None = None) -> EtcdRequest:
    """Delete the keys from `start` to before `end`, or only `start`."""
    return {"request_delete_range": _span(start, end)}


def get(name: str) -> EtcdRequest:
    """Read a key."""
    return {"request_range": _span(name)}


def holds(name: str, value: str) -> EtcdRequest:
    """A condition: the key has this value."""
    return _equal(name, "VALUE", value=encoded(value))


def made_at(name: str, revision: int) -> EtcdRequest:
    """A condition: the key was made at this revision; 0: it is not there."""
    return _equal(name, "CREATE", create_revision=str(revision))


def _equal(name: str, target: str, **to: str) -> EtcdRequest:
    return {"key": encoded(name), "result": "EQUAL", "target": target, **to}


def _span(start: str, end: str | None = None) -> EtcdRequest:
    return {"key": encoded(start), **({} if end is None else {"range_end": encoded(end)})}


def encoded(text: str | bytes) -> str:
    """Base64, as etcd's gateway wants keys and values."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: str) -> bytes:
    """What `encoded` was given."""
    return base64.b64decode(text)


def failure_reason(error: BaseException) -> str:
    """Why a request failed, in the words of the operating system or of the TLS library.

    Each library on the way wraps the exception in its own; the innermost one says why.
    """
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    for link in reversed(chain):
        if isinstance(link, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {link.verify_message}"
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        if isinstance(link, ConnectionError):
            return "the connection was closed"
    kinds = " ".join(type(link).__name__ for link in chain)
    if "SSL" in kinds:
        return "TLS failed; check [membership] etcd_ca, etcd_certificate and etcd_key"
    return "no answer in time" if "Timeout" in kinds else NOT_ETCD
