"""The workers' processes on all nodes, as the coordinator sees them: requests and answers in the store.

A request is for a session, so that a process whose agent is gone is gone, whoever serves the node now. Everything is
read from the store: whoever coordinates next knows what this one knew.

An agent whose lease has ended may come back with its workers, since an etcd that stood still ends all leases. It has
half a term for that, of which only the time counts in which the coordinator itself was answered.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.schema import (
    AgentKey,
    EndedKey,
    GoneKey,
    KillRequestKey,
    PlacesKey,
    StartRequestKey,
)
from recycle.exec.protocol import StartRequest
from recycle.job import Job
from recycle.nodes import node_of
from recycle.shape import Worker

_SAY_WHO_ENDED = (AgentKey, StartRequestKey, EndedKey)
"""Kinds of keys that `gone` follows from; a `GoneKey` is written here."""


class ClusterProcesses:
    """Implements `Processes` by agents that start and kill them.

    Args:
        store: the coordinator's.
    """

    def __init__(self, job: Job, store: EtcdStore) -> None:
        self._store, self._limits = store, job.membership
        self._homes = node_of(job.shape, job.cluster.workers_per_node)
        self._told: dict[Worker, int] = {}
        self._absent: dict[tuple[int, str], float] = {}
        self._looked = time.monotonic()
        self._versions: list[int] = []
        self._agents_version = -1
        self._nodes = frozenset(self._homes.values())
        moved = store.read(PlacesKey()) or {}
        self._places = {Worker.parse(worker): Worker.parse(place) for worker, place in moved.items()}

    def node(self, worker: Worker) -> int:
        """The node that the worker has its place on."""
        return self._homes[self._place(worker)]

    def _place(self, worker: Worker) -> Worker:
        return self._places.get(worker, worker)

    def move(self, positions: Collection[Worker], startable: Collection[Worker]) -> None:
        """Give every one of `positions` the place of one that is startable, who gets its place for it.

        It goes to a node without a peer of its stage if there is one; whoever is startable and stays is not moved.
        No process may run.
        """
        free = sorted(set(startable) - set(positions))
        for worker in sorted(set(positions) - set(startable)):
            peers = {self.node(peer) for peer in positions if peer.rank == worker.rank and peer in startable}
            other = min(free, key=lambda candidate: (self.node(candidate) in peers, candidate))
            free.remove(other)
            startable = {*startable, worker} - {other}
            self._places[worker], self._places[other] = self._place(other), self._place(worker)
        moved = {str(worker): str(place) for worker, place in sorted(self._places.items()) if worker != place}
        self._store.set(PlacesKey(), moved)
        self._versions = []

    def _agent(self, node: int) -> str | None:
        """The session of the node's agent."""
        return self._store.read(AgentKey(node))

    def _is_gone(self, node: int, session: str) -> bool:
        """Whether the agent that had this session is gone for good."""
        present = self._agent(node)
        if present is not None or not session:
            return present != session
        return self._store.read(GoneKey(node, session)) is not None

    def _give_up_agents(self) -> None:
        """Give up the agents that have been away for too long."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self._limits.heartbeat), now
        if not self._absent and self._store.version(AgentKey) == self._agents_version:
            return
        self._agents_version = self._store.version(AgentKey)
        without = {node for node in self._nodes if self._agent(node) is None}
        served = ((node, worker) for worker in self._homes if without and (node := self.node(worker)) in without)
        sessions = {(node, session) for node, worker in served if (session := self._request(worker).session)}
        away = {agent for agent in sessions if not self._is_gone(*agent)}
        self._absent = {agent: self._absent.get(agent, 0.0) + passed for agent in away}
        for (node, session), seconds in self._absent.items():
            if seconds > self._limits.lease / 2:
                self._store.decide_unless(GoneKey(node, session), True, AgentKey(node))
                self._versions = []

    def missing_nodes(self, workers: Collection[Worker]) -> list[int]:
        return [node for node in sorted({self.node(worker) for worker in workers}) if self._agent(node) is None]

    def _request(self, worker: Worker) -> StartRequest:
        """The latest request to start the worker."""
        return self._store.read(StartRequestKey(worker)) or StartRequest()

    def start(self, worker: Worker, generation: int, restored: int | None = None) -> None:
        """As `Processes.start`. Without an agent nothing happens, and the process counts as gone."""
        session, place = self._agent(self.node(worker)) or "", str(self._place(worker))
        request = StartRequest(self.incarnation(worker) + 1, session, place, generation, restored)
        self._store.set(StartRequestKey(worker), request)

    def started_in(self, worker: Worker) -> int | None:
        request = self._request(worker)
        return None if request.incarnation < 0 or self.ended(worker) == self._lost(worker) else request.generation

    def gone(self) -> dict[Worker, str]:
        self._give_up_agents()
        if (versions := [self._store.version(kind) for kind in _SAY_WHO_ENDED]) == self._versions:
            return {}
        self._versions = versions
        found: dict[Worker, str] = {}
        for worker in self._homes:
            number = self.incarnation(worker)
            if number >= 0 and self._told.get(worker) != number and (how := self.ended(worker)) is not None:
                self._told[worker] = number
                found[worker] = how
        return found

    def ended(self, worker: Worker) -> str | None:
        request = self._request(worker)
        ended, how = self._store.read(EndedKey(worker)) or (-1, "")
        if ended == request.incarnation:
            return how
        return self._lost(worker) if self._is_gone(self.node(worker), request.session) else None

    def tail(self, worker: Worker) -> str:
        """Nothing: the agent writes the last lines of the log behind how the process ended."""
        return ""

    def _lost(self, worker: Worker) -> str:
        return f"the agent of node {self.node(worker)} is gone"

    def running(self, worker: Worker) -> bool:
        return self.incarnation(worker) >= 0 and self.ended(worker) is None

    def incarnation(self, worker: Worker) -> int:
        return self._request(worker).incarnation

    def kill(self, worker: Worker) -> None:
        """Have every process of the worker so far killed."""
        key, number = KillRequestKey(worker), self.incarnation(worker)
        if self._store.read(key) != number:
            self._store.set(key, number)
