"""Cost of the control plane for thousands of processes: CPU and latency per commit, per second and per death.

    python benchmarks/control_plane.py [--case 2048] [--case 16384] [--commits 20] [--etcd]

The leader's process contains the parts of `recycle agent`: `AgentServer`, `LeaderRuntime` and `Leader`. With `--etcd`
its register is in a real etcd. All live sets have the same plan. Agents of 8 processes each are emulated by other
processes; each agent has an authenticated connection and sends the messages of a `NodeAgent`. CPU times are those of
all threads of the leader's process. Other programs on the same cores increase all figures.
"""

from __future__ import annotations

import argparse
import contextlib
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
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle.exec.election import Election, LeaderAddress
from recycle.exec.launch.agent import rarely_collect_garbage
from recycle.exec.launch.peers import AgentServer
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.launch.runtime import LeaderRuntime
from recycle.exec.launch.trackers import Observer
from recycle.exec.leader.actions import Planned, PreparedPlan, Question
from recycle.exec.leader.state import Phase
from recycle.exec.links import Hub, Link, connect_to
from recycle.exec.members import members_of, split_member
from recycle.exec.processes.processes import Waker
from recycle.exec.protocol import (
    Acknowledged,
    Batch,
    Committed,
    Computed,
    Ended,
    Formed,
    FromWorker,
    Heartbeat,
    Hello,
    Order,
    Permit,
    Propose,
    Ready,
    Report,
    RunInfo,
    Start,
    StepReport,
    WorkerMessage,
)
from recycle.job import Job, PricedJob, price
from recycle.job.shape import Worker, node_of, place_workers
from tests.exec.etcd_server import ETCD, EtcdServer

RANKS, PROCESSES_PER_NODE, MOST_WORKERS = 64, 8, 2048
EMULATORS = 2
"""Processes that emulate the agents."""
KEY = b"k" * 32
RUN = "control-plane"
TARGETS = {
    "CPU of the leader's process per commit, ms": (20, 120),
    "last report -> commit at all agents, median, s": (0.05, 0.4),
    "memory, etcd included, MB": (150, 300),
}
"""Of 2,048 and of 16,384 processes."""


def job_of(processes: int, store: str) -> PricedJob:
    """Up to 2,048 workers in pipelines of 64 ranks; of more processes each worker has several."""
    workers = min(processes, MOST_WORKERS)
    tensor_parallel = processes // workers
    text = f"""
        [shape]
        pipelines = {workers // RANKS}
        ranks = {RANKS}
        micro_batches = {RANKS}
        tensor_parallel = {tensor_parallel}
        [model]
        kind = "emulated"
        seconds_per_unit = 0.02
        [membership]
        store = "{store}"
        lease = 60
        dead_after = 600
        hung_after = 600
        form_timeout = 120.0
        [cluster]
        workers_per_node = {PROCESSES_PER_NODE // tensor_parallel}
        """
    return price(Job.from_toml(text))


# The emulated agents.


@lru_cache(maxsize=16)
def decoded(body: bytes) -> Order:
    """A message of the leader, decoded once for all agents that get it."""
    return msgspec.msgpack.decode(body, type=Order)


class EmulatedAgent:
    """A node: answers the leader's orders for its processes."""

    def __init__(self, node: int, workers: tuple[Worker, ...], job: Job, hub: Hub, link: Link) -> None:
        self.node, self._hub, self._link = node, hub, link
        self._tensor_parallel = job.grid.tensor_parallel
        self.members = members_of(workers, self._tensor_parallel)
        self.generation = 0
        self._beats: list[bytes] = []
        hub.add(link)
        self.send(Hello(node, f"session{node}"))

    def send(self, message: Any) -> None:
        self._hub.send(self._link, message)

    def say(self, message: WorkerMessage, generation: int = 0) -> None:
        """Each process says this."""
        self.send(Batch([FromWorker(member, message, generation) for member in self.members]))

    def report(self, step: int) -> bytes:
        """The batch of reports of an iteration, encoded."""
        said = []
        for member in self.members:
            rank = int(split_member(member)[0].partition(".")[2])
            computed = [Computed(rank, token, 64, 1.234567 + 1e-6 * step) for token in "FIW"]
            loss = 123.456789 if rank == RANKS - 1 else None
            report = Report({rank: [0.123456789012 + rank, 1e-17]}, loss, computed)
            said.append(FromWorker(member, StepReport(step, report), self.generation))
        return msgspec.msgpack.encode(Batch(said))

    def beat(self, turn: int) -> None:
        """A heartbeat of each process."""
        if not self._beats:
            beats = [
                {member: Heartbeat(number, 3 * number, False, "1F", 0.12) for member in self.members}
                for number in (1, 2)
            ]
            self._beats = [msgspec.msgpack.encode(Batch(beats=each)) for each in beats]
        self.send(self._beats[turn % 2])

    def end(self, worker: str) -> None:
        """The process of this worker ends."""
        self.members = [member for member in self.members if split_member(member)[0] != worker]
        self.send(Batch(ended=[Ended(worker, 0, "killed by SIGKILL")]))


class Emulator:
    """The agents of one process, controlled through a pipe.

    Args:
        number: of this process among all of them.
        iteration: seconds from a commit to the reports of the next iteration.
    """

    def __init__(self, number: int, toml: str, port: int, iteration: float) -> None:
        job = Job.from_toml(toml)
        nodes = place_workers(job.shape, job.cluster.workers_per_node)
        self._hub, self._iteration, self._heartbeat = Hub(), iteration, job.membership.heartbeat
        self.agents: list[EmulatedAgent] = []
        for node in range(number, len(nodes), EMULATORS):
            link = connect_to("127.0.0.1", port, KEY, msgspec.Raw)
            agent = EmulatedAgent(node, nodes[node], job, self._hub, link)
            link.owner = lambda link, bodies, agent=agent: self._obey(agent, bodies)
            self.agents.append(agent)
        self._counts: dict[Any, int] = {}
        self.times: dict[Any, float] = {}
        """Of what the last of these agents has sent or received."""
        self._next, self._due = 0, float("inf")
        self._prepared: list[bytes] = []
        self._reports, self._turn, self._next_beat = True, 0, float("inf")

    def _obey(self, agent: EmulatedAgent, bodies: list[Any] | None) -> None:
        assert bodies is not None, "the leader has closed the connection"
        starts = []
        for body in bodies:
            match order := decoded(bytes(body)):
                case Start():
                    starts.append(order.worker)
                case Propose(record=record):
                    agent.generation = record.generation
                    agent.say(Acknowledged(False), agent.generation)
                    self._note("proposal", record.generation)
                case Permit(what="form"):
                    agent.say(Formed(), agent.generation)
                case Permit(what="run"):
                    self._note("run", order.generation)
                    self._await_report(order.generation, self._next)
                case Committed(commit=commit):
                    self._note("commit", commit.step)
                    self._await_report(order.generation, commit.step + 1)
        if starts:
            members = members_of(starts, agent._tensor_parallel)
            agent.send(Batch([FromWorker(member, Ready(0)) for member in members]))

    def _note(self, *key: Any) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] == len(self.agents):
            self.times[key] = time.monotonic()

    def _await_report(self, generation: int, step: int) -> None:
        """Report once all agents have heard what the last one of them has heard now."""
        key = ("commit", step - 1) if ("commit", step - 1) in self.times else ("run", generation)
        if self._counts.get(key) == len(self.agents):
            self._next, self._due, self._prepared = step, time.monotonic() + self._iteration, []

    def serve(self, pipe: Connection) -> None:
        rarely_collect_garbage()
        while True:
            self._hub.dispatch(0.005)
            now = time.monotonic()
            if self._due < float("inf") and not self._prepared:
                self._prepared = [agent.report(self._next) for agent in self.agents]
            if self._reports and now >= self._due:
                for agent, body in zip(self.agents, self._prepared, strict=True):
                    agent.send(body)
                self.times["report", self._next] = time.monotonic()
                self._due, self._prepared = float("inf"), []
            self._beat(now)
            if pipe.poll():
                match pipe.recv():
                    case ("report", bool(wanted)):
                        self._reports = wanted
                    case ("beat", bool(wanted)):
                        self._next_beat = now if wanted else float("inf")
                    case ("end", worker) if self.agents[0].node == 0:
                        self.times["end", worker] = time.monotonic()
                        self.agents[0].end(worker)
                    case ("times",):
                        pipe.send(self.times)
                    case ("close",):
                        return

    def _beat(self, now: float) -> None:
        """The beats of all agents, spread over the interval of heartbeats."""
        while now >= self._next_beat:
            self.agents[self._turn % len(self.agents)].beat(self._turn // len(self.agents))
            self._turn += 1
            self._next_beat += self._heartbeat / len(self.agents)


def emulate(number: int, toml: str, port: int, iteration: float, pipe: Connection) -> None:
    """Be one process of agents."""
    with contextlib.suppress(EOFError):
        Emulator(number, toml, port, iteration).serve(pipe)


# The leader.


class FixedPlans:
    """As `PlanService`, with the same plan for any live workers."""

    can_search = True

    def __init__(self, job: PricedJob, *others: object) -> None:
        self._asked = list[Question]()

    def own(self) -> None:
        return None

    def ask(self, question: Question, profile: object = None) -> None:
        self._asked.append(question)

    def poll(self, warn: object) -> list[Planned]:
        asked, self._asked = self._asked, []
        return [self._answer(question) for question in asked]

    def _answer(self, question: Question) -> Planned:
        if not question.is_urgent:
            return Planned(question, None, "times do not count here")
        return Planned(question, PreparedPlan("0123456789abcdef", {"barrier": 64.0, "staggered": 63.0}))

    def close(self) -> None:
        return None


class Emulators:
    """The processes of agents."""

    def __init__(self, job: PricedJob, port: int, iteration: float) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(EMULATORS)]
        self._pipes = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=emulate, args=(number, job.to_toml(), port, iteration, other), daemon=True)
            for number, (_, other) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def tell(self, *order: Any) -> None:
        for pipe in self._pipes:
            pipe.send(order)

    def times(self) -> dict[Any, float]:
        """When the last agent of all has sent or received what all have."""
        self.tell("times")
        answers = [pipe.recv() for pipe in self._pipes]
        return {
            key: max(answer.get(key, 0.0) for answer in answers)
            for key in set().union(*answers)
            if key[0] == "end" or all(key in answer for answer in answers)
        }

    def close(self) -> None:
        self.tell("close")
        for process in self._processes:
            process.join(10)
            process.kill()


class LeadingAgent:
    """The leader's part of an agent's loop.

    Args:
        election: of the register; None to keep it in memory.
    """

    def __init__(self, job: PricedJob, folder: Path, election: Election | None) -> None:
        self.hub, self._waker = Hub(), Waker()
        self._pause = job.membership.heartbeat / 2
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = listener.getsockname()[1]
        register: Callable[[Any], None] = lambda action: None  # noqa: E731
        if election is not None:
            assert election.campaign(LeaderAddress(0, "session", "127.0.0.1", self.port))
            register = election.persist
        info = RunInfo(identity="identity", job="job", steps=10**6, faults=[], started=time.time())
        request = RunRequest(job=job, steps=10**6, schedule=None, planner=None, faults=(), observer=Observer())
        with patch("recycle.exec.launch.runtime.PlanService", FixedPlans):
            self.runtime = LeaderRuntime(
                request=request,
                register=register,
                homes=node_of(job.shape, job.cluster.workers_per_node),
                directory=RunDirectory(folder, job, shared=info),
                waker=self._waker,
            )
        self._server = AgentServer(self.runtime, self.hub, listener, KEY)
        self.runtime.start_run()
        self._poll = select.poll()
        for descriptor in (self.hub.fileno(), self._waker.descriptor):
            self._poll.register(descriptor, select.POLLIN)

    def turn(self) -> None:
        """Take what has come, decide, and wait for more."""
        self._server.close_strangers()
        self.hub.dispatch()
        self.runtime.tick()
        self._poll.poll(1000 * self._pause)
        self._waker.clear()

    def until(self, condition: Callable[[], bool], limit: float = 300.0) -> None:
        """Lead until the condition holds."""
        deadline = time.monotonic() + limit
        while not condition():
            self.turn()
            assert time.monotonic() < deadline, (self.runtime.leader.phase, self.runtime.record.generation)

    def for_seconds(self, seconds: float) -> None:
        """Lead for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)


def measure(processes: int, commits: int, iteration: float, idle: float, with_etcd: bool) -> dict[str, float]:
    """Figures of one case, by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        server = None
        if with_etcd:
            (Path(folder) / "etcd").mkdir()
            server = EtcdServer(Path(folder) / "etcd")
            closing.callback(server.end)
        job = job_of(processes, server.url if server is not None else "launcher")
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        election = None
        if server is not None:
            election = Election.connect(RUN, job.membership)
            closing.callback(election.resign)
        leading = LeadingAgent(job, Path(folder) / "run", election)
        rarely_collect_garbage()
        emulators = Emulators(job, leading.port, iteration)
        closing.callback(emulators.close)
        return _measure(leading, emulators, commits, idle, server)


def _measure(
    leading: LeadingAgent, emulators: Emulators, commits: int, idle: float, server: EtcdServer | None
) -> dict[str, float]:
    generations, began = leading.runtime.leader, time.monotonic()
    figures: dict[str, float] = {}

    def runs() -> bool:
        return generations.phase is Phase.RUNNING

    leading.until(runs)
    figures["start of the agents -> all may run, s"] = time.monotonic() - began
    leading.until(lambda: generations.record.committed >= 2)
    first, used = generations.record.committed, [time.process_time()]
    for step in range(first + 1, first + commits + 1):
        leading.until(lambda step=step: generations.record.committed >= step)  # type: ignore[misc]
        used.append(time.process_time())
    emulators.tell("report", False)
    leading.for_seconds(0.5)
    times = emulators.times()
    waits = [times["commit", step] - times["report", step] for step in range(first + 1, first + commits + 1)]
    figures["CPU of the leader's process per commit, ms"] = 1e3 * statistics.median(b - a for a, b in pairwise(used))
    figures["last report -> commit at all agents, median, s"] = statistics.median(waits)
    figures["last report -> commit at all agents, largest, s"] = max(waits)
    figures["CPU without beats, ms per s"] = 1e3 * _used(lambda: leading.for_seconds(idle)) / idle
    emulators.tell("beat", True)
    leading.for_seconds(1.0)
    figures["CPU with 4 beats per s of each process, ms per s"] = 1e3 * _used(lambda: leading.for_seconds(idle)) / idle
    emulators.tell("beat", False)
    leading.for_seconds(0.5)
    deaths = []
    for worker in ("0.1", "0.3"):
        generation = generations.record.generation
        emulators.tell("end", worker)
        leading.until(lambda before=generation: generations.record.generation > before and runs())  # type: ignore[misc]
        leading.for_seconds(1.0)
        times, generation = emulators.times(), generations.record.generation
        deaths.append([times[what, generation] - times["end", worker] for what in ("proposal", "run")])
    for what, seconds in zip(("have the proposal", "may run"), zip(*deaths, strict=True), strict=True):
        figures[f"death -> all {what}, s"] = statistics.mean(seconds)
    own, etcd = _resident(os.getpid()), _resident(server.members[0].pid) if server is not None else 0.0
    figures["memory, etcd included, MB"] = own + etcd
    figures["memory of the leader's process that is not of files, MB"] = _resident(os.getpid(), "RssAnon")
    if server is not None:
        figures["memory of etcd, MB"] = etcd
    return figures


def _used(action: Callable[[], None]) -> float:
    """Seconds of the processor that an action takes in this process."""
    before = time.process_time()
    action()
    return time.process_time() - before


def _resident(pid: int, what: str = "VmRSS") -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found is not None else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", type=int, help="processes; 2048 and 16384 when left out")
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--iteration", type=float, default=0.5, help="seconds from a commit to the next reports")
    parser.add_argument("--idle", type=float, default=6.0, help="seconds of heartbeats alone")
    parser.add_argument("--etcd", action="store_true", help="keep the register in a real etcd")
    options = parser.parse_args()
    if options.etcd and ETCD is None:
        parser.error("no etcd on this machine (Debian's package is etcd-server)")
    print(f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}", flush=True)
    cases = options.case or [2048, 16384]
    columns = []
    for case in cases:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # a fresh process for each
            arguments = case, options.commits, options.iteration, options.idle, options.etcd
            columns.append(pool.submit(measure, *arguments).result())
    print(f"{'processes':56}" + "".join(f"{case:>10,}{'target':>8}" for case in cases))
    for name in columns[0]:
        cells = []
        for case, figures in zip(cases, columns, strict=True):
            target = str(TARGETS[name][case > MOST_WORKERS]) if name in TARGETS else ""
            cells.append(f"{figures[name]:10,.3f}{target:>8}")
        print(f"{name:56}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
