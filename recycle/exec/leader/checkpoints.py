"""The leader's part in checkpoints: which commits are kept, and when a checkpoint is complete.

A commit states that its state is kept. The hosts of all stages announce the files that they have written; then the
runtime writes the manifest and removes what is older than the last few. No checkpoint is asked for while another one is
being written: a disk that is slower than the interval makes checkpoints rarer and never stops training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from recycle.exec.leader.actions import CheckpointCompleted, CompleteCheckpoint, DiscardCheckpoint, Outbox
from recycle.exec.protocol import Commit, GenerationRecord, Saved, SavedPart
from recycle.job import Job
from recycle.plans.hosting import Hosts


def writer_of(stage: int, hosts: Collection[str], record: GenerationRecord) -> str | None:
    """The worker that writes a stage: one that hosts it since before this generation; another pipeline's per stage.

    Args:
        hosts: of the stage, in the last generation that ran.

    Returns:
        None where no host is left.
    """
    left = sorted(set(hosts).intersection(record.live).difference(record.joins))
    return left[stage % len(left)] if left else None


Part = tuple[int, int]
"""(stage, tensor rank)."""


@dataclass
class _Pending:
    """A checkpoint that is not complete yet."""

    commit: Commit
    since: float
    live: frozenset[str]
    writers: dict[int, str]
    saved: dict[Part, Saved] = field(default_factory=dict)
    is_finishing: bool = False

    @property
    def stall(self) -> float:
        return max((part.stall for part in self.saved.values()), default=0.0)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        job: its `[train]` section says how often and how many.
        outbox: takes the actions.

    Attributes:
        kept: steps of the complete checkpoints.
        verified: step of the last state on which all hosts agreed; None where they do not compare.
    """

    def __init__(self, job: Job, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox
        self._pending: dict[int, _Pending] = {}
        self._keeps_last = False
        self.kept: set[int] = set()
        self.verified: int | None = None

    def keep_last(self) -> None:
        """The state at the end is kept however long the run is, because it ends early."""
        self._keeps_last = True

    def due(self, step: int, is_last: bool) -> bool:
        """Whether the state after `step` is kept: every so often, and at the end of a run that is long enough."""
        if not (is_last and self._keeps_last):
            every = self._job.train.checkpoint_every
            if not every or step + 1 < every:
                return False
            if not is_last and ((step + 1) % every or self._pending):
                return False
        self._pending.pop(step, None)
        self.kept.discard(step)
        self._outbox.put(DiscardCheckpoint(step))
        return True

    def committed(self, commit: Commit, record: GenerationRecord, hosts: Hosts) -> None:
        """A commit stands, of workers with these hosts; it says whether its state is kept."""
        self.verified = None if record.verified is None else record.verified.step
        if commit.checkpoint:
            names = {stage: list(map(str, workers)) for stage, workers in hosts.hosts_of_stages().items()}
            chosen = {stage: writer_of(stage, workers, record) for stage, workers in names.items()}
            writers = {stage: writer for stage, writer in chosen.items() if writer is not None}
            self._pending[commit.step] = _Pending(commit, self._outbox.now, frozenset(record.live), writers)

    def proposed(self, record: GenerationRecord, hosts: Hosts) -> None:
        """A generation begins after this record. What dead workers have not written of the committed state other hosts
        write now, unless they had a part of their own to write."""
        pending = self._pending.get(record.committed)
        if pending is None:
            return
        names, busy = hosts.hosts_of_stages(), set(pending.writers.values())
        for stage in [stage for stage, writer in pending.writers.items() if writer not in record.live]:
            writer = writer_of(stage, list(map(str, names[stage])), record)
            if writer is not None and writer not in busy:
                pending.writers[stage] = writer

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self._pending)

    @property
    def is_finishing(self) -> bool:
        """Whether the runtime is completing a checkpoint."""
        return any(pending.is_finishing for pending in self._pending.values())

    @property
    def missing(self) -> list[tuple[int, int, int]]:
        """(step, stage, tensor rank) of the parts that are awaited."""
        return [
            (step, *part)
            for step, pending in self._pending.items()
            if not pending.is_finishing
            for part in self._parts(pending.writers)
            if part not in pending.saved
        ]

    def take(self, worker: str, part: SavedPart) -> None:
        """A part of a checkpoint is written, or cannot be.

        What workers say that had no part in the step is ignored: they wrote what a run has gone back from.
        """
        pending = self._pending.get(part.step)
        if pending is not None and worker in pending.live and not pending.is_finishing:
            pending.saved[part.stage, part.tensor_rank] = part.saved

    def completed(self, answer: CheckpointCompleted) -> None:
        """The runtime has completed a checkpoint, or could not."""
        step = answer.step
        pending = self._pending.get(step)
        if pending is None or not pending.is_finishing:
            return
        if answer.error:
            self._give_up(step, answer.error)
            return
        del self._pending[step]
        self.kept = self.kept - answer.removed | {step}
        self._outbox.log(
            "checkpoint",
            step=step,
            folder=folder_name(step),
            seconds=round(self._outbox.now - pending.since, 6),
            stalled=pending.stall,
        )

    def tick(self, live: Collection[str], committed: int) -> None:
        """Complete, or give up, what is due.

        Args:
            live: workers that may still write.
            committed: the last committed step. Only of that step can another host write what a dead one did not.
        """
        for step, pending in sorted(self._pending.items()):
            is_whole = all(part in pending.saved for part in self._parts(pending.writers))
            if not pending.is_finishing and is_whole:
                pending.is_finishing = True
                saved = [pending.saved[part] for part in self._parts(pending.writers)]
                self._outbox.put(CompleteCheckpoint(pending.commit, saved, self.verified))
            elif self._outbox.now - pending.since > self._job.train.checkpoint_deadline:
                self._give_up(step, f"not complete after {self._job.train.checkpoint_deadline:g} s")
            elif pending.is_finishing:
                continue
            elif (dead := self._dead_writer(pending, live)) and (step < committed or not live):
                self._give_up(step, f"worker {dead} ended before it had written its part")

    def _parts(self, stages: Iterable[int]) -> list[Part]:
        return [(stage, rank) for stage in stages for rank in range(self._job.grid.tensor_parallel)]

    def _dead_writer(self, pending: _Pending, live: Collection[str]) -> str | None:
        """A writer that has ended without having written its stage."""
        for stage, writer in pending.writers.items():
            if writer not in live and any(part not in pending.saved for part in self._parts([stage])):
                return writer
        return None

    def _give_up(self, step: int, why: str) -> None:
        del self._pending[step]
        self._outbox.log("checkpoint", step=step, error=why)

    def rewind(self, step: int) -> None:
        """Training has gone back to the state after `step`: what is kept of later steps may be wrong."""
        self._pending = {at: pending for at, pending in self._pending.items() if at <= step}
        self.kept = {at for at in self.kept if at <= step}

    def folder(self, step: int) -> str | None:
        """Name of the folder of the complete checkpoint of a step; None when there is none."""
        return folder_name(step) if step in self.kept else None

    def start_over(self) -> None:
        """Training goes back to a checkpoint: forget those that are being written."""
        self._pending.clear()
        self.verified = None


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"
