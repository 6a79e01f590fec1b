"""A node that leaves: its agent was told to go, tells so for its workers, and is done when these have ended.

An agent that coordinates hands the role over first: the generation that runs goes on under another agent's coordinator,
which then lets the workers of the node go. Where all agents were told, one of them takes the role nevertheless after a
moment, and ends the run with a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from recycle.exec.leader.departures import announce
from recycle.exec.membership.schema import CoordinatorKey
from recycle.exec.membership.store import Store
from recycle.exec.processes.processes import LocalProcesses
from recycle.shape import Worker

GIVE_WAY_SECONDS = 2.0
"""How long an agent that leaves does not take the role, so that one that stays does."""


class NodeDeparture:
    """The departure of a node, from the moment that its agent was told.

    Args:
        store: of the agent.
        processes: of the node.
        workers: all of the job.
    """

    def __init__(self, store: Store, processes: LocalProcesses, workers: Collection[Worker]) -> None:
        self._store, self._processes, self._workers = store, processes, workers
        self._told: dict[Worker, int | None] = {}
        self._absent_since: float | None = None

    def is_over(self) -> bool:
        """Tell so for every worker that runs here; whether none does any more."""
        running: dict[Worker, int | None] = {
            worker: self._processes.incarnation(worker) for worker in self._workers if self._processes.running(worker)
        }
        if fresh := dict(running.items() - self._told.items()):
            announce(self._store, fresh, by_signal=True)
            self._told |= fresh
        return not running

    def gives_way(self) -> bool:
        """Whether this agent leaves the coordinator's role to others."""
        if self._store.read(CoordinatorKey()) is not None:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = time.monotonic()
        return self._absent_since is None or time.monotonic() - self._absent_since < GIVE_WAY_SECONDS
