"""The control plane of thousands of workers: what a commit, a second and a new generation cost on a real etcd.

    python benchmarks/control_plane.py [--case 2048x1] [--case 2048x8] [--commits 6] [--iteration 10]

The coordinator, its client of etcd and the relay are those of `recycle agent`. The agents are simulated, all in one
process beside, each with a watch and a connection of its own, and write what a relay writes. Bytes are those of the
connections, HTTP included. Ticks are told by the clock and by the processor's time, which other programs do not change.
Needs the `etcd` binary; without it the benchmark says so and ends well.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import multiprocessing
import os
import platform
import re
import resource
import select
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.drift import DriftMonitor
from recycle.exec.members import members_of
from recycle.exec.membership import schema
from recycle.exec.membership.bundles import bundle_name, bundled
from recycle.exec.membership.coordinator import Coordinator, GenerationPhase
from recycle.exec.membership.etcd_client import Lease, encoded, put
from recycle.exec.membership.etcd_store import EtcdStore
from recycle.exec.membership.heartbeats import HeartbeatReader
from recycle.exec.membership.interfaces import Ready
from recycle.exec.membership.local_socket import send
from recycle.exec.membership.relay import Relay
from recycle.exec.membership.relay_messages import Follow
from recycle.exec.processes.cluster_processes import ClusterProcesses
from recycle.exec.processes.waker import Listener, Waker
from recycle.exec.protocol import GO, VOID, Computed, Formed, Heartbeat, Report, StartRequest
from recycle.job import Job, PricedJob, price
from recycle.nodes import place_workers
from recycle.shape import Worker
from tests.exec.etcd_server import ETCD, EtcdServer

RANKS, PROCESSES_PER_NODE = 64, 8
_GO, _VOID = json.dumps(GO), json.dumps(VOID)
RUN = "control-plane"
PREFIX = f"/recycle/{RUN}/"


def job_of(workers: int, tensor_parallel: int, url: str, heartbeat: float) -> PricedJob:
    """Workers in pipelines of 64 ranks; eight processes per node."""
    text = f"""
        [shape]
        pipelines = {workers // RANKS}
        ranks = {RANKS}
        micro_batches = {RANKS}
        tensor_parallel = {tensor_parallel}
        [model]
        kind = "emulated"
        [membership]
        store = "{url}"
        heartbeat = {heartbeat}
        lease = 60
        dead_after = {15 * heartbeat}
        hung_after = {30 * heartbeat}
        form_timeout = 120.0
        [cluster]
        workers_per_node = {max(1, PROCESSES_PER_NODE // tensor_parallel)}
        """
    return price(Job.from_toml(text))


# The simulated agents: a process of their own.


class SimulatedAgent:
    """A node: follows the orders, acknowledges, forms, reports every iteration and beats, all for its processes."""

    def __init__(self, node: int, workers: list[Worker], job: Job, port: int, seconds: float) -> None:
        self.node, self.port, self.seconds, self.heartbeat = node, port, seconds, job.membership.heartbeat
        self.workers, self.tensor_parallel = {str(worker) for worker in workers}, job.grid.tensor_parallel
        self.received, self.beats = 0, 0
        self.seen: dict[str, float] = {}
        self._number = 0
        self._lock = asyncio.Lock()
        self._generation, self._next = 0, 0
        self._reporting: asyncio.Task[None] | None = None

    @property
    def members(self) -> list[str]:
        return members_of(sorted(self.workers), self.tensor_parallel)

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        ends = {"key": encoded(f"{PREFIX}groups/"), "range_end": encoded(f"{PREFIX}orders0")}
        request = {"create_request": {**ends, "fragment": True}}
        writer.write(_http("/v3/watch", request))
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        beating = asyncio.create_task(self._beat())
        rest = b""
        while part := await reader.read(1 << 20):
            self.received += len(part)
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if b'"events"' in line:
                    await self._take(line)
        beating.cancel()

    async def _take(self, line: bytes) -> None:
        now = time.monotonic()
        for key, text in events(line):
            kind = key.split("/")
            if "proposal" in kind and text:
                self._generation = int(kind[1].removeprefix("generation"))
                self.seen[key] = now
                self.workers &= live_in(text)
                if self.workers:
                    key_of = schema.AcknowledgedKey(self._generation, schema.EVERYBODY)
                    await self._say(key_of, key_of.encode(False))
            elif key.endswith("permission/form") and text == _GO:
                formed = schema.FormedKey(self._generation, schema.EVERYBODY)
                await self._say(formed, formed.encode(Formed()))
            elif key.endswith("permission/run") and text == _GO:
                self._reporting = asyncio.create_task(self._report(self._generation, self._next))
            elif "commit" in kind and text not in ("", _VOID):
                self._next = int(kind[-1]) + 1
                self.seen[key] = now
                self._reporting = asyncio.create_task(self._report(self._generation, self._next))

    async def _report(self, generation: int, step: int) -> None:
        await asyncio.sleep(self.seconds)
        if generation == self._generation:
            report = schema.ReportKey(generation, step, schema.EVERYBODY)
            stages = {int(name.partition(".")[2]) for name in self.workers}
            computed = [Computed(stage, token, 64, 1.234567) for stage in stages for token in "FIW"][:3]
            texts = {}
            for member in self.members:
                rank = int(member.partition("t")[0].partition(".")[2])
                loss = 123.456789 if rank == RANKS - 1 else None
                texts[member] = report.encode(Report({rank: [0.123456789012 + rank, 1e-17]}, loss, computed))
            await self._write(bundle_name(report.name[:-1], self.node, self._numbered()), bundled(texts))

    def _numbered(self) -> int:
        self._number += 1
        return self._number

    async def _say(self, key: Any, text: str) -> None:
        said = dict.fromkeys(self.members, text)
        await self._write(bundle_name(key.name[:-1], self.node, self._numbered()), bundled(said))

    async def _beat(self) -> None:
        await asyncio.sleep(self.heartbeat * (self.node % 97) / 97)
        while True:
            self.beats += 1
            key = schema.HeartbeatKey("")
            text = key.encode(Heartbeat(self.beats, 3 * self.beats, False, "1F", 0.12))
            await self._write(bundle_name(key.parent(), self.node), bundled(dict.fromkeys(self.members, text)))
            await asyncio.sleep(self.heartbeat)

    async def _write(self, name: str, text: str) -> None:
        async with self._lock:
            while True:
                self._writer.write(_http("/v3/kv/txn", {"success": [put(PREFIX + name, text)]}))
                head = await self._reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"Content-Length: (\d+)", head)
                if head.startswith(b"HTTP/1.1 200") and found is not None:
                    await self._reader.readexactly(int(found[1]))
                    return
                assert head.startswith(b"HTTP/1.1 503"), head  # etcd could not agree in time; a relay asks again, too
                self._writer.close()
                await asyncio.sleep(0.5)
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)


@lru_cache(maxsize=4)
def live_in(proposal: str) -> frozenset[str]:
    """Who is live; read once for all agents, which have a machine each."""
    return frozenset(schema.ProposalKey(0).decode(proposal).live)


def events(line: bytes) -> list[tuple[str, str]]:
    """(name, text) of each change in a result of a watch; the text is empty where the key was deleted."""
    found = []
    for event in json.loads(line)["result"].get("events", []):
        kv = event["kv"]
        name = base64.b64decode(kv["key"]).decode().removeprefix(PREFIX)
        found.append((name, base64.b64decode(kv.get("value", "")).decode()))
    return found


def _http(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: etcd\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(content), content)


def simulate(toml: str, port: int, seconds: float, pipe: Connection) -> None:
    """The process of all agents; answers each line on the pipe with what they have seen so far."""
    job = Job.from_toml(toml)
    nodes = place_workers(job.shape, job.cluster.workers_per_node)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def main() -> None:
        agents = [SimulatedAgent(node, workers, job, port, seconds) for node, workers in enumerate(nodes)]
        running = [asyncio.create_task(agent.run()) for agent in agents]
        loop = asyncio.get_running_loop()
        while True:
            asked = await loop.run_in_executor(None, pipe.recv_bytes)
            if asked == b"end":
                break
            name = asked.decode()
            seen = [agent.seen[name] for agent in agents if name in agent.seen]
            answer = {"count": len(seen), "last": max(seen, default=0.0), "bytes": [a.received for a in agents]}
            pipe.send_bytes(json.dumps(answer).encode())
        for task in running:
            task.cancel()

    asyncio.run(main())


# The coordinator.


class FixedPlan:
    """The same plan for whoever is alive, in the run directory already; times are watched as in any run."""

    def __init__(self, job: PricedJob) -> None:
        self.workers, self.profile, self.drift = list(job.shape.workers()), job.prices, DriftMonitor.of(job)
        self.line = ""

    def ready(self, failed: frozenset[Worker]) -> Ready:
        roles = {worker: worker for worker in self.workers if worker not in failed}
        return Ready("0123456789abcdef", "", roles, {"barrier": 64.0, "staggered": 63.0}, True)

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        self.line = json.dumps(times.line())
        self.drift.observe(times)
        self.drift.departed(self.profile, times.workers)

    def has_better(self, failed: frozenset[Worker]) -> bool:
        return False


class EtcdCounts:
    """What etcd itself has counted."""

    def __init__(self, server: EtcdServer) -> None:
        self._url = f"http://{server.address}:{server.port}/metrics"

    def proposals(self) -> float:
        """Writes: entries of its log."""
        with urllib.request.urlopen(self._url) as answer:
            found = re.search(r"^etcd_server_proposals_committed_total (\S+)", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])


class Process:
    """A process of the coordinator's node: counts what the relay sends it."""

    def __init__(self, relay: Relay) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + relay.url.partition("://")[2])
        send(self._socket, Follow())
        self.received = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while part := self._socket.recv(1 << 20):
            self.received += len(part)


def measure(workers: int, tensor_parallel: int, commits: int, seconds: float, heartbeat: float) -> dict[str, float]:
    """Figures of one case, by name."""
    with tempfile.TemporaryDirectory() as folder:
        server = EtcdServer(Path(folder))
        try:
            return _measure(server, job_of(workers, tensor_parallel, server.url, heartbeat), commits, seconds)
        finally:
            server.end()


def _measure(server: EtcdServer, job: PricedJob, commits: int, seconds: float) -> dict[str, float]:
    settings, shape = job.membership, job.shape
    nodes = place_workers(shape, job.cluster.workers_per_node)
    store = EtcdStore.connect(server.url, RUN, settings)
    lease = Lease(store.client.clone(), settings, lambda: None)
    for node in range(len(nodes)):
        store.create(schema.AgentKey(node), f"session{node}", lease.id)
    requests = {
        schema.StartRequestKey(worker).name: schema.StartRequestKey(worker).encode(
            StartRequest(0, f"session{node}", str(worker), 0)
        )
        for node, of in enumerate(nodes)
        for worker in of
    }
    names = list(requests)
    for first in range(0, len(names), 100):
        store.put_all({name: requests[name] for name in names[first : first + 100]})
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=simulate, args=(job.to_toml(), server.port, seconds, theirs), daemon=True)
    child.start()
    created = store.create(schema.CoordinatorKey(), "0 session0", lease.id)
    assert created is not None
    coordinating = store.coordinating(schema.CoordinatorKey(), created)
    waker, members = Waker(), members_of(shape.workers(), job.grid.tensor_parallel)
    relay = Relay(store.clone(), len(nodes), settings.heartbeat)
    process = Process(relay)
    reader = HeartbeatReader(coordinating.clone(), members, settings.heartbeat / 2)
    Listener(coordinating.clone(), waker)
    committed: list[int] = []
    plans = FixedPlan(job)
    coordinator = Coordinator(
        job=job,
        steps=10**6,
        live=set(shape.workers()),
        store=coordinating,
        processes=ClusterProcesses(job, coordinating),
        plans=plans,
        log=lambda kind, **details: (
            print(f"    {kind} {details.get('cause', '')}", flush=True) if kind in ("detected", "recovered") else None
        ),
        committed=lambda commit, record: committed.append(commit.step),
        now=time.monotonic,
        heartbeats=reader.reading(),
    )
    ticks: list[tuple[float, float, bool]] = []

    def asked(name: str = "") -> dict[str, Any]:
        ours.send_bytes(name.encode())
        return dict(json.loads(ours.recv_bytes()))

    def tick() -> None:
        before, began, worked = len(committed), time.perf_counter(), time.thread_time()
        coordinator.tick()
        seconds, own = time.perf_counter() - began, time.thread_time() - worked
        ticks.append((seconds, own, len(committed) > before))
        select.select([waker.descriptor], [], [], settings.heartbeat / 2)
        waker.clear()

    def until(condition: Any, limit: float = 300.0) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            tick()
            assert time.monotonic() < deadline, (coordinator.phase, coordinator.record.generation)

    gc.collect()
    gc.freeze()  # as an agent does
    counts = EtcdCounts(server)
    figures: dict[str, float] = {"workers": shape.worker_count, "processes": len(members), "agents": len(nodes)}
    try:
        deadline = time.monotonic() + 120
        while len(asked()["bytes"]) < len(nodes) or min(asked()["bytes"]) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        until(lambda: coordinator.phase is GenerationPhase.RUNNING)
        until(lambda: len(committed) >= 2)
        ticks.clear()
        first, writes, began, received = asked(), counts.proposals(), time.monotonic(), process.received
        until(lambda: len(committed) >= 2 + commits)
        passed = time.monotonic() - began
        writes_later, last, received_later = counts.proposals(), asked(), process.received
        figures["bytes of the times in a line of metrics"] = len(plans.line)
        figures["etcd writes/s"] = (writes_later - writes) / passed
        figures["s per commit"] = passed / commits
        per_agent = statistics.median(b - a for a, b in zip(first["bytes"], last["bytes"], strict=True)) / commits
        figures["bytes per process and commit: to its agent"] = per_agent
        figures["from its agent"] = (received_later - received) / commits
        for what, chosen in (
            ("tick ms", [tick for tick in ticks if not tick[2]]),
            ("tick ms with a commit", [tick for tick in ticks if tick[2]]),
        ):
            for place, name in enumerate(("", ", of the processor")):
                figures[f"{what}{name}: median"] = 1e3 * statistics.median(tick[place] for tick in chosen)
                figures[f"{what}{name}: longest"] = 1e3 * max(tick[place] for tick in chosen)
        for name in ("0.1", "1.2"):
            ended = schema.EndedKey(Worker.parse(name))
            store.set(ended, (0, "killed by SIGKILL"))
            generation = coordinator.record.generation
            while coordinator.record.generation == generation:
                proposing = time.monotonic()
                tick()
            key = schema.ProposalKey(generation + 1).name
            while (found := asked(key))["count"] < len(nodes):
                assert time.monotonic() < proposing + 120, found["count"]
                time.sleep(0.05)
            figures["s until a generation is announced to all"] = found["last"] - proposing
            until(lambda: coordinator.phase is GenerationPhase.RUNNING)
            figures["until it runs"] = time.monotonic() - proposing
        figures["MB of etcd's process"] = _resident(server.process.pid)
        figures["MB of the coordinator's"] = _resident(os.getpid())
    finally:
        ours.send_bytes(b"end")
        child.join(10)
        child.kill()
        reader.close()
        relay.close()
        lease.close()
        coordinating.close()
        store.close()
    return figures


def _resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found is not None else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="workers x processes of each; 2048x1 and 2048x8 when left out")
    parser.add_argument("--commits", type=int, default=6)
    parser.add_argument("--iteration", type=float, default=10.0, help="seconds of an iteration")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="seconds between heartbeats")
    options = parser.parse_args()
    if ETCD is None:
        print("no etcd on this machine: nothing is measured (Debian's package is etcd-server)")
        return
    print(f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, one etcd", flush=True)
    print(f"iterations of {options.iteration:g} s, heartbeats every {options.heartbeat:g} s", flush=True)
    for case in options.case or ["2048x1", "2048x8"]:
        workers, _, tensor_parallel = case.partition("x")
        figures = measure(
            int(workers), int(tensor_parallel or 1), options.commits, options.iteration, options.heartbeat
        )
        print(f"\n{case}")
        for name, figure in figures.items():
            print(f"  {name:50} {figure:12,.1f}", flush=True)


if __name__ == "__main__":
    main()
