"""Membership on etcd: the same register and keys as in the launcher's store, below a prefix per run.

Keys lie in four folders, so that nobody follows what is not for him. A worker mirrors `groups` and `orders`, which lie
side by side; who may coordinate mirrors `orders` and `posts`. Nobody polls, and a wait costs no request. Heartbeats are
read when they are looked at, in one request for all, which also tells silence of a worker from silence of the store.

    beats/      heartbeats
    groups/     what gloo's groups form on
    orders/     what the coordinator says to all
    posts/      what workers and agents say to the coordinator

What a client reads is never older than what it wrote or read before; of others' writes it may be a moment behind.
Every write is one transaction; a coordinator's writes also require that it still holds its role.
"""

from __future__ import annotations

import builtins
import time
import uuid
from typing import Any, Literal

from recycle.errors import RunError
from recycle.exec.membership.etcd_client import EtcdClient, decoded, encoded, open_client
from recycle.exec.membership.etcd_mirror import Mirror
from recycle.sections import MembershipSection

Reader = Literal["worker", "coordinator", "standby"]
"""Who reads: says which folders are mirrored."""
_POSTED = {
    *("ready", "ack", "formed", "report", "undone", "trouble", "fault", "final", "closed"),
    *("saved", "warning", "warned", "cut", "agent", "gone"),
}
_RANGES: dict[Reader, tuple[str, str]] = {
    "worker": ("groups/", "orders0"),
    "coordinator": ("orders/", "posts0"),
    "standby": ("orders/", "orders0"),
}
LISTEN_SECONDS = 300.0


class RoleLost(RunError):
    """Somebody else coordinates by now; nothing was written."""


class EtcdStore:
    """A client of the run's part of an etcd cluster.

    Args:
        client: answers the requests of this client's thread.
        prefix: of all keys of the run.
        mirror: shared with all clones.
    """

    def __init__(self, client: EtcdClient, prefix: str, mirror: Mirror, guard: tuple[str, int] | None = None) -> None:
        self._client, self._prefix, self._mirror, self._guard = client, prefix, mirror, guard
        self._heard, self._seen = mirror.puts, mirror.changes

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

    def guarded(self, key: str, created: int) -> EtcdStore:
        """A client whose writes fail with RoleLost unless `key` is still the one made at revision `created`."""
        return EtcdStore(self._client.clone(), self._prefix, self._mirror, (self._key(key), created))

    def clone(self) -> EtcdStore:
        return EtcdStore(self._client.clone(), self._prefix, self._mirror, self._guard)

    @property
    def client(self) -> EtcdClient:
        """For requests that are not about keys: leases."""
        return self._client

    @property
    def addresses(self) -> builtins.set[tuple[str, int]]:
        return self._client.addresses

    def set(self, key: str, text: str) -> None:
        self._write([], [_put(self._key(key), text)])

    def read(self, key: str) -> str | None:
        return self.read_all([key])[0]

    def read_all(self, keys: list[str]) -> list[str | None]:
        names = [self._key(key) for key in keys]
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

    def compare_set(self, key: str, expected: str, text: str) -> bool:
        name = self._key(key)
        holds = {"key": encoded(name), "result": "EQUAL", "target": "VALUE", "value": encoded(expected)}
        absent = {"key": encoded(name), "result": "EQUAL", "target": "CREATE", "create_revision": "0"}
        if expected:
            return self._swap(name, [holds], text)
        return self._swap(name, [absent], text) or self._swap(name, [holds], text)

    def _swap(self, name: str, compares: list[dict[str, Any]], text: str, lease: str | None = None) -> bool:
        """Put under conditions; whether the key now holds `text`. So an attempt that did arrive may be repeated."""
        answer = self._write(compares, [_put(name, text, lease)], [{"request_range": {"key": encoded(name)}}])
        if answer.get("succeeded"):
            return True
        found = answer["responses"][0]["response_range"].get("kvs", [])
        if found and self._mirror.covers(name):
            self._mirror.reach(int(found[0]["mod_revision"]))
        return bool(found) and decoded(found[0].get("value", "")).decode() == text

    def create(self, key: str, text: str, lease: str) -> int | None:
        """Write a key that must not be there and that goes with `lease`; the revision it was made at, else None."""
        name = self._key(key)
        absent = {"key": encoded(name), "result": "EQUAL", "target": "CREATE", "create_revision": "0"}
        if not self._swap(name, [absent], text, lease):
            return None
        kvs = self._client.call("/kv/range", {"key": encoded(name)}).get("kvs", [])
        return int(kvs[0]["create_revision"]) if kvs and decoded(kvs[0]["value"]).decode() == text else None

    def wait(self, key: str, seconds: float) -> str | None:
        name = self._key(key)
        if not self._mirror.covers(name):
            deadline = time.monotonic() + seconds
            while (text := self.read(key)) is None and time.monotonic() < deadline:
                time.sleep(min(0.05, seconds))
            return text
        self._mirror.wait(lambda: self._mirror.get(name) is not None, seconds)
        value = self._mirror.get(name)
        return None if value is None else value.decode()

    def has_all(self, keys: list[str]) -> bool:
        return all(text is not None for text in self.read_all(keys)) if keys else True

    def below(self, start: str) -> dict[str, str]:
        """Mirrored keys that begin with `start`, and their texts."""
        name, cut = self._key(start), len(self._key(start)) - len(start)
        return {key[cut:]: value.decode() for key, value in self._mirror.below(name).items()}

    def post(self, key: str, text: str) -> None:
        self.set(key, text)

    def wait_for_post(self) -> bool:
        if not self._mirror.wait(lambda: self._mirror.puts > self._heard, LISTEN_SECONDS):
            return False
        self._heard += 1
        return True

    def wait_for_change(self, seconds: float) -> bool:
        """Wait for any change of mirrored keys since the last call, posts or orders."""
        seen = self._seen
        self._mirror.wait(lambda: self._mirror.changes > seen, seconds)
        self._seen = self._mirror.changes
        return self._seen > seen

    def delete(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 100):
            names = [self._key(key) for key in keys[start : start + 100]]
            self._write([], [{"request_delete_range": {"key": encoded(name)}} for name in names])

    def delete_groups(self, generation: int) -> None:
        start, own = f"{self._prefix}groups/", f"{self._prefix}groups/generation{generation}/"
        for first, last in ((start, own), (_after(own), _after(start))):
            self._write([], [{"request_delete_range": {"key": encoded(first), "range_end": encoded(last)}}])

    def erase(self) -> None:
        """Forget the whole run."""
        self._delete_below(self._prefix)

    def _delete_below(self, prefix: str) -> None:
        self._write([], [{"request_delete_range": {"key": encoded(prefix), "range_end": encoded(_after(prefix))}}])

    def first(self, key: str) -> bool:
        return self.compare_set(key, "", uuid.uuid4().hex)

    def set_leased(self, key: str, text: str, lease: str) -> None:
        """Write a key that goes with `lease`."""
        self._write([], [_put(self._key(key), text, lease)])

    def close(self) -> None:
        """Stop mirroring and writing, for all clones."""
        self._mirror.close()

    @property
    def torch_store(self) -> EtcdGroups:
        return EtcdGroups(self._client.clone(), f"{self._prefix}groups/", self._mirror)

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

    def _key(self, key: str) -> str:
        kind = key.partition("/")[0]
        folder = "beats" if kind == "beat" else "posts" if kind in _POSTED else "orders"
        return f"{self._prefix}{folder}/{key}"


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


def _put(name: str, text: str | bytes, lease: str | None = None) -> dict[str, Any]:
    return {"request_put": {"key": encoded(name), "value": encoded(text), **({"lease": lease} if lease else {})}}


def _mirror(client: EtcdClient, prefix: str, reader: Reader) -> Mirror:
    start, end = _RANGES[reader]
    counted = f"{prefix}posts/" if reader == "coordinator" else prefix
    return Mirror(client, prefix + start, prefix + end, lambda key: key.startswith(counted))
