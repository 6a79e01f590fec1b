"""The leader's role and the register in etcd: the only module that knows the run's keys.

    /recycle/RUN/run      the run's description; the first agent writes it
    /recycle/RUN/role     the leader and its address; deleted with the lease of the leader's agent
    /recycle/RUN/record   the generation record
    /recycle/RUN/cursor   phase and last committed step, written at every commit
    /recycle/RUN/outcome  the outcome of the run

Each transaction of a leader requires that the role still is the key that it created. So a stalled leader writes nothing
after another leader was elected. Each also requires the cursor that this leader wrote last, so a repeated write that
arrives after later ones changes nothing. Every decision is written before it is announced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.exec.etcd import (
    EtcdClient,
    EtcdRequest,
    Lease,
    LeaseEnded,
    created_at,
    delete,
    open_client,
    put,
    written_times,
)
from recycle.exec.leader.actions import Persist
from recycle.exec.protocol import Cursor, GenerationRecord, RunInfo
from recycle.job.sections import MembershipSection

_Value = TypeVar("_Value")


class RoleLost(RecycleError):
    """Another agent has become leader; nothing was written."""

    code = "role-lost"


class LeaderAddress(NamedTuple):
    """The leader's entry in the role key: node and session of its agent, and its listening address."""

    node: int
    session: str
    host: str
    port: int


class Election:
    """One agent's view of a run's role and register; `is_lost` once the lease of the role has ended."""

    def __init__(self, client: EtcdClient, run: str, settings: MembershipSection) -> None:
        self._client, self._settings, self._prefix = client, settings, f"/recycle/{run}/"
        self._lease: Lease | None = None
        self._created = self._version = 0
        self.is_lost = False

    @classmethod
    def connect(cls, run: str, settings: MembershipSection) -> Election:
        """Open the run in the etcd of `[membership] store`.

        Raises:
            JobError: `[membership]` lacks a setting, or has a wrong one.
            RunError: the cluster does not answer, or refuses this user.
        """
        return cls(open_client(settings.store, settings), run, settings)

    def _read(self, name: str, kind: type[_Value], patience: float | None = None) -> _Value | None:
        key = self._prefix + name
        if (pair := self._client.read(key, patience)) is None:
            return None
        try:
            return msgspec.msgpack.decode(pair.value, type=kind)
        except msgspec.MsgspecError:
            raise JobError(
                f"{self._settings.store}: {key} was written by another version of recycle: use the same one on all"
                " nodes, or give another --id"
            ) from None

    def _put(self, name: str, value: Any) -> EtcdRequest:
        return put(self._prefix + name, msgspec.msgpack.encode(value))

    def _create(self, name: str, value: Any, lease: str | None = None) -> int:
        """Returns the creation revision; 0 if the key holds another value."""
        key, text = self._prefix + name, msgspec.msgpack.encode(value)
        body = {"compare": [created_at(key, 0)], "success": [put(key, text, lease)], "failure": []}
        self._client.call("/kv/txn", body)
        pair = self._client.read(key)  # also after an answer that was lost
        return pair.created if pair is not None and pair.value == text else 0

    # The run.

    def agree(self, info: RunInfo) -> RunInfo:
        """Return the run's description that all agents use: `info`, unless another agent was first."""
        return info if self._create("run", info) else self.run() or info

    def run(self) -> RunInfo | None:
        return self._read("run", RunInfo)

    def outcome(self) -> str | None:
        return self._read("outcome", str)

    def forget_ended(self) -> None:
        """Delete the run if it has ended: its last leader died before `erase`. Only while it has no other agent."""
        name = self._prefix + "outcome"
        if (outcome := self._client.read(name)) is not None:
            condition, deletion = created_at(name, outcome.created), delete(self._prefix, self._prefix[:-1] + "0")
            self._client.call("/kv/txn", {"compare": [condition], "success": [deletion], "failure": []})

    # The role.

    def leader(self, patience: float | None = None) -> LeaderAddress | None:
        """Return the present leader; None without one. Raises RunError without an answer, as `EtcdClient.call`."""
        return self._read("role", LeaderAddress, patience)

    def campaign(self, address: LeaderAddress) -> bool:
        self.is_lost = False
        lease = Lease(self._client.clone(), self._settings, self._lose)
        try:
            self._created = self._create("role", address, lease.id)
        except LeaseEnded:
            self._created = 0
        if not self._created:
            lease.close()
            return False
        self._lease = lease
        cursor = self._client.read(self._prefix + "cursor")
        self._version = 0 if cursor is None else cursor.version
        return True

    def _lose(self) -> None:
        self.is_lost = True

    @property
    def is_reached(self) -> bool:
        """Whether etcd has renewed the lease lately (it does so every third of it); else this node may be cut off."""
        return self._lease is not None and time.monotonic() - self._lease.answered < 0.4 * self._settings.lease

    @property
    def seconds_left(self) -> float:
        """Seconds until the role ends at the latest if etcd renews the lease no more."""
        return 0.0 if self._lease is None else max(0.0, self._lease.answered + self._settings.lease - time.monotonic())

    def resign(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    # The register.

    def register(self) -> tuple[GenerationRecord | None, Cursor | None]:
        return self._read("record", GenerationRecord), self._read("cursor", Cursor)

    def persist(self, action: Persist, others: Sequence[EtcdRequest] = ()) -> None:
        """Write the register, and carry out other requests with it. Raises RoleLost, RunError.

        An answer that this process reads after the end of its lease, because it was suspended, is too late to act on.
        """
        record = [] if action.record is None else [self._put("record", action.record)]
        self._write([*others, *record], action.cursor)
        if not self.seconds_left:
            raise RoleLost("the lease of the role has ended")

    def end(self, outcome: str, patience: float | None = None) -> None:
        """Write the outcome of the run. Raises RoleLost; RunError without an answer, as `EtcdClient.call`."""
        self._write([self._put("outcome", outcome)], patience=patience)

    def erase(self, goes_on_from: Persist | None = None) -> None:
        """Delete the run, or only its outcome if agents may continue from a register. Raises RoleLost, RunError."""
        if goes_on_from is None:
            self._write([delete(self._prefix, self._prefix[:-1] + "0")])
        else:
            self.persist(goes_on_from, [delete(self._prefix + "outcome")])

    def _write(
        self, operations: list[EtcdRequest], cursor: Cursor | None = None, patience: float | None = None
    ) -> None:
        """The transaction may be repeated, and requires that this agent still has the role."""
        version = self._version
        conditions = [created_at(self._prefix + "role", self._created), written_times(self._prefix + "cursor", version)]
        if cursor is not None:
            operations, version = [*operations, self._put("cursor", cursor)], version + 1
        body = {"compare": conditions, "success": operations, "failure": []}
        if not self._client.call("/kv/txn", body, patience).get("succeeded") and not self._has_written(version):
            raise RoleLost("another agent leads this run now")
        self._version = version

    def _has_written(self, version: int) -> bool:
        role, cursor = (self._client.read(self._prefix + name) for name in ("role", "cursor"))
        return role is not None and cursor is not None and (role.created, cursor.version) == (self._created, version)
