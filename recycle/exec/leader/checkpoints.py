"""Tracks checkpoints: selects the commits to save and detects when a checkpoint is complete.

When all stages have reported their files, the runtime writes the manifest and removes old checkpoints. The leader
requests no checkpoint while another is pending, so a slow disk makes them rarer and never stops training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

from recycle.exec.leader.actions import CheckpointCompleted, CompleteCheckpoint, DiscardCheckpoint, Outbox
from recycle.exec.members import split_member
from recycle.exec.protocol import Commit, GenerationRecord, Saved, SavedPart
from recycle.job import Job
from recycle.plans.hosting import Hosts


def writer_of(stage: int, hosts: Collection[str], record: GenerationRecord) -> str | None:
    """Select the worker that writes a stage, from hosts that did not just join; None if no host is left."""
    candidates = sorted(set(hosts).intersection(record.live).difference(record.joins))
    return candidates[stage % len(candidates)] if candidates else None


def _writers(hosts: Hosts, record: GenerationRecord) -> dict[int, str]:
    of_stages = hosts.hosts_of_stages().items()
    writers = {stage: writer_of(stage, list(map(str, workers)), record) for stage, workers in of_stages}
    return {stage: writer for stage, writer in writers.items() if writer is not None}


@dataclass
class PendingCheckpoint:
    """A checkpoint that is not complete yet.

    Attributes:
        live: the workers that took part in the step.
        writers: stage -> worker that writes the stage.
        parts: (stage, tensor rank) -> the written part; None until written.
    """

    commit: Commit
    since: float
    live: frozenset[str]
    writers: dict[int, str]
    parts: dict[tuple[int, int], Saved | None]
    is_finishing: bool = False

    @property
    def missing(self) -> list[tuple[int, int]]:
        return [part for part, saved in self.parts.items() if saved is None]


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        pending: step -> checkpoint that is being written.
        kept: steps of the complete checkpoints.
        keeps_last: save the final state regardless of the interval, because the run ends early.
    """

    def __init__(self, job: Job, outbox: Outbox) -> None:
        self._job, self._outbox = job, outbox
        self.pending: dict[int, PendingCheckpoint] = {}
        self.keeps_last = False
        self.kept: set[int] = set()

    def due(self, step: int, is_last: bool) -> bool:
        """Return whether to save the state after `step`: at each interval, and at the end of a long enough run."""
        if not (is_last and self.keeps_last):
            every = self._job.train.checkpoint_every
            if not every or step + 1 < every:
                return False
            if not is_last and ((step + 1) % every or self.pending):
                return False
        self.pending.pop(step, None)
        self.kept.discard(step)
        self._outbox.put(DiscardCheckpoint(step))
        return True

    def committed(self, commit: Commit, record: GenerationRecord, hosts: Hosts) -> None:
        """Start tracking a checkpoint if the commit saves its state; `hosts` belong to its generation."""
        if commit.checkpoint and commit.step not in self.kept:
            writers, ranks = _writers(hosts, record), range(self._job.grid.tensor_parallel)
            parts: dict[tuple[int, int], Saved | None] = dict.fromkeys(product(writers, ranks))
            live = frozenset(record.live)
            self.pending[commit.step] = PendingCheckpoint(commit, self._outbox.now, live, writers, parts)

    def proposed(self, record: GenerationRecord, hosts: Hosts) -> None:
        """Reassign the parts of dead workers to the writers of a new generation, which write what they have not."""
        if (pending := self.pending.get(record.committed)) is not None:
            for stage, writer in _writers(hosts, record).items():
                if pending.writers.get(stage) not in record.live:
                    pending.writers[stage] = writer

    @property
    def is_finishing(self) -> bool:
        return any(pending.is_finishing for pending in self.pending.values())

    def take(self, member: str, part: SavedPart) -> None:
        """Take a part of a checkpoint; ignore workers outside the step, which has been rolled back since."""
        pending, key, worker = self.pending.get(part.step), (part.stage, part.tensor_rank), split_member(member)[0]
        if pending is not None and worker in pending.live and key in pending.parts and not pending.is_finishing:
            pending.parts[key] = part.saved

    def completed(self, answer: CheckpointCompleted) -> None:
        step, pending = answer.step, self.pending.get(answer.step)
        if pending is None or not pending.is_finishing:
            return
        if answer.error:
            self._give_up(step, answer.error)
            return
        del self.pending[step]
        self.kept = self.kept - answer.removed | {step}
        self._outbox.log(
            "checkpoint",
            step=step,
            folder=folder_name(step),
            seconds=round(self._outbox.now - pending.since, 6),
            stalled=max((saved.stall for saved in pending.parts.values() if saved), default=0.0),
        )

    def tick(self, live: Collection[str], record: GenerationRecord) -> None:
        """Complete checkpoints whose parts are written; give up those that `live` workers cannot complete."""
        for step, pending in sorted(self.pending.items()):
            missing = pending.missing
            dead = next((writer for stage, _ in missing if (writer := pending.writers[stage]) not in live), None)
            if not pending.is_finishing and not missing:
                pending.is_finishing = True
                saved = [part for part in pending.parts.values() if part]
                self._outbox.put(CompleteCheckpoint(pending.commit, saved, record.verified_step))
            elif self._outbox.now - pending.since > self._job.train.checkpoint_deadline:
                self._give_up(step, f"not complete after {self._job.train.checkpoint_deadline:g} s")
            elif dead is not None and (step < record.committed or not live):  # else another host may write it
                self._give_up(step, f"worker {dead} ended before it had written its part")

    def _give_up(self, step: int, reason: str) -> None:
        del self.pending[step]
        self._outbox.log("checkpoint", step=step, error=reason)

    def rewind(self, step: int) -> None:
        """Forget checkpoints of steps after `step`, which may be wrong after a rollback."""
        self.pending = {at: pending for at, pending in self.pending.items() if at <= step}
        self.kept = {at for at in self.kept if at <= step}

    def folder(self, step: int) -> str | None:
        return folder_name(step) if step in self.kept else None


def folder_name(step: int) -> str:
    return f"step-{step:08d}"
