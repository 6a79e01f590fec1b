"""What the coordinator stands on: where plans come from, whose processes it drives, who takes its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from recycle.exec.membership.messages import Mode, Report
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
    """

    digest: str
    text: str
    roles: dict[Worker, Worker]
    periods: Mapping[Mode, float]


class Plans(Protocol):
    """Where plans come from; asked again every tick until one is there."""

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        """The plan without the failed workers, None while it is still being made. Raises RunError if none can be."""

    def observe(self, failed: frozenset[Worker], step: int, reports: Mapping[Worker, Report]) -> None:
        """An iteration is about to be committed; the reports tell how long each worker computed."""

    def has_better(self, failed: frozenset[Worker]) -> bool:
        """Whether `ready` would now give a plan that is worth a new generation."""


class Processes(Protocol):
    """The workers' processes."""

    def start(self, worker: Worker) -> None:
        """Start another process for the worker, whose last one has ended."""

    def gone(self) -> dict[Worker, str]:
        """Processes that ended since the last call, with how."""

    def kill(self, worker: Worker) -> None:
        """SIGKILL the worker's process, if it is still there."""

    def running(self, worker: Worker) -> bool:
        """Whether the worker has a process."""

    def incarnation(self, worker: Worker) -> int:
        """Number of the worker's present process, counted from 0."""
