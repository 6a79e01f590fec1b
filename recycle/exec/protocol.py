"""The messages between workers, agents and the leader, and what they consist of.

A worker speaks to the agent of its node, agents to the leader. The agent adds the name of the process (`FromWorker`),
so that no process speaks for another. Messages about a generation carry its number; the leader ignores those of others.
What goes up to the leader comes from thousands of processes and is encoded without the names of its fields.
"""

from __future__ import annotations

from typing import Any, Final, Literal, dataclass_transform

from msgspec import Struct

ENDED_EARLY: Final = "ended early"
"""The outcome of a run that was told to end before its last iteration, and can go on."""
StepMode = Literal["staggered", "barrier"]
"""How the stages of an iteration step: each at once after its own reduce, to be validated by the commit; or all after
the commit."""


@dataclass_transform(frozen_default=True)
class Value(Struct, frozen=True):
    """What does not change."""


class Row(Value, array_like=True, gc=False):
    """What there are many of: encoded without the names of its fields."""


class UpMessage(Row, tag=True):
    """A message towards the leader."""


class DownMessage(Value, tag=True):
    """A message of the leader, or an answer."""


class Commit(Value):
    """What the commit of an iteration fixes for everyone.

    Attributes:
        step: the iteration.
        loss: mean loss over its micro-batches.
        grad_norm: global norm of the mean gradient, before clipping.
        clip_factor: factor on the gradient; None when the step is skipped.
        mode: how it stepped.
        next_mode: how the next iteration steps, unless it is the first of a generation.
        recent: norms of the last iterations, this one included, that the next mode follows from; the oldest first.
        last: iteration after which all leave the generation. Said before any worker can have begun the one behind it.
        finished: this was the last iteration of the run.
        checkpoint: the state after this step is to be kept in a checkpoint.
        evaluate: the state after this step is to be evaluated.
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
    """The result of an evaluation.

    Attributes:
        step: the iteration whose state was evaluated.
        loss: sum of the losses of all tokens over their number; not a number when there are none.
        tokens: that counted.
    """

    step: int
    loss: float
    tokens: float


class Copy(Row):
    """Units of the model that a worker copies before its generation runs.

    Attributes:
        worker, source: processes.
        first, last: units from the first up to but without the last (see `recycle.plans.hosting`).
    """

    worker: str
    source: str
    first: int
    last: int


class Verified(Value):
    """The last state that the digests of all hosts agreed on, which they keep.

    Attributes:
        step: the iteration that it is from; -1 for the initial one.
        commit: of it, without what it announced; None for the initial one.
        without: workers that do not have it, as they joined later.
        holds: hash of the plan that the others hold the units of in it; empty for what processes start with.
    """

    step: int
    commit: Commit | None
    without: list[str] = []
    holds: str = ""


class Progress(Value, kw_only=True):
    """What is committed: the part of the register that changes within a generation.

    Attributes:
        committed: last committed iteration, -1 before the first.
        commit: of the last committed iteration; None before the first.
        mode: of the iteration after it.
        evaluated: result of the last evaluation that is done; None before the first.
        verified: the state to go back to where hosts disagree; None before the first comparison of digests.
        candidate: the state that replaces it once everything was replayed since, and nothing differed.
    """

    committed: int = -1
    commit: Commit | None = None
    mode: StepMode = "barrier"
    evaluated: Evaluated | None = None
    verified: Verified | None = None
    candidate: Verified | None = None

    @property
    def verified_step(self) -> int | None:
        """The iteration that the verified state is from."""
        return None if self.verified is None else self.verified.step

    def progress(self) -> dict[str, Any]:
        """These attributes by name, of a record or a cursor."""
        return {name: getattr(self, name) for name in Progress.__struct_fields__}


class GenerationRecord(Progress):
    """The register. `roles` maps processes (by the position they started in) to positions of the plan.

    Attributes:
        joins: processes that hold no state yet.
        periods: of the plan, in each mode that it may run in.
        copies: what is copied before the generation runs, by these and by workers that come to host other units; each
            worker takes part in its own in this order.
        held: hash of the plan that the others hold the units of; empty for what processes start with.
        holds: likewise, of what all hold once the generation runs.
        rounds: iterations in which everything is replayed once by the plan; 0 where nothing is.
        disputed: (stage, pipeline, index) of micro-batches for which hosts computed different results when the
            iteration after the committed one ran before.
        behind: what is copied while the generation runs: shards of which a death has left fewer copies.
        places: position -> position whose place on the nodes it has, where the two differ.
        incarnations: worker -> number of its latest process, from 0, where that is not 0.
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
    disputed: list[tuple[int, int, int]] = []
    behind: list[Copy] = []
    places: dict[str, str] = {}
    incarnations: dict[str, int] = {}

    @property
    def has_gone_back(self) -> bool:
        """Whether all went back to the committed state from a later one, and nothing has been committed since."""
        return self.verified_step == self.committed

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the next thing to do is the evaluation of the committed state."""
        is_done = self.evaluated is not None and self.evaluated.step == self.committed
        return self.commit is not None and self.commit.evaluate and not is_done


GenerationPhase = Literal["proposed", "running", "ended", "abandoned"]
"""Where a generation stands: it forms, it runs, it has run and is over, or it is over and never ran."""


class Cursor(Progress):
    """The part of the leader's state that changes within a generation; written at every commit.

    Attributes:
        generation: that it belongs to; one of an earlier generation does not count.
        phase: of the generation.
        struck: number of a fault that has struck -> the process that it struck first.
        released: worker -> how many of its processes were let go.
        gone: worker -> number of its process that was told to leave and has, or was let go.
        earlier: the commit before the last one, which a process may not have heard of; None where there is none.
    """

    generation: int
    phase: GenerationPhase
    struck: dict[int, str] = {}
    released: dict[str, int] = {}
    gone: dict[str, int] = {}
    earlier: Commit | None = None


class Computed(Row):
    """The instructions of one kind that a worker ran for one of its stages in an iteration.

    Attributes:
        stage: the stage.
        token: the kind's, as instructions are written.
        count: how many ran.
        seconds: what they took together, without any wait for peers.
    """

    stage: int
    token: str
    count: int
    seconds: float


class Replayed(Row):
    """What a worker says that came of a micro-batch which more than one host of a stage ran in an iteration.

    Attributes:
        stage, pipeline, index: whose work on which micro-batch.
        is_home: it counts; else the worker has replayed it.
        sums: both sums of each checksum of `recycle.exec.checksums.MicroBatchChecksums`.
    """

    stage: int
    pipeline: int
    index: int
    is_home: bool
    sums: tuple[int, ...]


class LinkTime(Row):
    """What a process says of its messages with another one, see `recycle.exec.transport.base.Messaged`.

    Attributes:
        pipeline, rank: position that the other process started in.
        sent, seconds: how many messages to it have arrived, and the lower quartile of what they took.
        waited: what this process waited for messages from it.
    """

    pipeline: int
    rank: int
    sent: int
    seconds: float
    waited: float


class Report(UpMessage):
    """A worker's part of a commit.

    Attributes:
        norms: squared gradient norm of each hosted stage, as floats whose exact sum it is. With tensor parallelism that
            of what this tensor rank alone has. With a sharded optimizer that of each owned shard: shards, by their
            number in the whole model, then stand in the place of stages in all that the report says of gradients.
        loss: its loss sum, last stage only.
        compute: the F, I, W and B of each of its stages.
        replicated: likewise the squared norm of what all tensor ranks hold; without tensor parallelism nothing.
        checksums: of all bits of the sums of each hosted stage, as `Stage.gradient_checksum` makes it.
        states: likewise the checksums of the states that the iteration began with, where these are compared, by the
            numbers of `Stage.compared`.
        replayed: what came of micro-batches that were replayed.
        links: of the worker's messages, where the transport times them; those that took longest, if they are many.
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
    """A worker's part of an evaluation: floats whose exact sums these are.

    Attributes:
        losses: sum of the losses of its tokens.
        tokens: how many these are.
    """

    losses: list[float]
    tokens: list[float]


class Copied(Row):
    """What a process has copied from another before its generation runs.

    Attributes:
        source: the other one's worker.
        first, last: units, as of `Copy`.
        bytes: of the state.
        seconds: from the first that was sent to the last that is there.
    """

    source: str
    first: int
    last: int
    bytes: int
    seconds: float


class Formed(UpMessage, omit_defaults=True):
    """Whether the groups of a process stand.

    Attributes:
        error: why they do not; empty when they do.
        expired: nothing failed in this process, but others did not come in time.
        copied: what it has copied.
    """

    error: str = ""
    expired: bool = False
    copied: list[Copied] = []


class Heartbeat(UpMessage):
    """What a process says of itself every so often.

    Attributes:
        beats: how many it has sent before.
        progress: how many operations of its main thread have begun, ended, or begun or ended to wait.
        waiting: whether it waits for somebody else.
        doing: its operation, a word.
        longest: seconds that such an operation took lately at most, None before the first one has ended.
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
    """A process's part of a checkpoint: the files that it wrote, or why it could not.

    Attributes:
        stall: seconds that it copied its state, in which it did not train.
    """

    files: dict[str, StoredFile] = {}
    error: str = ""
    stall: float = 0.0


class RunInfo(Value, kw_only=True):
    """What all agents of a run agree on.

    Attributes:
        identity: of this run, whatever its name.
        job: sha256 of the job.
        steps: iterations to train.
        faults: to strike on purpose, as text.
        started: seconds since the epoch.
        resume: it goes on from what its directory holds.
    """

    identity: str
    job: str
    steps: int
    faults: list[str]
    started: float
    resume: bool = False


# What a process says.


class Ready(UpMessage):
    """The process of this incarnation has started up."""

    incarnation: int


class Acknowledged(UpMessage):
    """The process has left its last generation and can form the proposed one.

    Attributes:
        undone: it has taken back a step that was not committed.
        stale: its live parameters are not those of the committed iteration.
    """

    undone: bool
    stale: bool = False


class CopyProgress(UpMessage):
    """All that the process has copied so far while its generation runs."""

    copied: list[Copied]


class StepReport(UpMessage):
    """The process has its part of the commit of iteration `step`, or of the evaluation after it."""

    step: int
    report: Report | EvaluationReport


class Trouble(UpMessage):
    """The transport of the process broke; another process may be the cause."""

    message: str


class CutOff(UpMessage):
    """A worker whose connection to this one is open does not answer on it."""

    peer: str


class SavedPart(UpMessage):
    """A part of the checkpoint of iteration `step` is written, or why not."""

    step: int
    stage: int
    tensor_rank: int
    saved: Saved


class StateTensors(UpMessage):
    """Where the tensors of a compared state lie in it, as `recycle.exec.checksums.StateTensor` has them.

    Attributes:
        number: of the state, see `Stage.compared`.
        plan: that it is a stage of; empty for the stages that processes start with.
    """

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
    """The process was told to leave.

    Attributes:
        incarnation: of the process.
    """

    incarnation: int


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
)


class FromWorker(Row):
    """A message of a process.

    Attributes:
        member: name of the process.
        generation: that the message is about; 0 for messages that are not about one.
    """

    member: str
    message: WorkerMessage
    generation: int = 0


# What an agent says.


class Ended(UpMessage):
    """A worker's process has ended.

    Attributes:
        incarnation: of the process.
        how: in words.
        lines: the last lines of its log, where it ended by itself.
    """

    worker: str
    incarnation: int
    how: str
    lines: str = ""


class AgentProcess(Value):
    """The latest process of a worker that an agent has started.

    Attributes:
        incarnation: its number.
        generation: the last one before the process.
        how: how it ended; None while it runs.
        lines: the last lines of its log.
    """

    worker: str
    incarnation: int
    generation: int
    how: str | None = None
    lines: str = ""


class Hello(UpMessage):
    """The first message of an agent to a leader.

    Attributes:
        session: of the agent; a new one for every agent process.
        processes: that it has started.
        said: what they have said and a leader may still need.
    """

    node: int
    session: str
    processes: list[AgentProcess] = []
    said: list[FromWorker] = []


class Batch(UpMessage, omit_defaults=True):
    """What has happened on a node since the last batch.

    Attributes:
        said: messages of its processes, those of each in order.
        beats: process -> its last heartbeat.
        ended: processes that have ended, after all that they have said.
        keys: that process groups form on: name -> value.
    """

    said: list[FromWorker] = []
    beats: dict[str, Heartbeat] = {}
    ended: list[Ended] = []
    keys: dict[str, bytes] = {}


# What `recycle drain` says.


class Drain(UpMessage):
    """Tell workers to leave. The answers are `Drained`, one for each worker, and `Refused`.

    Attributes:
        target: a worker, or the number of a node.
        seconds: until they are killed; None for no deadline.
    """

    target: str
    seconds: float | None = None


# What the leader says.


class Propose(DownMessage):
    """The next generation.

    Attributes:
        plan: the plan file's text, where the run directory does not hold it.
    """

    record: GenerationRecord
    plan: str = ""


class Permit(DownMessage):
    """The generation may form its groups, as all have acknowledged it; or run, as the groups of all stand.

    Attributes:
        stale: live parameters of some process are not those of the committed iteration.
    """

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
    """This process of the worker takes no part any more, and may end."""

    worker: str
    incarnation: int


class Strike(DownMessage):
    """The event of the fault of this number is written: its processes strike now.

    Attributes:
        member: the process that has reached the fault's point first; another one that has does not strike.
    """

    fault: int
    member: str


LeaderMessage = Propose | Permit | Committed | EvaluationResult | Stop | Leave | Strike


class Start(DownMessage):
    """Start a process of the worker.

    Attributes:
        incarnation: its number, from 0.
        place: position whose place on its node the process takes.
        generation: the last one before the process.
        restored: step of the checkpoint to start from; None for the initial state.
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
    """Keys that process groups form on, of other nodes: name -> value."""

    keys: dict[str, bytes]


class Alive(DownMessage):
    """The leader's process runs; said several times per lease."""


class Rejected(DownMessage):
    """The node has another agent."""


class Over(DownMessage):
    """The run has ended.

    Attributes:
        outcome: empty after its last iteration, `ENDED_EARLY`, or why it cannot go on.
    """

    outcome: str


Order = LeaderMessage | Start | Kill | Keys | Alive | Rejected | Over


class Drained(DownMessage):
    """The answer to `Drain`: the workers that were told to leave."""

    workers: list[str]


class Refused(DownMessage):
    """An answer to `Drain`: a worker stays, or all do where none is named; why."""

    worker: str
    why: str


# Between a process and its agent.


class Join(UpMessage):
    """The first message of a process on its connection."""

    member: str
    incarnation: int


class Said(UpMessage):
    """A message of the process for the leader."""

    message: WorkerMessage
    generation: int = 0


class SetKey(UpMessage):
    """Write a key that process groups form on; answered by `Values`."""

    name: str
    value: bytes


class GetKeys(UpMessage):
    """Read keys that process groups form on; answered by `Values`."""

    names: list[str]


class Values(DownMessage):
    """The values of keys, None for those that were not written."""

    values: list[bytes | None] = []


ProcessMessage = Join | Said | Heartbeat | SetKey | GetKeys
AgentMessage = LeaderMessage | Values
"""What an agent sends to a process."""


REFUSED_THE_JOB = "refused the job"
"""How a worker ended that says what is wrong with the job in the last line of its log."""

LINE_SEPARATOR = " | "
"""Between two lines of a log's end, as `Processes.tail` gives it."""


def with_last_lines(how: str, lines: str) -> str:
    """How a process ended, with the end of its log if there is one."""
    return f"{how}; its last lines: {lines}" if lines else how
