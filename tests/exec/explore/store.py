"""etcd, as far as elections use it: keys, transactions and leases, with stalls, lost answers and late requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from recycle.exec.etcd import EtcdClient, LeaseEnded, Unavailable, decoded
from recycle.job.endpoints import Endpoints
from recycle.job.sections import MembershipSection
from tests.exec.explore import kernel as machine
from tests.exec.explore.kernel import Kernel, Process, current
from tests.exec.explore.threads import Event

HOST = -1
"""The host of the store, for cuts."""


class Store:
    """The keys of a run. `written` takes name and value of each changed key (None: deleted), and the asking process.

    Attributes:
        stalls_until: requests wait that long.
        reads_end_at: reads are not answered before; writes and leases are.
        loses_until: requests are carried out, and their answers lost.
        slow_until: some requests take longer than their timeout.
    """

    def __init__(self, kernel: Kernel, written: Callable[[str, bytes | None, Process | None], None]) -> None:
        self._kernel, self._written = kernel, written
        self._keys: dict[str, tuple[str, int, str, int]] = {}
        self._leases: dict[str, tuple[int, float]] = {}
        self._owners: dict[str, Process] = {}
        self._revision, self._ids = 1, count(1)
        self._process: Process | None = None
        self.stalls_until = self.loses_until = self.slow_until = self.reads_end_at = 0.0

    def apply(self, path: str, body: dict[str, Any], process: Process) -> dict[str, Any] | Exception:
        self._expire()
        self._process = process
        match path:
            case "/kv/range":
                found = self._keys.get(body["key"])
                names = {"value": 0, "create_revision": 1, "version": 3}
                return {"kvs": [] if found is None else [{name: found[place] for name, place in names.items()}]}
            case "/kv/txn":
                return self._transact(body)
            case "/lease/grant":
                name = str(next(self._ids))
                self._leases[name] = body["TTL"], self._kernel.now + body["TTL"]
                self._owners[name] = process
                return {"ID": name}
            case "/lease/keepalive":
                if body["ID"] not in self._leases:
                    return {"result": {}}
                seconds = self._leases[body["ID"]][0]
                self._leases[body["ID"]] = seconds, self._kernel.now + seconds
                self._kernel.after(seconds + 0.001, self._expire)
                return {"result": {"TTL": str(seconds)}}
            case "/lease/revoke":
                self.revoke(body["ID"])
                return {}
        raise AssertionError(path)

    def _transact(self, body: dict[str, Any]) -> dict[str, Any] | Exception:
        for condition in body["compare"]:
            found = self._keys.get(condition["key"])
            stated = condition["create_revision" if condition["target"] == "CREATE" else "version"]
            if int(stated) != (0 if found is None else found[1 if condition["target"] == "CREATE" else 3]):
                return {}
        self._revision += 1
        for operation in body["success"]:
            if (put := operation.get("request_put")) is not None:
                if put.get("lease", "") and put["lease"] not in self._leases:
                    return LeaseEnded("requested lease not found")
                before = self._keys.get(put["key"])
                created = self._revision if before is None else before[1]
                version = 1 if before is None else before[3] + 1
                self._keys[put["key"]] = put["value"], created, put.get("lease", ""), version
                self._written(decoded(put["key"]).decode(), decoded(put["value"]), self._process)
            else:
                span = operation["request_delete_range"]
                first = decoded(span["key"])
                last = decoded(span["range_end"]) if "range_end" in span else first + b"\0"
                for key in [key for key in self._keys if first <= decoded(key) < last]:
                    self._delete(key)
        return {"succeeded": True}

    def _delete(self, key: str) -> None:
        del self._keys[key]
        self._written(decoded(key).decode(), None, self._process)

    def revoke(self, lease: str) -> None:
        self._leases.pop(lease, None)
        for key in [key for key, (_, _, of_key, _) in self._keys.items() if of_key == lease]:
            self._delete(key)

    def revoke_all(self, owner: Process | None = None) -> None:
        self._process = None
        for lease in list(self._leases):
            if owner in (None, self._owners[lease]):
                self.revoke(lease)

    def wipe(self) -> None:
        """Lose all data, as an etcd does that starts again without its volume."""
        self._leases.clear()
        self._process = None
        for key in list(self._keys):
            self._delete(key)

    def _expire(self) -> None:
        self._process = None
        if self.stalls_until > self._kernel.now:  # another member of etcd extends all leases when it is elected
            self._leases = {name: (seconds, self.stalls_until + seconds) for name, (seconds, _) in self._leases.items()}
        for name, (_, until) in list(self._leases.items()):
            if until <= self._kernel.now:
                self.revoke(name)

    def client(self, settings: MembershipSection) -> StoreClient:
        return StoreClient(self, settings)


class StoreClient(EtcdClient):
    """The real client, whose requests go to the simulated store.

    A request that gets no answer in time may still be carried out, when the cut or the stall is over.
    """

    def __init__(self, store: Store, settings: MembershipSection) -> None:
        super().__init__(Endpoints(False, (("etcd", 1), ("etcd", 2), ("etcd", 3))), settings, None)
        self._store, self._member = store, 0

    def clone(self) -> StoreClient:
        return StoreClient(self._store, self._settings)

    def _post(self, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        kernel, request = machine.KERNEL, _Request(self._store, path, body)
        host = request.process.host
        is_slow = self._store.slow_until > kernel.now and kernel.draws.random() < 0.4
        seconds_up = kernel.draw(0.5, 4.0) if is_slow else kernel.delay(host, HOST)
        kernel.send(host, HOST, seconds_up, request.arrive, (request.process.name, "store"))
        kernel.count_effect(" writes" if path == "/kv/txn" else "")
        if not request.answered.wait(seconds):
            request.has_left = True
            raise TimeoutError
        if isinstance(request.answer, Exception):
            raise request.answer
        return request.answer


class _Request:
    """A request of a process, on its way to the store and back."""

    def __init__(self, store: Store, path: str, body: dict[str, Any]) -> None:
        self._kernel, self._store, self._path, self._body = machine.KERNEL, store, path, body
        self.process, self.has_left, self.answered = current().process, False, Event()
        self.answer: dict[str, Any] | Exception = {}

    def arrive(self) -> None:
        kernel, store, path = self._kernel, self._store, self._path
        if store.stalls_until > kernel.now:
            if not self.has_left and kernel.draws.random() < 0.3:
                self._reply(Unavailable("etcdserver: no leader"))
            else:
                kernel.after(store.stalls_until - kernel.now, self.arrive)
            return
        if (self.has_left and kernel.draws.random() < 0.2) or (path == "/kv/range" and store.reads_end_at > kernel.now):
            return
        answer = store.apply(path, self._body, self.process)
        if path == "/kv/txn" and kernel.strikes(self.process, f"{self.process.name} role"):
            store.revoke_all(self.process)
            return
        if store.loses_until <= kernel.now or kernel.draws.random() < 0.5:
            self._reply(answer)

    def _reply(self, answer: dict[str, Any] | Exception) -> None:
        kernel, host = self._kernel, self.process.host
        kernel.send(HOST, host, kernel.delay(HOST, host), partial(self._take, answer), ("store", self.process.name))

    def _take(self, answer: dict[str, Any] | Exception) -> None:
        self.answer = answer
        self.answered.set()
