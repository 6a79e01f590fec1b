"""Draining: requested, refused and completed departures of workers.

A worker is told to leave by SIGTERM, by its agent together with all workers of the node, or by `recycle drain`. The
leader has the plan without the worker made while training goes on; then all workers stop after the same iteration, and
the next generation begins without it. Nothing is taken back or repeated. A worker whose deadline passes before that is
killed, which is an ordinary death.

The last host of a unit of the model stays, because its state would be lost. Where all workers were told to leave by a
signal, the run ends with a checkpoint instead (`everybody`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from recycle.errors import RunError
from recycle.exec.leader.actions import Outbox, RefuseDeparture, Tell
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.plans import Plans
from recycle.exec.leader.worker_processes import WorkerProcesses
from recycle.exec.protocol import Leave
from recycle.job.shape import Shape, Worker

END_SECONDS = 60.0
"""How long a released worker may take to end: it may still write its part of a checkpoint. Then it is killed."""


@dataclass(frozen=True)
class Notice:
    """A worker was told to leave.

    Attributes:
        incarnation: of its process.
        since: when, monotonic seconds.
        seconds: until it is killed; None for no deadline.
        by_signal: its machine or its owner wants it gone, not somebody who asks the run.
    """

    incarnation: int
    since: float
    seconds: float | None
    by_signal: bool


@dataclass
class _Leaver:
    """A worker that was released and has not ended yet."""

    step: int
    noticed_at: float
    deadline: float


class Departures:
    """The departures of a run.

    Args:
        shape: of the job.
        processes: of the workers.
        plans: what the remaining workers go on with.
        holdings: who holds what.
        outbox: takes events and answers, and has the time.

    Attributes:
        released: worker -> how many of its processes were released.
        gone: worker -> number of its process that was told to leave and has, or was released.
        everybody: every live worker was told to leave by a signal, so that the run is to end.
        is_prepared: the plan without those that were told to leave is there.
    """

    def __init__(
        self, shape: Shape, processes: WorkerProcesses, plans: Plans, holdings: Holdings, outbox: Outbox
    ) -> None:
        self._shape, self._processes, self._plans = shape, processes, plans
        self._holdings, self._outbox = holdings, outbox
        self.released: Counter[str] = Counter()
        self._notices: dict[Worker, Notice] = {}
        self._prepared: set[Worker] = set()
        self.gone: dict[str, int] = {}
        self._leaving: dict[Worker, _Leaver] = {}
        self.everybody = self.is_prepared = False

    def ask(self, worker: Worker, seconds: float | None = None, by_signal: bool = False) -> None:
        """Tell a worker to leave at the next boundary. It is told once: a first deadline counts."""
        number = self._processes.incarnation(worker)
        if not self._processes.is_running(worker):
            self._outbox.put(RefuseDeparture(worker, "it is dead already"))
        elif self.gone.get(str(worker)) != number and not self._is_noticed(worker):
            self._notices[worker] = Notice(number, self._outbox.now, seconds, by_signal)

    def _is_noticed(self, worker: Worker) -> bool:
        notice = self._notices.get(worker)
        return notice is not None and notice.incarnation == self._processes.incarnation(worker)

    def forget(self, workers: Iterable[Worker]) -> None:
        """A new agent serves these workers and has started none: what told them to leave was for the one before."""
        for worker in workers:
            self._notices.pop(worker, None)
            self.gone.pop(str(worker), None)

    def look(self, live: Collection[Worker], joined: Collection[Worker], step: int) -> None:
        """See to the plan without those that leave, release those that take no part, and note who has left.

        Args:
            live: the workers of the generation, those that join included.
            joined: the live workers that have no state yet.
            step: the next iteration.
        """
        self.watch()
        self.everybody = self.is_prepared = False
        self._prepared.clear()
        for worker in [worker for worker in self._notices if not self._is_noticed(worker)]:
            del self._notices[worker]
        for worker in [worker for worker in self._notices if worker not in live]:
            if self._processes.is_running(worker) and not self._processes.is_killed(worker):
                self._release(worker, step)  # it starts up, or waits to join
            else:
                self.gone[str(worker)] = self._notices.pop(worker).incarnation
        if not self._notices:
            return
        noticed = {worker for worker, notice in self._notices.items() if notice.by_signal}
        self.everybody = bool(live) and noticed >= set(live)
        leaving: list[Worker] = []
        for worker in list(self._notices) if not self.everybody else ():
            stay = set(live) - {*leaving, worker}
            if not self._holdings.lost(stay - set(joined)):
                leaving.append(worker)
            elif not stay & set(joined) and not self._holdings.is_restoring:
                self._refuse(
                    worker,
                    "it is the last live host of its stage; let a peer re-join first, or end the run with a checkpoint"
                    " by SIGTERM to recycle train",
                )
        if leaving:
            try:
                self.is_prepared = self._plans.ready(self._without(live, leaving)) is not None
                self._prepared = set(leaving)
            except RunError as error:
                for worker in leaving:
                    self._refuse(worker, str(error))

    def _refuse(self, worker: Worker, why: str) -> None:
        del self._notices[worker]
        self._outbox.log("warning", message=f"worker {worker} was told to leave and stays: {why}")
        self._outbox.put(RefuseDeparture(worker, why))

    def _without(self, live: Collection[Worker], leaving: Iterable[Worker]) -> frozenset[Worker]:
        """All that are dead when these have left."""
        return frozenset(self._shape.workers()) - (set(live) - set(leaving))

    @property
    def leaving(self) -> set[Worker]:
        """Workers that were released and have not ended yet."""
        return set(self._leaving)

    def overdue(self) -> dict[Worker, str]:
        """Workers that did not leave in time, each with why it is killed now."""
        return {
            worker: f"told to leave within {notice.seconds:g} s, in which no iteration came to its end"
            for worker, notice in self._notices.items()
            if notice.seconds is not None and self._outbox.now - notice.since >= notice.seconds
        }

    def is_gone(self, worker: Worker) -> bool:
        """Whether the worker's latest process was told to leave and has, so that the run does not start another."""
        return self.gone.get(str(worker)) == self._processes.incarnation(worker)

    def release(self, live: Collection[Worker], step: int) -> set[Worker]:
        """Between generations: release the live workers that were told to leave; the next generation is without them.

        Args:
            step: the first iteration without them.
        """
        released = {worker for worker in self._prepared if worker in live and self._is_noticed(worker)}
        for worker in sorted(released):
            self._release(worker, step)
        return released

    def _release(self, worker: Worker, step: int) -> None:
        notice = self._notices.pop(worker)
        self._leaving[worker] = _Leaver(step, notice.since, self._outbox.now + END_SECONDS)
        self.gone[str(worker)] = notice.incarnation
        self.released[str(worker)] += 1
        self._outbox.put(Tell(Leave(str(worker), notice.incarnation)))

    def watch(self) -> None:
        """Note who has left, and kill who does not end."""
        for worker, leaver in list(self._leaving.items()):
            if not self._processes.is_running(worker):
                del self._leaving[worker]
                seconds = round(self._outbox.now - leaver.noticed_at, 6)
                self._outbox.log("drained", worker=str(worker), step=leaver.step, seconds=seconds)
            elif self._outbox.now > leaver.deadline:
                self._processes.kill(worker)

    def start_over(self) -> None:
        """All processes were ended to go back to a checkpoint."""
        self._notices.clear()
        self._leaving.clear()
