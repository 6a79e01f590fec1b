"""Membership on etcd: the same keys as in the launcher's store, below a prefix per run.

Keys lie in the folders that the schema gives them, and each client mirrors the folders that it needs: an agent, or a
worker without one, `groups` and `orders`, which lie side by side, the coordinator `orders`, `posts` and `register`. No
client polls, and a wait costs no request. Heartbeats are not mirrored: the coordinator reads all of them
in one request, which also tells a silent worker from a store that does not answer.

What a client reads is never older than what it wrote or read before; of others' writes it may be a moment behind.
Every write is one transaction; a coordinator's writes also require that it still holds its role.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from recycle.errors import RunError
from recycle.exec.membership.bundles import unbundled
from recycle.exec.membership.copied import CopiedKeys, FormingKeys
from recycle.exec.membership.etcd_client import (
    EtcdClient,
    EtcdRequest,
    decoded,
    delete,
    get,
    holds,
    made_at,
    open_client,
    put,
)
from recycle.exec.membership.etcd_mirror import Mirror
from recycle.exec.membership.schema import Content, Decision, Folder, HeartbeatKey, Key, generation_folder
from recycle.exec.membership.store import RunStore, Seen
from recycle.sections import MembershipSection

Reader = Literal["follower", "coordinator"]
"""Who reads: says which folders are mirrored."""
_FOLLOWED: dict[Reader, tuple[Folder, Folder]] = {
    "follower": (Folder.GROUPS, Folder.ORDERS),
    "coordinator": (Folder.ORDERS, Folder.REGISTER),
}
"""The first and the last of the folders that are mirrored."""


class RoleLost(RunError):
    """Another agent has become coordinator; nothing was written."""


class EtcdStore(RunStore):
    """A client of the run's part of an etcd cluster.

    Args:
        client: answers the requests of this client's thread.
        prefix: of all keys of the run.
        mirror: shared with all clones.
    """

    def __init__(self, client: EtcdClient, prefix: str, mirror: Mirror, guard: tuple[str, int] | None = None) -> None:
        self._client, self._prefix, self._mirror, self._guard = client, prefix, mirror, guard
        self._seen = mirror.keys.changes

    @classmethod
    def connect(cls, url: str, run: str, settings: MembershipSection, reader: Reader = "follower") -> EtcdStore:
        """Open the run called `run` in the cluster at `url`.

        Raises:
            JobError: something is missing or refused in `[membership]`.
            RunError: the cluster does not answer, or refuses this user.
        """
        client = open_client(url, settings)
        return cls(client, f"/recycle/{run}/", _mirror(client.clone(), f"/recycle/{run}/", reader))

    def coordinating(self, role: Key[Any], created: int) -> EtcdStore:
        """A coordinator's client, whose writes fail with RoleLost unless `role` is still the one made at `created`."""
        mirror = _mirror(self._client.clone(), self._prefix, "coordinator")
        return EtcdStore(self._client.clone(), self._prefix, mirror, (self._prefix + role.name, created))

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
        self.write([], [put(self._prefix + key.name, text)])

    def read_now(self, key: Key[Content]) -> Content | None:
        """The value of `key` in the cluster, which the copy may not show yet; None when it was never written."""
        name = self._prefix + key.name
        found, _ = self._client.range(name)
        return key.decode(found[name].value.decode()) if name in found else None

    def texts(self, names: list[str]) -> list[str | None]:
        """The text of each key, by their names."""
        return self._texts(names)

    def _texts(self, names: list[str]) -> list[str | None]:
        if all(self._mirror.covers(self._prefix + name) for name in names):
            return [self._mirrored(name) for name in names]
        if names[0].startswith(Folder.BEATS):
            beats = unbundled(self._within(HeartbeatKey.parent()))
            return [beats.get(name.rpartition("/")[2]) for name in names]
        found, _ = self._client.range(self._prefix + min(names), self._prefix + max(names) + "\0")
        held = [found.get(self._prefix + name) for name in names]
        return [None if one is None else one.value.decode() for one in held]

    def _mirrored(self, name: str) -> str | None:
        """The text of a key in the copy; most lie in no bundle."""
        if (value := self._mirror.keys.get(name)) is not None:
            return value.decode()
        folder, _, leaf = name.rpartition("/")
        return unbundled(dict(self._mirror.keys.children_of(folder)), only_bundles=True).get(leaf)

    def _within(self, folder: str) -> Mapping[str, bytes]:
        """What the cluster holds right below a folder, bundles too, by the last part of their names."""
        full = f"{self._prefix}{folder}/"
        if self._mirror.covers(full):
            return self._mirror.keys.children_of(folder)
        found, _ = self._client.range(full, _after(full))
        return {name.rpartition("/")[2]: held.value for name, held in found.items()}

    def _below(self, folder: str, leaves: Collection[str]) -> dict[str, str]:
        found, wanted = unbundled(dict(self._within(folder))), set(leaves)  # of a copy, which does not change meanwhile
        return found if found.keys() <= wanted else {leaf: found[leaf] for leaf in found.keys() & wanted}

    def _come(self, folder: str, leaves: Collection[str], seen: Seen, partly: bool) -> dict[str, str]:
        if (version := self._mirror.keys.version(folder)) == seen.version:
            return {}
        within = dict(self._within(folder))
        fresh = {leaf: value for leaf, value in within.items() if seen.values.get(leaf) is not value}
        seen.version, seen.values = version, within
        return unbundled(fresh)

    def version(self, kind: type[Key[Any]]) -> int:
        """A number that is another one after every change of a key of this kind, one of those that are mirrored."""
        return self._mirror.keys.version(kind.parent())

    def advance(
        self,
        register: Decision[Content],
        before: Content | None,
        after: Content,
        decided: tuple[Decision[Any], Any],
        forget: Sequence[Key[Any]],
    ) -> bool:
        name, text = self._prefix + register.name, register.encode(after)
        condition = made_at(name, 0) if before is None else holds(name, register.encode(before))
        key, value = decided
        names = [self._prefix + key.name for key in forget]
        then = [put(self._prefix + key.name, key.encode(value))]
        then += [delete(name, _after(name) if name.endswith("/") else None) for name in names]
        return self._put_if([condition], name, text, then=then)

    def _swap(self, key: Key[Any], expected: str | None, text: str) -> bool:
        return self.swap(key.name, expected, text)

    def swap(self, name: str, expected: str | None, text: str) -> bool:
        """Write a key by its name if it holds `expected`, None: if it is not there; whether it now holds `text`."""
        name = self._prefix + name
        return self._put_if([made_at(name, 0) if expected is None else holds(name, expected)], name, text)

    def _put_if(
        self,
        conditions: list[EtcdRequest],
        name: str,
        text: str,
        lease: str | None = None,
        then: Sequence[EtcdRequest] = (),
    ) -> bool:
        """Put under conditions; whether the key now holds `text`. So an attempt that did arrive may be repeated.

        Args:
            then: to be done with it.
        """
        answer = self.write(conditions, [put(name, text, lease), *then], [get(name)])
        if answer.get("succeeded"):
            return True
        found = answer["responses"][0]["response_range"].get("kvs", [])
        if found and self._mirror.covers(name):
            self._mirror.reach(int(found[0]["mod_revision"]))
        return bool(found) and decoded(found[0].get("value", "")).decode() == text

    def decide_unless(self, key: Decision[Content], value: Content, other: Key[Any], lease: str | None = None) -> bool:
        """Write a key that must not be there, nor `other`, and that goes with `lease`; whether it now holds `value`.

        Raises LeaseEnded.
        """
        name = self._prefix + key.name
        return self._put_if([made_at(name, 0), made_at(self._prefix + other.name, 0)], name, key.encode(value), lease)

    def create(self, key: Decision[Content], value: Content, lease: str) -> int | None:
        """Write a key that must not be there and that goes with `lease`; the revision it was made at, else None.

        Raises LeaseEnded.
        """
        name, text = self._prefix + key.name, key.encode(value)
        if not self._put_if([made_at(name, 0)], name, text, lease):
            return None
        found, _ = self._client.range(name)
        return found[name].created if name in found and found[name].value.decode() == text else None

    def _await(self, name: str, seconds: float) -> None:
        full = self._prefix + name
        if self._mirror.covers(full):
            self._mirror.keys.wait(lambda: self._mirrored(name) is not None, seconds)
            return
        deadline = time.monotonic() + seconds
        while not self._has([name]) and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))

    def _has(self, names: list[str]) -> bool:
        return None not in self._texts(names)

    def wait_for_change(self, seconds: float) -> bool:
        seen, keys = self._seen, self._mirror.keys
        keys.wait(lambda: keys.changes > seen, seconds)
        self._seen = keys.changes
        return self._seen > seen

    def _delete(self, names: list[str]) -> None:
        for start in range(0, len(names), 100):
            self.write([], [delete(self._prefix + name) for name in names[start : start + 100]])

    def delete_names(self, names: list[str]) -> None:
        """Forget keys by their names."""
        self._delete(names)

    def forget_before(self, generation: int) -> None:
        paths = [f"{self._prefix}{folder}/" for folder in Folder]
        self.write([], [delete(path + generation_folder(0), path + generation_folder(generation)) for path in paths])

    def erase(self) -> None:
        """Forget the whole run."""
        self.write([], [delete(self._prefix, _after(self._prefix))])

    def close(self) -> None:
        """Stop mirroring and writing, for all clones."""
        self._mirror.close()

    @property
    def keys(self) -> CopiedKeys:
        """What this client follows."""
        return self._mirror.keys

    @property
    def torch_store(self) -> FormingKeys:
        store = self.clone()
        return FormingKeys(self._mirror.keys.get, lambda name, value: store.put_all({name: value}))

    def put_all(self, values: Mapping[str, str | bytes]) -> None:
        """Write keys by their names, in one transaction; of one kind of client, who has checked them."""
        self.write([], [put(self._prefix + name, value) for name, value in values.items()])

    def write(
        self, conditions: list[EtcdRequest], then: list[EtcdRequest], otherwise: Sequence[EtcdRequest] = ()
    ) -> dict[str, Any]:
        """One transaction, of a coordinator only as long as it holds its role; returns when the mirror shows it."""
        self._mirror.keys.check()
        if self._guard is not None:
            conditions, otherwise = [*conditions, made_at(*self._guard)], [*otherwise, get(self._guard[0])]
        answer = self._client.call("/kv/txn", {"compare": conditions, "success": then, "failure": list(otherwise)})
        if answer.get("succeeded"):
            for operation, response in zip(then, answer["responses"], strict=True):
                (kind, request), deleted = next(iter(operation.items())), response.get("response_delete_range", {})
                changed = kind == "request_put" or int(deleted.get("deleted", 0)) > 0
                if changed and self._mirror.covers(decoded(request["key"]).decode()):
                    self._mirror.reach(int(answer["header"]["revision"]))
                    break
        elif self._guard is not None:
            kvs = answer["responses"][-1]["response_range"].get("kvs", [])
            if not kvs or int(kvs[0]["create_revision"]) != self._guard[1]:
                raise RoleLost("another agent coordinates this run by now")
        return answer


def _after(prefix: str) -> str:
    """The first key behind all that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _mirror(client: EtcdClient, prefix: str, reader: Reader) -> Mirror:
    first, last = _FOLLOWED[reader]
    return Mirror(client, prefix, f"{prefix}{first}/", _after(f"{prefix}{last}/"))
