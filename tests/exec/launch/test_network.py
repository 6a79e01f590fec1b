"""Three nodes in separate networks, with a member of etcd on each, lose power or their cable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recycle import Job
from recycle.job.shape import place_workers
from tests.exec.agents import Cluster
from tests.exec.etcd_server import EtcdServer
from tests.exec.network import Network
from tests.exec.runs import Run, calm_run, job

pytestmark = [pytest.mark.process, pytest.mark.etcd]

DEAD_AFTER = 4.0
LIMITS = {
    "heartbeat": 0.5,
    "dead_after": DEAD_AFTER,
    "lease": 3,
    "insecure": True,
    "transport": "tests.exec.paced:Paced",
}

STEPS, UNHURRIED = 80, 2.0
"""Of runs in which an agent is started again, which takes a busy machine a minute, and seconds between iterations."""


def large(**limits: object) -> Job:
    """Twelve workers, four on each node, so that every stage has hosts on two nodes at least."""
    given = {"membership": LIMITS | limits, "cluster": {"workers_per_node": 4}, "train": {"checkpoint_every": 0}}
    return job(4, 3, 2, **given)


class Nodes:
    """A run on three nodes.

    Attributes:
        network: of the nodes.
        etcd: with a member on each.
        cluster: the agents.
    """

    def __init__(self, directory: Path, network: Network) -> None:
        self.network, trained = network, large()
        placed = place_workers(trained.shape, trained.cluster.workers_per_node)
        self._placed = [{str(worker) for worker in workers} for workers in placed]
        self._whole = sum(map(len, self._placed))
        self.etcd = EtcdServer(directory, network.nodes)
        self.cluster = Cluster(directory, trained, self.etcd, "run", "--steps", str(STEPS), nodes=network.nodes)
        for node in range(3):
            self.cluster.start(node)
        self.cluster.reach_step(2)
        self.cluster.slow_down(UNHURRIED)

    def power_off(self, node: int) -> None:
        self.network.power_off(node)
        self.cluster.agents[node].wait()
        self.etcd.members[node].wait()

    def await_loss(self, node: int) -> None:
        """Wait until the others train on without the workers of a node."""
        self.cluster.reach(lambda: self.workers_of(node) <= self.workers("detected"), f"the loss of node {node}")
        left = self._whole - len(self.workers_of(node))
        self.cluster.reach(lambda: self._live() == left, "training without it")

    def await_return(self, node: int) -> None:
        """Wait until a node's workers have rejoined; its agent is started again if it was given up and has ended."""
        agent = self.cluster.agents.pop(node)

        def all_train() -> bool:
            if node not in self.cluster.agents and agent.poll() == 1:
                self.cluster.start(node)
            return self.workers_of(node) <= self.workers("rejoined") and self._live() == self._whole

        self.cluster.reach(all_train, f"training with node {node}")
        self.cluster.agents.setdefault(node, agent)

    def _live(self) -> int:
        live: int = self.cluster.lines("metrics")[-1]["live_workers"]
        return live

    def workers_of(self, node: int) -> set[str]:
        return self._placed[node]

    def workers(self, kind: str) -> set[str]:
        return {event["worker"] for event in self.cluster.events(kind)}

    def assert_same_training(self, launch: Run) -> None:
        self.cluster.assert_trained_as(calm_run(large(dead_after=60.0), launch, STEPS))
        live = self.cluster.lines("metrics")[-1]["live_workers"]
        assert len(self.cluster.events("finished")[-1]["digests"]) == live

    def end(self) -> None:
        self.network.end()
        self.cluster.end()
        self.etcd.end()


@pytest.fixture
def nodes(network: Network, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, network)
    yield nodes
    nodes.end()


@pytest.mark.soak
@pytest.mark.parametrize("coordinates", [False, True])
def test_a_node_that_loses_power_comes_back(coordinates: bool, nodes: Nodes, launch: Run) -> None:
    victim = (nodes.cluster.coordinator() + (not coordinates)) % 3
    nodes.power_off(victim)
    nodes.await_loss(victim)
    nodes.network.mend(victim)
    nodes.etcd.start_again(victim)
    nodes.cluster.start(victim)
    nodes.await_return(victim)
    nodes.cluster.finish()
    nodes.assert_same_training(launch)
    assert nodes.workers("detected") == nodes.workers_of(victim)


@pytest.mark.soak
@pytest.mark.parametrize("coordinates", [False, True])
@pytest.mark.parametrize("seconds", [5, 30])
def test_a_node_that_is_cut_off_goes_and_comes_back(seconds: int, coordinates: bool, nodes: Nodes, launch: Run) -> None:
    """For longer than it takes to be given up, and for longer than its agent and workers wait for etcd."""
    victim = (nodes.cluster.coordinator() + (not coordinates)) % 3
    nodes.network.cut(victim)
    pulled = time.monotonic()
    nodes.await_loss(victim)
    time.sleep(max(0.0, seconds - (time.monotonic() - pulled)))
    nodes.network.mend(victim)
    nodes.await_return(victim)
    nodes.cluster.finish()
    nodes.assert_same_training(launch)
    assert nodes.workers("detected") == nodes.workers("rejoined") == nodes.workers_of(victim)
