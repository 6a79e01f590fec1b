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
    """The returns of a run.

    Args:
        processes: starts and kills them.
        is_ready: whether the worker's n-th process has started up.
        log: takes events.
        now: monotonic seconds.
        patience: seconds that the run waits for one at its step.
    """

    def __init__(
        self,
        processes: Processes,
        is_ready: Callable[[Worker, int], bool],
        log: Log,
        now: Callable[[], float],
        patience: float,
    ) -> None:
        self._processes, self._is_ready, self._log, self._now, self._patience = processes, is_ready, log, now, patience
        self._all: list[Rejoin] = []

    def expect(self, worker: Worker, step: int, started: bool = False) -> None:
        """`worker` shall take part again from iteration `step` on; its process may have been started already."""
        self._all.append(Rejoin(worker, step, started))

    def awaited(self, live: Collection[Worker]) -> list[Rejoin]:
        """The dead workers that shall come back, each with its next return."""
        nearest: dict[Worker, Rejoin] = {}
        for rejoin in sorted(self._all, key=lambda r: r.step):
            if rejoin.worker not in live:
                nearest.setdefault(rejoin.worker, rejoin)
        return list(nearest.values())

    def start(self, live: Collection[Worker], step: int, early: bool) -> None:
        """Start the processes of whoever is awaited at `step`; `early`, as imports take a while, later ones too."""
        for rejoin in self.awaited(live):
            wanted = early or rejoin.step <= step
            if wanted and not rejoin.started and not self._processes.running(rejoin.worker):
                rejoin.started = True
                self._processes.start(rejoin.worker)

    def settled(self, live: Collection[Worker], step: int, admit: Callable[[Worker], None]) -> bool:
        """Whether everyone who shall start with `step` was admitted, or was waited for long enough."""
        for rejoin in self.awaited(live):
            if rejoin.step > step:
                continue
            if rejoin.deadline is None:
                rejoin.deadline = self._now() + self._patience
            if not rejoin.started:
                return False  # its last process is about to end
            running = self._processes.running(rejoin.worker)
            if running and self._is_ready(rejoin.worker, self._processes.incarnation(rejoin.worker)):
                admit(rejoin.worker)
            elif running and self._now() < rejoin.deadline:
                return False
            else:
                self._processes.kill(rejoin.worker)
                self._log("fault", worker=str(rejoin.worker), step=rejoin.step, cause="did not re-join in time")
            self._all.remove(rejoin)
        return True

    def start_over(self) -> None:
        """All processes were started anew: who was on the way back has to come again."""
        for rejoin in self._all:
            rejoin.started, rejoin.deadline = False, None
