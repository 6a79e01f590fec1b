"""`--resume` continues from the run directory after all agents and their etcd have ended."""

import pytest

from tests.exec.agents import Cluster
from tests.exec.etcd_server import EtcdServer
from tests.exec.runs import calm_run, job

pytestmark = [pytest.mark.process, pytest.mark.etcd]

STEPS, UNHURRIED = 40, 0.6
"""Iterations, and seconds between them."""
NODES = (0, 1)
MEMBERSHIP = {"dead_after": 8.0, "lease": 2, "store_timeout": 6.0, "transport": "tests.exec.paced:Paced"}
SECTIONS = {"membership": MEMBERSHIP, "cluster": {"workers_per_node": 1}, "train": {"checkpoint_every": 4}}
REFUSED = 2


@pytest.fixture
def parts(needs_etcd, tmp_path):
    """The agents of two nodes twice, each time with a fresh etcd."""
    servers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        servers.append(EtcdServer(tmp_path / name))
    clusters = [Cluster(tmp_path, job(2, 1, 2, **SECTIONS), server, "run", "--steps", f"{STEPS}") for server in servers]
    clusters[0].slow_down(UNHURRIED)
    yield clusters
    for ended in (*clusters, *servers):
        ended.end()


def last_checkpoint(cluster: Cluster) -> int:
    return max((event["step"] for event in cluster.events("checkpoint")), default=-1)


def kill_all(cluster: Cluster):
    for node in NODES:
        cluster.kill(node)


def test_agents_resume_with_an_empty_store_and_with_the_store_kept(parts, launch, tmp_path):
    first, second = parts
    for node in NODES:
        first.start(node, "--resume")  # in an empty directory it begins a run
    first.reach(lambda: last_checkpoint(first) >= 3, "a checkpoint")
    first.reach_step(last_checkpoint(first) + 2)
    second.start(0, "--resume")  # another store, and the run directory is in use
    second.reach_end(0, REFUSED)
    assert not first.events("restored")
    kill_all(first)

    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")}
    second.start(0)
    second.reach_end(0, REFUSED)
    assert "--resume" in second.output(0).read_text().splitlines()[-1]
    assert {path: path.read_bytes() for path in before} == before

    second.start(0, "--resume")
    second.reach(lambda: "waiting for agents of nodes 1" in second.output(0).read_text(), "the first agent")
    second.start(1)
    second.reach_end(1, REFUSED)
    assert "--resume" in second.output(1).read_text().splitlines()[-1]
    second.start(1, "--resume")
    second.reach(lambda: bool(second.events("restored")), "the way on from the checkpoint")
    (restored,) = second.events("restored")
    second.reach(lambda: last_checkpoint(second) > restored["step"], "another checkpoint")
    kill_all(second)

    for node in NODES:
        second.start(node, "--resume")
    second.reach(lambda: len(second.events("restored")) == 2, "the way on with the store kept")
    second.finish()

    second.assert_trained_as(calm_run(job(2, 1, 2, **SECTIONS), launch, STEPS))
    times = [event["time"] for event in second.lines("events")]
    assert times == sorted(times)
    assert second.events("restored")[1]["step"] > restored["step"] >= 4
