"""What holds in every run, whatever strikes."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.agent import AgentExit
from recycle.exec.leader.actions import Action, AgentAbsent, Ask, DepartureAsked, Planned, Send, Tell, Tick
from recycle.exec.leader.commit import NEAR, WINDOW
from recycle.exec.leader.leader import Leader
from recycle.exec.leader.plans import MARGIN
from recycle.exec.leader.state import Phase
from recycle.exec.members import members_of, split_member, worker_of
from recycle.exec.processes.forkserver import ForkServerEnded
from recycle.exec.protocol import (
    Acknowledged,
    Batch,
    Committed,
    Cursor,
    EvaluationResult,
    Formed,
    FromWorker,
    GenerationRecord,
    Hello,
    Kill,
    LeaderMessage,
    Leave,
    Leaving,
    Permit,
    Propose,
    Refused,
    SavedPart,
    Start,
    StepReport,
    Strike,
    WorkerMessage,
)
from recycle.exec.worker.member import MemberState
from recycle.job.shape import Worker
from tests.exec.explore.faults import HARMLESS
from tests.exec.explore.kernel import Process, current

if TYPE_CHECKING:
    from tests.exec.explore.cluster import Cluster

CALM_FAULTS = {"leave worker", "drain worker", "drain node"}
"""Faults that cost no iteration."""
LOST_SECONDS = 2.0
"""Seconds for which a leader keeps its role without an answer of etcd, and within which it kills late processes."""
LONGEST = 300.0
"""Virtual seconds after the last fault in which a run has to end."""
CHECK_SECONDS, QUIET_SECONDS = 1.0, 4.0
"""Between two checks of what a leader and its processes think of each other, if nothing has changed for a while."""
WINDOWS = 7
"""Windows of measured times without a question to the planner after which the plan suits the workers' speeds."""
START_SECONDS = 10.0
"""Within which an agent has connected."""
CHECKPOINT_ERRORS = "no space|No space|is still being written|ended before it had written|within"
"""Why a checkpoint may be incomplete."""


class Violation(Exception):
    """A rule is violated.

    Args:
        rule: its name.
        what: what happened.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Reference(NamedTuple):
    """Lines of metrics, and stage or shard -> digests of its final state, of a run without failures."""

    metrics: Sequence[Mapping[str, Any]]
    digests: Mapping[int, set[str]]


class Rules:
    """Checks one run.

    Attributes:
        reference: what the run should compute, if known.
        result: what it has computed; complete when it has ended.
        struck_nodes: those that a fault has struck, or whose processes.
        leader: the latest one. members: process -> what it has heard.
        committed: last step in the register. kept: steps of checkpoints.
        rejoining: workers that the job brings back. given_up: processes, by worker and number.
    """

    def __init__(self, cluster: Cluster, before: Rules | None = None) -> None:
        self._cluster = cluster
        self.reference: Reference | None = None if before is None else before.reference
        self.result = Reference([], {})
        crashing = {name.removesuffix(" writes") for name, _ in cluster.scenario.crashes}
        self.struck_nodes = {node for node in set(cluster.homes.values()) if f"agent {node}" in crashing}
        self._crashing = {w for w in cluster.homes if any(name.startswith(f"worker {w}") for name in crashing)}
        is_full = any(fault.kind == "fill disk" for fault in cluster.scenario.faults)
        self._may_lack = is_full or (before is not None and before._may_lack)
        """A full disk may have cost lines of metrics."""
        # The processes of a run that is resumed have ended.
        ended = {} if before is None else {worker: before._number(worker) for worker in cluster.homes}
        self._struck: dict[Worker, int] = ended
        self.rejoining = {str(f.worker) for f in map(parse_fault, cluster.scenario.planned) if f.kind == "rejoin"}
        self.given_up, self._asked = set[tuple[str, int]](), dict[str, int]()
        self._until = dict[tuple[str, int], float]()
        self.kept = set[int]() if before is None else before.kept
        self._disturbed = self._written = 0.0
        self.members: dict[Process, MemberState] = {}
        self._thinks: Leader | None = None
        self._leader: Process | None = None if before is None else before._leader
        self.record: GenerationRecord | None = None
        self.cursor: Cursor | None = None
        self.committed = -1
        self._has_outcome = False
        self._commits: set[tuple[int, int]] = set() if before is None else before._commits
        self._evaluated = set[str]()
        self._had_one_host = False
        self._records: dict[int, set[int]] = {} if before is None else before._records
        self._ran = set[int]()
        self._better, self._steady_since = "", -1
        self._computed = set[tuple[Process, int]]()
        self._said: dict[tuple[int, str], set[str]] = defaultdict(set)

    def _fail(self, rule: str, what: str) -> None:
        if self._cluster.kernel.error is None:
            self._cluster.kernel.error = Violation(rule, what)

    # Processes.

    def struck(self, process: Process) -> None:
        if process.worker is not None:
            self._struck[process.worker] = max(process.incarnation, self._struck.get(process.worker, 0))

    def disturb(self, seconds: float = 0.0) -> None:
        """Processes or connections change, for some time."""
        self._disturbed = max(self._disturbed, self._cluster.kernel.now + seconds)

    def ended_process(self, process: Process) -> None:
        """A worker's process ends."""
        self.disturb()
        record, cursor, worker = self.record, self.cursor, process.worker
        if process.code or worker is None or record is None or cursor is None or str(worker) not in record.live:
            return
        is_over = cursor.commit is not None and cursor.commit.finished
        if not is_over and not self._cluster.scenario.elastic:
            peers = (Worker.parse(name) for name in record.live if name not in (str(worker), *record.joins))
            if not any(peer.rank == worker.rank for peer in peers):
                self._fail("last copy", f"{process.name} leaves, and nobody has the state of its stage")

    def said(self, member: str, generation: int, message: WorkerMessage) -> None:
        """A process says something."""
        match message:
            case StepReport(step=step, report=report):
                self._said[generation, f"{type(report).__name__} {step}"].add(member)
                self._computed.add((current().process, step))
            case Acknowledged() | Formed(error=""):
                self._said[generation, "form" if isinstance(message, Acknowledged) else "run"].add(member)
            case SavedPart(step=step) if (current().process, step) not in self._computed and self.record is not None:
                if split_member(member)[0] in self.record.joins:
                    self._fail("part", f"{member}, which joins, writes a part of the state after step {step}")

    def _require_said(self, rule: str, record: GenerationRecord, what: str) -> None:
        members = set(members_of(record.live, self._cluster.scenario.tensor_parallel))
        if missing := members - self._said[record.generation, what]:
            self._fail(rule, f"generation {record.generation} goes on without {what} of {sorted(missing)}")

    def heard(self, process: Process, message: LeaderMessage) -> None:
        """A process hears something."""
        record, cursor = self.record, self.cursor
        match message:
            case Permit(generation=generation, what=what) if record is not None and record.generation == generation:
                self._require_said("permit", record, what)
                if what == "run" and generation not in self._ran:
                    self._fail("persist", f"{process.name} hears that {generation} runs, which is not written")
            case Leave(worker=worker, incarnation=number, stage_lost="") if record is not None and cursor is not None:
                if worker != str(process.worker):
                    return  # perhaps of a process that a leader has forgotten, and whose number another one has now
                is_live = worker in record.live and record.incarnations.get(worker, 0) == number
                if is_live and record.plan and cursor.gone.get(worker) != number:
                    self._fail("persist", f"{process.name} may leave, which is not written")
            case Strike(fault=fault) if cursor is not None and fault not in cursor.struck:
                self._fail("persist", f"{process.name} is struck by {fault}, which is not written")
            case EvaluationResult(generation=generation, evaluated=evaluated) if cursor is not None:
                if cursor.generation == generation and str(evaluated) not in self._evaluated:
                    self._fail("persist", f"{process.name} hears of {evaluated}, which is not written")
            case Committed(generation=generation, commit=commit):
                if (generation, commit.step) not in self._commits and not self._is_begin(generation, commit.step):
                    self._fail(
                        "persist", f"{process.name} hears of {commit.step} of {generation}, which is not written"
                    )
            case Propose(record=record):
                if missing := self._records.get(record.generation, set()) - self.members[process].strikes.keys():
                    self._fail("hear", f"{process.name} hears of {record.generation} before the faults {missing}")
                if record.generation not in self._records:
                    self._fail("persist", f"{process.name} hears of {record.generation}, which is not written")

    def _is_begin(self, generation: int, step: int) -> bool:
        return generation in self._records and step <= self.committed

    # The leader's mind.

    @property
    def leader(self) -> Leader:
        assert self._thinks is not None
        return self._thinks

    @leader.setter
    def leader(self, leader: Leader) -> None:
        if self._thinks is not None and self._leader not in (None, current().process):
            return  # its agent was stopped, and has lost the role
        self._thinks = leader
        self._asked = dict(self.cursor.gone) if self.cursor is not None else {}
        self._until.clear()  # each leader counts from when it is asked
        self._steady_since = self.committed
        self.given_up = {given for given in self.given_up if self.record and given[0] not in self.record.live}

    def took(self, message: Any) -> None:
        """The leader takes a message."""
        match message:
            case Batch(said=said):
                for other in said:
                    self._take_leaving(other)
            case Hello(said=said):
                self.disturb()
                for other in said:
                    self._take_leaving(other)
            case Planned():
                self._steady_since = self.committed
            case AgentAbsent() | Tick(is_reached=False):  # absences do not count while etcd does not answer
                self.disturb()
            case DepartureAsked(workers=workers):
                for worker in workers:
                    name, number = str(worker), self.leader.processes[worker].incarnation
                    if message.seconds is not None and self._asked.get(name) != number:
                        self._until[name, number] = self._cluster.kernel.now + message.seconds + LOST_SECONDS
                    self._asked[name] = number
                    self._struck[worker] = max(number, self._struck.get(worker, 0))

    def _take_leaving(self, sent: FromWorker) -> None:
        if isinstance(sent.message, Leaving):
            worker = worker_of(sent.member)
            if self.leader.processes[worker].incarnation <= sent.message.incarnation:  # a new leader hears of it now
                self._asked[str(worker)] = sent.message.incarnation

    def decided(self, action: Action) -> None:
        """The leader decides something."""
        if isinstance(action, Send) and isinstance(action.order, Kill | Start):
            self.disturb()
        match action:
            case Ask():
                self._steady_since = self.committed
            case Refused(worker=worker):
                if (number := self._asked.pop(worker, None)) is not None:
                    self._until.pop((worker, number), None)
            case Tell(message=Leave(stage_lost=lost)) if lost:
                pass  # of a script, which all processes leave
            case Tell(message=Leave()) if self._leader not in (None, current().process):
                pass  # a leader that has lost the role tells nothing
            case Tell(message=Leave(worker=worker, incarnation=number)) if self.record is not None:
                # Processes of a run that was stopped leave when it continues.
                if self.record.plan and self._asked.get(worker) != number:
                    self._fail("left", f"process {number} of worker {worker} may leave, and was not asked to")
                is_told_again = self.cursor is not None and self.cursor.released.get(worker) == number + 1
                if not is_told_again and self._cluster.kernel.now > self._until.get((worker, number), LONGEST):
                    self._fail("drained", f"worker {worker} leaves after its deadline")
                if worker in self.record.live and worker not in self.record.joins:
                    self._require_hosts(Worker.parse(worker))
            case Send(order=Kill(worker=worker, incarnation=number)) if self.record is not None:
                if self.leader.phase is Phase.RESTORING:
                    self._struck[Worker.parse(worker)] = number
                is_given_up = worker in self.record.live or (worker, number) in self.given_up
                if self._is_gentle and self._asked.get(worker) == number and not is_given_up:
                    self._fail("left", f"worker {worker} is killed, although it was told to leave")
            case Send(order=Start(worker=worker, incarnation=number)) if self._asked.get(worker) == number - 1:
                # What was told to a worker counts as long as its agent lives.
                parents = [p.parent for p in self.members if (str(p.worker), p.incarnation) == (worker, number - 1)]
                is_agent = any(parent is not None and parent.is_alive for parent in parents)
                if is_agent and worker not in self.rejoining and self.leader.phase is not Phase.STARTING:
                    self._fail("left", f"process {number} of worker {worker} starts, after one that was told to leave")

    def _require_hosts(self, worker: Worker) -> None:
        """A host of the worker's stage stays whose agent is known to live, and another copy of what it has run with."""
        scenario, record = self._cluster.scenario, self.record
        if scenario.sharded and scenario.optimizer_copies == 1 and record and record.generation in self._ran:
            self._fail("last copy", f"worker {worker} may leave, and no other has its shards")
        others = [other for other in self.leader.holders if not self.leader.is_awaited([other])]
        if not (self._cluster.scenario.elastic or any(other.rank == worker.rank for other in others)):
            self._fail("last copy", f"worker {worker} may leave, and agents of the other hosts of its stage are away")

    @property
    def is_loud(self) -> bool:
        """Whether something has changed lately, or there is no leader."""
        kernel, leader = self._cluster.kernel, self._thinks
        if self._leader is None or not self._leader.is_alive or leader is None:
            return True
        hands_over = self._cluster.stops[self._leader.host].is_set()  # and etcd may hear late of it
        is_over = hands_over or leader.phase in (Phase.FINISHED, Phase.OVER)
        return is_over or self._cluster.scenario.slow_messages > 0 or kernel.now - self._disturbed < QUIET_SECONDS

    def check(self) -> None:
        """After some quiet the leader knows which processes run, and these know what is written."""
        kernel, leader, record, cursor = self._cluster.kernel, self._thinks, self.record, self.cursor
        kernel.after(CHECK_SECONDS, self.check)
        if wrong := "; ".join(filter(None, (drain.check() for drain in self._cluster.drains))):
            self._fail("drain", wrong)
        if self.is_loud or leader is None or record is None or cursor is None:
            return
        running = {
            (str(worker), process.incarnation)
            for worker, process in leader.processes.items()
            if process.is_running and not process.is_killed and not leader.is_awaited([worker])
        }
        processes = [p for p in kernel.processes if p.worker is not None and not leader.is_awaited([p.worker])]
        alive = {(str(process.worker), process.incarnation) for process in processes}
        if running != alive or alive & self.given_up:
            what = f"{running - alive} run, and that {alive - running} do not; given up are {alive & self.given_up}"
            self._fail("picture", f"the leader thinks that {what}")
        if kernel.now - self._written < QUIET_SECONDS:
            return
        for process, state in self.members.items():
            worker = str(process.worker)
            is_live = worker in record.live and record.incarnations.get(worker, 0) == process.incarnation
            if not (process.is_alive and is_live) or process.is_stopped:
                continue
            if cursor.phase == "running":
                is_new, evaluated = cursor.committed > record.committed, cursor.evaluated  # of a script it is NaN
                knows = state.generation == cursor.generation and state.permit("run") is not None
                knows &= not is_new or state.commit(cursor.committed) is not None
                is_known = evaluated is None or str(evaluated) == str(record.evaluated)
                knows &= is_known or state.evaluated(evaluated.step) is not None
            else:
                knows = cursor.phase == "proposed" or state.generation != cursor.generation or state.is_over
            if not knows:
                self._fail("hear", f"{process.name} does not know that {cursor} is written")

    # The register.

    def written(self, name: str, value: bytes | None, writer: Process | None) -> None:
        """A key changes; `writer` has asked for it."""
        key = name.rpartition("/")[2]
        if key == "role":
            self.disturb()
            if value is None and writer is not None and writer is self._leader:
                self._resign(writer)
            self._leader = None if value is None else writer
        if value is None:
            return
        if key in ("record", "cursor", "outcome") and writer is not self._leader:
            self._fail("leader", f"{writer and writer.name} writes {key}, and is not the leader")
        self._written = self._cluster.kernel.now
        match key:
            case "outcome":
                self._has_outcome = True
            case "record":
                self._record(msgspec.msgpack.decode(value, type=GenerationRecord))
            case "cursor":
                self._cursor(msgspec.msgpack.decode(value, type=Cursor))
            case "run":
                self.record = self.cursor = None
                self.committed, self._has_outcome = -1, False
                self._records.clear()
            case other:
                self._cluster.kernel.log(f"store: {other}")

    def _resign(self, agent: Process) -> None:
        kinds = {f.kind for f in self._cluster.scenario.faults if f.kind != "lose answers" or f.seconds > LOST_SECONDS}
        is_asked = self._cluster.stops[agent.host].is_set()
        may_resign = re.search("store|stop|isolate|cut|lose|suspend|interrupt", " ".join(kinds))
        if not (self._has_outcome or is_asked or may_resign):
            self._fail("role", f"{agent.name} gives the role up, which it has")

    def _record(self, record: GenerationRecord) -> None:
        before = self.record
        for worker in record.live if record.plan else ():  # that of a restart has none
            if (worker, record.incarnations.get(worker, 0)) in self.given_up:
                self._fail("given up", f"generation {record.generation} has worker {worker}, which was given up")
        if before is not None and record.generation < before.generation:
            self._fail("generation", f"{record.generation} follows {before.generation}")
        if (before is None or record.generation > before.generation) and record.mode != "barrier":
            self._fail("mode", f"generation {record.generation} begins with a {record.mode} step")
        self._require_balance(record)
        if self._cluster.script is not None:
            self._cluster.script.recorded(before, record)
        self.record, self._steady_since = record, max(self.committed, record.committed)
        hosts = Counter(Worker.parse(worker).rank for worker in record.live)
        self._had_one_host = self._had_one_host or 1 in hosts.values()
        self._records.setdefault(record.generation, set(self.cursor.struck) if self.cursor else set())

        scenario = self._cluster.scenario
        is_next = before is not None and record.generation > before.generation and self._ran
        may_change = scenario.elastic or scenario.slow_messages or self._cluster.is_resumed
        may_change = may_change or record.plan == self._better or self._is_end_announced
        may_change = may_change or (self._cluster.script is not None and self._cluster.script.has_delayed)
        if is_next and scenario.is_harmless and not may_change:
            self._fail("take-over", f"generation {record.generation} follows one that runs")

    @property
    def _is_end_announced(self) -> bool:
        """Whether the workers stop after the committed step, because a leader had a better plan for slow workers."""
        commit = self.cursor.commit if self.cursor else None
        is_end = commit is not None and commit.last == commit.step
        return bool(self._cluster.scenario.drift_iterations) and is_end

    def _require_balance(self, record: GenerationRecord) -> None:
        """Workers that join together copy the same from different holders, if there are several."""
        sources = defaultdict[tuple[int, int], list[str]](list)
        for copy in record.copies:
            sources[copy.first, copy.last].append(copy.source)
        for units, of_units in sources.items():
            holders = set(record.live) - set(record.joins)
            peers = {name for name in holders if Worker.parse(name).rank == Worker.parse(of_units[0]).rank}
            is_simple = not (self._cluster.scenario.elastic or self._cluster.scenario.sharded)
            if is_simple and len(set(of_units)) < min(len(of_units), len(peers)):
                self._fail("balance", f"units {units} are copied from {of_units}, and {sorted(peers)} have them")

    def _cursor(self, cursor: Cursor) -> None:
        before = self.cursor
        if before is not None and cursor.generation < before.generation:
            self._fail("generation", f"cursor of {cursor.generation} follows {before.generation}")
        is_same = before is not None and cursor.generation == before.generation
        # A stage without a live host is restored from a checkpoint, and a wrong state is left, in a new generation.
        has_failed = self._cluster.script is not None and self._cluster.script.has_failed
        may_go_back = not self._cluster.scenario.spared or self._is_wrong or has_failed
        if cursor.committed < self.committed and (is_same or not may_go_back):
            self._fail("commit", f"step {cursor.committed} follows {self.committed} in generation {cursor.generation}")
        if before is not None and cursor.committed > self.committed + 1:
            self._fail("commit", f"step {cursor.committed} follows {self.committed}")
        if self.record is not None and cursor.generation == self.record.generation and is_same:
            if cursor.committed == self.committed + 1:
                self._require_said("reports", self.record, f"Report {cursor.committed}")
            if cursor.evaluated is not None and before is not None and str(cursor.evaluated) != str(before.evaluated):
                self._require_said("reports", self.record, f"EvaluationReport {cursor.evaluated.step}")
        self.cursor, self.committed = cursor, cursor.committed
        self._asked.update(cursor.gone)
        self._evaluated.add(str(cursor.evaluated))
        if cursor.phase == "running":
            self._ran.add(cursor.generation)
        if cursor.commit is not None:
            self._commits.add((cursor.generation, cursor.commit.step))
        self._cluster.kernel.log(f"store: {cursor.phase} generation {cursor.generation}, committed {cursor.committed}")

    # The run directory.

    def wrote(self, line: dict[str, Any]) -> None:
        """A leader writes a line of metrics: each micro-batch counts once, to the last bit."""
        may_be_removed = self._is_wrong and self._cluster.scenario.replays
        if (wrong := self._wrong_bits(line)) and not may_be_removed:
            self._fail("bits", wrong)

    def _wrong_bits(self, line: Mapping[str, Any]) -> str:
        step = line["step"]
        expected = self.reference.metrics[step] if self.reference else line
        return " ".join(
            f"{key} of step {step} is {line[key]}, without failures {expected[key]}"
            for key in ("loss", "grad_norm")
            if line[key] != expected[key]
        )

    def logged(self, event: dict[str, Any], agent: Process) -> None:
        """An agent that leads, or thinks so, writes an event."""
        worker, cause = Worker.parse(event.get("worker") or "0.0"), event.get("cause", "")
        given = str(worker), self._number(worker)
        match event["kind"]:
            case "detected":
                is_away = cause.startswith("the agent of node")
                has_left = is_away and (event.get("over") or self._cluster.is_resumed)  # after its worker's end
                has_left |= is_away and self._is_agent_new(self._cluster.homes[worker])
                if not (has_left or self._is_struck(worker) or self._is_another(worker, cause)):
                    self._fail("fence", f"worker {worker}, which is well: {cause}")
                if not event.get("over") and agent is self._leader:
                    self.given_up.add(given)
                    self._require_copies(worker, cause)
            case "drained" if given in self.given_up:
                self._fail("drained", f"worker {worker}, which was given up")
            case "fault" if not cause and not event["fault"].startswith("slow"):
                self._struck[worker] = given[1]
            case "fault" if cause and not (
                self._is_struck(worker) or (self.cursor and str(worker) in self.cursor.gone)
            ):
                self._fail("return", f"worker {worker}, which is well, {cause}")
            case "replanned":
                self._better = event["plan"]
            case "checkpoint" if "error" not in event:
                self.kept.add(event["step"])
        if event["kind"] == "undone":
            self._require_need(event["step"], event["cause"])
        error = event.get("error") if event["kind"] == "checkpoint" else None
        # A full disk has cost the checkpoint already, and the next leader looks for its parts.
        kinds = {fault.kind for fault in self._cluster.scenario.faults}
        has_been_full = "fill disk" in kinds
        known = CHECKPOINT_ERRORS + "|No such file" * has_been_full
        # A leader that was stopped may complete what the next one has removed.
        is_gentle = self._is_gentle and not self._cluster.is_resumed
        if left := re.match(r"worker (\S+) ended before", error or ""):
            is_gentle &= not ("break" in kinds and left[1] in self._asked)  # it may have missed the commit
        if error and agent is self._leader and (is_gentle or not re.search(known, error)):
            self._fail("checkpoint", error)

    def _require_need(self, step: int, cause: str) -> None:
        """An iteration is repeated only for a reason that was not known when it began."""
        if "clipped" in cause:
            metrics = self.reference.metrics if self.reference else ()
            norms = [line["grad_norm"] for line in metrics[max(0, step - WINDOW) : step]]
            if max(norms, default=0.0) >= NEAR * self._cluster.scenario.clip:
                self._fail("repeated", f"step {step}, whose gradient is clipped, after steps with the norms {norms}")
        elif self._is_calm and not self.given_up:  # of too short a deadline
            self._fail("repeated", f"step {step}, although all departures were announced")

    def _is_agent_new(self, node: int) -> bool:
        """Whether one more agent of a node, which starts or asks again just now, may not know of the other one."""
        kernel, again = self._cluster.kernel, self._cluster.job.membership.lease + 2.0
        ages = [kernel.now - p.began for p in kernel.processes if p.name == f"agent {node} again"]
        return any(age < 0.5 or age >= again for age in ages)

    def _number(self, worker: Worker) -> int:
        """The process of a worker that an event is about: one may have started since."""
        if self.record is not None and str(worker) in self.record.live:
            return self.record.incarnations.get(str(worker), 0)
        return self.leader.processes[worker].incarnation

    def _is_struck(self, worker: Worker) -> bool:
        cluster = self._cluster
        number, node = self._number(worker), cluster.node_with(worker)
        is_near = node in self.struck_nodes or worker in self._crashing
        return is_near or cluster.scenario.slow_messages > 0.0 or number <= self._struck.get(worker, -1)

    def _require_copies(self, worker: Worker, cause: str) -> None:
        others = any(other.rank == worker.rank for other in self.leader.holders)
        if re.search(r"within \d+ s$|cut off from", cause) and not (others or self._cluster.scenario.elastic):
            self._fail("last copy", f"worker {worker} is given up, and nobody has the state of its stage: {cause}")

    @property
    def _is_calm(self) -> bool:
        scenario = self._cluster.scenario
        return not (scenario.planned or scenario.crashes) and {f.kind for f in scenario.faults} <= CALM_FAULTS

    @property
    def _is_gentle(self) -> bool:
        """Whether no process ends but those that are asked to, unless they are late."""
        scenario = self._cluster.scenario
        kinds = {fault.kind for fault in scenario.faults}
        is_asked = kinds <= CALM_FAULTS | {*HARMLESS}
        is_new = not self._cluster.is_resumed  # else processes of the earlier part have ended
        return not scenario.planned and is_asked and is_new and scenario.has_roles_only

    @property
    def _is_wrong(self) -> bool:
        """Whether a fault has changed what a worker holds or computes."""
        return any(text.startswith("flip") for text in self._cluster.scenario.planned)

    def _is_another(self, worker: Worker, cause: str) -> bool:
        """Whether a cause may lie elsewhere."""
        # Of workers that fail to form together any may be to blame; an agent without a leader, or whose connection to
        # it broke, waits for the store.
        kinds = " ".join(fault.kind for fault in self._cluster.scenario.faults)
        if {fault.kind for fault in self._cluster.scenario.faults} <= {"fail to form", *HARMLESS}:
            return False
        if cause.startswith("cut off from") and (kinds.count("isolate") > 1 or re.search("store|lose", kinds)):
            return True  # of two hosts that report each other either may be; a leader without etcd hears neither
        return bool(re.search("could not form|ended while no agent led the run", cause)) or (
            bool(re.search("store|lose", kinds)) and (cause.startswith("the agent of node") or not self._lives(worker))
        )

    def _lives(self, worker: Worker) -> bool:
        return any(process.worker == worker for process in self._cluster.kernel.processes)

    # The end.

    def must_have_ended(self, agent: Process) -> None:
        """The time is over in which an agent ends after SIGTERM."""
        if agent.is_alive and not agent.is_stopped:
            self._fail("grace", f"{agent.name} has not ended")
        agent.end("its grace is over", -9)

    def other_run_exited(self, exit: AgentExit | RecycleError | KeyboardInterrupt) -> None:
        """An agent with another job has ended."""
        known = "give another --id|another --run|already has an agent|were not ready|does not answer|has lost it"
        if not (isinstance(exit, RecycleError) and re.search(known, str(exit))):
            self._fail("refused", f"an agent with another number of steps ends with: {exit!r}")

    def _require_missing(self, nodes: list[int]) -> None:
        """A run that could start does start."""
        cluster = self._cluster
        agents = [cluster.agents.get(node) for node in nodes]
        kinds = " ".join(fault.kind for fault in cluster.scenario.faults)
        is_loud = cluster.scenario.slow_messages or re.search("store|lose|cut|isolate|stop|second", kinds)
        if not is_loud and all(agent and cluster.kernel.now - agent.began > START_SECONDS for agent in agents):
            self._fail("start", f"the agents of nodes {nodes} have been there for {START_SECONDS:g} s")

    def exited(self, node: int, exit: AgentExit | RecycleError | KeyboardInterrupt) -> None:
        """An agent has ended."""
        scenario = self._cluster.scenario
        kinds = {fault.kind for fault in scenario.faults}
        # An agent that starts late finds the directory of a run that etcd has forgotten, perhaps without its end.
        late = "|holds another run" if self._cluster.has_ended or self._has_outcome or "wipe store" in kinds else ""
        late += "|is used by agents of another run" if "wipe store" in kinds else ""
        late += "|is finished, it has all" if scenario.launched else ""
        late += "|another number of steps|holds another run" if "second agent" in kinds else ""
        deadline = self._cluster.job.membership.start_deadline
        may_be_away = not scenario.returns or any(not 0.0 <= at < 0.7 * deadline for at in scenario.arrivals)
        may_be_away |= bool(kinds & {"second agent", "wipe store"})
        away = "|were not ready" if may_be_away else ""
        full = "|was not saved" if kinds & {"fill disk", "second agent"} else ""
        twice = "|already has an agent" if "second agent" in kinds else ""
        # A script has saved after its last step, a run was interrupted after its last checkpoint, or is still in etcd.
        is_left = not re.search("nothing is left to train|is finished, it has all|without --resume", str(exit))
        if isinstance(exit, JobError) and is_left and not re.search("already has an agent" + late, str(exit)):
            self._fail("refused", f"agent {node}: {exit}")
        if self._cluster.script is not None and isinstance(exit, RecycleError):
            self._cluster.script.exited(exit)
        is_struck = not self._cluster.is_resumed or scenario.planned
        if isinstance(exit, RecycleError) and is_left and not is_struck:
            self._fail("resumed", f"agent {node}, which nothing strikes: {exit}")
        is_asked = self._is_ended_gently and all(stop.is_set() for stop in self._cluster.stops.values())
        is_unaware = "has ended while" in str(exit) and not kinds & {"break", "forge"}
        if is_asked and (isinstance(exit, KeyboardInterrupt) or is_unaware):
            self._fail("end", f"all agents were asked to end, and agent {node} ends late: {exit!r}")
        late_exits = [e for exits in self._cluster.exits.values() for e in exits if "were not ready" in str(e)]
        missing = re.search("agents of nodes (.*) were not ready", str(exit))
        if missing and len(late_exits) == 1:  # the others hear of it later
            self._require_missing(list(map(int, missing[1].split())))
        verified = self._thinks and self._thinks.record.verified_step
        restorable = sorted(step for step in self.kept if verified is None or step <= verified)
        is_lost = isinstance(exit, RecycleError) and not self._is_wrong and kinds <= set(HARMLESS)
        # A leader that loses the role during a restore has ended processes, as if they had died.
        is_lost = is_lost and is_left and bool(scenario.restarts or not (scenario.faults or scenario.crashes))
        is_lost = is_lost and not (scenario.slow_messages and "does not answer" in str(exit))
        is_late = "was asked to end" in str(exit) and kinds & {"suspend", "stop agent"}  # and saved by the last leader
        if restorable and (is_lost or ("has no complete checkpoint" in str(exit) and not is_late)):
            self._fail("restore", f"agent {node}, with checkpoints {restorable}: {exit}")
        is_stopping = kinds & {"end run", "interrupt run"} and self._has_left
        if (
            isinstance(exit, RecycleError)
            and self._cluster.scenario.spared
            and not is_stopping
            and not self._is_over_for_another
            and not isinstance(exit, ForkServerEnded)  # the node's own end
            and not (self._cluster.script is not None and self._cluster.script.has_failed)
            and not re.search("does not answer|during start-up|has ended while" + late + away + twice + full, str(exit))
            and not (self._is_wrong and "different states" in str(exit))
            and not (self._cluster.scenario.slow_messages and "no heartbeat for" in str(exit))
        ):
            self._fail("progress", f"agent {node}: {exit}")

    @property
    def _has_left(self) -> bool:
        every = [exit for exits in self._cluster.exits.values() for exit in exits]
        return any(exit is AgentExit.LEFT or isinstance(exit, KeyboardInterrupt) for exit in every)

    @property
    def _is_over_for_another(self) -> bool:
        """Whether all workers of an agent were asked to leave, or it waited for etcd in vain and took workers along."""
        exits = [exit for of_node in self._cluster.exits.values() for exit in of_node]
        return any(exit is AgentExit.STOPPED or "does not answer" in str(exit) for exit in exits)

    @property
    def may_be_resumed(self) -> bool:
        exits = [exit for of_node in self._cluster.exits.values() for exit in of_node]
        is_done = AgentExit.DONE in exits or AgentExit.ENDED_BEFORE in exits
        return bool(self.kept or self._cluster.script) and not (is_done or self._is_wrong)

    def _require_good_plan(self) -> None:
        """After many steps with the same leader, workers, plans and speeds the plan suits the speeds."""
        cluster, record, last = self._cluster, self.record, self.committed
        longest = WINDOWS * cluster.scenario.drift_iterations
        if not longest or record is None or last - self._steady_since < longest:
            return
        slow = [fault for fault in map(parse_fault, cluster.scenario.planned) if fault.kind == "slow"]
        if any(fault.holds_at(last) != fault.holds_at(step) for fault in slow for step in range(last - longest, last)):
            return
        periods = cluster.periods(record, {str(f.worker): f.argument or 1.0 for f in slow if f.holds_at(last)})
        if periods is not None and (1 - MARGIN) * periods[0] > 1.01 * periods[1]:
            raise Violation("times", f"the plan has period {periods[0]}, and one for the present speeds {periods[1]}")

    def _require_kept(self, exits: Sequence[AgentExit | RecycleError | KeyboardInterrupt]) -> None:
        """A run that its user has ended lost no iteration."""
        if self._cluster.script is not None:  # which saves by itself
            return
        if AgentExit.STOPPED in exits and self.committed >= 0 and not self.kept:
            raise Violation("end", f"a run that has no checkpoint should be resumed after step {self.committed}")
        # An agent whose connection breaks when it leaves does not tell which parts are written.
        is_told = not {fault.kind for fault in self._cluster.scenario.faults} & {"break", "suspend", "forge"}
        if self._is_ended_gently and is_told and self.committed >= 0 and self.committed not in self.kept:
            raise Violation("end", f"step {self.committed} is in none of the checkpoints {self.kept}: {exits}")

    @property
    def _is_ended_gently(self) -> bool:
        """Whether a user ends the run, and each stage has a host that no fault ends."""
        scenario = self._cluster.scenario
        kinds, gentle = {fault.kind for fault in scenario.faults}, {"end run", "leave node", *HARMLESS}
        if scenario.spared:
            gentle |= {"stop worker", "leave worker", "drain worker"}
        is_gentle = not scenario.planned and kinds <= gentle and scenario.has_roles_only
        return "end run" in kinds and is_gentle and not self._cluster.is_resumed

    def ended(self) -> None:
        """The run is over."""
        cluster = self._cluster
        exits = [exit for of_node in cluster.exits.values() for exit in of_node]
        if AgentExit.DONE not in exits:
            self._require_kept(exits)
            return
        self._require_good_plan()
        steps = cluster.scenario.steps
        lines = [json.loads(line) for line in (cluster.path / "metrics.jsonl").read_text().splitlines()]
        written = [line["step"] for line in lines]
        if written != list(range(steps)) and not (self._may_lack and written == sorted(set(written))):
            raise Violation("line", f"metrics has steps {written}, not {steps}")
        if wrong := "; ".join(filter(None, map(self._wrong_bits, lines))):
            raise Violation("bits", wrong)
        events = [json.loads(line) for line in (cluster.path / "events.jsonl").read_text().splitlines()]
        digests = [event["digests"] for event in events if event["kind"] == "finished"]
        states: dict[int, set[str]] = {}
        for of_worker in (of_worker for of_run in digests for of_worker in of_run.values()):
            for stage, digest in of_worker.items():
                states.setdefault(int(stage), set()).add(digest)
        self.result = Reference(lines, states)
        # A layout that moved has other stages. A bit flip on the only host of a stage is not detected.
        is_unknown = cluster.scenario.elastic or (self._is_wrong and self._had_one_host)
        if self.reference and not is_unknown and not states.items() <= self.reference.digests.items():
            raise Violation("bits", f"the final states are {states}")
        if any(len(of_stage) > 1 for of_stage in states.values()):
            raise Violation("bits", f"the hosts of a stage end with different states: {states}")
