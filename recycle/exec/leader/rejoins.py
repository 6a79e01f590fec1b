"""Dead workers that come back: those that are expected, and those that the run starts again by itself.

The processes of expected workers start early, and the run waits for them up to a deadline. A worker that is started
again joins when it is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recycle.exec.leader.departures import Departures
from recycle.exec.leader.state import Phase, RunState
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

    def restart(self, beats: Any) -> None:
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
        for worker, cause in state.starting.lost(coming, beats, state.now).items():
            processes.kill(worker)  # the next one is started when it has ended
            state.log_detected(worker, f"{cause} in start-up")
            state.starting.forget(worker)

    def start_over(self) -> None:
        """All processes are new: those that were being started for a return have to be started again."""
        for rejoin in self._all:
            rejoin.started, rejoin.deadline = False, None
