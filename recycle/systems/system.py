"""System: what a way of surviving failures is, as the cluster simulation asks it.

A system is bound to a `Setting`, which all systems get alike. It says what it runs on a set of live nodes (`begin`) and
what a change of that set costs and leads to (`change`). What it runs are real schedules: `Running.schedules` gives
them, they pass `check`, and the period is what `simulate` makes of them. It knows no clock: the cluster
(`cluster.py`) decides when a change happens, counts committed samples and books what was lost.

When `change` is called:

    a node fails            at once, also in the middle of a pause, which the new pause then replaces
    a node joins            at the next boundary of two iterations; at once while nothing runs
    `reconsider` is set     at the next boundary, with nobody failed and nobody joined

Nodes are numbers from 0 to `Setting.nodes` - 1; `Setting.slots` gives the workers that a set of nodes has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import ClassVar, Protocol

from recycle.ir.schedule import Schedule
from recycle.job.profile import Profile

Nodes = frozenset[int]


class Loss(Enum):
    """What a change takes from the work done so far."""

    NOTHING = "nothing"
    """The iteration in progress goes on where it was."""
    ITERATION = "iteration"
    """The iteration in progress is repeated; committed ones stay."""
    CHECKPOINT = "checkpoint"
    """All is repeated from the last checkpoint that is complete."""


@dataclass(frozen=True)
class Pause:
    """Seconds in which nobody trains, by cause: t_detect + t_plan + t_comm_rebuild + bytes / bandwidth, and `restart`
    where processes start again and read a checkpoint. `Setting.pause` makes one of the common model."""

    detect: float = 0.0
    plan: float = 0.0
    rebuild: float = 0.0
    copy: float = 0.0
    restart: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Checkpoints:
    """Training stops for `stall` seconds after every `every` seconds of training (rounded to whole iterations, at
    least one); the checkpoint counts once `lag` more seconds have passed, in which training goes on."""

    every: float
    stall: float
    lag: float = 0.0


Timed = tuple[Schedule, Profile]
"""A schedule with the profile that prices it."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A configuration that trains. Systems subclass it with what they need to know at the next change.

    Attributes:
        live: all live nodes, idle ones too.
        period: seconds per iteration in steady state, of the slowest part and with the sync between pipelines.
        samples: committed per iteration. The global batch, unless the system drops some.
        dropped: samples of the batch that are not trained, per iteration; no progress.
        idle: of the live slots, how many have nothing to do (spares, remainders).
        checkpoints: how state is kept; None for never, and then a `Loss.CHECKPOINT` goes back to the start.
        reconsider: `change` is to be called at the next boundary.
        layout: pipelines and their depths, for tables: "8 x 4".
        schedules: gives what runs, for the checker and the viewer: made on demand. More than one where pipelines share
            no schedule; each alone must then pass `check`.
    """

    live: Nodes
    period: float
    samples: float
    dropped: float = 0.0
    idle: int = 0
    checkpoints: Checkpoints | None = None
    reconsider: bool = False
    layout: str = ""
    schedules: Callable[[], list[Timed]] = field(default=list, repr=False, compare=False)

    @property
    def rate(self) -> float:
        """Samples per second that are committed."""
        return self.samples / self.period


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Nothing runs until nodes come back.

    Attributes:
        live: the nodes that wait.
        reason: one line: what is missing.
    """

    rate: ClassVar[float] = 0.0
    layout: ClassVar[str] = ""

    live: Nodes
    reason: str


@dataclass(frozen=True, kw_only=True)
class DoesNotFit:
    """The job does not fit into memory under this system, by the memory model: a result, not an error.

    Attributes:
        needed: bytes on the fullest worker of the leanest configuration that the system has.
        cap: bytes that a worker has.
        reason: one line that says which worker holds what.
    """

    rate: ClassVar[float] = 0.0
    layout: ClassVar[str] = ""

    needed: float
    cap: float
    reason: str

    def stopped(self, live: Nodes) -> Stopped:
        """The state of nodes that wait because they cannot hold the job."""
        return Stopped(live=live, reason=f"does not fit: {self.reason}")


State = Running | Stopped


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a change of the live set leads to.

    Attributes:
        state: what runs once the pause is over.
        pause: while nobody trains.
        loss: of the work done so far.
        bytes: copied over the network, in all.
        event: what the system did, in a word or two ("re-route", "take over", "merge", "restart"), for tables.
    """

    state: State
    pause: Pause = Pause()
    loss: Loss = Loss.NOTHING
    bytes: float = 0.0
    event: str = ""


class System(Protocol):
    """A way of surviving failures, bound to a setting; `name` is as `--systems` takes it.

    The docstring of its file says where it comes from, what the model of it assumes, and its limits.
    """

    @property
    def name(self) -> str: ...

    def begin(self, live: Nodes) -> State | DoesNotFit:
        """What it runs on these nodes from the first iteration on. `Stopped` where they are too few."""

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        """`failed` of `state.live` die and `joined` come in; see the module's docstring for when.

        A `Stopped` that can start again reads a checkpoint: `Setting.restart` prices it. The new state's `live` is
        `state.live - failed | joined`.
        """
