"""Workers that leave, and workers that come back.

**Departures.** A worker is told to leave by SIGTERM, by its agent together with all workers of the node, or by `recycle
drain`. The leader has the plan without the worker made while training goes on; then all workers stop after the same
iteration, and the next generation begins without it. Nothing is taken back or repeated. A worker whose deadline passes
before that is killed, which is an ordinary death. The last host of a unit of the model stays, because its state would
be lost. Where all workers were told to leave by a signal, the run ends with a checkpoint instead (`everybody`).

**Rejoins.** The processes of workers that are expected back start early, and the run waits for them up to a deadline. A
worker that the run starts again by itself joins when it is ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recycle.errors import RunError
from recycle.exec.leader.actions import DepartureAsked
from recycle.exec.leader.plans import Plans
from recycle.exec.leader.state import Phase, RunState
from recycle.exec.members import worker_of
from recycle.exec.protocol import Leave, Leaving, Refused, Value
from recycle.job.shape import Worker

END_SECONDS = 60.0
"""How long a released worker may take to end: it may still write its part of a checkpoint. Then it is killed."""


class Notice(Value):
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


class _Leaver(Value):
    """A worker that was released and has not ended yet."""

    step: int
    noticed_at: float
    deadline: float


class Departures:
    """The departures of a run.

    Args:
        state: of the run.
        plans: what the remaining workers go on with.

    Attributes:
        everybody: every live worker was told to leave by a signal, so that the run is to end.
        is_prepared: the plan without those that were told to leave is there.
    """

    def __init__(self, state: RunState, plans: Plans) -> None:
        self._state, self._processes, self._plans = state, state.processes, plans
        self._notices: dict[Worker, Notice] = {}
        self._prepared: list[Worker] = []
        self._leaving: dict[Worker, _Leaver] = {}
        self.everybody = self.is_prepared = False

    def take(self, member: str, leaving: Leaving) -> None:
        """A worker, or the agent of its node, has got a signal to leave."""
        worker = worker_of(member)
        if leaving.incarnation == self._processes[worker].incarnation:
            self.ask(worker, by_signal=True)

    def ask_all(self, asked: DepartureAsked) -> None:
        """Somebody asks the run to let workers leave."""
        for worker in asked.workers:
            self.ask(worker, asked.seconds)

    def ask(self, worker: Worker, seconds: float | None = None, by_signal: bool = False) -> None:
        """Tell a worker to leave at the next boundary. It is told once: a first deadline counts."""
        process, notice = self._processes[worker], self._notices.get(worker)
        if not process.is_running:
            self._state.put(Refused(str(worker), "it is dead already"))
        elif not self.is_gone(worker) and (notice is None or notice.incarnation != process.incarnation):
            self._notices[worker] = Notice(process.incarnation, self._state.now, seconds, by_signal)

    def forget(self, workers: Iterable[Worker]) -> None:
        """A new agent serves these workers and has started none: what told them to leave was for the one before."""
        for worker in workers:
            self._notices.pop(worker, None)
            self._state.gone.pop(str(worker), None)

    def look(self) -> None:
        """See to the plan without those that leave, release those that take no part, and note who has left."""
        self.watch()
        state, live = self._state, self._state.live
        self.everybody, self.is_prepared, self._prepared = False, False, []
        for worker, notice in list(self._notices.items()):
            process = self._processes[worker]
            if notice.incarnation != process.incarnation:
                del self._notices[worker]
            elif worker not in live and process.is_running and not process.is_killed:
                self._release(worker)  # it starts up, or waits to join
            elif worker not in live:
                state.gone[str(worker)] = self._notices.pop(worker).incarnation
        if not self._notices:
            return
        noticed = {worker for worker, notice in self._notices.items() if notice.by_signal}
        self.everybody = bool(live) and noticed >= live
        for worker in list(self._notices) if not self.everybody else ():
            stay = live.difference(self._prepared, [worker])
            if not state.holdings.lost(stay - state.joined):
                self._prepared.append(worker)
            elif not stay & state.joined and not state.holdings.is_restoring:
                self._refuse(
                    worker,
                    "it is the last live host of its stage; let a peer re-join first, or end the run with a checkpoint"
                    " by SIGTERM to recycle train",
                )
        if self._prepared:
            try:
                self.is_prepared = self._plans.ready(state.failed.union(self._prepared)) is not None
            except RunError as error:
                for worker in self._prepared:
                    self._refuse(worker, str(error))
                self._prepared = []

    def _refuse(self, worker: Worker, why: str) -> None:
        del self._notices[worker]
        self._state.log("warning", message=f"worker {worker} was told to leave and stays: {why}")
        self._state.put(Refused(str(worker), why))

    @property
    def leaving(self) -> set[Worker]:
        """Workers that were released and have not ended yet."""
        return set(self._leaving)

    def overdue(self) -> dict[Worker, str]:
        """Workers that did not leave in time, each with why it is killed now."""
        return {
            worker: f"told to leave within {notice.seconds:g} s, in which no iteration came to its end"
            for worker, notice in self._notices.items()
            if notice.seconds is not None and self._state.now - notice.since >= notice.seconds
        }

    def is_gone(self, worker: Worker) -> bool:
        """Whether the worker's latest process was told to leave and has, so that the run does not start another."""
        return self._state.gone.get(str(worker)) == self._processes[worker].incarnation

    def release(self) -> list[Worker]:
        """Between generations: release the live workers that were told to leave; the next is without them."""
        self.look()  # one that was to leave may be a last host by now
        for worker in sorted(self._prepared):
            self._release(worker)
        return self._prepared

    def _release(self, worker: Worker) -> None:
        notice, name = self._notices.pop(worker), str(worker)
        self._leaving[worker] = _Leaver(self._state.next_step, notice.since, self._state.now + END_SECONDS)
        self._state.gone[name] = notice.incarnation
        self._state.released[name] += 1
        self._state.tell(Leave(name, notice.incarnation))

    def watch(self) -> None:
        """Note who has left, and kill who does not end."""
        for worker, leaver in list(self._leaving.items()):
            if not self._processes[worker].is_running:
                del self._leaving[worker]
                seconds = round(self._state.now - leaver.noticed_at, 6)
                self._state.log("drained", worker=str(worker), step=leaver.step, seconds=seconds)
            elif self._state.now > leaver.deadline:
                self._processes.kill(worker)

    def start_over(self) -> None:
        """All processes were ended to go back to a checkpoint."""
        self._notices.clear()
        self._leaving.clear()


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
        state: of the run.
        departures: says who has left and stays away.
    """

    def __init__(self, state: RunState, departures: Departures) -> None:
        self._state, self._processes, self._departures = state, state.processes, departures
        self._all: list[Rejoin] = []

    def expect_faults(self) -> None:
        """Wait for the workers that faults bring back from here on."""
        for fault in self._state.run.faults:
            if not fault.strikes and fault.step >= self._state.next_step:
                self._all.append(Rejoin(fault.worker, fault.step))

    def adopt(self) -> None:
        """Processes that another leader has started for expected workers, as their agents say, are those that come
        back."""
        for rejoin in self.awaited():
            rejoin.started = rejoin.started or self._processes[rejoin.worker].is_running

    def awaited(self) -> list[Rejoin]:
        """The dead workers that are expected back, each with its next return."""
        nearest: dict[Worker, Rejoin] = {}
        for rejoin in sorted(self._all, key=lambda r: r.step):
            if rejoin.worker not in self._state.live:
                nearest.setdefault(rejoin.worker, rejoin)
        return list(nearest.values())

    def start(self) -> None:
        """Start the processes of workers that are awaited now; while a generation runs also of those that are awaited
        later, as imports take a while."""
        state, processes = self._state, self._processes
        for rejoin in self.awaited():
            worker, process = rejoin.worker, processes[rejoin.worker]
            if process.generation is None:
                rejoin.started = False  # its process is gone with its node
            is_due = state.phase is Phase.RUNNING or rejoin.step <= state.next_step
            is_free = not process.is_running and not processes.missing_nodes([worker])
            if is_due and not rejoin.started and is_free:
                rejoin.started = True
                processes.start(worker, state.record.generation)

    def settle(self) -> bool:
        """Admit the workers that shall start with the next step; whether none has to be waited for any more."""
        state, now = self._state, self._state.now
        for rejoin in self.awaited():
            worker, is_running = rejoin.worker, self._processes[rejoin.worker].is_running
            if rejoin.step > state.next_step:
                continue
            if rejoin.deadline is None:
                rejoin.deadline = now + state.job.membership.rejoin_deadline
            if rejoin.started and is_running and self._processes.is_ready(worker):
                state.live.add(worker)
                state.joined.add(worker)
                state.detector.forget(worker)
            elif (is_running or not rejoin.started) and now < rejoin.deadline:
                return False  # it starts up, its last process is about to end, or its node is missing
            else:
                self._processes.kill(worker)
                state.log("fault", worker=str(worker), step=rejoin.step, cause="did not re-join in time")
            self._all.remove(rejoin)
        return True

    def restart(self) -> None:
        """Start workers that died again, where the run does so by itself, and expect them when they are ready."""
        state, processes = self._state, self._processes
        if not state.run.restarts or state.phase is not Phase.RUNNING:
            return
        coming: list[Worker] = []
        awaited = {rejoin.worker for rejoin in self.awaited()}
        for worker in sorted(state.failed - awaited - state.run.absent):
            process = processes[worker]
            if self._departures.is_gone(worker):
                continue
            if processes.is_ready(worker) and process.is_running:
                self._all.append(Rejoin(worker, state.next_step, started=True))
            elif process.is_running:
                coming.append(worker)
            elif process.incarnation - state.released[str(worker)] < state.run.restarts and not processes.missing_nodes(
                [worker]
            ):
                processes.start(worker, state.record.generation)
                state.starting.forget(worker)
        for worker, cause in state.starting.lost(coming, state.now).items():
            processes.kill(worker)  # the next one is started when it has ended
            state.log_detected(worker, f"{cause} in start-up")
            state.starting.forget(worker)

    def start_over(self) -> None:
        """All processes are new: those that were being started for a return have to be started again."""
        for rejoin in self._all:
            rejoin.started, rejoin.deadline = False, None
