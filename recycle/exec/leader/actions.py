"""Messages from the runtime to the leader, and the actions that the leader requests from the runtime.

The runtime carries out the actions of a message in order. `Persist` is a barrier: if `Persist` fails because another
leader has been elected, the runtime drops the remaining actions.
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
        periods: step mode -> period; a plan made for the barrier has only the barrier's.
        text: the plan file if the run directory does not hold the file; else empty.
        hosts: the workers' stages; None for the stages that processes start with.
        rounds: iterations after which all work has been replayed once; 0 without replays.
        layout_limit: the limit that keeps layers from moving.
        compared_period: period of the question's `compared` plan under the same profile, in a mode of both plans.
    """

    digest: str
    periods: Mapping[StepMode, float]
    text: str = ""
    hosts: Hosts | None = None
    rounds: int = 0
    layout_limit: LayoutLimit | None = None
    compared_period: float | None = None

    @property
    def is_kept(self) -> bool:
        return not self.text


class Question(Value):
    """A request for a plan without the `failed` workers.

    Attributes:
        is_urgent: training waits for the answer, so the planner answers without a search.
        moves: workers may host other parts of the model.
        within: hash of a plan in use whose layout the new plan keeps or starts from.
        profile: digest of the profile to plan with; empty for the job's profile.
        compared: hash of a plan in use; the answer includes this plan's period under the same profile.
        text: a schedule to check and prepare; empty to make one.
    """

    failed: frozenset[Worker]
    is_urgent: bool = False
    moves: bool = False
    within: str = ""
    profile: str = ""
    compared: str = ""
    text: str = ""


# Messages from the runtime.


class StoredCheckpoint(Value):
    """A complete checkpoint, its commit, and whether the run directory has the metrics line of its step."""

    step: int
    commit: Commit
    has_metrics: bool


class Begin(Value):
    """The first message: start the run, resume the run, or continue from another leader's register.

    Attributes:
        record, cursor: the register; None for a run that starts or resumes.
        plan: the record's plan, prepared again; None if the plan file is missing.
        hosts: hash of each plan that the register names -> hosts.
        times: the record's measured times; None if the job's count.
        checkpoint: the checkpoint to resume from.
        generation, committed: the last generation and step of the previous part of a script's run.
        kept: steps of the complete checkpoints.
    """

    node: int = 0
    record: GenerationRecord | None = None
    cursor: Cursor | None = None
    plan: PreparedPlan | None = None
    hosts: Mapping[str, Hosts] = {}
    times: Profile | None = None
    checkpoint: StoredCheckpoint | None = None
    generation: int = 0
    committed: int = -1
    kept: frozenset[int] = frozenset()


class Tick(Value):
    """All messages so far have been taken: decide. `judges_beats` if agents have had time to send newer heartbeats.

    Without `is_reached` the leader's own node may be the one that is cut off.
    """

    judges_beats: bool = False
    is_reached: bool = True


class Planned(Value):
    """The answer to a question; if `plan` is None, `error` gives the reason."""

    question: Question
    plan: PreparedPlan | None
    error: str = ""


class CheckpointCompleted(Value):
    """A checkpoint is complete, or failed with `error`; `removed` are the steps of deleted old checkpoints."""

    step: int
    error: str = ""
    removed: frozenset[int] = frozenset()


class CheckpointFound(Value):
    """The newest checkpoint that training can restore; None if there is none."""

    checkpoint: StoredCheckpoint | None


class AgentAbsent(Value):
    """The connection to a node's agent was lost; the agent may reconnect."""

    node: int


class DepartureAsked(Value):
    """A request to drain workers; `seconds` until they are killed, None for no deadline."""

    workers: Sequence[Worker]
    seconds: float | None = None


class EndEarly(Value):
    """End the run at the next iteration after which all workers can stop together."""


RuntimeMessage = (
    Begin | Tick | Planned | CheckpointCompleted | CheckpointFound | AgentAbsent | DepartureAsked | EndEarly
)


# Actions for the runtime.


class Persist(Value):
    """Write the cursor to the register, and the record if the record has changed."""

    cursor: Cursor
    record: GenerationRecord | None = None


class Tell(Value):
    """Send a message to all processes that the message concerns."""

    message: LeaderMessage


class Send(Value):
    """Send an order to a node's agent."""

    node: int
    order: Start | Kill


class Ask(Value):
    """Ask the planner, with the job's profile if `profile` is None; the runtime answers with `Planned`."""

    question: Question
    profile: Profile | None = None


class DiscardCheckpoint(Value):
    """Remove the files that an earlier attempt left in a step's checkpoint."""

    step: int


class CompleteCheckpoint(Value):
    """Write the manifest of a checkpoint whose parts are all written, and remove checkpoints that are too old.

    The newest checkpoint up to step `verified` is kept. The runtime answers with `CheckpointCompleted`.
    """

    commit: Commit
    saved: Sequence[Saved]
    verified: int | None


class FindCheckpoint(Value):
    """Find the newest complete checkpoint up to step `upto`; the runtime answers with `CheckpointFound`."""

    upto: int | None


class Rewind(Value):
    """Remove the metrics of steps after `step`; with `checkpoints`, also their checkpoints, which may be wrong."""

    step: int
    checkpoints: bool = False


class Event(Value):
    """Write an event."""

    kind: str
    fields: Mapping[str, Any]


class Line(Value):
    """Write a step's metrics line, unless another leader has written the line."""

    line: Mapping[str, Any]


class Waiting(Value):
    """Show what the run is waiting for."""

    what: str


class Finish(Value):
    """End the run after step `step`, and `merge` traces; `digests`: worker -> stage -> sha256 of the final state."""

    digests: Mapping[str, Mapping[int, str]]
    ended_early: bool
    step: int
    merge: bool = True


class Fail(Value):
    """Abort the run with an error."""

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
    """Collects the actions that follow from a message, taken at `now` (monotonic seconds)."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.actions: list[Action] = []

    def put(self, action: Action) -> None:
        self.actions.append(action)

    def tell(self, message: LeaderMessage) -> None:
        self.put(Tell(message))

    def log(self, kind: str, **fields: Any) -> None:
        self.put(Event(kind, fields))

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions
