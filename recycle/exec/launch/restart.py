"""What follows when a stage has no live host left: from where training goes on, and with whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from recycle.errors import RunError
from recycle.exec.checkpoint.checkpoint import Checkpoint
from recycle.exec.checkpoint.checkpoint_manager import CheckpointManager
from recycle.exec.checkpoint.reassignment import reassign
from recycle.exec.launch.shared_directory import SharedRunDirectory
from recycle.exec.membership.coordinator import Coordinator, StageLost
from recycle.exec.processes.cluster_processes import ClusterProcesses
from recycle.job import Job
from recycle.shape import Worker


def where_to_go_back(
    job: Job,
    checkpoints: CheckpointManager,
    lost: StageLost,
    left: Collection[Worker],
    run: Path,
    warn: Callable[[str], object],
) -> tuple[list[Worker], Checkpoint]:
    """Positions for as many processes as are left, and the checkpoint that they start from.

    Args:
        left: positions whose processes can be started again; none of them runs.
        run: the run directory, for what to do where the run cannot go on.

    Raises:
        RunError: there is no complete checkpoint, or too few are left for every stage to have a host.
    """
    checkpoint = checkpoints.newest(warn)
    if checkpoint is None:
        every = job.train.checkpoint_every
        raise RunError(
            f"{lost}: its parameters are lost, and there is no complete checkpoint to go back to;"
            f" [train] checkpoint_every is {every}{'' if every else ', which is never'}: the state is kept every so"
            " many steps"
        )
    positions = reassign(job.shape, left)
    if positions is None:
        raise RunError(
            f"{lost}, and {len(left)} live workers are too few for {job.shape.ranks} ranks; go on from"
            f" {checkpoint.folder.name} with: recycle train JOB --resume --run {run}"
        )
    return positions, checkpoint


class ClusterRestart:
    """The way back on a cluster: all processes are ended, then places on the nodes that are there are dealt out anew.

    A worker that had died takes part if it may be started once more. Where too few are left, agents that come back
    are waited for, as long as for a worker that joins again.

    Args:
        absent: positions that a schedule of one's own leaves out.
        log: takes events.
    """

    def __init__(
        self,
        job: Job,
        processes: ClusterProcesses,
        coordinator: Coordinator,
        checkpoints: CheckpointManager,
        directory: SharedRunDirectory,
        absent: Collection[Worker],
        log: Callable[..., None],
    ) -> None:
        self._job, self._processes, self._coordinator, self._checkpoints = job, processes, coordinator, checkpoints
        self._directory, self._absent, self._log = directory, absent, log
        self._lost: StageLost | None = None
        self._left: set[Worker] = set()
        self._deadline = 0.0

    @property
    def under_way(self) -> bool:
        """Whether it is still open who goes on."""
        return self._lost is not None

    def begin(self, lost: StageLost, left: Collection[Worker]) -> None:
        """Have all processes killed.

        Args:
            left: who was alive when the stage was lost.
        """
        self._lost, self._left = lost, set(left)
        self._deadline = time.monotonic() + self._job.membership.rejoin_deadline
        for worker in self._job.shape.workers():
            self._processes.kill(worker)

    def tick(self) -> None:
        """Decide who goes on, once that can be. Raises RunError when nobody can."""
        if self._lost is None:
            return
        late = time.monotonic() > self._deadline
        workers = [worker for worker in self._job.shape.workers() if worker not in self._absent]
        if running := [str(worker) for worker in workers if self._processes.running(worker)]:
            if late:
                raise RunError(f"{self._lost}, and workers {' '.join(running)} could not be ended to go back")
            return
        left = {worker for worker in workers if self._may_start(worker)}
        if not late and reassign(self._job.shape, left) is None:
            return
        positions, checkpoint = where_to_go_back(
            self._job, self._checkpoints, self._lost, left, self._directory.path, self._warn
        )
        self._processes.move(positions, left)
        self._checkpoints.start_over()
        commit = checkpoint.manifest.commit
        self._coordinator.restart(set(positions), commit.step, commit)
        self._directory.rewind(commit.step + 1)
        self._lost = None
        names = [str(worker) for worker in positions]
        self._log("restored", step=commit.step + 1, checkpoint=checkpoint.folder.name, live=names)

    def _may_start(self, worker: Worker) -> bool:
        spent = worker not in self._left and self._processes.incarnation(worker) >= self._job.cluster.restarts
        return not spent and self._processes.reachable(worker)

    def _warn(self, message: str) -> Any:
        self._log("warning", message=message)
