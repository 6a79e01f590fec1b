"""A leader that a test drives: messages in, actions out, on a clock that only the test moves."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from recycle import Worker
from recycle.exec.leader.actions import (
    AgentAbsent,
    Ask,
    Begin,
    CheckpointCompleted,
    CheckpointFound,
    CompleteCheckpoint,
    Event,
    Fail,
    FindCheckpoint,
    Planned,
    PreparedPlan,
    Send,
    Tell,
    Tick,
)
from recycle.exec.leader.checkpoints import Checkpoints
from recycle.exec.leader.leader import Leader
from recycle.exec.leader.state import Phase, RunDescription
from recycle.exec.members import members_of
from recycle.exec.protocol import (
    Acknowledged,
    AgentProcess,
    Batch,
    Commit,
    Cursor,
    Ended,
    Formed,
    FromWorker,
    GenerationPhase as PersistedPhase,
    GenerationRecord,
    Heartbeat,
    Hello,
    Kill,
    Ready,
    Report,
    Saved,
    SavedPart,
    Start,
    StepReport,
    WorkerMessage,
)
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts
from tests.exec.runs import job

TICK = 0.25
KILLED = "killed by SIGKILL"
A = TypeVar("A")


def run_of(config: PricedJob, steps=9, homes: Mapping[Worker, int] | None = None, **more) -> RunDescription:
    """A run of which node 0 has all processes, unless `homes` says otherwise."""
    homes = homes or dict.fromkeys(config.shape.workers(), 0)
    return RunDescription(job=config, steps=steps, initial=Hosts.at_start(config, None), homes=homes, **more)


class LeaderDriver:
    """Plays the runtime, the agents and the planner of one leader. The processes of connected agents send heartbeats.

    Args:
        of: the job.
        begin: the first message.
        running: workers whose first process the agents have started before they connect.
        is_connected: all agents connect at once.
        run: what `RunDescription` has more.

    Attributes:
        now: the leader's time, seconds.
        actions: all actions so far.
        processes: node -> worker -> its latest process, as the agent of the node has it.
        plan: answers a question; None for no answer.
        checkpoint: that there is to go back to.
        is_still: heartbeats tell of no progress. waits: they say that the process waits for another one.
        starts_up: a process is ready as soon as it is started.
        kills: a process ends as soon as it is killed.
    """

    def __init__(
        self,
        config: PricedJob,
        steps=9,
        *,
        begin: Begin | None = None,
        running: Collection[str] = (),
        is_connected=True,
        **run,
    ):
        self.job, self.now = config, 1000.0
        self.actions = []
        self.plan = lambda question: PreparedPlan("plan", {"barrier": 9.0})
        self.is_still, self.waits, self.starts_up, self.kills = False, True, True, True
        self.checkpoint = None
        self._beats = 0
        self._is_answered = False
        description = run_of(config, steps, **run)
        self._homes = description.homes
        self.processes = {node: {} for node in set(self._homes.values())}
        self._sessions = dict.fromkeys(self.processes, 0)
        self._connected = set()
        for name in running:
            self.processes[self._homes[Worker.parse(name)]][Worker.parse(name)] = AgentProcess(name, 0, 0)
        self.leader = Leader(description, self.now)
        self.take(begin or Begin())
        for node in self.processes if is_connected else ():
            self.connect(node)

    # Agents.

    def connect(self, node: int, is_new=False, messages: Sequence[FromWorker] = ()):
        """The agent of a node connects, or another one does, which has started no process yet.

        Args:
            said: what processes have said before.
        """
        if is_new:
            self._sessions[node] += 1
            self.processes[node].clear()
        self._connected.add(node)
        self.take(Hello(node, f"session {self._sessions[node]}", list(self.processes[node].values()), list(messages)))

    def disconnect(self, node: int):
        """The connection to the agent of a node is gone. Its processes go on."""
        self._connected.discard(node)
        self.take(AgentAbsent(node))

    def _start(self, node: int, start: Start):
        worker = Worker.parse(start.worker)
        self.processes[node][worker] = AgentProcess(start.worker, start.incarnation, start.generation)
        if self.starts_up:
            for member in members_of([worker], self.job.grid.tensor_parallel):
                self.say(member, Ready(start.incarnation))

    def end(self, worker: Worker, how: str, lines=""):
        """The worker's latest process ends."""
        for node, processes in self.processes.items():
            process = processes.get(worker)
            if process is not None and process.how is None:
                processes[worker] = msgspec.structs.replace(process, how=how, lines=lines)
                if node in self._connected:
                    self.take(Batch(ended=[Ended(str(worker), process.incarnation, how, lines)]))

    def _kill(self, node: int, kill: Kill):
        worker = Worker.parse(kill.worker)
        process = self.processes[node].get(worker)
        if self.kills and process is not None and process.incarnation <= kill.incarnation:
            self.end(worker, KILLED)

    # What follows.

    def of_kind(self, kind: type[A]) -> list[A]:
        """The actions of a kind, in order."""
        return [action for action in self.actions if isinstance(action, kind)]

    def told(self, kind: type[A]) -> list[A]:
        """The messages of a kind that the leader has sent, in order."""
        return [tell.message for tell in self.of_kind(Tell) if isinstance(tell.message, kind)]

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """The fields of the events of a kind, in order."""
        return [event.fields for event in self.of_kind(Event) if event.kind == kind]

    @property
    def detected(self) -> list[tuple[str, str]]:
        """The workers that were found dead or hung, with why."""
        return [(event["worker"], event["cause"]) for event in self.events("detected")]

    @property
    def killed(self) -> list[Worker]:
        """The workers that the leader had killed, in order."""
        return [Worker.parse(kill.worker) for kill in self.ordered(Kill)]

    def ordered(self, kind: type[A]) -> list[A]:
        """The orders of a kind to agents, in order."""
        return [send.order for send in self.of_kind(Send) if isinstance(send.order, kind)]

    @property
    def record(self) -> GenerationRecord:
        """The register's record, as of the last commit."""
        return self.leader.record

    @property
    def phase(self) -> Phase:
        """Of the generation."""
        return self.leader.phase

    # What happens.

    def take(self, message):
        """Give the leader a message and do what it asks for. Raises what it fails with."""
        for action in self.leader.take(self.now, message):
            self.actions.append(action)
            match action:
                case Ask(question=question):
                    if (plan := self.plan(question)) is not None:
                        self._is_answered = True
                        self.take(Planned(question, plan))
                case Send(node=node, order=Start() as start) if node in self._connected:
                    self._start(node, start)
                case Send(node=node, order=Kill() as kill) if node in self._connected:
                    self._kill(node, kill)
                case CompleteCheckpoint(commit=commit):
                    self.take(CheckpointCompleted(commit.step))
                case FindCheckpoint():
                    self.take(CheckpointFound(self.checkpoint))
                case Fail(error=error):
                    raise error

    def say(self, member: str, message: WorkerMessage):
        """A process says something, about the present generation."""
        self.take(FromWorker(member, message, self.record.generation))

    def tick(self, seconds: float = TICK, beats=1):
        """Let time pass, in which so many heartbeats come, then have the leader decide; again at once where it has got
        an answer."""
        self.now += seconds
        self._beats += beats
        self.take(Batch(beats=self._new_beats()))
        self.take(Tick(judges_beats=True))
        while self._is_answered:
            self._is_answered = False
            self.take(Tick())

    def _new_beats(self) -> dict[str, Heartbeat]:
        progress, longest = 0 if self.is_still else self._beats, 0.1 if self.waits else 9.0
        beat = Heartbeat(self._beats, progress, self.waits, "form", longest)
        running = [
            name for node in self._connected for name, process in self.processes[node].items() if not process.how
        ]
        return dict.fromkeys(members_of(running, self.job.grid.tensor_parallel), beat)

    def count_time(self, seconds: float):
        """Let time pass in ticks."""
        for _ in range(round(seconds / TICK)):
            self.tick()

    def start(self):
        """Let all workers start up, until a generation is proposed."""
        for _ in range(50):
            if self.phase is Phase.PROPOSED:
                return
            self.tick(0.0)
        raise AssertionError("no generation is proposed")

    def acknowledge(self, without: Collection[str] = ()):
        """All workers but some acknowledge the generation."""
        for name in self.record.live:
            if name not in without:
                self.say(name, Acknowledged(False))
        self.tick()

    def form(self, without: Collection[str] = (), answers: Mapping[str, Formed] | None = None):
        """All workers but some say that their groups stand, or what is given for them."""
        for name in self.record.live:
            if name not in without:
                self.say(name, (answers or {}).get(name, Formed()))
        self.tick()

    def start_and_form(self):
        """Have the proposed generation run, the first one if there is none."""
        self.start()
        self.acknowledge()
        self.form()
        assert self.phase is Phase.RUNNING

    def save_parts(self):
        """Worker 0.0 says that all parts of the pending checkpoints are written."""
        for step, stage, rank in missing_parts(self.leader.checkpoints):
            self.say("0.0", SavedPart(step, stage, rank, Saved()))

    def report(self, norm=1e-06, states: int | None = None):
        """All workers report the next iteration; each hosts the stage of its rank.

        Args:
            states: checksum of each state that the iteration began with; None where these are not compared.
        """
        step, messages = self.record.committed + 1, []
        for name in self.record.live:
            rank = Worker.parse(name).rank
            loss = 1.0 if rank == self.job.shape.ranks - 1 else None
            compared = {} if states is None else {rank: (states, 0)}
            report = Report({rank: [norm]}, loss, checksums={rank: 1}, states=compared)
            messages.append(FromWorker(name, StepReport(step, report), self.record.generation))
        self.take(Batch(messages))
        self.tick()


def missing_parts(checkpoints: Checkpoints) -> list[tuple[int, int, int]]:
    """(step, stage, tensor rank) of the parts that are awaited."""
    return [(step, *part) for step, pending in checkpoints.pending.items() for part in pending.missing]


# Another leader.

LIVE = ["0.0", "1.0"]
FACTS = Commit(4, 1.5, 0.25, 1.0)


def record(commit: Commit = FACTS, joins: Sequence[str] = (), **more) -> GenerationRecord:
    roles = {worker: worker for worker in LIVE}
    return GenerationRecord(
        3, LIVE, roles, "plan", list(joins), {"barrier": 7.0}, committed=commit.step, commit=commit, **more
    )


def cursor_of(config: GenerationRecord, phase: PersistedPhase, **more) -> Cursor:
    return Cursor(config.generation, phase, **config.progress(), **more)


def follow(
    before: GenerationRecord, phase: PersistedPhase | None = "proposed", cursor: Cursor | None = None, **run
) -> LeaderDriver:
    """A leader that finds this record, and a cursor in this phase; None for a cursor of an earlier generation."""
    if cursor is None:
        earlier = Cursor(before.generation - 1, "ended", committed=0)
        cursor = earlier if phase is None else cursor_of(before, phase)
    begin = Begin(record=before, cursor=cursor)
    return LeaderDriver(job(2, 1, 1), begin=begin, running=before.live, **run)
