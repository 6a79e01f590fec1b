"""Protocol of a resilience system in the cluster simulation.

A system is bound to a `Scenario`, the same for all systems. It defines its configuration on a set of live nodes
(`begin`), and the cost and result of a change of that set (`change`). A configuration's schedules pass `check`, and
`simulate` gives their period. `cluster.py` decides when a change happens, counts committed samples and books losses.

`change` is called

    a node fails            immediately, even in a pause, which the new pause replaces
    a node joins            at the next iteration boundary; immediately while training is stopped
    `reconsider` is set     at the next iteration boundary, without failed or joined nodes

Nodes are numbers from 0 to `Scenario.nodes` - 1; `Scenario.slots` gives the workers of a set of nodes.
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
    """Work that a change discards."""

    NOTHING = "nothing"
    """The iteration in progress continues."""
    ITERATION = "iteration"
    """The iteration in progress is repeated; committed iterations stay."""
    CHECKPOINT = "checkpoint"
    """Work since the last complete checkpoint is repeated."""


@dataclass(frozen=True)
class Pause:
    """Seconds without training, by cause: t_detect + t_plan + t_comm_rebuild + bytes / bandwidth.

    `restart` is the time to start processes again and read a checkpoint. `Scenario.pause` creates the common model.
    """

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
    """Checkpoint policy: stop for `stall` seconds after every `every` seconds of training.

    `every` is rounded to whole iterations, at least one. The checkpoint counts after `lag` more seconds, during which
    training continues.
    """

    every: float
    stall: float
    lag: float = 0.0


TimedSchedule = tuple[Schedule, Profile]
"""A schedule with the profile that prices it."""


@dataclass(frozen=True, kw_only=True)
class ActiveConfiguration:
    """A training configuration. Subclasses add the state that they need at the next change.

    Attributes:
        live: all live nodes, including idle ones.
        period: seconds per iteration in steady state, of the slowest part, including the sync between pipelines.
        samples: committed samples per iteration; the global batch, unless the system drops samples.
        dropped: samples per iteration that are not trained; no progress.
        idle: number of live slots without work (spares, remainders).
        checkpoints: None for no checkpoints; a `Loss.CHECKPOINT` then returns to the start.
        reconsider: call `change` at the next boundary.
        layout: pipelines and their depths, for tables: "8 x 4".
        schedules: makes the schedules on demand, for the checker and the viewer; each must pass `check` alone.
    """

    live: Nodes
    period: float
    samples: float
    dropped: float = 0.0
    idle: int = 0
    checkpoints: Checkpoints | None = None
    reconsider: bool = False
    layout: str = ""
    schedules: Callable[[], list[TimedSchedule]] = field(default=list, repr=False, compare=False)

    @property
    def rate(self) -> float:
        return self.samples / self.period


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """No training until nodes return; the reason says in one line what is missing."""

    rate: ClassVar[float] = 0.0
    layout: ClassVar[str] = ""

    live: Nodes
    reason: str


@dataclass(frozen=True, kw_only=True)
class DoesNotFit:
    """The job does not fit into memory under this system, by the memory model. A result, not an error.

    The fullest worker of the leanest configuration needs `needed` bytes.
    """

    rate: ClassVar[float] = 0.0
    layout: ClassVar[str] = ""

    needed: float
    cap: float
    reason: str

    def stopped(self, live: Nodes) -> Stopped:
        return Stopped(live=live, reason=f"does not fit: {self.reason}")


State = ActiveConfiguration | Stopped


@dataclass(frozen=True, kw_only=True)
class Change:
    """Result of a change of the live nodes.

    `bytes` are those copied over the network. `event` names the action in a word or two, such as "re-route".
    """

    state: State
    pause: Pause = Pause()
    loss: Loss = Loss.NOTHING
    bytes: float = 0.0
    event: str = ""


class System(Protocol):
    """A resilience system bound to a scenario; `name` as in `--systems`."""

    @property
    def name(self) -> str: ...

    def begin(self, live: Nodes) -> State | DoesNotFit:
        """Return the first configuration on these nodes; `Stopped` if they are too few."""

    # A system may also have `pace` and `unnoticed`, as `grids.CheckpointedSystem` has.

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        """Handle the death of `failed` nodes of `state.live` and the arrival of `joined`; see the module for when.

        A `Stopped` state that can start again reads a checkpoint, which `Scenario.restart` prices. The new state's
        `live` is `state.live - failed | joined`.
        """
