"""Three nodes in separate networks, with a member of etcd on each, lose power, their cable, and packets."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from recycle import Job
from recycle.job.shape import place_workers
from tests.exec.agents import Cluster
from tests.exec.etcd_server import EtcdServer
from tests.exec.network import Network
from tests.exec.runs import Run, calm_run, job

pytestmark = [pytest.mark.process, pytest.mark.soak]

DEAD_AFTER = 4.0
LIMITS = {
    "heartbeat": 0.5,
    "dead_after": DEAD_AFTER,
    "lease": 3,
    "insecure": True,
    "transport": "tests.exec.paced:Paced",
}

LOSE, SLOW = partial(Network.lose, percent=20), partial(Network.slow, bytes_per_second=20_000)
STEPS, UNHURRIED = 80, 2.0
"""Of runs in which an agent is started again, which takes a busy machine a minute, and seconds between iterations."""


def large(**limits) -> Job:
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

    def __init__(self, directory: Path, network: Network, make_job: Callable[..., Job], steps: int):
        self.network, self.steps, self._make_job = network, steps, make_job
        placed = place_workers(make_job().shape, make_job().cluster.workers_per_node)
        self._placed = [{str(worker) for worker in workers} for workers in placed]
        self.etcd = EtcdServer(directory, network.nodes)
        self.cluster = Cluster(directory, make_job(), self.etcd, "run", "--steps", str(steps), nodes=network.nodes)
        for node in range(3):
            self.cluster.start(node)
        self.cluster.reach_step(2)

    def go_on(self, steps=2):
        """Wait until more steps are committed."""
        self.cluster.reach_step(len(self.cluster.lines("metrics")) + steps)

    def power_off(self, node: int):
        self.network.power_off(node)
        self.cluster.agents[node].wait()
        self.etcd.members[node].wait()

    def await_loss(self, node: int):
        """Wait until the others train on without the workers of a node."""
        self.cluster.reach(lambda: self.workers_of(node) <= self.workers("detected"), f"the loss of node {node}")
        left = sum(map(len, self._placed)) - len(self.workers_of(node))
        self.cluster.reach(lambda: self.cluster.lines("metrics")[-1]["live_workers"] == left, "training without it")

    def await_return(self, node: int):
        """Wait until a node's workers have re-joined; its agent is started again if it was given up and has ended."""
        self._await_all(node, lambda: self.workers_of(node) <= self.workers("rejoined"))

    def settle(self, node: int):
        """Wait until all train, whether a node was given up or not, and silent workers were detected."""
        settled = time.monotonic() + 2 * DEAD_AFTER
        self._await_all(node, lambda: time.monotonic() > settled)

    def _await_all(self, node: int, condition: Callable[[], bool]):
        agent = self.cluster.agents.pop(node)
        whole = sum(map(len, self._placed))

        def all_train():
            if node not in self.cluster.agents and agent.poll() == 1:
                self.cluster.start(node)
            return condition() and self.cluster.lines("metrics")[-1]["live_workers"] == whole

        self.cluster.reach(all_train, f"training with node {node}")
        self.cluster.agents.setdefault(node, agent)

    def workers_of(self, node: int) -> set[str]:
        return self._placed[node]

    def workers(self, kind: str) -> set[str]:
        return {event["worker"] for event in self.cluster.events(kind)}

    def assert_same_training(self, launch: Run):
        self.cluster.assert_trained_as(calm_run(self._make_job(dead_after=60.0), launch, self.steps))
        live = self.cluster.lines("metrics")[-1]["live_workers"]
        assert len(self.cluster.events("finished")[-1]["digests"]) == live

    def end(self):
        self.network.end()
        self.cluster.end()
        self.etcd.end()


@pytest.fixture
def start(network, tmp_path):
    runs = []

    def begin(make_job, steps):
        runs.append(Nodes(tmp_path, network, make_job, steps))
        if steps == STEPS:
            runs[-1].cluster.slow_down(UNHURRIED)
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.mark.parametrize("coordinates", [False, True])
def test_a_node_that_loses_power_comes_back(coordinates, start, launch):
    nodes = start(large, STEPS)
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


@pytest.mark.parametrize("coordinates", [False, True])
@pytest.mark.parametrize("seconds", [5, 30])
def test_a_node_that_is_cut_off_goes_and_comes_back(seconds, coordinates, start, launch):
    """For longer than it takes to be given up, and for longer than its agent and workers wait for etcd."""
    nodes = start(large, STEPS)
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


@pytest.mark.parametrize("harm", [LOSE, SLOW], ids=["loses", "slow"])
def test_a_node_that_loses_a_fifth_of_its_packets_or_is_slow_for_ten_seconds_costs_no_loss(harm, start, launch):
    """Whether it is given up, with 20 kB/s each way, or not."""
    nodes = start(large, STEPS)
    victim = (nodes.cluster.coordinator() + 1) % 3
    harm(nodes.network, number=victim)
    time.sleep(10.0)
    nodes.network.mend(victim)
    nodes.settle(victim)
    nodes.cluster.finish()
    nodes.assert_same_training(launch)
    assert nodes.workers("detected") == nodes.workers("rejoined")
