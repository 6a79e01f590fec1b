"""What follows when the state of a stage is lost: from which checkpoint training goes on, and with whom.

All processes are ended, then positions are given to as many workers as can be started again. A worker that had died
before takes part if it may be started once more. Where too few are left, nodes that come back are waited for, as long
as for a worker that re-joins.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from recycle.errors import RunError
from recycle.exec.checkpoint.checkpoint import Checkpoint
from recycle.exec.checkpoint.checkpoint_manager import CheckpointManager
from recycle.exec.checkpoint.reassignment import reassign
from recycle.exec.launch.contact import resume_command
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.membership.coordinator import Coordinator, StageLost
from recycle.exec.protocol import Commit
from recycle.shape import Worker


class Restart:
    """The way back from a lost stage.

    Args:
        request, coordinator, checkpoints, directory: of the run.
        restarts: how often a worker that died may be started again.
    """

    def __init__(
        self,
        request: RunRequest,
        coordinator: Coordinator,
        checkpoints: CheckpointManager,
        directory: RunDirectory,
        restarts: int,
    ) -> None:
        self._job, self._coordinator, self._checkpoints = request.job, coordinator, checkpoints
        self._steps = request.steps
        self._directory, self._restarts = directory, restarts
        self._processes, self._log = coordinator.processes, coordinator.log
        self._workers = [worker for worker in self._job.shape.workers() if worker not in request.absent]
        self._lost: StageLost | None = None
        self._left: set[Worker] = set()
        self._deadline = 0.0

    @property
    def under_way(self) -> bool:
        """Whether it is still open who goes on."""
        return self._lost is not None

    def begin(self, lost: StageLost, left: Collection[Worker]) -> None:
        """Go back.

        Args:
            left: the workers that were alive when the stage was lost.
        """
        self._lost, self._left = lost, set(left)
        self._deadline = time.monotonic() + self._job.membership.rejoin_deadline
        self.tick()

    def tick(self) -> None:
        """End all processes, then decide which workers go on. Raises RunError when the run cannot."""
        if self._lost is None:
            return
        is_late = time.monotonic() > self._deadline
        self._processes.gone()
        if running := [worker for worker in self._workers if self._processes.running(worker)]:
            if is_late:
                names = " ".join(map(str, running))
                raise RunError(f"{self._lost}, and workers {names} could not be ended to go back")
            for worker in running:
                self._processes.kill(worker)
            return
        allowed = [w for w in self._workers if w in self._left or self._processes.incarnation(w) < self._restarts]
        startable = {worker for worker in allowed if not self._processes.missing_nodes([worker])}
        positions = reassign(self._job.shape, startable)
        if positions is None and len(startable) < len(allowed) and not is_late:
            return  # a node may come back
        checkpoint = self._newest_checkpoint(self._lost)
        if positions is None:
            raise RunError(
                f"{self._lost}, and {len(startable)} live workers are too few for {self._job.shape.ranks} ranks; go on"
                f" from {checkpoint.folder.name} with: {resume_command(self._directory.path)}"
            )
        self._processes.move(positions, startable)
        self._checkpoints.start_over()
        commit = self.commit_of(checkpoint)
        self._coordinator.restart(set(positions), commit.step, commit)
        self._directory.rewind(commit.step)
        self._lost = None
        self.log_restored(checkpoint)

    def commit_of(self, checkpoint: Checkpoint) -> Commit:
        """The commit that training goes on from.

        The state is evaluated if that is still to be done, which it is as long as the step has no line of metrics.
        """
        commit = checkpoint.manifest.commit
        is_last = commit.step + 1 >= self._steps
        is_due = self._job.is_evaluated(commit.step, is_last) and not self._directory.has_metrics_of(commit.step)
        return msgspec.structs.replace(commit, finished=is_last and is_due, evaluate=is_due)

    def log_restored(self, checkpoint: Checkpoint) -> None:
        """Write the event that training goes on from a checkpoint, with the coordinator's live workers."""
        names = [str(worker) for worker in sorted(self._coordinator.live)]
        self._log("restored", step=checkpoint.manifest.step + 1, checkpoint=checkpoint.folder.name, live=names)

    def _newest_checkpoint(self, lost: StageLost) -> Checkpoint:
        checkpoint = self._checkpoints.newest(lambda message: self._log("warning", message=message))
        if checkpoint is None:
            every = self._job.train.checkpoint_every
            raise RunError(
                f"{lost}, and there is no complete checkpoint to go back to;"
                f" [train] checkpoint_every is {every}{'' if every else ', which is never'}: the state is kept every so"
                " many steps"
            )
        return checkpoint
