"""A frozen etcd or the loss of a member costs no worker, and the losses stay the same."""

import signal
import time

import pytest

from recycle import Job
from tests.exec.agents import Cluster
from tests.exec.etcd_server import LOOPBACK, EtcdServer
from tests.exec.runs import Run, calm_run, job, processes_writing_below

pytestmark = [pytest.mark.process, pytest.mark.soak]

STEPS = 60
LIMITS = {"dead_after": 6.0, "lease": 2, "transport": "tests.exec.paced:Paced"}
"""The shortest term that etcd grants: each outage longer than it ends the leases of all agents."""


def three_nodes(**limits) -> Job:
    given = {"membership": {**LIMITS, **limits}, "cluster": {"workers_per_node": 2}, "train": {"checkpoint_every": 0}}
    return job(3, 2, 2, **given)


@pytest.fixture
def members(needs_etcd, tmp_path):
    cluster = EtcdServer(tmp_path, [LOOPBACK] * 3)
    yield cluster
    cluster.end()


@pytest.fixture
def start(tmp_path):
    """Start the agents of three nodes."""
    clusters = []

    def begin(config, server):
        clusters.append(Cluster(tmp_path, config, server, "run", "--steps", str(STEPS)))
        for node in range(3):
            clusters[-1].start(node)
        return clusters[-1]

    yield begin
    for cluster in clusters:
        cluster.end()


def assert_nobody_was_lost(cluster: Cluster, launch: Run):
    cluster.assert_trained_as(calm_run(three_nodes(dead_after=60.0), launch, STEPS))
    assert {line["live_workers"] for line in cluster.lines("metrics")} == {6}
    assert not cluster.events("detected")
    assert len(cluster.events("finished")[-1]["digests"]) == 6


def go_on(cluster: Cluster):
    """Wait until more steps are committed."""
    cluster.reach_step(len(cluster.lines("metrics")) + 2)


def stop(server: EtcdServer, seconds: float):
    server.freeze()
    time.sleep(seconds)
    server.thaw()


def test_frozen_etcd_costs_no_worker_and_no_loss(own_etcd, start, launch):
    """For less than a term, for longer, and for so long that every request of the time before has been given up."""
    cluster = start(three_nodes(), own_etcd)
    cluster.reach_step(2)
    for seconds in (1, 3, 10):
        stop(own_etcd, seconds)
        go_on(cluster)
    cluster.finish()
    assert_nobody_was_lost(cluster, launch)


def test_unreachable_etcd_ends_every_agent_with_one_line(own_etcd, start, tmp_path):
    cluster = start(three_nodes(store_timeout=2.0), own_etcd)
    cluster.reach_step(2)
    own_etcd.kill()
    for node, agent in cluster.agents.items():
        assert agent.wait(60) == 1
        messages = cluster.output(node).read_text()
        assert f"{own_etcd.url} does not answer" in messages.splitlines()[-1]
        assert "Traceback" not in messages
    assert not processes_writing_below(str(tmp_path / "run"))


def test_elections_and_members_that_die_cost_no_worker_and_no_loss(members, start, launch):
    cluster = start(three_nodes(lease=6), members)
    cluster.reach_step(2)
    first = members.leader()
    members.kill(first)
    go_on(cluster)
    members.start_again(first)
    members.kill((members.leader() + 1) % 3)
    go_on(cluster)
    cluster.finish()
    assert_nobody_was_lost(cluster, launch)
    assert not cluster.events("coordinator")


def test_briefly_frozen_agent_loses_the_role_and_keeps_its_workers(own_etcd, start, launch):
    """Its lease ends, and with it the role, which another agent takes."""
    cluster = start(three_nodes(lease=4), own_etcd)
    cluster.reach_step(2)
    first = cluster.coordinator()
    cluster.agents[first].send_signal(signal.SIGSTOP)
    cluster.reach(lambda: bool(cluster.events("coordinator")), "another coordinator")
    cluster.agents[first].send_signal(signal.SIGCONT)
    go_on(cluster)
    cluster.finish()
    assert_nobody_was_lost(cluster, launch)
    assert [event["node"] == first for event in cluster.events("coordinator")] == [False]
