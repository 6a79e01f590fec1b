"""A simulated world around the leader: a virtual clock, processes, delays, faults, and what its actions do."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import msgspec

from recycle.exec.agent.node_agent import StandingOrders
from recycle.exec.checkpoint.completion import GENERATION_FIELDS
from recycle.exec.leader.actions import (
    Action,
    AgentAbsent,
    Ask,
    Begin,
    CheckpointCompleted,
    CheckpointFound,
    CompleteCheckpoint,
    DiscardCheckpoint,
    EndEarly,
    Event,
    Fail,
    FindCheckpoint,
    Finish,
    Line,
    Persist,
    Planned,
    PreparedPlan,
    Question,
    Rewind,
    Send,
    StoredCheckpoint,
    Tell,
    Tick,
    Waiting,
)
from recycle.exec.leader.leader import Leader
from recycle.exec.leader.state import PlannedFault, RunDescription
from recycle.exec.protocol import (
    Batch,
    Commit,
    GenerationRecord,
    Heartbeat,
    Hello,
    Kill,
    LeaderMessage,
    Refused,
    Rejected,
    Start,
)
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts, joined, layers_of, without
from recycle.plans.shards import Shards, held_by
from tests.exec.leader.agent import Agent, Connection
from tests.exec.leader.faults import strike
from tests.exec.leader.process import Process
from tests.exec.leader.rules import Rules, Violation

LONGEST = 400.0
"""Virtual seconds after the last fault in which every run has to end."""


@dataclass(frozen=True)
class Scenario:
    """What a seed draws before the world begins.

    Attributes:
        job: what is trained.
        steps: iterations to train.
        faults: that the leader knows; one whose text is "compute" or "gather" ends its worker's process there.
        absent, restarts: as of `RunDescription`.
        strikes: (time, kind, worker) of faults that the leader does not know; without a worker they strike any.
        crashes: numbers of the actions before which the leader ends.
        nodes: that the workers lie on.
        plans_fail, fails_to_start, disk_fails: whether planners, starts and checkpoints may fail.
        is_wrong: a fault changes what a worker computes or holds, so that the run may fail for that.
        is_struck: a process may end while it starts.
        large_norms: share of iterations whose gradient has to be clipped.
        slow_messages: share of messages that take seconds.
        eagerness: share of messages after which the leader decides at once.
        resumed: step of the checkpoint that the run begins with; None for none.
    """

    job: PricedJob
    steps: int
    faults: tuple[PlannedFault, ...] = ()
    absent: frozenset[Worker] = frozenset()
    restarts: int = 0
    strikes: tuple[tuple[float, str, Worker | None], ...] = ()
    crashes: frozenset[int] = frozenset()
    nodes: int = 1
    plans_fail: bool = False
    fails_to_start: bool = False
    disk_fails: bool = False
    is_wrong: bool = False
    is_struck: bool = False
    large_norms: float = 0.0
    slow_messages: float = 0.0
    eagerness: float = 0.5
    resumed: int | None = None


class Checkpoint(NamedTuple):
    """A complete checkpoint; `origin` as of `State`."""

    commit: Commit
    origin: int


@dataclass
class Figures:
    """What happened in a world."""

    commits: int = 0
    deaths: int = 0
    leaders: int = 0
    generations: int = 0
    seconds: float = 0.0
    outcome: str = ""
    rewinds: int = 0
    disturbed: float = 0.0
    events: dict[str, int] = field(default_factory=dict)


class World:
    """One history of one run.

    Args:
        scenario: what it begins with.
        draws: everything else that is random.
        trace: takes the history, line by line; None for none.

    Attributes:
        now: virtual seconds.
        nodes: node -> its agent; a dead one until another one is started.
        agents: node -> the connection of its agent, as the leader has it.
        running: the processes that have not ended, in the order in which they were started.
        cuts: processes that cannot reach each other.
        nans: gradients to come that are not a number.
        files: written parts of checkpoints, each with the generation that its state is from.
        leaders: how many there were.
    """

    def __init__(self, scenario: Scenario, draws: random.Random, trace: Callable[[str], None] | None = None) -> None:
        self.scenario, self.job, self.faults, self.random = scenario, scenario.job, scenario.faults, draws
        self._trace = trace
        self.now, self.figures = 0.0, Figures()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.initial = Hosts.at_start(self.job, None)
        self.shards = Shards(self.job, self.initial) if self.job.train.sharded_optimizer else None
        self._workers = list(self.job.shape.workers())
        count_per_node = math.ceil(len(self._workers) / scenario.nodes)
        self.homes = {worker: place // count_per_node for place, worker in enumerate(self._workers)}
        self.nodes: dict[int, Agent] = {}
        self.agents: dict[int, Connection] = {}
        self._sessions = count()
        self.running: list[Process] = []
        self.rules = Rules(self)
        self.there: dict[tuple[int, object], set[str]] = {}
        self.cuts: set[frozenset[Process]] = set()
        self._plans: dict[str, PreparedPlan] = {}
        self.nans = 0
        self._nan_runs: dict[tuple[int, int], bool] = {}
        self.files: dict[str, int] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self._completing: set[int] = set()
        self._standing = StandingOrders()
        self._arrivals: dict[object, float] = {}
        self._leader_node = 0
        self.leader: Leader | None = None
        self.leaders = self._actions = 0
        self.stalls_until = 0.0
        self._extra_tick = False
        self.may_end_early = self.is_ending = False
        self.is_over = self.has_stalled = False

    # Time.

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def draw(self, low: float, high: float) -> float:
        """Seconds between the two."""
        return low + (high - low) * self.random.random()

    def pause(self) -> float:
        """Seconds that something short takes; now and then it is not short."""
        return self.draw(0.5, 5.0) if self.random.random() < 0.02 else self.draw(0.01, 0.2)

    def _delay(self) -> float:
        if self.random.random() < self.scenario.slow_messages:
            return self.draw(0.2, 4.0)
        return self.draw(0.001, 0.05)

    def in_order(self, channel: object, call: Callable[[], None], delay: float | None = None) -> None:
        """Have something arrive after all that was sent on the channel before."""
        arrival = max(self.now + (self._delay() if delay is None else delay), self._arrivals.get(channel, 0.0))
        self._arrivals[channel] = arrival
        self.after(arrival - self.now, call)

    def log(self, text: str) -> None:
        """Write the history."""
        if self._trace is not None:
            self._trace(f"{self.now:9.3f} {text}")

    def run(self) -> Figures:
        """Live through it. Raises Violation."""
        scenario = self.scenario
        if scenario.resumed is not None:
            step = scenario.resumed
            self.checkpoints[step] = Checkpoint(Commit(step, 1.0, 0.1, 1.0, recent=[0.1]), 0)
            self.rules.resumed(step)
        for node in sorted(set(self.homes.values())):
            self._start_agent(node)
        for time, kind, worker in scenario.strikes:
            self.after(time, partial(strike, self, kind, worker))
        self._elect()
        while not self.is_over:
            time, _, call = heapq.heappop(self._events)
            if time > self.figures.disturbed + LONGEST:
                raise Violation("end", f"the run has not ended {LONGEST:g} s after the last fault")
            self.now = time
            call()
        self.figures.commits, self.figures.leaders, self.figures.seconds = self.rules.commits, self.leaders, self.now
        record = self.rules.record
        self.figures.generations = 0 if record is None else record.generation
        return self.figures

    # The leader.

    def _elect(self) -> None:
        """The agent of some node begins to lead."""
        alive = [node for node, agent in self.nodes.items() if agent.is_alive]
        alive = [node for node in alive if not self.nodes[node].is_leaving] or alive
        if not alive or self.is_over:
            self.after(0.5, self._elect)
            return
        self._leader_node = self.random.choice(alive)
        scenario, rules = self.scenario, self.rules
        self.leaders += 1
        self.figures.disturbed = self.now
        self.log(f"leader {self.leaders} begins on node {self._leader_node}")
        self.leader = leader = Leader(
            RunDescription(
                job=self.job,
                steps=scenario.steps,
                initial=self.initial,
                homes=self.homes,
                absent=scenario.absent,
                faults=scenario.faults,
                restarts=scenario.restarts,
            ),
            self.now,
        )
        record, cursor = rules.record, rules.cursor
        kept = frozenset(self.checkpoints)
        if record is None:
            stored = None if scenario.resumed is None else self._stored(scenario.resumed)
            begin = Begin(checkpoint=stored, generation=7 if stored else 0, kept=kept)
        else:
            plan = self._plans.get(record.plan)
            hosts = {digest: plan.hosts for digest, plan in self._plans.items() if plan.hosts is not None}
            if plan is not None and self.random.random() < 0.1:
                plan = None
            begin = Begin(self._leader_node, record, cursor, plan, hosts, kept=kept)
        self._standing = StandingOrders()
        self.give(begin)
        if self.is_ending and self.random.random() < 0.5:
            self.after(self.draw(0, 5), lambda: self.give(EndEarly()))
        self.after(self.draw(0.0, 0.5), lambda: self._tick(leader))

    def _tick(self, leader: Leader) -> None:
        if self.leader is not leader:
            return
        if self.stalls_until > self.now:
            self.after(self.stalls_until - self.now, lambda: self._tick(leader))
            return
        self.after(self.job.membership.heartbeat / 2, lambda: self._tick(leader))
        self._decide(self._take_heartbeats())

    def _tick_soon(self) -> None:
        """The leader looks at a message that has come."""
        if self._extra_tick or self.random.random() >= self.scenario.eagerness:
            return
        self._extra_tick = True

        def tick() -> None:
            self._extra_tick = False
            if self.stalls_until <= self.now:
                self._decide(False)

        self.after(0.02, tick)

    def _decide(self, judges_beats: bool) -> None:
        while True:
            committed = self.rules.committed
            self.give(Tick(judges_beats))
            judges_beats = False
            if self.rules.committed == committed:
                return

    def give(self, message: Any) -> None:
        if self.leader is None or self.is_over:
            return
        if self._trace is not None and not isinstance(message, Tick):
            self.log(f"  -> {_short(message)}")
        try:
            actions = self.leader.take(self.now, message)
        except Exception as error:
            raise Violation("exception", f"{type(error).__name__}: {error}") from error
        for action in actions:
            self._actions += 1
            if self._actions in self.scenario.crashes:
                self._crash(action)
                return
            self._carry_out(action)

    def _crash(self, action: Action) -> None:
        """The leader ends before an action; the record may be written and the cursor not."""
        self.log(f"leader {self.leaders} ends before {_short(action)}")
        if isinstance(action, Persist) and action.record is not None and self.random.random() < 0.5:
            self.rules.persisted(action, is_partial=True)
        self._depose()

    def _depose(self) -> None:
        """The leader ends; another starts later. Agents notice with a delay."""
        leader, self.leader, self._extra_tick = self.leader, None, False
        self.agents.clear()
        self._completing.clear()
        for agent in self.nodes.values():
            if (connection := agent.connection) is not None and connection.leader is leader:
                seconds = 0.0 if agent.node == self._leader_node else self.draw(0.0, 1.0)
                self.after(seconds, partial(agent.disconnect, connection))
        self.after(self.draw(0.1, 8.0), self._elect)

    def _take_heartbeats(self) -> bool:
        """Give the leader the heartbeats of its agents; whether they are judged."""
        if self.random.random() < 0.1:
            return False
        beats: dict[str, Heartbeat] = {}
        for process in self.running:
            connection = self.agents.get(process.agent.node)
            if process.is_silent or connection is None or connection.is_cut or connection.agent is not process.agent:
                continue
            count = int((self.now - process.started) / self.job.membership.heartbeat)
            longest = None if math.isnan(process.longest) else process.longest
            beat = Heartbeat(count, process.progress, process.is_waiting, "1F", longest)
            beats |= dict.fromkeys(process.members, beat)
        self.give(Batch(beats=beats))
        return True

    def _carry_out(self, action: Action) -> None:
        if self._trace is not None:
            self.log(f"{_short(action)}")
        match action:
            case Persist():
                self.rules.persisted(action)
            case Tell(message=message):
                self.rules.told(message)
                self._tell(message)
            case Event(kind=kind, fields=fields):
                self.rules.logged(kind, fields)
                self.figures.events[kind] = self.figures.events.get(kind, 0) + 1
            case Line(line=line):
                self.rules.wrote(line)
            case Send(node=node, order=Start() as start):
                self.rules.started(node, start)
                self._send(node, start)
            case Send(node=node, order=Kill(worker=worker, incarnation=incarnation) as kill):
                for process in self.running:
                    process.is_to_end |= process.name == worker and process.incarnation <= incarnation
                self._send(node, kill)
            case Refused():
                pass
            case Ask(question=question):
                self._ask(question)
            case DiscardCheckpoint(step=step):
                self._remove(step)
            case CompleteCheckpoint():
                self._complete(action)
            case FindCheckpoint(upto=upto):
                leader, steps = self.leader, self.checkpoints_upto(upto)
                stored = self._stored(steps[-1]) if steps else None
                self.after(self.draw(0.1, 2.0), lambda: self._give_to(leader, CheckpointFound(stored)))
            case Rewind(step=step, checkpoints=checkpoints):
                self.rules.rewound(step)
                self.figures.rewinds += 1
                if checkpoints:
                    self._completing = {at for at in self._completing if at <= step}
                    for at in [at for at in self.checkpoints if at > step]:
                        self._remove(at)
            case Finish():
                self.rules.finished(action)
                self.is_over, self.figures.outcome = True, "early" if action.ended_early else "finished"
            case Fail(error=error):
                self.rules.failed(error)
                self.is_over, self.figures.outcome = True, f"failed: {error}"
            case Waiting():
                pass

    def _give_to(self, leader: Leader | None, message: Any) -> None:
        if self.leader is leader:
            self.give(message)
            self._tick_soon()

    # Messages.

    def _tell(self, message: LeaderMessage) -> None:
        self._standing.take(message)
        for connection in self.agents.values():
            connection.down(message)

    def _send(self, node: int, order: Start | Kill) -> None:
        if (connection := self.agents.get(node)) is not None:
            connection.down(order)

    def receive(self, connection: Connection, message: Hello | Batch) -> None:
        """An agent says something to a leader."""
        if self.leader is not connection.leader:
            return
        node = connection.agent.node
        match message:
            case Hello():
                known = self.agents.get(node)
                if known is not None and known.agent is connection.agent:
                    self.lose_agent(known)  # the agent noticed first that this connection broke
                elif known is not None:
                    connection.down(Rejected())
                    return
                self.agents[node] = connection
                for order in self._standing.messages():
                    connection.down(order)
                self.give(message)
            case Batch() if self.agents.get(node) is connection:
                for messages in message.said if self._trace is not None else ():
                    self.log(f"  {_short(messages)}")
                self.give(message)
        self._tick_soon()

    def lose_agent(self, connection: Connection) -> None:
        """The leader notices that a connection is gone."""
        node = connection.agent.node
        if self.leader is connection.leader and self.agents.get(node) is connection:
            del self.agents[node]
            self.give(AgentAbsent(node))
            self._tick_soon()

    def poke_all(self, generation: int) -> None:
        """Wake the processes of a generation."""
        for process in self.running:
            if process.generation == generation:
                self.after(self.draw(0.0, 0.02), process.poke)

    # Processes.

    def process(self, worker: Worker | str) -> Process | None:
        """The worker's latest process that has not ended."""
        name = str(worker)
        return next((process for process in reversed(self.running) if process.name == name), None)

    def has_started(self, process: Process) -> None:
        """An agent has started a process."""
        self.log(f"{process} starts on node {process.agent.node}")
        self.running.append(process)

    def ended(self, process: Process, how: str) -> None:
        """A process has ended."""
        self.log(f"{process} {how}")
        self.figures.deaths += how != "ended with exit code 0"
        self.running.remove(process)
        process.agent.ended(process, how)
        self.miss(process)

    def miss(self, process: Process) -> None:
        """Its peers notice that a process does not answer any more, or wait in vain."""
        if not process.takes_part:
            return
        for peer in self.running:
            if peer.is_open and peer.generation == process.generation:
                self._break(peer, peer.generation, f"the connection to worker {process.name} is closed")

    def _break(self, process: Process, generation: int, why: str) -> None:
        soon = self.random.random() < 0.6
        seconds = self.draw(0.01, 2.0) if soon else self.job.membership.transport_timeout

        def notice() -> None:
            process.broken.setdefault(generation, why)
            process.poke()

        self.after(seconds, notice)

    def breaks(self, record: GenerationRecord, why: str, but: Process) -> None:
        """The other processes of a generation notice that one has left it."""
        for process in self.running:
            if process is not but and process.generation == record.generation:
                self._break(process, record.generation, why)

    def watch_peers(self, process: Process, record: GenerationRecord) -> None:
        """A process begins to form its groups."""
        for name in record.live:
            peer = self.process(name)
            if peer is None:
                self._break(process, record.generation, f"worker {name} does not answer")
            elif frozenset((process, peer)) in self.cuts:
                self.cut_off(process, peer, record.generation)

    def cut_off(self, process: Process, peer: Process, generation: int) -> None:
        def notice() -> None:
            if frozenset((process, peer)) in self.cuts:
                process.unreachable.setdefault(generation, peer.name)
                process.poke()

        self.after(self.draw(0.5, 1.5) * self.job.membership.dead_after, notice)

    def units_of(self, hosts: Hosts, worker: Worker) -> frozenset[int]:
        """The units that a worker hosts."""
        return frozenset(unit for units in hosts.units.get(worker, ()) for unit in range(*units))

    def units_at_start(self, worker: Worker) -> frozenset[int]:
        """What a process has that starts with the initial state, or a checkpoint's."""
        return self.units_of(self.initial if self.shards is None else self.shards.anything(), worker)

    def hosts_of(self, record: GenerationRecord) -> Hosts:
        """The hosts of a generation; shards replace units and stages if the optimizer is sharded."""
        if self.shards is not None:
            return held_by(self.shards, self._workers, record.holds)
        hosts = self._plans[record.plan].hosts
        assert hosts is not None
        return hosts

    def norm(self, step: int) -> float:
        """Of the gradient of an iteration, the same each time that it runs."""
        draw = random.Random(step * 7919 + self.scenario.steps)
        return 3.0 if draw.random() < self.scenario.large_norms else 0.1 + 0.3 * draw.random()

    def is_nan(self, generation: int, step: int) -> bool:
        """Whether the gradient of an iteration is not a number this time."""
        key = generation, step
        if key not in self._nan_runs:
            self._nan_runs[key] = self.nans > 0
            self.nans = max(0, self.nans - 1)
        return self._nan_runs[key]

    # Checkpoints and plans.

    def _stored(self, step: int) -> StoredCheckpoint:
        has_metrics = step in self.rules.lines or step < self.rules.first
        return StoredCheckpoint(step, self.checkpoints[step].commit, has_metrics)

    def checkpoints_upto(self, upto: int | None) -> list[int]:
        """Steps of the complete checkpoints up to a step."""
        return sorted(step for step in self.checkpoints if upto is None or step <= upto)

    def checkpoints_upto_verified(self) -> list[int]:
        """Steps of the complete checkpoints that may be gone back to."""
        cursor = self.rules.cursor
        if not self.job.integrity.compares_states or cursor is None:
            return self.checkpoints_upto(None)
        return [] if cursor.verified is None else self.checkpoints_upto(cursor.verified.step)

    def _remove(self, step: int) -> None:
        """Remove what is there of the checkpoint of a step."""
        self.files = {name: origin for name, origin in self.files.items() if not name.startswith(f"{step}/")}
        self.checkpoints.pop(step, None)

    def is_written(self, step: int, stage: int) -> bool:
        """Whether a process has written a stage's part of the checkpoint of a step."""
        return any(name.startswith(f"{step}/{stage}.") for name in self.files)

    def _complete(self, action: CompleteCheckpoint) -> None:
        leader, commit = self.leader, action.commit
        files = {name: file.bytes for part in action.saved for name, file in part.files.items()}
        self._completing.add(commit.step)

        def complete() -> None:
            if self.leader is not leader or commit.step not in self._completing:
                return
            self._completing.discard(commit.step)
            removed = frozenset[int]()
            error = next((part.error for part in action.saved if part.error), "")
            error = error or next((f"{name} is gone" for name in files if name not in self.files), "")
            if not error:
                origin = self.rules.origins.get(commit.step)
                if self.rules.committed >= commit.step and set(files.values()) != {origin}:
                    raise Violation("checkpoint", f"of step {commit.step} of {origin} holds {files}")
                if other := [name for name, number in files.items() if self.files[name] != number]:
                    raise Violation("checkpoint", f"of step {commit.step} has others than it names: {other}")
                plain = msgspec.structs.replace(commit, **GENERATION_FIELDS)
                self.checkpoints[commit.step] = Checkpoint(plain, max(files.values()))
                older = [step for step in sorted(self.checkpoints, reverse=True) if step < commit.step]
                kept = older[: self.job.train.checkpoint_keep - 1]
                if action.verified is not None:
                    kept += [step for step in older if step <= action.verified][:1]
                removed = frozenset(older) - frozenset(kept)
                for step in removed:
                    self._remove(step)
            else:
                self._remove(commit.step)
            self.give(CheckpointCompleted(commit.step, error, removed))
            self._tick_soon()

        self.after(self.draw(0.05, 2.0), complete)

    def _ask(self, question: Question) -> None:
        leader = self.leader
        error, plan = "", None
        if self.scenario.plans_fail and self.random.random() < 0.3:
            error = "the planner has ended"
        else:
            plan = draw_plan(self.job, question, self._plans, self.random)
            if plan is None:
                error = "no worker of a rank is left"
        seconds = self.draw(5.0, 20.0) if self.random.random() < 0.05 else self.draw(0.01, 0.5)
        self.after(seconds, lambda: self._give_to(leader, Planned(question, plan, error)))

    # Nodes.

    def _start_agent(self, node: int) -> None:
        self.nodes[node] = Agent(self, node, f"session {next(self._sessions)}")

    def lose_node(self, node: int) -> None:
        """The agent of a node dies, and its processes with it. Another one is started later."""
        agent = self.nodes[node]
        if not agent.is_alive:
            return
        self.log(f"the agent of node {node} dies")
        agent.die()
        self._follow(node)

    def leave_node(self, node: int) -> None:
        """A node is asked to leave; another agent starts there later."""
        agent = self.nodes[node]
        if agent.is_alive and not agent.is_leaving:
            if node == self._leader_node and self.leader is not None:
                self._depose()
            agent.leave(lambda: self._follow(node))

    def _follow(self, node: int) -> None:
        if (connection := self.nodes[node].connection) is not None and not connection.is_cut:
            connection.cut()
        if node == self._leader_node and self.leader is not None:
            self._depose()
        seconds = self.draw(0.3, 4.0) if self.random.random() < 0.4 else self.draw(4.0, 60.0)
        self.after(seconds, lambda: self._start_agent(node))


def _short(thing: Any) -> str:
    return repr(thing)[:400]


def draw_plan(
    job: PricedJob, question: Question, plans: MutableMapping[str, PreparedPlan], draws: random.Random
) -> PreparedPlan | None:
    """A plan in the given stages, in the present layout, or in a drawn one; None without a plan.

    Args:
        plans: by their hash; the new one is added.
    """
    live = [worker for worker in job.shape.workers() if worker not in question.failed]
    most = job.shape.stages
    has_dead_rank = len({worker.rank for worker in live}) < job.shape.ranks
    cut: tuple[int, ...] = ()
    if question.within and not question.moves:
        before = plans[question.within].hosts
        assert before is not None
        stages, cut = {worker: before.stages.get(worker, ()) for worker in live}, before.cut
    elif question.moves or (job.planner.layout == "elastic" and has_dead_rank):
        if len(live) < most:
            return None
        layers = sum(layers_of(job))
        ends = sorted(draws.sample(range(1, layers), most - 1))
        cut = tuple(end - begin for begin, end in zip([0, *ends], [*ends, layers], strict=True))
        order = draws.sample(live, len(live))
        stages = {worker: (place % most,) for place, worker in enumerate(order)}
    else:
        given = Hosts.at_start(job, None).stages
        stages = {worker: given[worker] for worker in live}
    hosts = Hosts.of(job, stages, cut)
    if without([(0, hosts.count)], joined(units for ranges in hosts.units.values() for units in ranges)):
        return None
    digest = f"{' '.join(f'{worker}:{stages[worker]}' for worker in live)} {cut}"
    factor = 0.5 if question.moves else 1.0
    plan = PreparedPlan(digest, {"barrier": 2.0 * factor}, hosts=hosts)
    if job.planner.staggered:
        plan = PreparedPlan(digest, {**plan.periods, "staggered": 1.5 * factor}, hosts=hosts)
    plans[digest] = plan
    return plan
