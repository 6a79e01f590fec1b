"""The state of a run: live workers, messages of the present generation, the register, and the time.

The register is the last generation's record and the cursor. In memory the record includes the cursor's fields.
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


class ReceivedMessages:
    """The last message of each kind from each process of one generation; for `Trouble` and `CutOff` the first.

    `members` are all processes of the generation, in order; `failed` those that could not form their groups.
    """

    def __init__(self, tensor_parallel: int) -> None:
        self._tensor_parallel = tensor_parallel
        self.start_generation(GenerationRecord(0, [], {}, ""))

    def start_generation(self, record: GenerationRecord) -> None:
        self._generation = record.generation
        self.members = members_of(record.live, self._tensor_parallel)
        self._member_set = frozenset(self.members)
        self._messages = defaultdict[type, dict[str, Any]](dict)
        self._parts = defaultdict[tuple[type, int], dict[str, Any]](dict)
        self.failed: set[str] = set()

    def take(self, sent: FromWorker) -> None:
        """Take a message; messages of other generations or of non-members are dropped."""
        member, message = sent.member, sent.message
        if sent.generation != self._generation or member not in self._member_set:
            return
        if isinstance(message, StepReport):
            self._parts[type(message.report), message.step][member] = message.report
            return
        earlier = self._messages[type(message)]
        if not (isinstance(message, Trouble | CutOff) and member in earlier):
            earlier[member] = message
        if isinstance(message, Formed):
            (self.failed.add if message.error else self.failed.discard)(member)

    def by_process(self, kind: type[_Message]) -> dict[str, _Message]:
        """Return process -> message of this kind, in the order of the first messages."""
        return self._messages[kind]

    def is_complete(self, kind: type[WorkerMessage]) -> bool:
        return len(self._messages[kind]) == len(self.members)

    def missing(self, kind: type[WorkerMessage]) -> set[Worker]:
        return parse_workers(self._member_set - self._messages[kind].keys())

    def take_parts(self, kind: type[_Part], step: int) -> dict[str, _Part] | None:
        """Return and forget the reports of an iteration or evaluation, in process order; None until complete."""
        parts = self._parts[kind, step]
        if len(parts) < len(self.members):
            return None
        del self._parts[kind, step]
        return {member: parts[member] for member in self.members}


class Phase(Enum):
    """The phase of a run."""

    STARTING = "its workers start"
    RESTORING = "all processes end before a checkpoint is restored"
    BETWEEN = "between generations"
    PROPOSED = "a generation is proposed"
    FORMING = "its groups form"
    RUNNING = "it runs"
    FINISHED = "training is done, and the workers report their final states"
    OVER = "the run has ended or failed"


class PlannedFault(Value):
    """A fault to inject.

    Attributes:
        text: the fault as users write it.
        worker, step: where and when the fault strikes, or which worker returns and when.
        strikes: the fault strikes a worker; else it brings a worker back.
    """

    text: str
    worker: Worker
    step: int
    strikes: bool = True


class RunDescription(Value, kw_only=True):
    """A run, as the leader needs to know it.

    Attributes:
        initial: what processes host that start with the initial state.
        homes: node of each position.
        absent: workers that the run starts without.
        restarts: how often a dead worker is restarted automatically.
        own: the workers that the user's own schedule leaves out, and its plan.
        can_search: whether the planner can search for better plans.
        started: start of the run on the leader's clock.
        script_restarts: how often a user's script is started again after the loss of a stage; None if workers restore
            a checkpoint of the run.
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
    script_restarts: int | None = None

    @property
    def is_script(self) -> bool:
        return self.script_restarts is not None


@dataclass
class WorkerProcess:
    """A worker's latest process.

    Attributes:
        incarnation: number of the process, from 0; -1 before the first.
        generation: the last generation before the process; None without a process, or after a loss with its node.
        how: how the process ended; None while it runs.
        lines: the last lines of its log.
        is_killed: the leader has requested its end.
        ready: members that have started up.
        at: iteration of the state that it has started with; -1 for an initial state.
    """

    incarnation: int = -1
    generation: int | None = None
    node: int = 0
    how: str | None = None
    lines: str = ""
    is_killed: bool = False
    ready: set[str] = field(default_factory=set)
    at: int = -1

    @property
    def is_running(self) -> bool:
        return self.incarnation >= 0 and self.how is None

    @property
    def is_present(self) -> bool:
        """Whether it runs and is to go on."""
        return self.is_running and not self.is_killed


class RunState(Outbox):
    """The state of one run, and the register.

    Attributes:
        places: position -> position whose place on the nodes it uses, if different.
        start_deadline: until when all workers must be ready.
        positions: all positions.
        live: workers of the generation, or of the next one.
        joined: live workers that hold no state yet.
        record: the register's record, as of the last commit.
        waited: seconds since the phase began, without suspensions of this process.
        struck, released, gone: as in `Cursor`.
    """

    def __init__(self, run: RunDescription, now: float) -> None:
        job = run.job
        super().__init__(now)
        self.run, self.job, self.limits = run, job, job.membership
        self.checkpoints = Checkpoints(job, self)
        self.processes = {worker: WorkerProcess() for worker in run.homes}
        self.places: dict[Worker, Worker] = {}
        self.received = ReceivedMessages(job.grid.tensor_parallel)
        self.detector = FailureDetector(job, run.is_script)
        self.start_deadline = now + self.limits.start_deadline
        self.positions = frozenset(job.shape.workers())
        self.holdings = (
            ShardHoldings(job, run.initial, self.positions) if job.train.sharded_optimizer else Holdings(run.initial)
        )
        self.live, self.joined = set(self.positions - run.absent), set[Worker]()
        self.record = GenerationRecord(0, [], {}, "")
        self.phase, self.waited = Phase.STARTING, 0.0
        self.struck: dict[int, str] = {}
        self.released, self.gone = Counter[str](), dict[str, int]()
        self._persisted_phase: GenerationPhase = "abandoned"

    @property
    def next_step(self) -> int:
        return self.record.committed + 1

    @property
    def commit(self) -> Commit:
        assert self.record.commit is not None
        return self.record.commit

    @property
    def failed(self) -> frozenset[Worker]:
        return self.positions - self.live

    @property
    def holders(self) -> set[Worker]:
        """The live workers that hold the state assigned by the last generation that ran."""
        return self.live - self.joined

    def lost_unit(self, holders: Iterable[Worker]) -> str:
        """Return a unit that none of these workers holds, as text with a verb; empty if there is none."""
        lost = self.holdings.lost(holders)
        return self.holdings.describe(lost[0]) if lost else ""

    def members(self, worker: Worker | str) -> list[str]:
        return members_of([worker], self.job.grid.tensor_parallel)

    def enter(self, phase: Phase) -> None:
        self.phase, self.waited = phase, 0.0

    def log_detected(self, worker: Worker, cause: str, **more: Any) -> None:
        self.log("detected", **{"worker": str(worker), "step": self.next_step, "cause": cause} | more)

    # The register.

    def cursor(self) -> Cursor:
        return Cursor(
            self.record.generation,
            self._persisted_phase,
            dict(self.struck),
            dict(self.released),
            dict(self.gone),
            **self.record.progress(),
        )

    def persist(self, phase: GenerationPhase | None = None, record: GenerationRecord | None = None) -> None:
        self._persisted_phase = phase or self._persisted_phase
        self.put(Persist(self.cursor(), record))

    def change(self, **progress: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **progress)
        self.persist()

    def announce(self, phase: GenerationPhase = "proposed", text: str = "", **changes: Any) -> None:
        """Write a new generation's record to the register, and propose the generation unless `phase` is "abandoned".

        `changes` are the fields that differ from the last record; the live workers' holdings stay by default.
        """
        has_run = self._persisted_phase in ("running", "ended")
        common = {
            "generation": self.record.generation + 1,
            "ran": self.record.generation if has_run else self.record.ran,
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
        self.received.start_generation(record)
        self.persist(phase, record)
        if phase == "proposed":
            self.checkpoints.proposed(record, self.holdings.hosts)
            self.tell(Propose(record, text))

    def _kept_state(self) -> Verified | None:
        """Workers that join do not have the verified state either."""
        verified = self.record.verified
        if verified is None:
            return None
        without = {*verified.without, *map(str, self.joined)}
        return msgspec.structs.replace(verified, without=[name for name in worker_names(self.live) if name in without])
