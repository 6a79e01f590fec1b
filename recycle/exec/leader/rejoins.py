"""Dead workers that shall come back: their processes start early, and the run waits for them up to a deadline."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from recycle.exec.membership.interfaces import Log, Processes
from recycle.shape import Worker


@dataclass
class Rejoin:
    """A worker's return at the start of iteration `step`, or soon after; whether its process was asked for, and until
    when it is waited for."""

    worker: Worker
    step: int
    started: bool = False
    deadline: float | None = None


class Rejoins:
    """The re-joins of a run.

    Args:
        processes: starts and kills them.
        is_ready: whether the worker's present processes have started up.
        log: takes events.
        now: monotonic seconds.
        patience: seconds that the run waits for one at its step.
    """

    def __init__(
        self,
        processes: Processes,
        is_ready: Callable[[Worker], bool],
        log: Log,
        now: Callable[[], float],
        patience: float,
    ) -> None:
        self._processes, self._is_ready, self._log, self._now, self._patience = processes, is_ready, log, now, patience
        self._all: list[Rejoin] = []

    def expect(self, worker: Worker, step: int, started: bool = False) -> None:
        """`worker` shall take part again from iteration `step` on; its process may have been started already."""
        self._all.append(Rejoin(worker, step, started))

    def adopt(self, live: Collection[Worker]) -> None:
        """Processes that another coordinator started for workers that are awaited are those that come back."""
        for rejoin in self.awaited(live):
            rejoin.started = self._processes.running(rejoin.worker)

    def awaited(self, live: Collection[Worker]) -> list[Rejoin]:
        """The dead workers that shall come back, each with its next return."""
        nearest: dict[Worker, Rejoin] = {}
        for rejoin in sorted(self._all, key=lambda r: r.step):
            if rejoin.worker not in live:
                nearest.setdefault(rejoin.worker, rejoin)
        return list(nearest.values())

    def start(self, live: Collection[Worker], step: int, generation: int, early: bool) -> None:
        """Start the processes of workers that are awaited at `step`; with `early` also those awaited later, as imports
        take a while.

        Args:
            generation: the present one, or the last.
        """
        for rejoin in self.awaited(live):
            worker, wanted = rejoin.worker, early or rejoin.step <= step
            if self._processes.started_in(worker) is None:
                rejoin.started = False  # its process is gone with its node
            is_free = not self._processes.running(worker) and not self._processes.missing_nodes([worker])
            if wanted and not rejoin.started and is_free:
                rejoin.started = True
                self._processes.start(worker, generation)

    def settled(self, live: Collection[Worker], step: int, admit: Callable[[Worker], None]) -> bool:
        """Whether every worker that shall start with `step` was admitted, or was waited for long enough."""
        for rejoin in self.awaited(live):
            if rejoin.step > step:
                continue
            if rejoin.deadline is None:
                rejoin.deadline = self._now() + self._patience
            running = self._processes.running(rejoin.worker)
            if rejoin.started and running and self._is_ready(rejoin.worker):
                admit(rejoin.worker)
            elif (running or not rejoin.started) and self._now() < rejoin.deadline:
                return False  # it starts up, its last process is about to end, or its node is not there
            else:
                self._processes.kill(rejoin.worker)
                self._log("fault", worker=str(rejoin.worker), step=rejoin.step, cause="did not re-join in time")
            self._all.remove(rejoin)
        return True

    def start_over(self) -> None:
        """All processes are new: those that were being started for a re-join have to be started again."""
        for rejoin in self._all:
            rejoin.started, rejoin.deadline = False, None
