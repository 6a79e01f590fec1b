"""With `[membership] ports` agents and workers listen within the range only, through deaths and returns."""

import socket

import pytest

from recycle import JobError, RunError
from recycle.exec.ports import MOST_CHOICES, kernel_ports, listen_within, refusal_of_gloo, refusal_of_nccl
from recycle.exec.transport.plugin import transport_of
from tests.exec.agents import Cluster
from tests.exec.etcd_server import LOOPBACK
from tests.exec.runs import calm_run, job, listening, processes_writing_below, varied

LOW, HIGH = kernel_ports()
HALF = (HIGH + 1 - LOW) // 4 * 2
PORTS = LOW + HALF // 2, LOW + HALF // 2 + HALF // 20
STEPS = 30


def test_agents_and_workers_listen_within_the_range_only(etcd, launch, tmp_path):
    limits = {"transport": "tests.exec.paced:Paced", "ports": list(PORTS), "dead_after": 10.0}
    config = job(2, 2, 2, membership=limits, cluster={"workers_per_node": 2})
    cluster = Cluster(tmp_path, config, etcd, "ports", "--steps", f"{STEPS}", "--fault", "kill:1.1@4")

    def ports_of(pid):
        return {port for _, port in listening(pid)}

    def ports():
        yield from ((False, ports_of(agent.pid)) for agent in cluster.agents.values())
        yield from ((True, ports_of(pid)) for pid in processes_writing_below(str(tmp_path / "run" / "logs")))

    try:
        for node in range(2):
            cluster.start(node)
        cluster.reach(lambda: len(cluster.events("rejoined")) == 1, "the return of 1.1")
        cluster.reach_step(cluster.events("rejoined")[0]["step"] + 1)
        found = list(ports())
        cluster.finish()
    finally:
        cluster.end()
    assert sum(len(each) for is_worker, each in found if not is_worker) == 1  # the leader
    workers = [each for is_worker, each in found if is_worker and each]
    assert [len(each) for each in workers] == [1] * 4  # one port each, also after three generations
    assert all(PORTS[0] <= port <= PORTS[1] for _, each in found for port in each)
    unbound = varied(config, membership={"ports": None, "transport": "auto"})
    cluster.assert_trained_as(calm_run(unbound, launch, STEPS))


def test_range_without_a_free_port_is_refused():
    port = LOOPBACK.free_port()
    refused = pytest.raises(RunError, match=r"\[membership\] ports: no port of .* is free")
    with socket.create_server(("127.0.0.1", port)), refused:
        listen_within((port, port), "127.0.0.1", 1)
    with listen_within((port, port), "127.0.0.1", 1) as listener:
        assert listener.getsockname()[1] == port


def test_range_that_the_kernel_rarely_or_never_chooses_from_is_refused():
    enough = -(-HALF // MOST_CHOICES)
    assert refusal_of_gloo((LOW, LOW + enough - 1)) is None
    few = refusal_of_gloo((LOW, LOW + enough - 2))
    assert f"choose at least {enough} ports of {LOW} to {LOW + HALF - 1}" in few
    with pytest.raises(JobError, match="gloo cannot listen on ports"):
        transport_of(job(2, 2, 2, membership={"ports": [LOW + HALF, HIGH]}))
    assert refusal_of_nccl((LOW, HIGH)) is None
    assert f"sysctl -w net.ipv4.ip_local_port_range='{LOW} {HIGH - 1}'" in str(refusal_of_nccl((LOW, HIGH - 1)))
