"""A whole run in one thread: agents, their leader, the election, workers and their iterations, under virtual time.

Real: `recycle agent` (`serve`) with its election, connections, frames and handshakes, its node, the leader and its
runtime, the run directory, checkpoints and plans; `run_worker` with its connection, main loop, iterations, state, hooks
and emulated stages. Simulated: time, threads and sockets (kernel.py), etcd (store.py), process groups (transport.py),
starts and ends of processes, the planner's process (its plans are real), the check of a job before the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import tempfile
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import torch

import recycle.exec.agent.node_agent
import recycle.exec.checkpoint.checkpoint
import recycle.exec.election
import recycle.exec.faults.kinds
import recycle.exec.hooks.saver
import recycle.exec.launch.agent
import recycle.exec.launch.agreement
import recycle.exec.launch.launcher
import recycle.exec.launch.node
import recycle.exec.launch.run_directory
import recycle.exec.launch.runtime
import recycle.exec.planning.planning
import recycle.exec.processes.processes
import recycle.exec.transport.formation
import recycle.exec.transport.groups
import recycle.exec.worker.main_loop
import recycle.exec.worker.member
import recycle.exec.worker.step_state
import recycle.exec.worker.worker
from recycle.cli.planner import plan_for_training
from recycle.cli.train import CLOSING_SECONDS, CLOSING_SHARE
from recycle.errors import RecycleError, RunError
from recycle.exec.checkpoint.checkpoint import write_manifest, write_stage
from recycle.exec.device import DeviceState
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.agent import AgentExit, serve
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory, lock_directory
from recycle.exec.launch.runtime import LeaderRuntime
from recycle.exec.launch.trackers import Observer
from recycle.exec.leader.actions import Action, Event, Persist, Send, Tell
from recycle.exec.leader.leader import Leader
from recycle.exec.leader.plans import common_mode
from recycle.exec.leader.state import RunDescription
from recycle.exec.members import member_name
from recycle.exec.planning.planner_process import PlannerAnswer, Question, answer
from recycle.exec.planning.run_checks import periods_of
from recycle.exec.processes.forkserver import ForkServerEnded, describe_exit
from recycle.exec.protocol import (
    Batch,
    FromWorker,
    GenerationRecord,
    LeaderMessage,
    Leaving,
    Permit,
    Start,
    WorkerMessage,
)
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.worker.member import FormingKeys, Member, MemberState
from recycle.exec.worker.specification import RunSpecification, WorkerSpecification
from recycle.exec.worker.worker import Participant, run_worker
from recycle.files import write_whole
from recycle.ir.instruction import Compute
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob
from recycle.job.shape import Worker, place_workers
from recycle.plans import Plan, failure_vector
from recycle.plans.plan import programs_of
from tests.exec.explore.drains import NodeDrain
from tests.exec.explore.faults import FAULTS, HARMLESS, Fault, kill
from tests.exec.explore.kernel import BREAK_SECONDS, Kernel, Process, Thread, Waiting, current
from tests.exec.explore.network import Selector
from tests.exec.explore.rules import CHECK_SECONDS, LONGEST, Reference, Rules, Violation
from tests.exec.explore.script import COMMAND, ScriptWorld, UserScript, job_with_script
from tests.exec.explore.stages import simulated_stages
from tests.exec.explore.store import Store
from tests.exec.explore.threads import Event as ThreadEvent
from tests.exec.explore.transport import Fabric, SimulatedTransport
from tests.exec.explore.virtual import stand_in, virtual
from tests.exec.runs import job

LIMITS = {
    "store": "etcd://127.0.0.1:1",
    "heartbeat": 1.0,
    "dead_after": 4.0,
    "hung_after": 5.0,
    "hung_factor": 4.0,
    "warm_up": 15.0,
    "form_timeout": 8.0,
    "transport_timeout": 25.0,
    "start_deadline": 40.0,
    "rejoin_deadline": 30.0,
    "store_timeout": 12.0,
    "grace": 40.0,
    "lease": 6,
    "drift": 0.0,
}
DRIFT = 0.3
COURSE = "pipelines ranks micro_batches steps tensor_parallel sharded clip surges"
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True)
class Scenario:
    """What a run begins with.

    Attributes:
        tensor_parallel, sharded, elastic, digests, clip, trace: of the job; `clip` is the largest norm of a gradient.
        replays: steps in which everything is replayed once. surges: steps with larger gradients.
        copy_seconds: time that a copy of a piece of a state takes.
        look_seconds: time that an agent takes between reading what has arrived and looking for ends of processes.
        drift_iterations: window of measured times after which slow workers get less work; 0 to measure none.
        planned: faults that the job's own injector strikes, as `recycle train --fault` takes them.
        spared: numbers of workers, a host of each stage, whose processes and nodes no fault strikes.
        restarts: of each worker by the run. returns: agents that end come back. slow_plans: share that take seconds.
        crashes: processes that end after so many of their effects: messages, requests to the store, transfers; or
            after so many of requests to write ("agent 0 writes"). With "agent 0 role" such a request is carried out
            without an answer, and the agent's leases end.
        script: what trains in place of recycle's trainer; then `checkpoint_every` and `eval_every` are its own.
        launched: `recycle train` runs all workers, without agents and a store.
        arrivals: seconds at which the agents of nodes 0, 1, … start for the first time; within the first second if
            not given, and never if negative.
        detours: numbers of messages that arrive after the next one of another sender (`Kernel.detours`).
    """

    pipelines: int = 2
    ranks: int = 2
    per_node: int = 1
    micro_batches: int = 2
    steps: int = 4
    faults: tuple[Fault, ...] = ()
    checkpoint_every: int = 0
    eval_every: int = 0
    staggered: bool = True
    tensor_parallel: int = 1
    sharded: bool = False
    elastic: bool = False
    digests: int = 0
    replays: int = 0
    clip: float = 9.0
    surges: tuple[int, ...] = ()
    copy_seconds: float = 0.0
    look_seconds: float = 0.0
    trace: bool = False
    slow_messages: float = 0.0
    seed: int = 0
    planned: tuple[str, ...] = ()
    spared: frozenset[int] = frozenset()
    restarts: int = 3
    returns: bool = True
    slow_plans: float = 0.05
    crashes: frozenset[tuple[str, int]] = frozenset()
    script: UserScript | None = None
    launched: bool = False
    arrivals: tuple[float, ...] = ()
    detours: frozenset[int] | None = None
    drift_iterations: int = 0
    optimizer_copies: int = 2

    @property
    def is_harmless(self) -> bool:
        """Whether nothing strikes but losses of the role and of connections, and no step is repeated."""
        are_short = all(f.kind in HARMLESS or (f.kind == "stall store" and f.seconds < 2.0) for f in self.faults)
        is_slow = all(text.startswith("slow") for text in self.planned)
        has_error = self.script is not None and max(self.script.fails_at, self.script.skips_at) >= 0
        return is_slow and not has_error and are_short and self.has_roles_only and not self.surges

    @property
    def has_roles_only(self) -> bool:
        """Whether no process crashes, and an agent at most loses its role."""
        return all(name.endswith(" role") for name, _ in self.crashes)

    @cached_property
    def calm(self) -> Scenario:
        """What of it the job depends on."""
        names = "per_node checkpoint_every eval_every staggered elastic digests replays trace restarts"
        names += " drift_iterations optimizer_copies"
        return self._only(f"{COURSE} {names}")

    @cached_property
    def course(self) -> Scenario:
        """What of it the losses and states depend on."""
        return self._only(COURSE)

    @cached_property
    def planning(self) -> Scenario:
        """What of it the plans depend on."""
        return self._only("pipelines ranks micro_batches staggered tensor_parallel sharded elastic replays")

    def _only(self, names: str) -> Scenario:
        named = {name: getattr(self, name) for name in names.split()}
        return Scenario(**named, script=self.script and UserScript())


@cache
def job_of(scenario: Scenario) -> PricedJob:
    own = scenario.script is None
    priced = job(
        scenario.pipelines,
        scenario.ranks,
        scenario.micro_batches,
        shape={"tensor_parallel": scenario.tensor_parallel},
        model={"seconds_per_unit": 0.1},
        planner={
            "steps": 20,
            "ahead": 0,
            "staggered": scenario.staggered,
            "layout": "elastic" if scenario.elastic else "fixed",
            "move_when": "always",
        },
        train={
            "checkpoint_every": scenario.checkpoint_every if own else 0,
            "checkpoint_deadline": 30.0,
            "checkpoint_keep": 1,
            "steps": scenario.steps,
            "trace": "all" if scenario.trace else "off",
            "sharded_optimizer": scenario.sharded,
            "optimizer_copies": scenario.optimizer_copies,
            "clip": scenario.clip,
            "non_finite": "skip",
        },
        eval={"every": scenario.eval_every if own else 0},
        cluster={"workers_per_node": scenario.per_node, "restarts": scenario.restarts, "gpu_checks": 0.0},
        integrity={"digests": scenario.digests, "every": scenario.replays},
        membership=LIMITS | ({"drift": DRIFT, "drift_iterations": many} if (many := scenario.drift_iterations) else {}),
    )
    return priced if own else job_with_script(priced)


@cache
def reference(course: Scenario) -> Reference:
    """What a run without failures computes."""
    cluster = Cluster(course)
    cluster.run()
    return cluster.rules.result


@cache
def _planned(planning: Scenario, question: Question, texts: tuple[tuple[str, str], ...]) -> PlannerAnswer:
    """`texts` are the contents of the files that fields of the question name."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        for name, text in texts:
            path = Path(folder) / f"{name}.json"
            path.write_text(text)
            question = msgspec.structs.replace(question, **{name: str(path)})
        return answer(plan_for_training, job_of(planning), None, question)


class _Planner:
    """As `PlannerProcess`: answers with quick plans, after a while."""

    is_busy = False

    def __init__(self, config: PricedJob, planner: Any, answered: Callable[[Any], Any], *_: Any) -> None:
        self._answered, self._process = answered, current().process

    def ask(self, question: Question) -> None:
        kernel, cluster = self._process.kernel, CLUSTER
        paths = {"within": question.within, "profile": question.profile}
        texts = tuple((name, Path(path).read_text()) for name, path in paths.items() if path is not None)
        asked = msgspec.structs.replace(question, quick=not question.moves, within=None, profile=None)
        answered = msgspec.structs.replace(_planned(cluster.scenario.planning, asked, texts), question=question)
        seconds = (
            kernel.draw(2.0, 8.0) if kernel.draws.random() < cluster.scenario.slow_plans else kernel.draw(0.01, 0.3)
        )
        call = partial(cluster.run_in, self._process, partial(self._answered, answered))
        kernel.after(seconds, call)

    def restart_if_ended(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Waker:
    """As `Waker`."""

    def __init__(self) -> None:
        self.waiting, self.is_set = Waiting(), False

    def wake(self) -> None:
        self.is_set = True
        CLUSTER.kernel.wake(self.waiting)

    def clear(self) -> None:
        self.is_set = False

    def close(self) -> None:
        pass


class _Processes:
    """As `LocalProcesses`: starts processes that run `run_worker`."""

    def __init__(
        self, server: object, run: RunSpecification, places: object, waker: _Waker, tensor_parallel: int = 1
    ) -> None:
        self._run, self._waker, self._agent = run, waker, current().process
        self._tensor_ranks = range(tensor_parallel)
        self.processes: dict[Worker, list[Process]] = {}
        self._ended: dict[Worker, tuple[str, str]] = {}
        self._hub: Selector | None = None
        self._has_server = True
        if CLUSTER.agents.get(self._agent.host) is self._agent:
            CLUSTER.processes[self._agent.host] = self

    def watch(self, hub: Selector) -> None:
        self._hub = hub
        hub.waiting.append(self._waker.waiting)

    def start(self, order: Start) -> None:
        worker, kernel, rules = Worker.parse(order.worker), CLUSTER.kernel, CLUSTER.rules
        assert CLUSTER.homes[Worker.parse(order.place)] == self._agent.host, order
        self.processes[worker] = []
        for rank in self._tensor_ranks:
            name = f"worker {member_name(worker, rank)}.{order.incarnation}"
            process = Process(kernel, name, self._agent.host, self._agent, worker, order.incarnation)
            process.tensor_rank = rank
            self.processes[worker].append(process)
            kernel.log(f"{name} starts on node {process.host}")
            specification = WorkerSpecification(
                run=self._run,
                worker=order.worker,
                incarnation=order.incarnation,
                generation=order.generation,
                restored=order.restored,
                tensor_rank=rank,
            )
            rules.disturb(2.0)
            process.at_end.append(lambda process=process: rules.ended_process(process))
            notice = partial(self._notice, worker, self.processes[worker], process)
            process.at_end.append(lambda notice=notice: kernel.after(kernel.draw(0.0, 0.05), notice))
            process.run(partial(_live, msgspec.json.encode(specification).decode()), kernel.draw(0.3, 2.0))

    def _notice(self, worker: Worker, processes: list[Process], process: Process) -> None:
        assert process.code is not None
        is_last = not any(other.is_alive for other in processes)
        if self.processes.get(worker) is processes and worker not in self._ended and (process.code or is_last):
            how = process.how if process.how.startswith("killed") else describe_exit(process.code)
            self._ended[worker] = how, process.lines
            CLUSTER.kernel.wake(self._waker.waiting)
        if process.code:
            for other in processes:
                kill(other)

    def running(self, worker: Worker) -> bool:
        return worker in self.processes

    def kill(self, worker: Worker) -> None:
        for process in self.processes.get(worker, []):
            CLUSTER.kernel.after(CLUSTER.kernel.draw(0.0, 0.1), partial(kill, process))

    def lose_server(self) -> None:
        self._has_server = False
        self.end(0.0)
        self._waker.wake()

    def take_ends(self) -> dict[Worker, tuple[str, str]]:
        if not self._has_server:
            raise ForkServerEnded("the fork server was killed by SIGKILL")
        if seconds := CLUSTER.scenario.look_seconds:
            CLUSTER.kernel.park(seconds=seconds)
        ended, self._ended = self._ended, {}
        for worker in ended:
            del self.processes[worker]
        return ended

    def wait(self, seconds: float) -> None:
        if not (self._waker.is_set or self._ended or (self._hub is not None and self._hub.is_readable)):
            CLUSTER.kernel.park(self._waker.waiting, seconds)
        self._waker.clear()

    def end(self, patience: float) -> None:
        for processes in self.processes.values():
            for process in processes:
                kill(process)


def _live(specification: str) -> None:
    run = run_worker if CLUSTER.script is None else CLUSTER.script.run
    try:
        run(specification)
    except RuntimeError as error:
        if "struck by the fault" not in str(error):
            raise
        current().process.end("", 1)


class _Member(Member):
    """Tells the rules what a process says, and knows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        CLUSTER.rules.members[current().process] = self._state

    def send(self, message: WorkerMessage) -> None:
        CLUSTER.rules.said(self.name, self._state.generation, message)
        super().send(message)


class _Participant(Participant):
    """A process that is not forked, and has neither signals nor a device."""

    def __init__(self, text: str, device_state: Callable[[], DeviceState] = DeviceState) -> None:
        self.specification = specification = msgspec.json.decode(text, type=WorkerSpecification)
        run, self.job = specification.run, CLUSTER.job
        self.worker, self.tensor_rank = Worker.parse(specification.worker), specification.tensor_rank
        self.tensor_parallel = self.job.grid.tensor_parallel
        self.name = member_name(self.worker, self.tensor_rank)
        self.is_first = not specification.generation or specification.restored is not None
        self._links, self._keys = None, FormingKeys(run.agent)
        settings = TransportSettings(
            self._keys, torch.device("cpu"), run.address, (self.tensor_rank, self.tensor_parallel), self.job.membership
        )
        self.transport = SimulatedTransport(CLUSTER.fabric, settings)
        self.member = _Member(
            run.agent,
            self.name,
            specification.incarnation,
            self.job.membership.heartbeat,
            self.transport.wake,
            self.end,
            specification.generation,
            device_state,
        )
        CLUSTER.leave_calls[current().process] = partial(self._leave, Leaving(specification.incarnation))

    def _leave(self, message: Leaving) -> None:
        with contextlib.suppress(RunError):  # the agent is gone, and the process ends by itself
            self.member.send(message)

    def end(self, reason: str, code: int = 3) -> Any:
        if CLUSTER.script is not None:
            current().process.lines = f"worker {self.name} ends: {reason}"
        current().process.end(f"ended with exit code {code}: {reason}" if code != 3 else "", code)
        CLUSTER.kernel.log(f"worker {self.name} says: {reason}")
        CLUSTER.kernel.park()


def _signal(process_id: int, number: int) -> None:
    """A process sends itself a signal: a fault of the job's own injector."""
    process = current().process
    CLUSTER.kernel.log(f"{process.name} is struck by signal {number}")
    match number:
        case signal.SIGKILL:
            kill(process)
        case signal.SIGSTOP:
            process.stop(LONGEST)
        case signal.SIGTERM:
            CLUSTER.leave_calls[process]()
    CLUSTER.kernel.park(seconds=0.0)


class _State(MemberState):
    """Tells the rules what a process hears."""

    def take(self, message: LeaderMessage) -> None:
        CLUSTER.rules.heard(current().process, message)
        super().take(message)


class _Runtime(LeaderRuntime):
    """The launcher's, which writes to no store."""

    def __init__(self, **named: Any) -> None:
        process, written = current().process, CLUSTER.rules.written

        def register(action: Persist) -> None:
            for name, value in (("record", action.record), ("cursor", action.cursor)):
                if value is not None:
                    written(name, msgspec.msgpack.encode(value), process)

        written("role", b"", process)
        super().__init__(**named | {"register": register})


class _Leader(Leader):
    """Tells the cluster what it takes and decides, and the rules what it thinks."""

    def __init__(self, run: RunDescription, now: float) -> None:
        super().__init__(run, now)
        CLUSTER.rules.leader = self

    def take(self, now: float, message: Any) -> list[Action]:
        CLUSTER.rules.took(message)
        for said in (*message.said, *message.ended) if isinstance(message, Batch) else (message,):
            CLUSTER.reach(type(said.message if isinstance(said, FromWorker) else said).__name__)
        actions = super().take(now, message)
        for action in actions:
            CLUSTER.rules.decided(action)
            CLUSTER.reach(moment_of(action))
        return actions


def moment_of(action: Action) -> str:
    match action:
        case Send(order=told) | Tell(message=told):
            return f"{type(told).__name__} {told.what}" if isinstance(told, Permit) else type(told).__name__
        case Event(kind=kind):
            return kind
        case Persist(cursor=cursor):
            return cursor.phase
    return type(action).__name__


class _Request(RunRequest):
    """Needs no fork server, and finds nothing."""

    def fork_server(self) -> Any:
        return types.SimpleNamespace(close=lambda: None, log_to=lambda path: None)

    def checked_by(self, server: object, processes: int) -> RunRequest:
        return self


class _Directory(RunDirectory):
    """Is closed when its process ends."""

    _is_closed = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        current().process.at_end.append(self.close)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):  # `open_agreed_directory` has closed the lock
                super().close()


def _lock(path: Path, kind: int) -> int | None:
    """As `lock_directory`; the lock ends with the process that has it."""
    descriptor = lock_directory(path, kind)
    if descriptor is not None:
        kept = os.dup(descriptor)

        def release() -> None:
            fcntl.flock(kept, fcntl.LOCK_UN)
            os.close(kept)

        current().process.at_end.append(release)
    return descriptor


def _close(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # `_lock` has another descriptor of it
    os.close(descriptor)


def _unless_full(write: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
    """A function that writes to the disk, which may be full."""

    def written(*arguments: Any, **named: Any) -> Any:
        if CLUSTER.full_until > CLUSTER.kernel.now:
            raise error()
        return write(*arguments, **named)

    return written


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _load(path: Path) -> Schedule:
    try:
        text = path.read_text()
    except OSError:
        return Schedule.load(path)
    return _loads(text, str(path.name))


_loads = cache(Schedule.loads)
_KNOWN: dict[object, tuple[object, Any]] = {}


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pure function of immutable objects, cached by their identity; texts and sets are compared."""

    def known(*arguments: Any) -> Any:
        key = function, *(a if isinstance(a, str | frozenset) else id(a) for a in arguments)
        if key not in _KNOWN:
            _KNOWN[key] = arguments, function(*arguments)
        return _KNOWN[key][1]

    return known


class _Observer(Observer):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def committed(self, line: dict[str, Any]) -> None:
        self._cluster.rules.wrote(line)

    def event(self, event: dict[str, Any]) -> None:
        fields = {name: value for name, value in event.items() if name != "time"}
        agent = current().process
        self._cluster.kernel.log(f"node {agent.host} {fields}"[:300])
        self._cluster.rules.logged(event, agent)


_SCHEDULES = types.SimpleNamespace(load=_load, loads=_loads)
_MAIN_LOOP, _PLANNING = recycle.exec.worker.main_loop, recycle.exec.planning.planning
INTERVALS: list[tuple[Any, str, Any]] = [
    (recycle.exec.transport.groups, "OVER_SECONDS", 0.2),
    (recycle.exec.transport.formation, "PAUSE_SECONDS", (0.05, 0.2)),
    (recycle.exec.worker.step_state, "COMMIT_POLL_SECONDS", 0.05),
]
"""Of polls; the real ones are shorter."""
PURE: list[tuple[Any, str, Any]] = [
    (_MAIN_LOOP, "Schedule", _SCHEDULES),
    (_MAIN_LOOP, "schedule_hash", _once(_MAIN_LOOP.schedule_hash)),
    (_MAIN_LOOP, "evaluation_schedule", _once(_MAIN_LOOP.evaluation_schedule)),
    (
        _MAIN_LOOP,
        "programs_of",
        lambda schedule, job, disputed: (
            programs_of(schedule, job, disputed) if disputed else _programs(schedule, CLUSTER.job)
        ),
    ),
    (_PLANNING, "Schedule", _SCHEDULES),
    (_PLANNING, "schedule_hash", _once(_PLANNING.schedule_hash)),
    (_PLANNING, "check_for_run", _once(_PLANNING.check_for_run)),
    (_PLANNING, "Plan", types.SimpleNamespace(from_text=cache(Plan.from_text))),
    (Job, "to_toml", _once(Job.to_toml)),
    (Plan, "for_processes", _once(Plan.for_processes)),
    (PricedJob, "shape", property(_once(PricedJob.shape.fget))),
]
"""What repeats in every run, and is computed once."""
_programs = _once(lambda schedule, job: programs_of(schedule, job, []))
OVER = AgentExit.DONE, AgentExit.ENDED_BEFORE, AgentExit.STOPPED
Exit = AgentExit | RecycleError | KeyboardInterrupt
CLUSTER: Cluster


class Cluster:
    """One run. `run` returns what its agents returned, or raises Violation."""

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.scenario, self.job = scenario, job_of(scenario.calm)
        self.kernel = Kernel(random.Random(scenario.seed), trace)
        self.kernel.slow_messages, self.kernel.crashes = scenario.slow_messages, set(scenario.crashes)
        self.kernel.detours = scenario.detours
        places = place_workers(self.job.shape, scenario.per_node)
        if scenario.launched:
            places = [list(self.job.shape.workers())]
        self.homes = {worker: node for node, workers in enumerate(places) for worker in workers}
        self.script = None if scenario.script is None else ScriptWorld(self, scenario.script)
        self.rules = Rules(self)
        self.store = Store(self.kernel, lambda *change: self.rules.written(*change))
        self.fabric = Fabric(self.kernel, self.job.membership.dead_after)
        self.workers = list(self.job.shape.workers())
        self.nodes = range(len(places))
        self.agents: dict[int, Process] = {}
        self.processes: dict[int, _Processes] = {}
        self.leave_calls: dict[Process, Callable[[], None]] = {}
        self.exits: dict[int, list[Exit]] = {node: [] for node in self.nodes}
        self.stops = defaultdict[int, ThreadEvent](ThreadEvent)
        self.full_until = 0.0
        self.drains: list[NodeDrain] = []
        self.is_resumed, self.resumes_at = False, 0.0
        self.moments = Counter[str]()
        self._aimed = defaultdict[tuple[str, int], list[Fault]](list)
        for fault in scenario.faults:
            self._aimed[fault.moment, fault.number].append(fault)
        self.last_fault = max((fault.time + fault.seconds for fault in scenario.faults), default=0.0)
        self.last_fault = max(self.last_fault, *scenario.arrivals, 0.0)
        self.awaited = set[int]()

    def run(self, directory: Path | None = None) -> Mapping[int, list[Exit]]:
        global CLUSTER
        scenario = self.scenario
        if scenario != scenario.course:
            self.rules.reference = reference(scenario.course)
        CLUSTER = self
        path = directory or Path(tempfile.mkdtemp(prefix="recycle-explore-", dir=FOLDER))
        self.request = _Request(
            job=self.job,
            steps=scenario.steps,
            schedule=None,
            planner=plan_for_training,
            faults=[parse_fault(text) for text in scenario.planned],
            observer=_Observer(self),
            command=() if scenario.script is None else COMMAND,
            script_restarts=0 if scenario.script is None else scenario.script.restarts,
        )
        self.path = path
        modules = recycle.exec
        others = [
            (modules.launch.node, "LocalProcesses", _Processes),
            (modules.launch.node, "Waker", _Waker),
            (modules.planning.planning, "PlannerProcess", _Planner),
            (modules.launch.run_directory, "os", stand_in(os, write=_unless_full(os.write, _no_space))),
            (modules.planning.planning, "write_whole", _unless_full(write_whole, lambda: RecycleError("no space"))),
            (modules.hooks.saver, "write_stage", _unless_full(write_stage, lambda: RunError("no space"))),
            (modules.checkpoint.checkpoint, "write_manifest", _unless_full(write_manifest, _no_space)),
            (modules.launch.agreement, "RunDirectory", _Directory),
            (modules.launch.launcher, "RunDirectory", _Directory),
            (modules.launch.launcher, "LeaderRuntime", _Runtime),
            (modules.launch.launcher, "price", lambda job: self.job),
            (modules.launch.launcher, "request_run", lambda job, **named: self.request),
            (modules.launch.launcher, "require_open_files", lambda *_: None),
            (modules.launch.agreement, "lock_directory", _lock),
            (modules.launch.agreement, "os", stand_in(os, close=_close)),
            (modules.election, "open_client", lambda url, settings: self.store.client(settings)),
            (modules.launch.agent, "rarely_collect_garbage", lambda: None),
            (modules.launch.agent, "require_open_files", lambda *_: None),
            (modules.worker.worker, "Participant", _Participant),
            (modules.worker.member, "MemberState", _State),
            (modules.launch.runtime, "Leader", _Leader),
            (modules.faults.kinds, "os", stand_in(os, kill=_signal)),
            *simulated_stages(scenario.tensor_parallel, scenario.surges, scenario.copy_seconds),
            *INTERVALS,
            *PURE,
            *([] if self.script is None else self.script.stand_ins(_Participant)),
        ]
        try:
            # Threads that wait within `no_grad` leave the gradient mode as they please.
            with torch.inference_mode(), virtual(self.kernel, others):
                for node, seconds in zip(self.nodes, scenario.arrivals, strict=False):
                    if seconds >= 0.0:
                        self.awaited.add(node)
                        self.kernel.after(seconds, partial(self.start_agent, node))
                for node in self.nodes if not scenario.arrivals else ():
                    self.kernel.after(self.kernel.draw(0.0, 1.0), partial(self.start_agent, node))
                self.kernel.after(CHECK_SECONDS, self.rules.check)
                for fault in self._aimed.pop(("", 1), ()):
                    self.kernel.after(fault.time, partial(self.strike, fault))
                self._live()
                self.rules.ended()
                if self.rules.may_be_resumed:
                    self._resume()
                    self._live()
                    self.rules.ended()
        finally:
            for process in list(self.kernel.processes):
                process.end("the run is over", 0)
            if self.script is not None:
                self.script.close()
            if directory is None:
                shutil.rmtree(path, ignore_errors=True)
        return self.exits

    def _live(self) -> None:
        latest = self.last_fault + LONGEST
        try:
            self.kernel.run(latest)
        except (Violation, AssertionError):
            raise
        except Exception as error:
            raise Violation("exception", f"{type(error).__name__}: {error}") from error
        if not self.kernel.is_finished:
            raise Violation("progress", f"the run has not ended {LONGEST:g} s after the last fault")

    def _resume(self) -> None:
        """Start all agents again, as a user does whose run has ended early. Nothing strikes them."""
        kernel = self.kernel
        for process in list(kernel.processes):
            process.end("its run has ended", 0)
        kernel.log(f"the run is resumed, after {self.exits}")
        self.is_resumed, kernel.is_finished = True, False
        self.fabric = Fabric(kernel, self.job.membership.dead_after)
        if self.script is not None:
            self.script.mend()
        self.scenario = replace(self.scenario, faults=(), crashes=frozenset(), spared=frozenset())
        kernel.crashes.clear()
        self._aimed.clear()
        self.exits = {node: [] for node in self.nodes}
        self.rules = Rules(self, self.rules)
        later = max(0.0, self.last_fault - kernel.now) + BREAK_SECONDS[1]
        self.last_fault = self.resumes_at = kernel.now + later
        for node in self.nodes:
            kernel.after(kernel.draw(later, later + 1.0), partial(self.start_agent, node))
        kernel.after(later, self.rules.check)

    @property
    def has_ended(self) -> bool:
        """Whether some agent says that the run is over."""
        every = [exit for exits in self.exits.values() for exit in exits]
        return any(
            exit in OVER
            or (isinstance(exit, RunError) and not self._is_again(exit))
            or "which etcd does not have" in str(exit)
            for exit in every
        )

    @staticmethod
    def _is_again(error: RecycleError) -> bool:
        return isinstance(error, ForkServerEnded) or "does not answer" in str(error)

    def run_in(self, process: Process, call: Callable[[], Any]) -> None:
        """Run something in a thread of a process that lives."""
        if process.is_alive:
            Thread(call, process=process).start()

    def start_agent(self, node: int) -> None:
        is_first = node in self.awaited
        self.awaited.discard(node)
        if node in self.agents or (self.has_ended and not is_first) or self.kernel.now < self.resumes_at:
            return
        self.agents[node] = process = Process(self.kernel, f"agent {node}", node)
        self.stops[node] = stop = ThreadEvent()
        self.kernel.log(f"{process.name} starts")
        self.rules.disturb()

        def ended() -> None:
            if self.agents.get(node) is process:
                del self.agents[node]
            self._end_if_over(process)
            exits = self.exits[node]
            self.rules.disturb()
            if not self.scenario.returns:
                return
            if process.code != 0 or (exits and exits[-1] not in OVER):
                self.kernel.after(self.kernel.draw(1.0, 12.0), partial(self.start_agent, node))

        process.at_end.append(ended)
        process.run(partial(self._serve, node, stop, 0))

    def _end_if_over(self, process: Process) -> None:
        others = [other for other in self.kernel.processes if other.name.startswith("agent ") and other is not process]
        self.kernel.is_finished = not (others or self.awaited) and (self.has_ended or not self.scenario.returns)

    def start_another(self, node: int, more_steps: int) -> None:
        """Start one more agent of a node."""
        process = Process(self.kernel, f"agent {node} again", node)
        self.kernel.log(f"{process.name} starts")
        self.rules.disturb()
        process.at_end.append(partial(self._end_if_over, process))
        process.run(partial(self._serve, node, ThreadEvent(), more_steps))

    def terminate(self, node: int) -> None:
        """SIGTERM to an agent; `end_at_termination` interrupts it before its time is over, and then ends it."""
        if (agent := self.agents.get(node)) is None:
            return
        grace = self.job.membership.grace
        closing = min(CLOSING_SECONDS, CLOSING_SHARE * grace)
        self.run_in(agent, self.stops[node].set)
        self.kernel.after(grace - closing, agent.interrupt)
        self.kernel.after(grace, partial(self.rules.must_have_ended, agent))

    def _serve(self, node: int, stop: ThreadEvent, more_steps: int) -> None:
        try:
            if self.scenario.launched:
                train = recycle.exec.launch.launcher.train
                result = train(self.job, self.path, planner=plan_for_training, resume=self.is_resumed, stop=stop)  # type: ignore[arg-type]
                exit: Exit = AgentExit.STOPPED if result.ended_early else AgentExit.DONE
            else:
                exit = serve(
                    replace(self.request, steps=self.request.steps + more_steps),
                    node=node,
                    run="run",
                    directory=self.path,
                    address=f"node{node}",
                    resume=self.is_resumed,
                    stop=stop,  # type: ignore[arg-type]
                )
        except (RecycleError, KeyboardInterrupt) as error:
            exit = error
        self.kernel.log(f"agent {node}: {exit!r}")
        if more_steps:
            self.rules.other_run_exited(exit)
            return
        self.exits[node].append(exit)
        self.rules.exited(node, exit)

    def periods(self, record: GenerationRecord, speed: Mapping[str, float]) -> tuple[float, float] | None:
        """Of the plan in use, and of one for these speeds; None if a worker has no work to be measured by."""
        path = self.path / "plans" / f"{record.plan}.json"
        schedule = _load(path) if path.is_file() else None  # the disk may have been full
        if schedule is None or not all(any(isinstance(i, Compute) for i in schedule.program(w)) for w in schedule.live):
            return None
        profile = replace(self.job.prices, speed=dict(speed))
        vector, failed = failure_vector(self.job.shape, schedule.failed), tuple(map(str, sorted(schedule.failed)))
        texts = (("profile", msgspec.json.encode(profile).decode()),) if speed else ()
        answered = _planned(self.scenario.planning, Question(vector, quick=True, failed=failed), texts)
        periods = periods_of(schedule, self.job, profile)
        mode = common_mode(periods, answered.facts.periods)
        return periods[mode], answered.facts.periods[mode]

    # Faults.

    def strike(self, fault: Fault) -> None:
        self.kernel.log(f"fault: {fault}")
        self.rules.disturb(fault.seconds)
        FAULTS[fault.kind](self, fault)

    def reach(self, moment: str) -> None:
        """A leader takes or decides something; what is aimed at it strikes, perhaps this process."""
        self.moments[moment] += 1
        for fault in self._aimed.pop((moment, self.moments[moment]), ()):
            self.strike(fault)
            if not current().process.is_alive:
                self.kernel.park()

    def drain(self, node: int, seconds: float | None) -> None:
        """A user drains a node."""
        self.drains.append(NodeDrain(self, node, seconds))

    def process_of(self, fault: Fault) -> Process | None:
        """A process of the worker with the fault's number."""
        worker = self.workers[fault.target % len(self.workers)]
        of_node = self.processes.get(self.node_with(worker))
        processes = [] if of_node is None else of_node.processes.get(worker, [])
        return self.kernel.draws.choice(processes) if processes else None

    def node_with(self, worker: Worker) -> int:
        """The node of a worker, which may have got the place of another one."""
        places = self.rules.record.places if self.rules.record else {}
        return self.homes[Worker.parse(places.get(str(worker), str(worker)))]

    def node_of(self, fault: Fault) -> int:
        return fault.target % len(self.nodes)

    def on_node(self, node: int) -> Iterator[Process]:
        return (process for process in list(self.kernel.processes) if process.host == node)
