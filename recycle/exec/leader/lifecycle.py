"""The start of a run's workers, at its beginning and on the way back to a checkpoint, and the end of the run: after its
last iteration, or before where it is told to end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.leader.actions import (
    CheckpointFound,
    EndEarly,
    FindCheckpoint,
    Finish,
    Rewind,
    StoredCheckpoint,
    Waiting,
)
from recycle.exec.leader.checkpoints import folder_name
from recycle.exec.leader.commit import names_of_numbers
from recycle.exec.leader.generations import Generations, StageLost
from recycle.exec.leader.state import Phase
from recycle.exec.leader.worker_processes import reassign
from recycle.exec.members import joined_digests, worker_names
from recycle.exec.protocol import REFUSED_THE_JOB, Commit, FinalState, with_last_lines
from recycle.job.shape import Worker


@dataclass
class _GoingBack:
    """Training goes on from a checkpoint, with the workers that can be started.

    Attributes:
        lost: why.
        left: the workers that were alive when the stage was lost.
        deadline: until when nodes that return are waited for, and processes to end.
        found: the checkpoint to go back to; None before it is asked for.
    """

    lost: StageLost
    left: Collection[Worker]
    deadline: float
    found: CheckpointFound | Literal["asked for"] | None = None


class Startup:
    """Starts the workers of a run.

    Attributes:
        can_go_back: where workers cannot be started, others may be started instead, from a checkpoint.
    """

    def __init__(self, generations: Generations) -> None:
        self._generations, self._processes = generations, generations.processes
        self.can_go_back = False
        self._going_back: _GoingBack | None = None
        self._waits_for = ""

    def start(self) -> None:
        """Start all workers once their nodes are present, from the checkpoint that was gone back to, if any; wait for
        them to be ready. Workers that join later copy a peer's state."""
        generations, processes, now = self._generations, self._processes, self._generations.now
        record, live = generations.record, generations.live
        processes.take_ended()
        if missing := processes.missing_nodes(live):
            nodes = " ".join(map(str, missing))
            if self.can_go_back and not processes.is_awaited(live):
                self.begin_to_go_back(StageLost(f"nodes {nodes} are gone again"), live)
                return
            late = waits_for = f"agents of nodes {nodes}"
        else:
            for worker in sorted(live):
                process = processes[worker]
                if process.generation != record.generation:
                    processes.start(worker, record.generation, record.committed if record.committed >= 0 else None)
                elif process.how is not None:
                    self._fail(worker, process.how)
                    return
            slow = [worker for worker in sorted(live) if not processes.is_ready(worker)]
            for worker, cause in generations.starting.lost(slow, now).items():
                processes.kill(worker)
                self._fail(worker, f"had {cause}")
                return
            if not slow:
                generations.enter(Phase.BETWEEN)
                generations.lines.starts(now)
                return
            late, waits_for = f"workers {' '.join(map(str, slow))}", f"{len(live)} workers"
        if now > generations.start_deadline:
            limit, logs = generations.job.membership.start_deadline, generations.run.logs
            raise RunError(f"{late} were not ready within {limit:g} s; see {logs}")
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self._generations.put(Waiting(f"{waits_for} to start"))

    def _fail(self, worker: Worker, how: str) -> None:
        """At the start of the run this is its end; on the way back to a checkpoint others may be started instead."""
        message, lines = f"worker {worker} {how} during start-up", self._processes[worker].lines
        if not self.can_go_back:
            if how.endswith(REFUSED_THE_JOB):
                raise JobError(lines.rpartition(" ends: ")[2] or message)
            raise RunError(with_last_lines(message, lines))
        self._generations.log_detected(worker, f"{how} during start-up")
        self.begin_to_go_back(StageLost(message), self._generations.live - {worker})

    # Going back to a checkpoint.

    def begin_to_go_back(self, lost: StageLost, left: Collection[Worker]) -> None:
        """Training goes on from a checkpoint, with the workers that can be started.

        Args:
            left: the workers that were alive when the stage was lost.
        """
        self.can_go_back, self._waits_for = True, ""
        deadline = self._generations.now + self._generations.job.membership.rejoin_deadline
        self._going_back = _GoingBack(lost, set(left), deadline)
        self._generations.enter(Phase.GOING_BACK)
        self.go_back()

    def found(self, checkpoint: CheckpointFound) -> None:
        """This is the checkpoint to go back to."""
        if self._going_back is not None:
            self._going_back.found = checkpoint

    def go_back(self) -> None:
        """End all processes, then assign positions to as many workers as can be started, and restore the checkpoint.

        A worker that had died before takes part if it may be started once more. Where too few are left, nodes that
        return are waited for, as long as for a worker that re-joins.
        """
        generations, processes, back = self._generations, self._processes, self._going_back
        assert back is not None
        job, run, checkpoints = generations.job, generations.run, generations.checkpoints
        is_late = self._generations.now > back.deadline
        processes.take_ended()
        if running := [worker for worker in sorted(generations.everybody) if processes[worker].is_running]:
            if is_late:
                raise RunError(f"{back.lost}, and workers {' '.join(map(str, running))} could not be ended to go back")
            for worker in running:
                processes.kill(worker)
            return
        allowed = {
            worker
            for worker in generations.everybody - run.absent
            if (worker in back.left or processes[worker].incarnation < run.restarts)
            and not generations.departures.is_gone(worker)
        }
        startable = {worker for worker in allowed if not processes.missing_nodes([worker])}
        positions = reassign(job.shape, startable)
        if positions is None and startable < allowed and not is_late:
            return  # a node may come back
        checkpoints.tick((), generations.record)
        if checkpoints.is_finishing:
            return
        if back.found is None:
            back.found = "asked for"
            generations.put(FindCheckpoint(generations.record.verified_step))
        if not isinstance(back.found, CheckpointFound):
            return
        checkpoint = back.found.checkpoint
        if checkpoint is None:
            every = job.train.checkpoint_every
            raise RunError(
                f"{back.lost}, and there is no complete checkpoint to go back to;"
                f" [train] checkpoint_every is {every}{'' if every else ', which is never'}: the state is kept every so"
                " many steps"
            )
        if positions is None:
            raise RunError(
                f"{back.lost}, and {len(startable)} live workers are too few for {job.shape.ranks} ranks; go on"
                f" from {folder_name(checkpoint.step)} with: {run.resume_command}"
            )
        processes.move(positions, startable)
        places = {str(worker): str(place) for worker, place in processes.places.items()}
        generations.start_over(positions, self._commit_of(checkpoint), generations.record.generation)
        generations.announce("abandoned", places=places)  # another leader goes on from there
        self._generations.put(Rewind(checkpoint.step))
        self._going_back = None
        generations.expect_starts()
        self._log_restored(checkpoint)

    def resume(self, checkpoint: StoredCheckpoint, generation: int) -> None:
        """Go on from a checkpoint that an earlier part of the run has left.

        Args:
            generation: the last one of that part.
        """
        commit = self._commit_of(checkpoint)
        self._generations.start_over(self._generations.live, commit, generation)
        if checkpoint.commit.evaluate and not (checkpoint.has_metrics or commit.evaluate):
            self._generations.write_line()
        self._log_restored(checkpoint)

    def _commit_of(self, checkpoint: StoredCheckpoint) -> Commit:
        """The commit that training goes on from.

        The state is evaluated if that is still to be done, which it is as long as the step has no line of metrics.
        """
        run, commit = self._generations.run, checkpoint.commit
        is_last = commit.step + 1 >= run.steps
        is_due = run.job.is_evaluated(commit.step, is_last) and not checkpoint.has_metrics
        return msgspec.structs.replace(commit, finished=is_last and is_due, evaluate=is_due)

    def _log_restored(self, checkpoint: StoredCheckpoint) -> None:
        names, folder = worker_names(self._generations.live), folder_name(checkpoint.step)
        self._generations.log("restored", step=checkpoint.step + 1, checkpoint=folder, live=names)


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

    def finish(self) -> None:
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
        digests = self._final_digests()
        if digests is None or generations.checkpoints.pending or departures.leaving:
            return
        self._compare_final_states(digests)
        generations.ends_early = record.committed + 1 < generations.run.steps or self._is_cut_short
        if generations.ends_early:
            self._log_stopped()
        self._finish(Finish(digests, generations.ends_early, record.committed))

    def _final_digests(self) -> dict[str, dict[int, str]] | None:
        """Worker -> stage -> sha256 of the stage's final state, once every worker that still lives has left them; None
        before. A worker that dies or hangs meanwhile is detected as ever, without consequence."""
        generations, live = self._generations, self._generations.live
        lost = generations.detector.lost(live, generations.now, self._final)
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
