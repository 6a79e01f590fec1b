"""The coordinator's part in checkpoints: which commits are kept, when a checkpoint is complete, which are removed.

A commit states that its state is kept. The manager waits for the hosts of all stages to announce their files, writes
the manifest, and removes what is older than the last few. It asks for no checkpoint while one is being written: a disk
that is slower than the interval makes checkpoints rarer and never stops training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import Checkpoint, Manifest, folder_of, writer_of
from recycle.exec.membership.schema import SavedKey
from recycle.exec.membership.store import Store
from recycle.exec.protocol import Commit, GenerationRecord, Saved
from recycle.job import Job
from recycle.manifest import MANIFEST
from recycle.plans.hosting import Hosts, layers_of, stage_units
from recycle.plans.unit_shards import has_unit_shards

PLAIN = {"last": None, "finished": False, "checkpoint": False}
"""What a commit announces for the generation that it belonged to, which a later run must not act on."""


@dataclass(frozen=True)
class _Pending:
    commit: Commit
    since: float
    writers: dict[int, str]
    finishing: Future[str] | None = None
    stall: float = 0.0


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        job: its `[train]` section says how often and how many.
        root: folder of all checkpoints; made when first needed.
        text_digest: of the training text.
        store: where workers announce their files.
        log: takes events.
        wake: wakes the coordinator's loop.
        now: monotonic seconds.
    """

    def __init__(
        self,
        *,
        job: Job,
        root: Path,
        text_digest: str | None,
        store: Store,
        log: Callable[..., None],
        wake: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._job, self._root, self._text_digest = job, root, text_digest
        self._store, self._log, self._wake, self._now = store, log, wake, now
        self._most_stages = max(job.shape.stages, sum(layers_of(job)))
        if job.train.sharded_optimizer:  # shards are announced in the place of stages
            parts = stage_units(layers_of(job))[-1][1] if has_unit_shards(job) else self._most_stages
            self._most_stages = parts * job.shape.pipelines
        self._pending: dict[int, _Pending] = {}
        self._announced: list[int] = []
        self._keeps_last = False
        self._upto: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

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
        self._store.delete(self._keys(step, range(self._most_stages)))
        checkpoint.remove(folder_of(self._root, step))  # what an attempt before a restart left of it
        return True

    def committed(self, commit: Commit, record: GenerationRecord, hosts: Hosts) -> None:
        """A commit stands, of workers that host this; it says whether its state is kept."""
        self._upto = None if record.verified is None else record.verified.step
        if commit.checkpoint:
            of_stages = hosts.hosts_of_stages()
            chosen = {stage: writer_of(stage, list(map(str, of)), record) for stage, of in of_stages.items()}
            writers = {stage: writer for stage, writer in chosen.items() if writer is not None}
            self._pending[commit.step] = _Pending(commit, self._now(), writers)
            self._announced.append(commit.step)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self._pending)

    def tick(self, live: Collection[str], committed: int) -> None:
        """Complete, or give up, what is due.

        Args:
            live: processes that may still write.
            committed: the last committed step; only of that one another host can still write what a dead one did not.
        """
        for step, pending in sorted(self._pending.items()):
            is_late = self._now() - pending.since > self._job.train.checkpoint_deadline
            if pending.finishing is not None and pending.finishing.done():
                self._end(step, pending.finishing.result())
                continue
            keys = self._keys(step, pending.writers)
            if pending.finishing is None and self._store.has_all(keys):
                saved = [part for part in self._store.read_all(keys) if part is not None]
                finishing = self._thread.submit(self._finish, pending.commit, saved)
                finishing.add_done_callback(lambda _: self._wake())
                self._pending[step] = replace(
                    pending, finishing=finishing, stall=max((part.stall for part in saved), default=0.0)
                )
            elif is_late:
                self._give_up(step, f"not complete after {self._job.train.checkpoint_deadline:g} s")
            elif pending.finishing is not None:
                continue
            elif (dead := self._missing(pending, live)) and (step < committed or not live):
                self._give_up(step, f"worker {dead} ended before it had written its part")

    def _keys(self, step: int, stages: Iterable[int]) -> list[SavedKey]:
        """Under which all tensor ranks announce their parts of stages."""
        return [SavedKey(step, of, rank) for of in stages for rank in range(self._job.grid.tensor_parallel)]

    def _missing(self, pending: _Pending, live: Collection[str]) -> str | None:
        """A writer that has ended without having written its stage."""
        for stage, writer in pending.writers.items():
            if writer not in live and not self._store.has_all(self._keys(pending.commit.step, [stage])):
                return writer
        return None

    def _finish(self, commit: Commit, saved: list[Saved]) -> str:
        """In the thread, because a disk may be slow: complete a checkpoint; returns why that failed, or nothing."""
        folder = folder_of(self._root, commit.step)
        error = next((part.error for part in saved if part.error), "")
        if not error:
            files = {name: stored for part in saved for name, stored in part.files.items()}
            manifest = Manifest(
                commit.step,
                msgspec.structs.replace(commit, **PLAIN),
                self._job.shape.to_json(),
                checkpoint.identity(self._job),
                checkpoint.course(self._job, self._text_digest),
                files,
            )
            try:
                checkpoint.write_manifest(folder, manifest)
            except OSError as failure:
                error = f"{folder}: {failure.strerror}"
        if error:
            checkpoint.remove(folder)
        else:
            self._prune(commit.step)
        return error

    def _prune(self, step: int) -> None:
        older = [(at, folder) for at, folder in checkpoint.folders(self._root) if at < step]
        whole = [folder for _, folder in older if (folder / MANIFEST).exists()]
        kept = whole[: self._job.train.checkpoint_keep - 1]
        if self._upto is not None:  # the newest one that training may go back to
            kept += [folder for at, folder in older if at <= self._upto and folder in whole][:1]
        for _, folder in older:
            if folder not in kept:
                checkpoint.remove(folder)

    def _end(self, step: int, error: str) -> None:
        if error:
            self._give_up(step, error)
            return
        pending = self._pending.pop(step)
        folder = folder_of(self._root, step)
        seconds = round(self._now() - pending.since, 6)
        self._log("checkpoint", step=step, folder=folder.name, seconds=seconds, stalled=pending.stall)
        self._forget([old for old in self._announced if old < step])

    def _give_up(self, step: int, why: str) -> None:
        del self._pending[step]
        self._log("checkpoint", step=step, error=why)

    def _forget(self, steps: list[int]) -> None:
        self._store.delete([key for step in steps for key in self._keys(step, range(self._most_stages))])
        self._announced = [step for step in self._announced if step not in steps]

    def newest(self, warn: Callable[[str], object]) -> Checkpoint | None:
        """The newest complete checkpoint, when no worker lives that could still write one; where hosts compare their
        states, of a step behind which they have agreed."""
        for _ in range(2):
            self._wait(self._pending.values())
            self.tick((), max(self._pending, default=0))
        return checkpoint.newest(self._root, warn, self._upto, "the states of all workers have agreed")

    def rewind(self, step: int) -> None:
        """Training has gone back to the state after `step`: what is kept of later ones may be wrong."""
        self._wait([self._pending.pop(at) for at in list(self._pending) if at > step])
        self._forget([at for at in self._announced if at > step])
        for at, folder in checkpoint.folders(self._root):
            if at > step:
                checkpoint.remove(folder)

    def folder_of(self, step: int) -> str | None:
        """Name of the folder of the complete checkpoint of a step; None when there is none."""
        folder = folder_of(self._root, step)
        return folder.name if (folder / MANIFEST).exists() else None

    def start_over(self) -> None:
        """Training goes back to a checkpoint: forget those that are being written and what was announced."""
        self._pending.clear()
        self._upto = None
        self._forget(list(self._announced))

    def _wait(self, checkpoints: Iterable[_Pending]) -> None:
        """Wait for those that are being completed, up to the deadline."""
        finishing = [pending.finishing for pending in checkpoints if pending.finishing is not None]
        wait(finishing, self._job.train.checkpoint_deadline)

    def close(self) -> None:
        """Wait for what is being completed, up to the deadline, and complete no more."""
        self._wait(self._pending.values())
        self._thread.shutdown(wait=False, cancel_futures=True)
