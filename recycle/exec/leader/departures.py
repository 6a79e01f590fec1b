"""Workers that leave announced: who was told to, who stays nevertheless, and who has left.

A notice is an entry of one key of the store. The worker itself writes it when it gets SIGTERM, its agent for all
workers of its node, or whoever asks for it from outside. The coordinator has the plan without the worker made while
training goes on; then all stop after the same iteration, and the next generation begins without the worker. Nothing is
taken back and nothing repeated. A worker whose deadline passes before that is killed, and its death is an ordinary one.

The last host of a unit of the model stays, because its state would be lost with it. Where everybody was told to leave,
the run is to end with a checkpoint instead (`everybody`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from recycle.errors import RunError
from recycle.exec.leader.holdings import Holdings
from recycle.exec.membership.interfaces import Log, Plans, Processes
from recycle.exec.membership.schema import LeaveKey, NoticesKey
from recycle.exec.membership.store import Store
from recycle.exec.protocol import Notice
from recycle.shape import Shape, Worker

END_SECONDS = 60.0
"""How long a worker that may leave has to end: it may still write its part of a checkpoint. Then it is killed."""


def announce(
    store: Store, workers: Mapping[Worker, int | None], seconds: float | None = None, by_signal: bool = False
) -> None:
    """Tell workers to leave at the next boundary.

    Args:
        workers: each with the number of the process that is meant; None for whichever it has now.
        seconds: until they are killed; None for no deadline.
        by_signal: their machine or its owner wants them gone, not somebody who asks the run.

    Raises:
        RunError: the store is gone.
    """
    notices = {str(worker): Notice(number, seconds, by_signal) for worker, number in workers.items()}
    while True:
        before = store.read(NoticesKey())
        if store.compare_set(NoticesKey(), before, (before or {}) | notices):
            return


def withdraw(store: Store, workers: Iterable[Worker]) -> None:
    """Forget that workers were told to leave. Raises RunError: the store is gone."""
    names = set(map(str, workers))
    while before := store.read(NoticesKey()):
        after = {name: notice for name, notice in before.items() if name not in names}
        if after == before or store.compare_set(NoticesKey(), before, after):
            return


@dataclass
class _Leaver:
    """A worker that may leave, and has not ended yet."""

    step: int
    noticed_at: float
    deadline: float


class Departures:
    """The departures of a run.

    Args:
        shape: of the job.
        store: of the run.
        processes: of the workers.
        plans: what those who stay go on with.
        holdings: who holds what.
        log: takes events.
        now: monotonic seconds.

    Attributes:
        everybody: every live worker was told to leave by a signal, so that nobody is to go on.
        is_prepared: the plan without those who were told to leave is there.
    """

    def __init__(
        self,
        shape: Shape,
        store: Store,
        processes: Processes,
        plans: Plans,
        holdings: Holdings,
        log: Log,
        now: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._shape, self._store, self._processes, self._plans = shape, store, processes, plans
        self._log, self._now = log, now
        self._notices: dict[str, Notice] = {}
        self._noticed_at: dict[Worker, float] = {}
        self._leaving: dict[Worker, _Leaver] = {}
        self.everybody = self.is_prepared = False

    def look(self, live: Collection[Worker], joined: Collection[Worker], step: int) -> None:
        """Take up notices, see to the plan without those who leave, and note who has left.

        Args:
            live: the workers of the generation, those who join included.
            joined: of these, who has no state yet.
            step: the next iteration.
        """
        self.watch()
        self._notices = self._store.read(NoticesKey()) or {}
        self.everybody = self.is_prepared = False
        if not self._notices:
            self._noticed_at.clear()
            return
        answers = {name: self._answer(name, notice, live, step) for name, notice in self._notices.items()}
        asked = [Worker.parse(name) for name, answer in answers.items() if answer is not None and not answer.refused]
        noticed = {Worker.parse(n) for n, answer in answers.items() if answer is not None and answer.by_signal}
        self.everybody = bool(live) and noticed >= set(live)
        leaving: list[Worker] = []
        for worker in asked if not self.everybody else ():
            stay = set(live) - {*leaving, worker}
            if not self._holdings.lost(stay - set(joined)):
                leaving.append(worker)
            elif not stay & set(joined) and not self._holdings.is_restoring:
                answers[str(worker)] = self._refuse(
                    worker,
                    "it is the last live host of its stage; let a peer re-join first, or end the run with a checkpoint"
                    " by SIGTERM to recycle train",
                )
        if leaving:
            try:
                self.is_prepared = self._plans.ready(self._without(live, leaving)) is not None
            except RunError as error:
                answers |= {str(worker): self._refuse(worker, str(error)) for worker in leaving}
                leaving = []
        self._noticed_at = {worker: self._noticed_at.get(worker, self._now()) for worker in leaving}
        self._reply({name: answer for name, answer in answers.items() if answer is not None})

    def _answer(self, name: str, notice: Notice, live: Collection[Worker], step: int) -> Notice | None:
        """The notice as it stands now; None where it is about a process that is no more or takes no part."""
        worker = Worker.parse(name)
        number = self._processes.incarnation(worker)
        if worker in live:
            if notice.incarnation is None:
                return msgspec.structs.replace(notice, incarnation=number)
            return notice if notice.incarnation == number else None
        if notice.incarnation is None and not notice.refused:
            if not self._processes.running(worker):
                self._reply({name: msgspec.structs.replace(notice, refused="it is dead already")})
            else:
                notice = msgspec.structs.replace(notice, incarnation=number)
                self._reply({name: notice})
        is_waiting = notice.incarnation == number and self._processes.running(worker) and worker not in self._leaving
        if is_waiting and not notice.refused:  # it starts up, or waits to join
            self._let_go(worker, self._now(), step)
        return None

    def _refuse(self, worker: Worker, why: str) -> Notice:
        self._log("warning", message=f"worker {worker} was told to leave and stays: {why}")
        notice, number = self._notices[str(worker)], self._processes.incarnation(worker)
        return msgspec.structs.replace(notice, incarnation=number, refused=why)

    def _reply(self, answers: dict[str, Notice]) -> None:
        """Write what has come of notices, unless there are others by now: then with the next look."""
        after = self._notices | answers
        if after != self._notices and self._store.compare_set(NoticesKey(), self._notices, after):
            self._notices = after

    def _without(self, live: Collection[Worker], leaving: Iterable[Worker]) -> frozenset[Worker]:
        """All that are dead when these have left."""
        return frozenset(self._shape.workers()) - (set(live) - set(leaving))

    @property
    def leaving(self) -> set[Worker]:
        """Workers that take no part any more and have not ended yet."""
        return set(self._leaving)

    def overdue(self) -> dict[Worker, str]:
        """Workers that were to leave within a time that is over, each with why it is killed now."""
        found: dict[Worker, str] = {}
        for worker, since in self._noticed_at.items():
            seconds = self._notices[str(worker)].seconds
            if seconds is not None and self._now() - since >= seconds:
                found[worker] = f"told to leave within {seconds:g} s, in which no iteration came to its end"
        return found

    def is_gone(self, worker: Worker) -> bool:
        """Whether the worker's latest process was told to leave and may, so that no other is started by itself."""
        notice = self._notices.get(str(worker))
        return notice is not None and not notice.refused and notice.incarnation == self._processes.incarnation(worker)

    def left(self, worker: Worker) -> int:
        """How many processes of the worker so far were let go; the others of its ended ones have failed."""
        numbers = range(self._processes.incarnation(worker) + 1)
        return sum(self._store.has_all([LeaveKey(worker, number)]) for number in numbers)

    def release(self, live: Collection[Worker], step: int) -> set[Worker]:
        """Between generations: let go who was told to leave and lives; the next generation is without them.

        Args:
            step: the first iteration without them.
        """
        released, self._noticed_at = {worker: since for worker, since in self._noticed_at.items() if worker in live}, {}
        for worker, since in sorted(released.items()):
            self._let_go(worker, since, step)
        return set(released)

    def _let_go(self, worker: Worker, since: float, step: int) -> None:
        self._leaving[worker] = _Leaver(step, since, self._now() + END_SECONDS)
        self._store.set(LeaveKey(worker, self._processes.incarnation(worker)), True)

    def watch(self) -> None:
        """Note who has left, and kill who does not end."""
        for worker, leaver in list(self._leaving.items()):
            if not self._processes.running(worker):
                del self._leaving[worker]
                seconds = round(self._now() - leaver.noticed_at, 6)
                self._log("drained", worker=str(worker), step=leaver.step, seconds=seconds)
            elif self._now() > leaver.deadline:
                self._processes.kill(worker)

    def start_over(self) -> None:
        """All processes were ended to go back to a checkpoint."""
        self._noticed_at.clear()
        self._leaving.clear()
