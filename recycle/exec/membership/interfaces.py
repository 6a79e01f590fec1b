"""What the coordinator stands on: where plans come from, whose processes it drives, who takes its events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.protocol import StepMode
from recycle.plans.hosting import Hosts
from recycle.shape import Worker

Log = Callable[..., None]
"""Called as log(kind, worker=..., step=..., ...) for every event."""


@dataclass(frozen=True)
class Ready:
    """A checked plan for a live set.

    Attributes:
        digest, text: hash of the schedule, and the file.
        roles: process -> role.
        periods: its period in each mode that it may run in; a plan made for the barrier has that one only.
        is_kept: the run directory holds the file, where every process finds it by its hash.
        hosts: who hosts what; None where it is what processes start with.
        rounds: iterations in which everything is replayed once; 0 where nothing is.
    """

    digest: str
    text: str
    roles: dict[Worker, Worker]
    periods: Mapping[StepMode, float]
    is_kept: bool = False
    hosts: Hosts | None = None
    rounds: int = 0


class Plans(Protocol):
    """Where plans come from; asked again every tick until one is there."""

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        """The plan without the failed workers, None while it is still being made. Raises RunError if none can be."""

    def hosts(self, digest: str) -> Hosts | None:
        """Who hosts what by a plan that the coordinator before used; None for one that is not there any more."""

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        """An iteration is about to be committed, in which the workers computed for so long."""

    def has_better(self, failed: frozenset[Worker]) -> bool:
        """Whether `ready` would now give a plan that is worth a new generation."""


class Processes(Protocol):
    """The workers' processes, wherever they run."""

    def start(self, worker: Worker, generation: int, restored: int | None = None) -> None:
        """Start another process for the worker, whose last one has ended.

        Args:
            generation: the last one before the process.
            restored: step of the checkpoint to start from; None for the initial state.
        """

    def started_in(self, worker: Worker) -> int | None:
        """The generation that the latest process was started in; None when there was none, or when the process is
        gone with its node and may be started again there."""

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how."""

    def ended(self, worker: Worker) -> str | None:
        """How the worker's latest process ended, as far as `gone` has seen; None when it has not."""

    def tail(self, worker: Worker) -> str:
        """The last lines of the worker's log, where `ended` does not hold them."""

    def kill(self, worker: Worker) -> None:
        """SIGKILL the worker's process, if it is still there."""

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process."""

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's present process, counted from 0; -1 when it never had one."""

    def missing_nodes(self, workers: Collection[Worker]) -> list[int]:
        """The nodes of these workers on which no process can be started now."""

    def move(self, positions: Collection[Worker], startable: Collection[Worker]) -> None:
        """Let processes be started for all `positions`, in the places of those that are startable. None may run."""
