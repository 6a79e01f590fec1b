"""Runs with real worker processes, forked by the servers that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle import Job
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.trackers import Observer
from recycle.exec.processes.forkserver import ForkServer
from recycle.ir.schedule import Schedule
from tests.exec.etcd_server import ETCD, EtcdServer
from tests.exec.network import Network
from tests.exec.runs import Run


@pytest.fixture(scope="session", autouse=True)
def plan_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans of tests are neither taken from nor left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECYCLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def needs_etcd() -> None:
    if ETCD is None:
        pytest.skip("no etcd: install Debian's etcd-server")


@pytest.fixture(scope="session")
def etcd(needs_etcd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.end()


@pytest.fixture
def own_etcd(needs_etcd: None, tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that the test may stop and kill."""
    server = EtcdServer(tmp_path)
    yield server
    server.end()


@pytest.fixture
def network(needs_etcd: None) -> Iterator[Network]:
    """Three nodes in separate networks."""
    try:
        results = Network(3)
    except PermissionError as refusal:
        pytest.skip(f"no networks of nodes on this machine: {refusal}")
    yield results
    results.end()


@pytest.fixture(scope="session")
def launch(servers: dict[str, ForkServer], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a job in a fresh run directory: launch(job, steps, "kill:1.1@3", ...)."""

    def run(
        job: Job,
        steps: int,
        *faults: str,
        schedule: Schedule | None = None,
        observer: Observer | None = None,
        planner: Any = plan_for_training,
        directory: Path | None = None,
        resume: bool = False,
    ) -> RunResult:
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
