"""The simulated accelerator on several nodes: communicators form on keys that agents serve."""

import pytest

from tests.exec.accelerator.transport import SIMULATED
from tests.exec.agents import Cluster
from tests.exec.runs import job

STEPS = 12
NODES = {"cluster": {"workers_per_node": 2}, "train": {"checkpoint_every": 0}}


@pytest.fixture
def cluster(etcd, tmp_path):
    simulated = job(3, 2, 2, membership={"dead_after": 4.0, "transport": SIMULATED}, **NODES)
    faults = ("--fault", "kill:1.1@4", "--fault", "rejoin:1.1@8")
    started = Cluster(tmp_path, simulated, etcd, tmp_path.name, "--steps", str(STEPS), *faults)
    yield started
    started.end()


@pytest.mark.soak
def test_agents_train_through_a_kill_and_a_rejoin(cluster, launch):
    for node in range(3):
        cluster.start(node)
    cluster.finish()
    cluster.assert_trained_as(launch(job(3, 2, 2, membership={"dead_after": 60.0}, **NODES), STEPS))
    assert [event["worker"] for event in cluster.events("detected")] == ["1.1"]
    assert [event["worker"] for event in cluster.events("rejoined")] == ["1.1"]
    assert len(cluster.events("finished")[-1]["digests"]) == 6
