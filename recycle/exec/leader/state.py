"""The state of a run: who takes part, what processes have said of the present generation, the register, and the time.

The register is the record of the last generation and the cursor. The record in memory has what the cursor has too: it
is as of the last commit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import msgspec

from recycle.exec.leader.actions import Outbox, Persist, PreparedPlan
from recycle.exec.leader.checkpoints import Checkpoints
from recycle.exec.leader.detector import FailureDetector
from recycle.exec.leader.holdings import Holdings, ShardHoldings
from recycle.exec.members import members_of, parse_workers, worker_names
from recycle.exec.protocol import (
    Commit,
    Cursor,
    CutOff,
    EvaluationReport,
    Formed,
    FromWorker,
    GenerationPhase,
    GenerationRecord,
    Propose,
    Report,
    StepReport,
    Trouble,
    Value,
    Verified,
    WorkerMessage,
)
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts

_Message = TypeVar("_Message", bound=WorkerMessage)
_Part = TypeVar("_Part", Report, EvaluationReport)


class Heard:
    """Keeps the last message of each kind of each process of one generation; of `Trouble` and `CutOff` the first.

    Args:
        tensor_parallel: processes of each worker.

    Attributes:
        members: names of all processes of the generation, in order.
        failed: those that could not form their groups.
    """

    def __init__(self, tensor_parallel: int) -> None:
        self._tensor_parallel = tensor_parallel
        self.begin(GenerationRecord(0, [], {}, ""))

    def begin(self, record: GenerationRecord) -> None:
        """Forget all of the generation before."""
        self._generation = record.generation
        self.members = members_of(record.live, self._tensor_parallel)
        self._known = frozenset(self.members)
        self._said = defaultdict[type, dict[str, Any]](dict)
        self._parts = defaultdict[tuple[type, int], dict[str, Any]](dict)
        self.failed: set[str] = set()

    def take(self, said: FromWorker) -> None:
        """Take a message. That of another generation, or of a process that has no part in this one, is dropped."""
        member, message = said.member, said.message
        if said.generation != self._generation or member not in self._known:
            return
        if isinstance(message, StepReport):
            self._parts[type(message.report), message.step][member] = message.report
            return
        said_before = self._said[type(message)]
        if not (isinstance(message, Trouble | CutOff) and member in said_before):
            said_before[member] = message
        if isinstance(message, Formed):
            (self.failed.add if message.error else self.failed.discard)(member)

    def of(self, kind: type[_Message]) -> dict[str, _Message]:
        """The messages of a kind by process, in the order in which the processes first said one."""
        return self._said[kind]

    def all_said(self, kind: type[WorkerMessage]) -> bool:
        """Whether all processes have said a message of a kind."""
        return len(self._said[kind]) == len(self.members)

    def silent(self, kind: type[WorkerMessage]) -> set[Worker]:
        """The workers with a process that has not said a message of a kind."""
        return parse_workers(self._known - self._said[kind].keys())

    def take_parts(self, kind: type[_Part], step: int) -> dict[str, _Part] | None:
        """The reports of an iteration, or of the evaluation after it, by process, in order, once all have come; then
        they are forgotten."""
        parts = self._parts[kind, step]
        if len(parts) < len(self.members):
            return None
        del self._parts[kind, step]
        return {member: parts[member] for member in self.members}


class Phase(Enum):
    """Where a run stands."""

    STARTING = "its workers start"
    GOING_BACK = "all processes end, to go back to a checkpoint"
    BETWEEN = "between generations"
    PROPOSED = "a generation is proposed"
    FORMING = "its groups form"
    RUNNING = "it runs"
    FINISHED = "nothing is left to train: the workers say what they end with"
    OVER = "all have said so, or the run has failed"


class PlannedFault(Value):
    """A fault to inject.

    Attributes:
        text: as users write it.
        worker, step: where it strikes; of one that strikes nobody, which worker returns and when.
        strikes: a worker; else the fault brings one back.
    """

    text: str
    worker: Worker
    step: int
    strikes: bool = True


class RunDescription(Value, kw_only=True):
    """What the leader needs to know of a run.

    Attributes:
        job: what is trained.
        steps: iterations to train.
        initial: what processes host that start with the initial state.
        homes: the node of each position.
        absent: workers that the run starts without.
        faults: to inject, by their numbers.
        restarts: how often a worker that died is started again without being asked for.
        own: the user's own schedule, and the workers that it leaves out.
        can_search: whether the planner can be asked for better plans.
        started: when the run started, on the leader's clock.
        logs: folder of the logs, for messages.
        resume_command: that resumes the run, for messages.
    """

    job: PricedJob
    steps: int
    initial: Hosts
    homes: Mapping[Worker, int]
    absent: frozenset[Worker] = frozenset()
    faults: Sequence[PlannedFault] = ()
    restarts: int = 0
    own: tuple[frozenset[Worker], PreparedPlan] | None = None
    can_search: bool = True
    started: float = 0.0
    logs: str = "the logs"
    resume_command: str = "recycle train JOB --resume"


@dataclass
class WorkerProcess:
    """A worker's latest process.

    Attributes:
        incarnation: its number, from 0; -1 when there was none.
        generation: the last generation before the process; None when there was no process, or it is gone with its node
            and may be started again.
        node: that it was started on.
        how: how it ended; None while it runs.
        lines: the last lines of its log.
        is_killed: the leader has asked for its end.
        ready: its members that have started up.
    """

    incarnation: int = -1
    generation: int | None = None
    node: int = 0
    how: str | None = None
    lines: str = ""
    is_killed: bool = False
    ready: set[str] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.incarnation >= 0 and self.how is None


class RunState(Outbox):
    """The state of one run, and the register.

    Args:
        run: what is trained.
        now: time on the leader's clock.

    Attributes:
        checkpoints, holdings: of the run.
        processes: worker -> its latest process.
        places: position -> position whose place on the nodes it has, where the two differ.
        heard: what the processes of the generation have said.
        detector: judges their heartbeats.
        start_deadline: until when all workers are to be ready.
        everybody: all positions.
        live: the workers of the generation, or of the next one.
        joined: those of them that hold no state yet.
        record: the register's record, as of the last commit.
        phase: of the run.
        waited: seconds since it began, without pauses of this process.
        struck, released, gone: as of `Cursor`.
    """

    def __init__(self, run: RunDescription, now: float) -> None:
        job = run.job
        super().__init__(now)
        self.run, self.job, self.limits = run, job, job.membership
        self.checkpoints = Checkpoints(job, self)
        self.processes = {worker: WorkerProcess() for worker in run.homes}
        self.places: dict[Worker, Worker] = {}
        self.heard = Heard(job.grid.tensor_parallel)
        self.detector = FailureDetector(job)
        self.start_deadline = now + self.limits.start_deadline
        self.everybody = frozenset(job.shape.workers())
        self.holdings = (
            ShardHoldings(job, run.initial, self.everybody) if job.train.sharded_optimizer else Holdings(run.initial)
        )
        self.live, self.joined = set(self.everybody - run.absent), set[Worker]()
        self.record = GenerationRecord(0, [], {}, "")
        self.phase, self.waited = Phase.STARTING, 0.0
        self.struck: dict[int, str] = {}
        self.released, self.gone = Counter[str](), dict[str, int]()
        self._earlier: Commit | None = None
        self._persisted_phase: GenerationPhase = "abandoned"

    @property
    def next_step(self) -> int:
        """The iteration after the committed one."""
        return self.record.committed + 1

    @property
    def commit(self) -> Commit:
        """The last commit, of a run that has one."""
        assert self.record.commit is not None
        return self.record.commit

    @property
    def failed(self) -> frozenset[Worker]:
        """The positions without a live worker."""
        return self.everybody - self.live

    @property
    def holders(self) -> set[Worker]:
        """The live workers that hold what the last generation that ran has given them."""
        return self.live - self.joined

    def lost_unit(self, holders: Iterable[Worker]) -> str:
        """A unit that none of these workers holds, in words, with a verb; empty where there is none."""
        lost = self.holdings.lost(holders)
        return self.holdings.described(lost[0]) if lost else ""

    def members(self, worker: Worker | str) -> list[str]:
        """The processes of a worker."""
        return members_of([worker], self.job.grid.tensor_parallel)

    def enter(self, phase: Phase) -> None:
        """Another phase begins."""
        self.phase, self.waited = phase, 0.0

    def log_detected(self, worker: Worker, cause: str, **more: Any) -> None:
        """Write that a worker was found dead or hung."""
        self.log("detected", **{"worker": str(worker), "step": self.next_step, "cause": cause} | more)

    # The register.

    def cursor(self) -> Cursor:
        """The part of the register that changes within a generation."""
        return Cursor(
            self.record.generation,
            self._persisted_phase,
            dict(self.struck),
            dict(self.released),
            dict(self.gone),
            self._earlier,
            **self.record.progress(),
        )

    def resumable_cursor(self) -> Cursor:
        """The cursor of a run that was ended early and shall go on: its last step does not end it."""
        cursor = self.cursor()
        assert cursor.commit is not None
        commit = msgspec.structs.replace(cursor.commit, last=None, finished=False)
        return msgspec.structs.replace(cursor, commit=commit)

    def persist(self, phase: GenerationPhase | None = None, record: GenerationRecord | None = None) -> None:
        """Write the cursor, in another phase if there is one, and the record where it has changed."""
        self._persisted_phase = phase or self._persisted_phase
        self.put(Persist(self.cursor(), record))

    def change(self, **progress: Any) -> None:
        """Change what the cursor says, and write it."""
        self.record = msgspec.structs.replace(self.record, **progress)
        self.persist()

    def announce(self, phase: GenerationPhase = "proposed", text: str = "", **changes: Any) -> None:
        """Make the record of another generation the register's, and propose it, or have it be over from the start.

        Unless `changes` say otherwise, what the live workers hold stays as it is.

        Args:
            phase: "proposed" or "abandoned".
            text: of the plan, as of `Propose`.
            changes: how the record differs from the last one.
        """
        common = {
            "generation": self.record.generation + 1,
            "live": worker_names(self.live),
            "joins": worker_names(self.joined),
            "mode": "barrier",  # a repeated iteration must wait for its norm, and any other starts an empty pipeline
            "copies": [],
            "behind": [],
            "held": self.holdings.plan,
            "holds": self.holdings.plan,
            "verified": self._kept_state(),
            "candidate": None,
            "disputed": [],
            "incarnations": {
                str(worker): process.incarnation
                for worker, process in self.processes.items()
                if process.incarnation > 0
            },
        }
        self.record = record = msgspec.structs.replace(self.record, **common | changes)
        self._earlier = None
        self.heard.begin(record)
        self.persist(phase, record)
        if phase == "proposed":
            self.checkpoints.proposed(record, self.holdings.hosts)
            self.tell(Propose(record, text))

    def _kept_state(self) -> Verified | None:
        """The state to go back to, as the next record names it: workers that join do not have it either."""
        verified = self.record.verified
        if verified is None:
            return None
        without = {*verified.without, *map(str, self.joined)}
        return msgspec.structs.replace(verified, without=[name for name in worker_names(self.live) if name in without])
