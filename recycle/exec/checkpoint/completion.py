"""Completes, finds and removes the checkpoints of a run, in a thread, because a disk may be slow."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from pathlib import Path

import msgspec

from recycle.exec.checkpoint import checkpoint
from recycle.exec.checkpoint.checkpoint import Manifest, folder_of
from recycle.exec.leader.actions import CheckpointCompleted, CheckpointFound, CompleteCheckpoint, StoredCheckpoint
from recycle.job import Job
from recycle.job.manifest import MANIFEST
from recycle.threads import WaitingThread

GENERATION_FIELDS = {"last": None, "finished": False, "checkpoint": False}
"""Fields of a commit that apply to its own generation only, reset in the manifest."""

Answer = CheckpointCompleted | CheckpointFound


class CheckpointCompletion:
    """The checkpoint folders of one run. `has_metrics` tells whether metrics.jsonl has the line of a step."""

    def __init__(
        self,
        job: Job,
        root: Path,
        text_digest: str | None,
        has_metrics: Callable[[int], bool],
        wake: Callable[[], None],
    ) -> None:
        self._job, self._root, self._text_digest = job, root, text_digest
        self._has_metrics, self._wake = has_metrics, wake
        self._answers: list[Future[Answer]] = []
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = WaitingThread()

    def kept(self) -> frozenset[int]:
        return frozenset(step for step, folder in checkpoint.folders(self._root) if (folder / MANIFEST).exists())

    def complete(self, request: CompleteCheckpoint) -> None:
        """Begin to complete a checkpoint; `poll` returns the answer."""
        self._submit(lambda: self._complete(request))

    def _submit(self, work: Callable[[], Answer]) -> None:
        answer = self._thread.submit(work)
        answer.add_done_callback(lambda _: self._wake())
        self._answers.append(answer)

    def _complete(self, request: CompleteCheckpoint) -> CheckpointCompleted:
        commit, folder = request.commit, folder_of(self._root, request.commit.step)
        error = next((part.error for part in request.saved if part.error), "")
        if not error:
            files = {name: stored for part in request.saved for name, stored in part.files.items()}
            manifest = Manifest(
                commit.step,
                msgspec.structs.replace(commit, **GENERATION_FIELDS),
                self._job.shape.to_json(),
                checkpoint.identity(self._job),
                checkpoint.course(self._job, self._text_digest),
                files,
            )
            try:
                for name in files:  # a part reported to a previous leader may have been removed since
                    (folder / name).stat()
                checkpoint.write_manifest(folder, manifest)
            except OSError as failure:
                error = f"{failure.filename or folder}: {failure.strerror}"
        if error:
            checkpoint.remove(folder)
            return CheckpointCompleted(commit.step, error)
        return CheckpointCompleted(commit.step, removed=self._prune(commit.step, request.verified))

    def _prune(self, step: int, verified: int | None) -> frozenset[int]:
        older = [(at, folder) for at, folder in checkpoint.folders(self._root) if at < step]
        whole = [folder for _, folder in older if (folder / MANIFEST).exists()]
        kept = whole[: self._job.train.checkpoint_keep - 1]
        if verified is not None:  # the newest one that training may restore
            kept += [folder for at, folder in older if at <= verified and folder in whole][:1]
        removed = {at: folder for at, folder in older if folder not in kept}
        for folder in removed.values():
            checkpoint.remove(folder)
        return frozenset(removed)

    def find(self, upto: int | None) -> None:
        """Begin to find the newest complete checkpoint, up to the last agreed step if given; for `poll`."""
        self._submit(lambda: self._find(upto))

    def _find(self, upto: int | None) -> CheckpointFound:
        newest = checkpoint.newest(self._root, self._warnings.put, upto, "the states of all workers have agreed")
        if newest is None:
            return CheckpointFound(None)
        manifest = newest.manifest
        return CheckpointFound(StoredCheckpoint(manifest.step, manifest.commit, self._has_metrics(manifest.step)))

    def poll(self, warn: Callable[[str], object]) -> Sequence[Answer]:
        """The answers since the last call. Raises JobError if the newest checkpoint is from a newer version."""
        while not self._warnings.empty():
            warn(self._warnings.get_nowait())
        done = [answer for answer in self._answers if answer.done()]
        self._answers = self._answers[len(done) :]
        return [answer.result() for answer in done]

    def discard(self, step: int) -> None:
        checkpoint.remove(folder_of(self._root, step))

    def rewind(self, step: int) -> None:
        """Remove the checkpoints of later steps, after waiting for pending completions up to the deadline."""
        self._wait_pending()
        for at, folder in checkpoint.folders(self._root):
            if at > step:
                checkpoint.remove(folder)

    def _wait_pending(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._thread.submit(lambda: None).result(self._job.train.checkpoint_deadline)

    def close(self) -> None:
        """Wait for pending completions up to the deadline, and complete no more."""
        self._wait_pending()
        self._thread.shut()
