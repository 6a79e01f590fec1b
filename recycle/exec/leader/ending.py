"""The end of a run: after its last iteration, or before where it is told to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recycle.errors import RunError
from recycle.exec.leader.actions import EndEarly, Finish
from recycle.exec.leader.commit import names_of_numbers
from recycle.exec.leader.generations import Generations
from recycle.exec.leader.state import Phase
from recycle.exec.members import joined_digests, worker_names
from recycle.exec.protocol import FinalState


class Ending:
    """Ends one run."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._since = 0.0
        self._is_cut_short = False
        self._final: dict[str, dict[int, str]] = {}

    def take(self, member: str, final: FinalState) -> None:
        """A process has said what it ends with."""
        self._final[member] = final.digests

    def end_early(self, asked: EndEarly | None) -> None:
        """Have the run end with the present iteration, or the next if that has begun, and keep its state."""
        if not self._generations.ends_early:
            self._since = self._generations.now
            self._generations.end_early()

    def end_without_iteration(self) -> bool:
        """End a run that is told to end and has not committed another step in time; whether it is over with that.

        The committed state goes to a checkpoint, unless it is in one, or no step was committed.
        """
        generations, record = self._generations, self._generations.record
        if not generations.ends_early or generations.phase is Phase.FINISHED:
            return False
        is_training = generations.phase not in (Phase.STARTING, Phase.GOING_BACK)
        if is_training and self._generations.now - self._since <= generations.end_patience:
            return False
        is_kept = record.committed in generations.checkpoints.kept  # to keep it again would begin with its removal
        if is_training and record.commit is not None and not is_kept:
            self._is_cut_short = record.is_evaluation_due
            generations.end_at_committed()
            return False
        self._log_stopped()
        self._finish(Finish({}, True, record.committed, merge=False))
        return True

    def _log_stopped(self) -> None:
        step = self._generations.record.committed
        self._generations.log("stopped", step=step, checkpoint=self._generations.checkpoints.folder(step))

    def _finish(self, action: Finish) -> None:
        self._generations.enter(Phase.OVER)
        self._generations.put(action)

    def finish(self, beats: Any) -> None:
        """After the last iteration: wait for the last checkpoint and the final states of all workers."""
        generations, record = self._generations, self._generations.record
        departures, processes = generations.departures, generations.processes
        departures.watch()
        live = generations.live | departures.leaving
        for worker in sorted(generations.everybody - live):
            processes.kill(worker)  # it returned too late and waits for a generation that never comes
        left = [worker for worker in live if processes[worker].is_running]
        generations.checkpoints.tick(worker_names(left), record)
        generations.release_after_last()
        digests = self._final_digests(beats)
        if digests is None or generations.checkpoints.pending or departures.leaving:
            return
        self._compare_final_states(digests)
        generations.ends_early = record.committed + 1 < generations.run.steps or self._is_cut_short
        if generations.ends_early:
            self._log_stopped()
        self._finish(Finish(digests, generations.ends_early, record.committed))

    def _final_digests(self, beats: Any) -> dict[str, dict[int, str]] | None:
        """Worker -> stage -> sha256 of the stage's final state, once every worker that still lives has left them; None
        before. A worker that dies or hangs meanwhile is detected as ever, without consequence."""
        generations, live = self._generations, self._generations.live
        lost = generations.detector.lost(live, beats, generations.now, self._final)
        waits = {worker for worker in live if not self._final.keys() >= set(generations.members(worker))}
        for worker in sorted(waits):
            if (cause := generations.processes[worker].how or lost.get(worker)) is not None:
                generations.processes.kill(worker)
                live.discard(worker)
                generations.log_detected(worker, cause, step=generations.record.committed, over=True)
        if waits & live:
            return None
        return {
            name: joined_digests([self._final[member] for member in generations.members(name)])
            for name in worker_names(live)
        }

    def _compare_final_states(self, digests: Mapping[str, Mapping[int, str]]) -> None:
        """Write which hosts end with another state than their peers. Where hosts compare their states, what was
        computed since they agreed is taken back and the run fails."""
        held_by: dict[int, dict[str, str]] = {}
        for worker, stages in digests.items():
            for number, digest in stages.items():
                held_by.setdefault(number, {})[worker] = digest
        unlike = {number: held for number, held in sorted(held_by.items()) if len(set(held.values())) > 1}
        if not unlike:
            return
        generations, record = self._generations, self._generations.record
        name = names_of_numbers(generations.job)
        what = "; ".join(
            f"workers {' and '.join(held)} end with different states of {name(n)}" for n, held in unlike.items()
        )
        self._generations.log("corrupt", step=record.committed, workers=[], what=what, held=unlike)
        if generations.job.integrity.compares_states and record.verified is not None:
            generations.rewind(record.verified.step)
            raise RunError(
                f"{what}; what came after step {record.verified.step}, where they agreed, is taken back; go on from a"
                f" checkpoint with: {generations.run.resume_command}"
            )
