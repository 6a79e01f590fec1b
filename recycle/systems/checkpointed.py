"""CheckpointedSystem: what the systems here have in common.

A change is met with what survives of the configuration; where too little does, or nothing runs, all processes start
again from a checkpoint. A subclass says what it runs on live nodes (`begin`) and how it goes on (`survive`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar, Generic, TypeVar, cast

from recycle.systems.grids import PipelineGrids
from recycle.systems.setting import Setting
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, Running, State, Stopped

R = TypeVar("R", bound=Running)


class CheckpointedSystem(ABC, Generic[R]):
    """Implements `recycle.systems.system.System`.

    Attributes:
        copies: hosts of each part of the optimizer's state, where the job shards it: 0 for all of it on every host,
            None for as many as the job says.
        counts_reads: whether `Change.bytes` has what a restart reads.
    """

    name: ClassVar[str]
    copies: ClassVar[int | None] = 0
    counts_reads: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting if self.copies is None else setting.with_copies(self.copies)

    @abstractmethod
    def begin(self, live: Nodes) -> State | DoesNotFit:
        """See `System.begin`."""

    @abstractmethod
    def survive(self, state: R, live: Nodes, failed: Nodes, joined: Nodes) -> Change | None:
        """See `System.change`; `live` are the nodes after it. None where a checkpoint is needed."""

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        live = state.live - failed | joined
        survived = None if isinstance(state, Stopped) else self.survive(cast("R", state), live, failed, joined)
        return survived or self.restart(live, failed)

    def restart(self, live: Nodes, failed: Nodes, event: str = "") -> Change:
        """Everybody starts again from the last checkpoint."""
        state = self.begin(live)
        if isinstance(state, DoesNotFit):
            state = state.stopped(live)
        is_running = isinstance(state, Running)
        return Change(
            state=state,
            pause=self.setting.restart(detected=bool(failed)),
            loss=Loss.CHECKPOINT,
            bytes=self.setting.state if is_running and self.counts_reads else 0.0,
            event=event or ("restart" if is_running else "stop"),
        )

    @cached_property
    def grids(self) -> PipelineGrids:
        return PipelineGrids(self.setting)
