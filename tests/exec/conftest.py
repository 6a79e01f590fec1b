"""Runs with real worker processes, forked by the servers that all tests share."""

import pytest

from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from tests.exec.etcd_server import ETCD, EtcdServer
from tests.exec.network import Network


@pytest.fixture(scope="session", autouse=True)
def plan_cache(tmp_path_factory):
    """Plans of tests are neither taken from nor left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECYCLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def needs_etcd():
    if ETCD is None:
        pytest.skip("no etcd: install Debian's etcd-server")


@pytest.fixture(scope="session")
def etcd(needs_etcd, tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.end()


@pytest.fixture
def own_etcd(needs_etcd, tmp_path):
    """A server that the test may stop and kill."""
    server = EtcdServer(tmp_path)
    yield server
    server.end()


@pytest.fixture
def network(needs_etcd):
    """Three nodes in separate networks."""
    try:
        results = Network(3)
    except PermissionError as refusal:
        pytest.skip(f"no networks of nodes on this machine: {refusal}")
    yield results
    results.end()


@pytest.fixture(scope="session")
def launch(servers, tmp_path_factory):
    """Train a job in a fresh run directory: launch(job, steps, "kill:1.1@3", ...)."""

    def run(job, steps, *faults, schedule=None, observer=None, planner=plan_for_training, directory=None, resume=False):
        kind = job.model.kind
        result = train(
            job,
            directory or tmp_path_factory.mktemp("run"),
            steps=steps,
            schedule=schedule,
            faults=[parse_fault(fault) for fault in faults],
            planner=planner,
            observer=observer,
            server=servers[kind],
            resume=resume,
        )
        print(f"{kind}, {steps} steps, {faults or 'no faults'}:", *result.events, sep="\n  ")  # shown if the test fails
        return result

    return run
