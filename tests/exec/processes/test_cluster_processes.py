"""When an agent whose lease has ended is given up, and when it may come back: a real etcd, and a test's own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from recycle.exec.membership.etcd_client import Lease
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.schema import AgentKey, CoordinatorKey, GoneKey
from recycle.exec.processes import cluster_processes
from recycle.exec.processes.cluster_processes import ClusterProcesses
from recycle.sections import MembershipSection
from recycle.shape import Worker
from tests.exec.etcd_server import EtcdServer
from tests.exec.runs import job

WORKER = Worker(0, 0)
OF = job(2, 1, 1, membership={"heartbeat": 0.5, "lease": 6}, cluster={"workers_per_node": 1})


class Clock:
    """Stands still between `pass_by` calls."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Nodes:
    """A coordinator's view of two nodes, and the agent of node 0."""

    def __init__(self, etcd: EtcdServer, clock: Clock) -> None:
        settings = MembershipSection(store=etcd.url)
        self.store, self._clock = EtcdStore.connect(etcd.url, "nodes", settings, "follower"), clock
        self._leases = [Lease(self.store.client.clone(), settings, lambda: None)]
        self._say("first")
        created = self.store.create(CoordinatorKey(), "coordinator", self._take())
        assert created is not None
        self.coordinating = self.store.coordinating(CoordinatorKey(), created)
        self.processes = ClusterProcesses(OF, self.coordinating)
        self.processes.start(WORKER, 0)

    def _take(self) -> str:
        self._leases.append(Lease(self.store.client.clone(), OF.membership, lambda: None))
        return self._leases[-1].id

    def _say(self, session: str) -> bool:
        gone = GoneKey(0, session)
        return self.store.decide_unless(AgentKey(0), session, gone, self._leases[0].id)

    def come(self, session: str) -> bool:
        """The agent says that it is there, and the coordinator sees it; whether it may be."""
        may_be = self._say(session)
        self._until_seen(session if may_be else None)
        return may_be

    def _until_seen(self, session: str | None) -> None:
        """What the coordinator reads follows the store a moment later."""
        deadline = time.monotonic() + 30
        while self.coordinating.read(AgentKey(0)) != session:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def leave(self) -> None:
        """Its lease ends."""
        self._leases[0].close()
        self._leases[0] = Lease(self.store.client.clone(), OF.membership, lambda: None)
        self._until_seen(None)

    def pass_by(self, seconds: float, step: float = 0.25) -> dict[Worker, str]:
        """The coordinator looks every `step`; who is gone meanwhile."""
        found: dict[Worker, str] = {}
        for _ in range(round(seconds / step)):
            self._clock.now += step
            found |= self.processes.gone()
        return found

    def close(self) -> None:
        for lease in self._leases:
            lease.close()
        self.coordinating.close()
        self.store.erase()
        self.store.close()


@pytest.fixture
def nodes(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    clock = Clock()
    monkeypatch.setattr(cluster_processes, "time", clock)
    found = Nodes(etcd, clock)
    yield found
    found.close()


def test_an_agent_that_comes_back_within_half_a_term_keeps_its_workers(nodes: Nodes) -> None:
    for _ in range(2):
        nodes.leave()
        assert nodes.processes.missing_nodes([WORKER]) == [0]
        assert nodes.pass_by(2.75) == {}
        assert nodes.processes.running(WORKER)
        assert nodes.come("first")
        assert nodes.pass_by(10) == {}
    assert nodes.processes.running(WORKER)


def test_the_time_in_which_the_coordinator_did_not_look_does_not_count(nodes: Nodes) -> None:
    nodes.leave()
    assert nodes.pass_by(100, step=50) == {}
    assert nodes.come("first")


def test_an_agent_that_is_given_up_does_not_come_back_and_another_one_may(nodes: Nodes) -> None:
    nodes.leave()
    assert nodes.pass_by(4) == {WORKER: "the agent of node 0 is gone"}
    assert not nodes.processes.running(WORKER)
    assert not nodes.come("first")
    assert nodes.come("second")
    assert nodes.processes.missing_nodes([WORKER]) == []
    assert not nodes.processes.running(WORKER)


def test_another_agent_of_the_node_is_the_end_of_the_first_ones_workers(nodes: Nodes) -> None:
    nodes.leave()
    assert nodes.come("second")
    assert nodes.pass_by(0.25) == {WORKER: "the agent of node 0 is gone"}
