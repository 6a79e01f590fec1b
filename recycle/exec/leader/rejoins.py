"""Dead workers that are expected back: their processes start early, and the run waits for them up to a deadline."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from recycle.exec.leader.actions import Outbox
from recycle.exec.leader.worker_processes import WorkerProcesses
from recycle.job.shape import Worker


@dataclass
class Rejoin:
    """A worker's return at the start of iteration `step`, or soon after.

    Attributes:
        started: its process was asked for.
        deadline: until when the run waits for it, monotonic seconds; None before the run has come to `step`.
    """

    worker: Worker
    step: int
    started: bool = False
    deadline: float | None = None


class Rejoins:
    """The returns of a run.

    Args:
        processes: starts and kills them.
        is_ready: whether the worker's present processes have started up.
        outbox: takes events, and has the time.
        patience: seconds that the run waits for a worker at its step.
    """

    def __init__(
        self, processes: WorkerProcesses, is_ready: Callable[[Worker], bool], outbox: Outbox, patience: float
    ) -> None:
        self._processes, self._is_ready, self._outbox, self._patience = processes, is_ready, outbox, patience
        self._all: list[Rejoin] = []

    def expect(self, worker: Worker, step: int, started: bool = False) -> None:
        """`worker` shall take part again from iteration `step` on; its process may have been started already."""
        self._all.append(Rejoin(worker, step, started))

    def adopt(self, live: Collection[Worker]) -> None:
        """Processes that another leader has started for expected workers are those that come back."""
        for rejoin in self.awaited(live):
            rejoin.started = rejoin.started or self._processes.is_running(rejoin.worker)

    def awaited(self, live: Collection[Worker]) -> list[Rejoin]:
        """The dead workers that are expected back, each with its next return."""
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
        processes = self._processes
        for rejoin in self.awaited(live):
            worker, wanted = rejoin.worker, early or rejoin.step <= step
            if processes.generation_before(worker) is None:
                rejoin.started = False  # its process is gone with its node
            is_free = not processes.is_running(worker) and not processes.missing_nodes([worker])
            if wanted and not rejoin.started and is_free:
                rejoin.started = True
                processes.start(worker, generation)

    def settled(self, live: Collection[Worker], step: int, admit: Callable[[Worker], None]) -> bool:
        """Whether every worker that shall start with `step` was admitted, or was waited for long enough."""
        for rejoin in self.awaited(live):
            if rejoin.step > step:
                continue
            if rejoin.deadline is None:
                rejoin.deadline = self._outbox.now + self._patience
            running = self._processes.is_running(rejoin.worker)
            if rejoin.started and running and self._is_ready(rejoin.worker):
                admit(rejoin.worker)
            elif (running or not rejoin.started) and self._outbox.now < rejoin.deadline:
                return False  # it starts up, its last process is about to end, or its node is missing
            else:
                self._processes.kill(rejoin.worker)
                self._outbox.log("fault", worker=str(rejoin.worker), step=rejoin.step, cause="did not re-join in time")
            self._all.remove(rejoin)
        return True

    def start_over(self) -> None:
        """All processes are new: those that were being started for a return have to be started again."""
        for rejoin in self._all:
            rejoin.started, rejoin.deadline = False, None
