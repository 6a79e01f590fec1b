"""The leader's role and the register in etcd: the only module that knows which keys a run has there.

    /recycle/RUN/run      what all agents of the run agree on; the first agent writes it
    /recycle/RUN/role     the leader and its address; goes with the lease of that agent
    /recycle/RUN/record   the generation record
    /recycle/RUN/cursor   phase and last committed step, written at every commit
    /recycle/RUN/outcome  how the run has ended

Each transaction of a leader requires that the role is still the one that it created, so that a leader that stood still
writes nothing after another one was elected. Whatever decides something is written before it is told.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from recycle.errors import RunError
from recycle.exec.etcd import EtcdClient, EtcdRequest, Lease, LeaseEnded, delete, made_at, open_client, put
from recycle.exec.leader.actions import Persist
from recycle.exec.protocol import Cursor, GenerationRecord, RunInfo
from recycle.job.sections import MembershipSection

_Value = TypeVar("_Value")


class RoleLost(RunError):
    """Another agent has become leader; nothing was written."""


class LeaderAddress(NamedTuple):
    """The leader as its role names it: node and session of its agent, and where it listens."""

    node: int
    session: str
    host: str
    port: int


class Election:
    """One agent's view of the role and the register of a run.

    Args:
        client: of etcd.
        run: name of the run.
        settings: term of the lease.

    Attributes:
        is_lost: the lease of the role has ended, so that another agent may have it.
    """

    def __init__(self, client: EtcdClient, run: str, settings: MembershipSection) -> None:
        self._client, self._settings, self._prefix = client, settings, f"/recycle/{run}/"
        self._lease: Lease | None = None
        self._created = 0
        self.is_lost = False

    @classmethod
    def connect(cls, run: str, settings: MembershipSection) -> Election:
        """Open the run in the etcd of `[membership] store`.

        Raises:
            JobError: something is missing or refused in `[membership]`.
            RunError: the cluster does not answer, or refuses this user.
        """
        return cls(open_client(settings.store, settings), run, settings)

    def _read(self, name: str, kind: type[_Value]) -> _Value | None:
        pair = self._client.read(self._prefix + name)
        return None if pair is None else msgspec.msgpack.decode(pair.value, type=kind)

    def _put(self, name: str, value: Any) -> EtcdRequest:
        return put(self._prefix + name, msgspec.msgpack.encode(value))

    def _create(self, name: str, value: Any, lease: str | None = None) -> int:
        """Write a key that does not exist; the revision that it was created at, 0 where it holds something else."""
        key, text = self._prefix + name, msgspec.msgpack.encode(value)
        body = {"compare": [made_at(key, 0)], "success": [put(key, text, lease)], "failure": []}
        self._client.call("/kv/txn", body)
        pair = self._client.read(key)  # also after an answer that was lost
        return pair.created if pair is not None and pair.value == text else 0

    # The run.

    def agree(self, info: RunInfo) -> RunInfo:
        """What all agents of the run agree on: `info`, unless another agent was first."""
        if self._create("run", info):
            return info
        first = self.run()
        return info if first is None else first

    def run(self) -> RunInfo | None:
        """What all agents of the run agree on; None before the first agent has written it."""
        return self._read("run", RunInfo)

    def outcome(self) -> str | None:
        """How the run has ended; None while it goes on."""
        return self._read("outcome", str)

    # The role.

    def leader(self) -> LeaderAddress | None:
        """The present leader; None when there is none."""
        return self._read("role", LeaderAddress)

    def campaign(self, address: LeaderAddress) -> bool:
        """Become the leader, if there is none; whether this agent is."""
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
        return True

    def _lose(self) -> None:
        self.is_lost = True

    def resign(self) -> None:
        """Give the role back, if this agent has it."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    # The register.

    def register(self) -> tuple[GenerationRecord | None, Cursor | None]:
        """What the last leader has left."""
        return self._read("record", GenerationRecord), self._read("cursor", Cursor)

    def persist(self, action: Persist) -> None:
        """Write the register. Raises RoleLost, RunError."""
        record = [] if action.record is None else [self._put("record", action.record)]
        self._write([self._put("cursor", action.cursor), *record])

    def end(self, outcome: str) -> None:
        """Write how the run has ended. Raises RoleLost, RunError."""
        self._write([self._put("outcome", outcome)])

    def erase(self, goes_on_from: Cursor | None = None) -> None:
        """Forget the run, or how it has ended where agents shall go on from its register. Raises RoleLost, RunError."""
        if goes_on_from is None:
            self._write([delete(self._prefix, self._prefix[:-1] + "0")])
        else:
            self._write([delete(self._prefix + "outcome"), self._put("cursor", goes_on_from)])

    def _write(self, operations: list[EtcdRequest]) -> None:
        """One transaction, which may be repeated, on the condition that this agent still has the role."""
        role = self._prefix + "role"
        body = {"compare": [made_at(role, self._created)], "success": operations, "failure": []}
        if not self._client.call("/kv/txn", body).get("succeeded"):
            raise RoleLost("another agent leads this run by now")
