"""What the leader asks its runtime to do, and what the runtime tells the leader beside the messages of agents.

The runtime carries out the actions of a message in their order. `Persist` is a barrier: where it fails, because another
leader has been elected, nothing after it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recycle.errors import RecycleError
from recycle.exec.protocol import (
    Commit,
    Cursor,
    GenerationRecord,
    Kill,
    LeaderMessage,
    Refused,
    Saved,
    Start,
    StepMode,
    Value,
)
from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.plans import LayoutLimit
from recycle.plans.hosting import Hosts


@dataclass(frozen=True)
class PreparedPlan:
    """A checked plan for the live workers.

    Attributes:
        digest: hash of the schedule.
        roles: worker -> role.
        periods: its period in each mode that it may run in; a plan made for the barrier has that one only.
        text: the plan file, where the run directory does not hold it; else empty.
        hosts: the workers' stages; None where they are those that processes start with.
        rounds: iterations in which everything is replayed once; 0 where nothing is replayed.
        layout_limit: the limit that keeps layers from moving.
        compared_period: period of the plan that the question compares with, under the question's profile and in the
            mode that both plans have.
    """

    digest: str
    roles: Mapping[Worker, Worker]
    periods: Mapping[StepMode, float]
    text: str = ""
    hosts: Hosts | None = None
    rounds: int = 0
    layout_limit: LayoutLimit | None = None
    compared_period: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the run directory holds the file."""
        return not self.text


class Question(Value):
    """Asks for a plan.

    Attributes:
        failed: the dead workers.
        is_urgent: training waits for the answer: it is made without a search.
        moves: workers may come to host other parts of the model.
        within: hash of a plan in use whose layout the plan keeps, or moves from.
        profile: digest of the profile to plan with; empty for the job's own.
        compared: hash of a plan in use, whose period under the same profile is wanted too.
    """

    failed: frozenset[Worker]
    is_urgent: bool = False
    moves: bool = False
    within: str = ""
    profile: str = ""
    compared: str = ""


# What the runtime tells the leader.


class StoredCheckpoint(Value):
    """A complete checkpoint.

    Attributes:
        step: the iteration whose state it holds.
        commit: of that iteration.
        has_metrics: the run directory has a line of metrics of that step.
    """

    step: int
    commit: Commit
    has_metrics: bool


class Begin(Value):
    """The first message: begin the run, resume it, or go on from another leader's register.

    Attributes:
        node: of this leader's agent, when it follows another leader.
        record, cursor: the register; None for a run that begins or is resumed.
        plan: of the record, prepared again; None where its file is gone.
        hosts: hash of a plan that the register names -> its hosts.
        checkpoint: to resume from.
        generation: the last generation of the part of the run before.
        kept: steps of the complete checkpoints.
    """

    node: int = 0
    record: GenerationRecord | None = None
    cursor: Cursor | None = None
    plan: PreparedPlan | None = None
    hosts: Mapping[str, Hosts] = {}
    checkpoint: StoredCheckpoint | None = None
    generation: int = 0
    kept: frozenset[int] = frozenset()


class Tick(Value):
    """All messages that have come are taken: decide what follows from them.

    Attributes:
        judges_beats: heartbeats are judged, as agents have had the time to send newer ones.
    """

    judges_beats: bool = False


class Planned(Value):
    """The answer to a question; `plan` is None where there is no plan, and `error` says why."""

    question: Question
    plan: PreparedPlan | None
    error: str = ""


class CheckpointCompleted(Value):
    """A checkpoint is complete, or `error` says why not; those of the steps `removed` were too old."""

    step: int
    error: str = ""
    removed: frozenset[int] = frozenset()


class CheckpointFound(Value):
    """The newest checkpoint that training can go back to; None where there is none."""

    checkpoint: StoredCheckpoint | None


class AgentAbsent(Value):
    """The connection to the agent of a node is gone, which is not its death yet."""

    node: int


class DepartureAsked(Value):
    """Somebody asks the run to let workers leave.

    Attributes:
        seconds: until they are killed; None for no deadline.
    """

    workers: Sequence[Worker]
    seconds: float | None = None


class EndEarly(Value):
    """The run shall end with the next iteration after which all workers can stop together."""


RuntimeMessage = (
    Begin | Tick | Planned | CheckpointCompleted | CheckpointFound | AgentAbsent | DepartureAsked | EndEarly
)


# What the leader asks for.


class Persist(Value):
    """Write the register: the cursor, and the record where it has changed."""

    cursor: Cursor
    record: GenerationRecord | None = None


class Tell(Value):
    """Send a message to all processes that it is for."""

    message: LeaderMessage


class Send(Value):
    """Send an order to the agent of a node."""

    node: int
    order: Start | Kill


class Ask(Value):
    """Ask the planner; `Planned` is the answer.

    Attributes:
        profile: to plan with, where it is not the job's own.
    """

    question: Question
    profile: Profile | None = None


class DiscardCheckpoint(Value):
    """Remove what an earlier attempt has left of the checkpoint of a step."""

    step: int


class CompleteCheckpoint(Value):
    """Write the manifest of a checkpoint all of whose parts are written, and remove those that are too old;
    `CheckpointCompleted` is the answer.

    Attributes:
        saved: the parts.
        verified: step of the state that training may go back to; its checkpoint, or the newest before it, stays.
    """

    commit: Commit
    saved: Sequence[Saved]
    verified: int | None


class FindCheckpoint(Value):
    """Find the newest complete checkpoint up to a step, if any; `CheckpointFound` is the answer."""

    upto: int | None


class Rewind(Value):
    """Training has gone back to the state after `step`: remove the metrics of later steps, and with `checkpoints` their
    checkpoints, which may be wrong."""

    step: int
    checkpoints: bool = False


class Event(Value):
    """Write an event."""

    kind: str
    fields: Mapping[str, Any]


class Line(Value):
    """Write the line of metrics of a step, unless another leader has written it."""

    line: Mapping[str, Any]


class Waiting(Value):
    """Show what the run waits for."""

    what: str


class Finish(Value):
    """The run is over.

    Attributes:
        digests: worker -> stage -> sha256 of the stage's final state.
        ended_early: before its last iteration.
        step: the last committed iteration.
        merge: whether there are traces to merge.
    """

    digests: Mapping[str, Mapping[int, str]]
    ended_early: bool
    step: int
    merge: bool = True


class Fail(Value):
    """The run cannot go on."""

    error: RecycleError


Action = (
    Persist
    | Tell
    | Send
    | Refused
    | Ask
    | DiscardCheckpoint
    | CompleteCheckpoint
    | FindCheckpoint
    | Rewind
    | Event
    | Line
    | Waiting
    | Finish
    | Fail
)


class Outbox:
    """Collects the actions that follow from a message.

    Attributes:
        now: when the message was taken, monotonic seconds.
        actions: so far.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.actions: list[Action] = []

    def put(self, action: Action) -> None:
        """Add an action."""
        self.actions.append(action)

    def tell(self, message: LeaderMessage) -> None:
        """Add a message to all processes."""
        self.put(Tell(message))

    def log(self, kind: str, **fields: Any) -> None:
        """Add an event."""
        self.put(Event(kind, fields))

    def take_actions(self) -> list[Action]:
        """All actions so far, which are not given again."""
        actions, self.actions = self.actions, []
        return actions
