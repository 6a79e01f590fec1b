"""Membership on etcd: the same keys as in the launcher's store, below a prefix per run.

Keys lie in the folders that the schema gives them, so that nobody follows what is not for him. A worker mirrors
`groups` and `orders`, which lie side by side; who may coordinate mirrors `orders`, and whoever does `posts` as well.
Nobody polls, and a wait costs no request. Heartbeats are read when they are looked at, in one request for all, which
also tells silence of a worker from silence of the store.

What a client reads is never older than what it wrote or read before; of others' writes it may be a moment behind.
Every write is one transaction; a coordinator's writes also require that it still holds its role.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Sequence
from typing import Any, Literal

from recycle.errors import RunError
from recycle.exec.membership.etcd_client import EtcdClient, decoded, encoded, open_client
from recycle.exec.membership.etcd_mirror import Mirror
from recycle.exec.membership.schema import Decision, Folder, Key, Value, generation_folder
from recycle.exec.membership.store import Store
from recycle.sections import MembershipSection

Reader = Literal["worker", "coordinator", "standby"]
"""Who reads: says which folders are mirrored."""
_FOLLOWED: dict[Reader, tuple[Folder, Folder]] = {
    "worker": (Folder.GROUPS, Folder.ORDERS),
    "coordinator": (Folder.ORDERS, Folder.POSTS),
    "standby": (Folder.ORDERS, Folder.ORDERS),
}
"""The first and the last of the folders that are mirrored."""


class RoleLost(RunError):
    """Somebody else coordinates by now; nothing was written."""


class EtcdStore(Store):
    """A client of the run's part of an etcd cluster.

    Args:
        client: answers the requests of this client's thread.
        prefix: of all keys of the run.
        mirror: shared with all clones.
    """

    def __init__(self, client: EtcdClient, prefix: str, mirror: Mirror, guard: tuple[str, int] | None = None) -> None:
        self._client, self._prefix, self._mirror, self._guard = client, prefix, mirror, guard
        self._seen = mirror.changes

    @classmethod
    def connect(cls, url: str, run: str, settings: MembershipSection, reader: Reader = "worker") -> EtcdStore:
        """Open the run called `run` in the cluster at `url`.

        Raises:
            JobError: something is missing or refused in `[membership]`.
            RunError: the cluster does not answer, or refuses this user.
        """
        client = open_client(url, settings)
        return cls(client, f"/recycle/{run}/", _mirror(client.clone(), f"/recycle/{run}/", reader))

    def reading_as(self, reader: Reader) -> EtcdStore:
        """A client with a mirror of its own."""
        return EtcdStore(self._client.clone(), self._prefix, _mirror(self._client.clone(), self._prefix, reader))

    def guarded(self, key: Key[Any], created: int) -> EtcdStore:
        """A client whose writes fail with RoleLost unless `key` is still the one made at revision `created`."""
        return EtcdStore(self._client.clone(), self._prefix, self._mirror, (self._prefix + key.name, created))

    def clone(self) -> EtcdStore:
        return EtcdStore(self._client.clone(), self._prefix, self._mirror, self._guard)

    @property
    def client(self) -> EtcdClient:
        """For requests that are not about keys: leases."""
        return self._client

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return self._client.addresses

    def _put(self, key: Key[Any], text: str) -> None:
        self._write([], [_put(self._prefix + key.name, text)])

    def _texts(self, names: list[str]) -> list[str | None]:
        names = [self._prefix + name for name in names]
        if all(self._mirror.covers(name) for name in names):
            values = [self._mirror.get(name) for name in names]
        else:
            found = self._range(names)
            values = [found.get(name) for name in names]
        return [None if value is None else value.decode() for value in values]

    def _range(self, names: list[str]) -> dict[str, bytes]:
        """Values of keys from the cluster itself: one request, for what lies between the first and the last."""
        body = {"key": encoded(min(names)), "range_end": encoded(max(names) + "\0")}
        answer = self._client.call("/kv/range", body)
        return {decoded(kv["key"]).decode(): decoded(kv.get("value", "")) for kv in answer.get("kvs", [])}

    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool:
        name = self._prefix + key.name
        if expected is None:
            return self._put_if([_absent(name)], name, text)
        holds = {"key": encoded(name), "result": "EQUAL", "target": "VALUE", "value": encoded(expected)}
        return self._put_if([holds], name, text)

    def _put_if(self, compares: list[dict[str, Any]], name: str, text: str, lease: str | None = None) -> bool:
        """Put under conditions; whether the key now holds `text`. So an attempt that did arrive may be repeated."""
        answer = self._write(compares, [_put(name, text, lease)], [{"request_range": {"key": encoded(name)}}])
        if answer.get("succeeded"):
            return True
        found = answer["responses"][0]["response_range"].get("kvs", [])
        if found and self._mirror.covers(name):
            self._mirror.reach(int(found[0]["mod_revision"]))
        return bool(found) and decoded(found[0].get("value", "")).decode() == text

    def create(self, key: Decision[Value], value: Value, lease: str) -> int | None:
        """Write a key that must not be there and that goes with `lease`; the revision it was made at, else None."""
        name, text = self._prefix + key.name, key.encode(value)
        if not self._put_if([_absent(name)], name, text, lease):
            return None
        kvs = self._client.call("/kv/range", {"key": encoded(name)}).get("kvs", [])
        return int(kvs[0]["create_revision"]) if kvs and decoded(kvs[0]["value"]).decode() == text else None

    def _await(self, name: str, seconds: float) -> None:
        full = self._prefix + name
        if self._mirror.covers(full):
            self._mirror.wait(lambda: self._mirror.get(full) is not None, seconds)
            return
        deadline = time.monotonic() + seconds
        while not self._has([name]) and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))

    def _has(self, names: list[str]) -> bool:
        return None not in self._texts(names)

    def wait_for_change(self, seconds: float) -> bool:
        seen = self._seen
        self._mirror.wait(lambda: self._mirror.changes > seen, seconds)
        self._seen = self._mirror.changes
        return self._seen > seen

    def _delete(self, names: list[str]) -> None:
        for start in range(0, len(names), 100):
            self._delete_ranges([(self._prefix + name, None) for name in names[start : start + 100]])

    def forget_before(self, generation: int) -> None:
        paths = [f"{self._prefix}{folder}/" for folder in Folder]
        self._delete_ranges([(path + generation_folder(0), path + generation_folder(generation)) for path in paths])

    def _delete_ranges(self, ranges: Sequence[tuple[str, str | None]]) -> None:
        """Delete keys from the first to before the second of each pair; without a second only the first."""
        ends = [{} if end is None else {"range_end": encoded(end)} for _, end in ranges]
        keys = [encoded(start) for start, _ in ranges]
        self._write([], [{"request_delete_range": {"key": k, **end}} for k, end in zip(keys, ends, strict=True)])

    def erase(self) -> None:
        """Forget the whole run."""
        self._delete_ranges([(self._prefix, _after(self._prefix))])

    def close(self) -> None:
        """Stop mirroring and writing, for all clones."""
        self._mirror.close()

    @property
    def torch_store(self) -> EtcdGroups:
        return EtcdGroups(self._client.clone(), f"{self._prefix}{Folder.GROUPS}/", self._mirror)

    def _write(
        self,
        compares: list[dict[str, Any]],
        then: list[dict[str, Any]],
        otherwise: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        self._mirror.check()
        answer = write(self._client, self._mirror, compares + self._held(), then, (otherwise or []) + self._look())
        if self._guard is not None and not answer.get("succeeded"):
            kvs = answer["responses"][-1]["response_range"].get("kvs", [])
            if not kvs or int(kvs[0]["create_revision"]) != self._guard[1]:
                raise RoleLost("another agent coordinates this run by now")
        return answer

    def _held(self) -> list[dict[str, Any]]:
        if self._guard is None:
            return []
        name, created = self._guard
        return [{"key": encoded(name), "result": "EQUAL", "target": "CREATE", "create_revision": str(created)}]

    def _look(self) -> list[dict[str, Any]]:
        return [] if self._guard is None else [{"request_range": {"key": encoded(self._guard[0])}}]


class EtcdGroups:
    """The part of torch's store interface that gloo's groups form on."""

    def __init__(self, client: EtcdClient, prefix: str, mirror: Mirror) -> None:
        self._client, self._prefix, self._mirror = client, prefix, mirror

    def set(self, key: str, value: str | bytes) -> None:
        write(self._client, self._mirror, [], [_put(self._prefix + key, value)])

    def get(self, key: str) -> bytes:
        value = self._mirror.get(self._prefix + key)
        if value is None:
            raise RuntimeError(f"{key} was not written")
        return value

    def check(self, keys: list[str]) -> bool:
        return all(self._mirror.get(self._prefix + key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 when missing; returns the sum."""
        name = self._prefix + key
        while True:
            kvs = self._client.call("/kv/range", {"key": encoded(name)}).get("kvs", [])
            found = int(decoded(kvs[0]["value"])) if kvs else 0
            revision = kvs[0]["mod_revision"] if kvs else "0"
            same = {"key": encoded(name), "result": "EQUAL", "target": "MOD", "mod_revision": revision}
            if write(self._client, self._mirror, [same], [_put(name, str(found + amount))]).get("succeeded"):
                return found + amount


def write(
    client: EtcdClient,
    mirror: Mirror,
    compares: list[dict[str, Any]],
    then: list[dict[str, Any]],
    otherwise: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One transaction; returns when the mirror shows it."""
    answer = client.call("/kv/txn", {"compare": compares, "success": then, "failure": otherwise or []})
    if answer.get("succeeded"):
        for operation, response in zip(then, answer["responses"], strict=True):
            (kind, request), deleted = next(iter(operation.items())), response.get("response_delete_range", {})
            changed = kind == "request_put" or int(deleted.get("deleted", 0)) > 0
            if changed and mirror.covers(decoded(request["key"]).decode()):
                mirror.reach(int(answer["header"]["revision"]))
                break
    return answer


def _after(prefix: str) -> str:
    """The first key behind all that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _absent(name: str) -> dict[str, Any]:
    return {"key": encoded(name), "result": "EQUAL", "target": "CREATE", "create_revision": "0"}


def _put(name: str, text: str | bytes, lease: str | None = None) -> dict[str, Any]:
    return {"request_put": {"key": encoded(name), "value": encoded(text), **({"lease": lease} if lease else {})}}


def _mirror(client: EtcdClient, prefix: str, reader: Reader) -> Mirror:
    first, last = _FOLLOWED[reader]
    return Mirror(client, f"{prefix}{first}/", _after(f"{prefix}{last}/"))
