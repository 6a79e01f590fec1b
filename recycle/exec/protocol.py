"""What membership's keys hold (schema.py)."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

GO: Final = "go"
VOID: Final = "void"
"""What an open decision becomes when its generation ends."""
ENDED_EARLY: Final = "ended early"
"""The outcome of a run that was told to end before its last iteration, and can go on."""
Permission = Literal["go", "void"]
StepMode = Literal["staggered", "barrier"]
"""How the stages of an iteration step: each at once after its own reduce, to be validated by the commit; or all after
the commit."""


class Commit(Struct, frozen=True):
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


class Evaluated(Struct, frozen=True):
    """The result of an evaluation.

    Attributes:
        step: the iteration whose state was evaluated.
        loss: sum of the losses of all tokens over their number; not a number when there are none.
        tokens: that counted.
    """

    step: int
    loss: float
    tokens: float


class Copy(Struct, frozen=True, array_like=True):
    """Units of the model that a worker copies before its generation runs.

    Attributes:
        worker, source: processes.
        first, last: units from the first up to but without the last (see `recycle.plans.hosting`).
    """

    worker: str
    source: str
    first: int
    last: int


class Verified(Struct, frozen=True):
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


class GenerationRecord(Struct, frozen=True):
    """The register. `roles` maps processes (by the position they started in) to positions of the plan.

    Attributes:
        joins: processes that hold no state yet.
        copies: what is copied before the generation runs, by these and by workers that come to host other units; each
            worker takes part in its own in this order.
        behind: what is copied while the generation runs: shards of which a death has left fewer copies.
        held: hash of the plan that the others hold the units of; empty for what processes start with.
        holds: likewise, of what all hold once the generation runs.
        verified: the state to go back to where hosts disagree; None before the first comparison of digests.
        candidate: the state that takes its place once everything was replayed since, and nothing differed.
        rounds: iterations in which everything is replayed once by the plan; 0 where nothing is.
        disputed: (stage, pipeline, index) of micro-batches of which hosts made different things when the iteration
            behind the committed one ran before.
        committed: last committed iteration, -1 before the first.
        commit: of the last committed iteration; None before the first.
        mode: of the iteration behind it.
        periods: of the plan, in each mode that it may run in.
        evaluated: result of the last evaluation that is done; None before the first.
    """

    generation: int
    live: list[str]
    roles: dict[str, str]
    plan: str
    committed: int = -1
    commit: Commit | None = None
    joins: list[str] = []
    mode: StepMode = "barrier"
    periods: dict[StepMode, float] = {}
    evaluated: Evaluated | None = None
    copies: list[Copy] = []
    held: str = ""
    holds: str = ""
    verified: Verified | None = None
    candidate: Verified | None = None
    rounds: int = 0
    disputed: list[tuple[int, int, int]] = []
    behind: list[Copy] = []

    @property
    def has_gone_back(self) -> bool:
        """Whether all went back to the committed state from a later one, and nothing has been committed since."""
        return self.verified is not None and self.verified.step == self.committed

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the next thing to do is the evaluation of the committed state."""
        is_done = self.evaluated is not None and self.evaluated.step == self.committed
        return self.commit is not None and self.commit.evaluate and not is_done


class Computed(Struct, frozen=True, array_like=True, gc=False):
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


class Replayed(Struct, frozen=True, array_like=True, gc=False):
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


class LinkTime(Struct, frozen=True, array_like=True, gc=False):
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


class Report(Struct, frozen=True, array_like=True, gc=False):
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


class EvaluationReport(Struct, frozen=True):
    """A worker's part of an evaluation: floats whose exact sums these are.

    Attributes:
        losses: sum of the losses of its tokens.
        tokens: how many these are.
    """

    losses: list[float]
    tokens: list[float]


class Copied(Struct, frozen=True, array_like=True):
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


class Formed(Struct, frozen=True, omit_defaults=True):
    """Whether the groups of a process stand.

    Attributes:
        error: why they do not; empty when they do.
        expired: nothing failed in this process, but others did not come in time.
        copied: what it has copied.
    """

    error: str = ""
    expired: bool = False
    copied: list[Copied] = []


class Heartbeat(Struct, frozen=True, array_like=True, gc=False):
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


class StoredFile(Struct, frozen=True):
    """Size and hash of a file."""

    bytes: int
    sha256: str


class Saved(Struct, frozen=True):
    """A process's part of a checkpoint: the files that it wrote, or why it could not.

    Attributes:
        stall: seconds that it copied its state, in which it did not train.
    """

    files: dict[str, StoredFile] = {}
    error: str = ""
    stall: float = 0.0


class Notice(Struct, frozen=True):
    """Tells a worker to leave.

    Attributes:
        incarnation: number of its process that is meant; None for whichever it has when the coordinator reads this.
        seconds: from then until it is killed; None for no deadline.
        by_signal: its machine or its owner wants it gone; else somebody who asks the run.
        refused: why it stays, as the coordinator answers; empty as long as it does not.
    """

    incarnation: int | None = None
    seconds: float | None = None
    by_signal: bool = False
    refused: str = ""


class RunInfo(Struct, frozen=True, kw_only=True):
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


class StartRequest(Struct, frozen=True):
    """Asks an agent for a worker's process.

    Attributes:
        incarnation: number of the worker's process, from 0; -1 for none.
        session: of the agent that is asked.
        place: position whose place on its node the process takes.
        generation: the last one before the process.
        restored: step of the checkpoint to start from; None for the initial state.
    """

    incarnation: int = -1
    session: str = ""
    place: str = ""
    generation: int = 0
    restored: int | None = None
