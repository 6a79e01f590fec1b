"""The messages between workers, agents and the leader, and their parts.

A worker talks to the agent of its node, agents to the leader. The agent adds the process's name (`FromWorker`).
Messages about a generation carry its number; the leader ignores other generations.
"""

from __future__ import annotations

from typing import Any, Final, Literal, dataclass_transform

from msgspec import Struct

ENDED_EARLY: Final = "ended early"
"""The outcome of a run that ended early on request, and can be resumed."""
STAGE_LOST: Final = 75
"""Exit code of a user's script, and of its agent, when a stage has no live host: load the newest checkpoint."""
StepMode = Literal["staggered", "barrier"]
"""How stages step: each after its own reduce, validated by the commit later; or all after the commit (barrier)."""


@dataclass_transform(frozen_default=True)
class Value(Struct, frozen=True):
    """An immutable record."""


class Row(Value, array_like=True, gc=False):
    """A frequent record, encoded without field names."""


class UpMessage(Row, tag=True):
    """A message towards the leader."""


class DownMessage(Value, tag=True):
    """A message from the leader, or an answer."""


class Commit(Value):
    """The commit of an iteration, the same for all workers.

    Attributes:
        loss: mean loss over its micro-batches.
        grad_norm: global norm of the mean gradient, before clipping.
        clip_factor: factor on the gradient; None if the step is skipped.
        next_mode: step mode of the next iteration, unless it starts a generation.
        recent: norms of the last iterations, oldest first, this one included; they decide the next mode.
        last: iteration after which all leave the generation; announced before any worker can begin the next.
        finished: this was the last iteration of the run.
        checkpoint: the state after this step is saved to a checkpoint.
        evaluate: the state after this step is evaluated.
    """

    step: int
    loss: float
    grad_norm: float
    clip_factor: float | None
    mode: StepMode = "barrier"
    next_mode: StepMode = "barrier"
    recent: list[float] = []
    last: int | None = None
    finished: bool = False
    checkpoint: bool = False
    evaluate: bool = False


class Evaluated(Value):
    """The result of an evaluation of a step's state: mean loss of all tokens (NaN without tokens), and their number."""

    step: int
    loss: float
    tokens: float


class Copy(Row):
    """Units `first` to before `last` (see `recycle.plans.hosting`) that a worker copies before its generation runs."""

    worker: str
    source: str
    first: int
    last: int


class Verified(Value):
    """The last state that all hosts agreed on by digest, and keep.

    Attributes:
        step: the iteration that produced the state; -1 for the initial state.
        commit: commit of that iteration, without announcements; None for the initial state.
        without: workers that lack the state, because they joined later.
        holds: hash of the plan whose units the other workers hold in the state; empty for the initial units.
    """

    step: int
    commit: Commit | None
    without: list[str] = []
    holds: str = ""


class Progress(Value, kw_only=True):
    """The committed progress: the part of the register that changes within a generation.

    Attributes:
        committed: last committed iteration; -1 before the first.
        commit: commit of that iteration; None before the first.
        earlier: the commit before that one, which a process may have missed; None after a rollback.
        mode: step mode of the next iteration.
        evaluated: result of the last complete evaluation; None before the first.
        verified: the state to restore if hosts disagree; None before the first comparison of digests.
        candidate: the next verified state, once all work since was replayed without differences.
    """

    committed: int = -1
    commit: Commit | None = None
    earlier: Commit | None = None
    mode: StepMode = "barrier"
    evaluated: Evaluated | None = None
    verified: Verified | None = None
    candidate: Verified | None = None

    @property
    def verified_step(self) -> int | None:
        return None if self.verified is None else self.verified.step

    def progress(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Progress.__struct_fields__}


class GenerationRecord(Progress):
    """The register's record of a generation. `roles` maps processes (by start position) to positions of the plan.

    Attributes:
        joins: processes that hold no state yet.
        periods: step mode -> period of the plan.
        copies: copies before the generation runs; each worker makes its copies in this order.
        held: hash of the plan whose units the other workers hold before; empty for the initial units.
        holds: hash of the plan whose units all workers hold once the generation runs; empty for the initial units.
        rounds: iterations after which the plan has replayed all work once; 0 without replays.
        times: digest of the measured times that the plan suits; empty for the job's.
        disputed: (stage, pipeline, index) of micro-batches for which hosts computed different results when the
            iteration after the committed one ran before.
        behind: background copies while the generation runs, of shards that lost copies in a death.
        places: position -> position whose place on the nodes it uses, if different.
        incarnations: worker -> number of its latest process, from 0, if not 0.
        script_starts: how often all processes of the user's script were started again after the loss of a stage.
        ran: the last generation that has run; 0 without one.
    """

    generation: int
    live: list[str]
    roles: dict[str, str]
    plan: str
    joins: list[str] = []
    periods: dict[StepMode, float] = {}
    copies: list[Copy] = []
    held: str = ""
    holds: str = ""
    rounds: int = 0
    times: str = ""
    disputed: list[tuple[int, int, int]] = []
    behind: list[Copy] = []
    places: dict[str, str] = {}
    incarnations: dict[str, int] = {}
    script_starts: int = 0
    ran: int = 0

    @property
    def has_gone_back(self) -> bool:
        """Whether all workers rolled back to the committed state, and no commit has followed."""
        return self.verified_step == self.committed

    @property
    def is_evaluation_due(self) -> bool:
        is_done = self.evaluated is not None and self.evaluated.step == self.committed
        return self.commit is not None and self.commit.evaluate and not is_done


GenerationPhase = Literal["proposed", "running", "ended", "abandoned"]
"""Phase of a generation: forming, running, over after it ran, or over without having run."""


class Cursor(Progress):
    """The leader's state that changes within a generation; written at every commit.

    Attributes:
        generation: its generation; a cursor of an earlier generation is ignored.
        phase: phase of the generation.
        struck: number of a fault that has struck -> the process that it struck first.
        released: worker -> number of its processes up to the last one that was released.
        gone: worker -> number of its process that left on request or was released.
    """

    generation: int
    phase: GenerationPhase
    struck: dict[int, str] = {}
    released: dict[str, int] = {}
    gone: dict[str, int] = {}


class Computed(Row):
    """The instructions of one kind that a worker ran for a stage in an iteration; `seconds` in total, without waits."""

    stage: int
    token: str
    count: int
    seconds: float


class Replayed(Row):
    """A worker's result for a micro-batch that several hosts of a stage ran in an iteration.

    Attributes:
        stage, pipeline, index: the stage and the micro-batch.
        is_home: the worker owns the work; otherwise it replayed the work.
        sums: both sums of each checksum of `recycle.exec.checksums.MicroBatchChecksums`.
    """

    stage: int
    pipeline: int
    index: int
    is_home: bool
    sums: tuple[int, ...]


class LinkTime(Row):
    """A process's message times with a peer, see `recycle.exec.transport.base.LinkStats`.

    Attributes:
        pipeline, rank: start position of the peer.
        sent, seconds: number of messages delivered to the peer, and the lower quartile of their durations.
        waited: seconds that this process waited for messages from the peer.
    """

    pipeline: int
    rank: int
    sent: int
    seconds: float
    waited: float


class Report(UpMessage):
    """A worker's part of a commit.

    Attributes:
        norms: stage -> floats whose exact sum is the squared gradient norm; with tensor parallelism, of the parameters
            that only this tensor rank has. With a sharded optimizer, shards (by their number in the model) replace
            stages in all gradient fields.
        loss: loss sum, last stage only.
        compute: the F, I, W and B of each of its stages.
        replicated: the same as `norms`, of parameters on all tensor ranks; empty without tensor parallelism.
        checksums: stage -> checksum of all bits of the gradient sums, as by `Stage.gradient_checksum`.
        states: number (`Stage.compared`) -> checksum of the state at the start of the iteration, if compared.
        replayed: results of replayed micro-batches.
        links: message times, if the transport measures them; only the longest of many.
    """

    norms: dict[int, list[float]]
    loss: float | None
    compute: list[Computed] = []
    replicated: dict[int, list[float]] = {}
    checksums: dict[int, int] = {}
    states: dict[int, tuple[int, int]] = {}
    replayed: list[Replayed] = []
    links: list[LinkTime] = []


class EvaluationReport(UpMessage):
    """A worker's part of an evaluation: floats whose exact sums are the sum of losses and the number of tokens."""

    losses: list[float]
    tokens: list[float]


class Copied(Row):
    """A copy that a process made of another worker's units; `seconds` from the first send to the last arrival."""

    source: str
    first: int
    last: int
    bytes: int
    seconds: float


class Formed(UpMessage, omit_defaults=True):
    """The groups of a process are formed, or failed to form.

    Attributes:
        error: why forming failed; empty on success.
        expired: this process did not fail, but others were late.
        copied: the copies that the process has made.
    """

    error: str = ""
    expired: bool = False
    copied: list[Copied] = []


class Heartbeat(UpMessage):
    """The regular status of a process.

    Attributes:
        beats: number of earlier heartbeats.
        progress: number of begins and ends of operations and waits of its main thread.
        waiting: whether it waits for another process.
        doing: its operation, a word.
        longest: longest recent duration of that operation, seconds; None before the first one has ended.
    """

    beats: int
    progress: int
    waiting: bool
    doing: str
    longest: float | None


class StoredFile(Value):
    """Size and hash of a file."""

    bytes: int
    sha256: str


class Saved(Value):
    """A process's part of a checkpoint: the written files or an error, and the seconds (`stall`) without training."""

    files: dict[str, StoredFile] = {}
    error: str = ""
    stall: float = 0.0


class RunInfo(Value, kw_only=True):
    """The run's description, the same for all agents.

    Attributes:
        job: sha256 of the job.
        schedule: hash of the user's own schedule; empty without one.
        started: seconds since the epoch.
        script_restarts: how often the user's script is started again; None without a script.
    """

    identity: str
    job: str
    steps: int
    faults: list[str]
    started: float
    resume: bool = False
    transport: str = ""
    schedule: str = ""
    script_restarts: int | None = None


# Messages of a process.


class Ready(UpMessage):
    """The process of this incarnation has started up.

    Attributes:
        at: iteration of the state that a user's script has loaded; -1 for none.
        schedule: the script's own schedule of all workers, as text; empty without one, and from all but one process.
    """

    incarnation: int
    at: int = -1
    schedule: str = ""


class Acknowledged(UpMessage):
    """The process has left its last generation and can form the proposed one.

    Attributes:
        undone: it has undone a step that was not committed.
        stale: its live parameters differ from the committed iteration.
    """

    undone: bool
    stale: bool = False


class CopyProgress(UpMessage):
    """All copies that the process has made so far while its generation runs."""

    copied: list[Copied]


class StepReport(UpMessage):
    """The process has its part of the commit of iteration `step`, or of the evaluation after it."""

    step: int
    report: Report | EvaluationReport


class Trouble(UpMessage):
    """The transport of the process broke; another process may be the cause."""

    message: str


class CutOff(UpMessage):
    """A peer does not answer on an open connection."""

    peer: str


class SavedPart(UpMessage):
    """A part of the checkpoint of iteration `step` is written, or failed."""

    step: int
    stage: int
    tensor_rank: int
    saved: Saved


class StateTensors(UpMessage):
    """The places of a compared state's tensors, see `checksums.StateTensor` and `Stage.compared` (number)."""

    number: int
    tensor_rank: int
    plan: str
    tensors: list[tuple[str, int, int, int]]


class FinalState(UpMessage):
    """The run is over: stage -> sha256 of its final state."""

    digests: dict[int, str]


class Warned(UpMessage):
    """The process could not do something that training does not need."""

    message: str


class FaultReached(UpMessage):
    """The injected fault of this number has reached its point in the process, which waits for `Strike`."""

    fault: int


class Leaving(UpMessage):
    """The process was asked to leave, or its agent asks for it, with a reason."""

    incarnation: int
    reason: str = ""


class EndAsked(UpMessage):
    """A user's script asks to end the run after its present or next step."""


WorkerMessage = (
    Ready
    | Acknowledged
    | Formed
    | CopyProgress
    | StepReport
    | Trouble
    | CutOff
    | SavedPart
    | StateTensors
    | FinalState
    | Warned
    | FaultReached
    | Leaving
    | EndAsked
)


class FromWorker(Row):
    """A message of a process; `generation` is 0 for a message without one."""

    member: str
    message: WorkerMessage
    generation: int = 0


# Messages of an agent.


class Ended(UpMessage):
    """A worker's process has ended; `lines` are the last lines of its log, if it ended by itself."""

    worker: str
    incarnation: int
    how: str
    lines: str = ""


class AgentProcess(Value):
    """The latest process of a worker that an agent has started; `how` is None while it runs."""

    worker: str
    incarnation: int
    generation: int
    how: str | None = None
    lines: str = ""


class Hello(UpMessage):
    """The first message of an agent: its session, its processes, and their messages that a leader may still need."""

    node: int
    session: str
    processes: list[AgentProcess] = []
    said: list[FromWorker] = []


class Batch(UpMessage, omit_defaults=True):
    """The events on a node since the last batch; processes in `ended` have sent all their messages before."""

    said: list[FromWorker] = []
    beats: dict[str, Heartbeat] = {}
    ended: list[Ended] = []
    keys: dict[str, bytes] = {}


# Messages of `recycle drain`.


class Drain(UpMessage):
    """Ask the workers of `target`, a worker or a node's number, to leave; killed after `seconds`, None for no deadline.

    The answers are `Drained`, and `Refused` for each worker that stays.
    """

    target: str
    seconds: float | None = None


# Messages of the leader.


class Propose(DownMessage):
    """Propose the next generation, with the text of its plan file if the run directory does not hold it."""

    record: GenerationRecord
    plan: str = ""


class Permit(DownMessage):
    """Permit forming groups, or running; `stale` if some live parameters differ from the committed iteration."""

    generation: int
    what: Literal["form", "run"]
    stale: bool = False


class Committed(DownMessage):
    """The commit of the next iteration."""

    generation: int
    commit: Commit


class EvaluationResult(DownMessage):
    """The result of the evaluation of the committed state."""

    generation: int
    evaluated: Evaluated


class Stop(DownMessage):
    """The generation is over."""

    generation: int


class Leave(DownMessage):
    """This process of the worker is released, and may end; with exit code `STAGE_LOST` if `stage_lost` says why."""

    worker: str
    incarnation: int
    stage_lost: str = ""


class Strike(DownMessage):
    """The event of this fault is written: its processes strike now, of those at its point only `member`, the first."""

    fault: int
    member: str


LeaderMessage = Propose | Permit | Committed | EvaluationResult | Stop | Leave | Strike


class Start(DownMessage):
    """Start a process of the worker, from the checkpoint of step `restored`, None for the initial state.

    A user's script loads its own checkpoint; `restored` is then any number if all processes start with a state.

    Attributes:
        place: position whose place on its node the process uses.
        generation: the last generation before the process.
    """

    worker: str
    incarnation: int
    place: str
    generation: int
    restored: int | None = None


class Kill(DownMessage):
    """Kill every process of the worker up to this incarnation."""

    worker: str
    incarnation: int


class Keys(DownMessage):
    """Keys of other nodes for forming process groups: name -> value."""

    keys: dict[str, bytes]


class Alive(DownMessage):
    """The leader's process runs; sent several times per lease."""


class Rejected(DownMessage):
    """The node already has an agent."""


class Over(DownMessage):
    """The run has ended.

    Attributes:
        outcome: empty after its last iteration, `ENDED_EARLY`, or exit code, code and text of why it cannot continue.
    """

    outcome: str


Order = LeaderMessage | Start | Kill | Keys | Alive | Rejected | Over


class Drained(DownMessage):
    """An answer to `Drain`: the workers that were asked to leave."""

    workers: list[str]


IS_DEAD = "dead already, and not started again"


class Refused(DownMessage):
    """An answer to `Drain`: a worker stays, or all workers if `worker` is empty, and why. `IS_DEAD`: it has ended."""

    worker: str
    why: str


# Messages between a process and its agent.


class Join(UpMessage):
    """The first message of a process on its connection."""

    member: str
    incarnation: int


class Said(UpMessage):
    """A message of the process for the leader."""

    message: WorkerMessage
    generation: int = 0


class SetKey(UpMessage):
    """Write a key for forming process groups; answered by `Values`."""

    name: str
    value: bytes


class GetKeys(UpMessage):
    """Read keys for forming process groups; answered by `Values`."""

    names: list[str]


class Values(DownMessage):
    """The values of keys; None for a key that was not written."""

    values: list[bytes | None] = []


ProcessMessage = Join | Said | Heartbeat | SetKey | GetKeys
AgentMessage = LeaderMessage | Values
"""Messages from an agent to a process."""


REFUSED_THE_JOB = "refused the job"
"""Description of the end of a worker whose last log line names an error in the job."""

LINE_SEPARATOR = " | "
"""Separates the lines of a log's end."""


def as_clause(how: str) -> str:
    """Return how a process ended as a clause: "was killed by SIGKILL"."""
    return f"was {how}" if how.startswith("killed") else how


def with_last_lines(how: str, lines: str) -> str:
    """Return the description of a process's end, with the last lines of its log if any."""
    return f"{how}; its last lines: {lines}" if lines else how
