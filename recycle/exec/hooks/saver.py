"""Checkpoints on a worker: copy the committed state of its stages, and write the copy during training.

One host of each stage writes it, chosen by the plan and the generation record. The copy is taken between the commit and
the next step, so it never has a step that might be undone. Its buffers are reused; files are serialized one by one.
Buffers in pinned memory take seconds to allocate, and wait for the device: they are allocated when a generation begins,
before any receive is posted, and each counts as progress.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from recycle.errors import RunError, first_line
from recycle.exec.checkpoint.checkpoint import folder_of, stored_names, write_stage
from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.leader.checkpoints import writer_of
from recycle.exec.members import split_member
from recycle.exec.model.stage import Stage, StoredPart, buffers_for, copy_state, on_host
from recycle.exec.protocol import Commit, GenerationRecord, Saved, SavedPart


class Saver(IterationHook):
    """Writes this process's part of each checkpoint.

    Args:
        all_at: whether the last step of every stage was a given iteration (`StepState.all_at`).
        send: reports saved parts to the leader; from any thread.
        set_waiting: called with True before a wait for the disk and False after it; each call is progress.
        reserves: whether to allocate buffers when a generation begins, instead of with the first checkpoint.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        stages: Mapping[int, Stage],
        all_at: Callable[[int], bool],
        send: Callable[[SavedPart], object],
        tensor_parallel: int = 1,
        deadline: float = math.inf,
        set_waiting: Callable[[bool], None] = lambda waiting: None,
        reserves: bool = False,
    ) -> None:
        self._deadline, self._set_waiting, self._reserves = deadline, set_waiting, reserves
        self._root, self._name, self._stages, self._all_at = root, name, stages, all_at
        self._hosts: Mapping[int, Sequence[str]] = {}
        self._worker, self._tensor_rank = split_member(name)
        self._tensor_parallel = tensor_parallel
        self._send = send
        self._taken: set[tuple[int, int]] = set()
        self._copies: dict[int, list[torch.Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._saved_step = -1

    def begin_generation(self, generation: Generation) -> None:
        if generation.hosts.keys() != self._hosts.keys():
            self._copies = {}
        self._hosts = generation.hosts
        if self._reserves:
            for index in self._own_numbers(generation.record):
                self._buffers(index, self._parts()[index].tensors)

    def _own_numbers(self, record: GenerationRecord) -> list[int]:
        return [index for index, hosts in self._hosts.items() if writer_of(index, hosts, record) == self._worker]

    def _parts(self) -> dict[int, StoredPart]:
        return {number: part for stage in self._stages.values() for number, part in stage.stored().items()}

    def save(self, record: GenerationRecord, commit: Commit | None) -> None:
        """Copy and write this process's stages if the commit requests a checkpoint and they are in its state.

        The last checkpoint of a run waits for the previous one; any other is skipped if the previous one is unfinished.
        """
        if commit is None or not commit.checkpoint or not self._all_at(commit.step):
            return
        own_numbers = [index for index in self._own_numbers(record) if (commit.step, index) not in self._taken]
        if not own_numbers:
            return
        self._taken.update((commit.step, index) for index in own_numbers)
        if commit.finished:
            self.close()
        if self._writing is not None and not self._writing.done() and self._saved_step != commit.step:
            for index in own_numbers:
                self._report(commit.step, index, Saved(error="the previous checkpoint is still being written"))
            return
        self._saved_step = commit.step
        began, parts = time.monotonic(), self._parts()
        copied = [(index, parts[index], self._copy(index, parts[index].tensors)) for index in own_numbers]
        self._writing = self._thread.submit(self._write, commit.step, copied, time.monotonic() - began)

    def rolled_back(self, committed: int) -> None:
        """Wait for unfinished writes, and allow later steps to be saved again."""
        if committed < self._saved_step:
            self.close()
            self._saved_step = -1
        self._taken = {(step, stage) for step, stage in self._taken if step <= committed}

    def close(self) -> None:
        """Wait until everything is written. Raises RunError after the deadline."""
        if self._writing is None or self._writing.done():
            return
        self._set_waiting(True)
        wait([self._writing], None if math.isinf(self._deadline) else self._deadline)
        self._set_waiting(False)
        if not self._writing.done():
            raise RunError(f"{self._root}: a checkpoint was not written within {self._deadline:g} s; check the disk")

    def _buffers(self, index: int, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            self._set_waiting(False)
            return on_host(tensor)

        self._copies[index] = buffers_for(live, self._copies.pop(index, []), allocate)
        return self._copies[index]

    def _copy(self, index: int, live: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        copies = self._buffers(index, live)
        copy_state(copies, live)
        if any(tensor.is_cuda for tensor in live):
            torch.cuda.current_stream().synchronize()  # the next step changes them
        return copies

    def _write(self, step: int, copied: Sequence[tuple[int, StoredPart, Sequence[torch.Tensor]]], stall: float) -> None:
        for index, part, state in copied:
            tensor = self._tensor_rank, self._tensor_parallel
            named = stored_names(part.named(state), part.cuts, tensor)
            try:
                files = write_stage(folder_of(self._root, step), index, self._name, named, self._tensor_rank, part.kind)
                saved = Saved(files, stall=round(stall, 6))
            except Exception as error:  # training continues, and the leader writes the event
                saved = Saved(error=f"worker {self._name}: {first_line(error)}")
            self._report(step, index, saved)

    def _report(self, step: int, index: int, saved: Saved) -> None:
        with contextlib.suppress(RunError):  # the agent is gone, and this process ends in a moment
            self._send(SavedPart(step, index, self._tensor_rank, saved))
