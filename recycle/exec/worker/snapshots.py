"""Checksums of states, which hosts compare, and snapshots, which training restores if hosts differ.

`Stage.compared` defines the compared parts: the whole state, or each held shard and the live parameters. The checksum
of the state at the beginning of an iteration is computed piece by piece; for a snapshot, from the copy. Two snapshots
are held: the one to restore, and its successor; leader/commit.py decides. Live parameters follow from shards, so they
are compared but not copied. Restoring a snapshot also restores the stages and shards that the worker had then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from recycle.exec.checksums import PARAMETERS, Checksum
from recycle.exec.device import CopyStream
from recycle.exec.leader.commit import Comparison
from recycle.exec.model.integrity import RunningChecksum
from recycle.exec.model.stage import Stage, buffers_for, copy_state
from recycle.exec.model.state.optimizer import piece_of_step
from recycle.exec.worker.local_stages import HostedLayout, LocalStages

_MOST_SNAPSHOTS = 2


class _Snapshot(NamedTuple):
    layout: HostedLayout
    buffers: dict[int, list[torch.Tensor]]


class StateCopy:
    """A copy of `live`, piece by piece; complete after `CopyStream.join` only."""

    def __init__(self, live: Sequence[torch.Tensor], into: Sequence[torch.Tensor], stream: CopyStream) -> None:
        self._stream = stream
        self._pieces = [
            pair
            for source, copy in zip(live, into, strict=True)
            for pair in zip(
                *(torch.split(tensor.view(-1), piece_of_step(source.device)) for tensor in (source, copy)), strict=True
            )
        ]

    @torch.no_grad()
    def piece(self) -> bool:
        """Copy the next piece. Returns whether there was one."""
        if not self._pieces:
            return False
        live, into = self._pieces.pop()
        self._stream.copy(into, live)
        return True

    def finish(self) -> None:
        while self.piece():
            pass


class _PartCopy:
    def __init__(self, live: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None, stream: CopyStream) -> None:
        self._stream = stream
        self._copy: StateCopy | None = None if into is None else StateCopy(live, into, stream)
        self._checksum = RunningChecksum(live if into is None else into)

    def piece(self) -> bool:
        if self._copy is not None:
            if self._copy.piece():
                return True
            self._copy = None
            self._stream.settle()
        return self._checksum.piece()

    def finish(self) -> Checksum:
        while self.piece():
            pass
        return self._checksum.finish()


class StateSnapshots:
    def __init__(
        self,
        stages: Mapping[int, Stage],
        empty_like: Callable[[torch.Tensor], torch.Tensor],
        stream: CopyStream,
        hosted: LocalStages | None = None,
    ) -> None:
        self._stages, self._empty_like, self._stream, self._hosted = stages, empty_like, stream, hosted
        self._snapshots: dict[int, _Snapshot] = {}
        self._part_copies: dict[int, dict[int, _PartCopy]] = {}
        self._comparison: Comparison | None = None
        self.checksums: dict[int, Checksum] = {}

    def compare(self, comparison: Comparison) -> None:
        """Begin to compare the current state, which must be committed."""
        if self._comparison is not None and self._comparison.step == comparison.step:
            return
        self._comparison, self.checksums = comparison, {}
        parts = {
            index: {number: part.tensors for number, part in stage.compared().items()}
            for index, stage in self._stages.items()
        }
        state = {number: live for part in parts.values() for number, live in part.items() if number < PARAMETERS}
        buffers = self._buffers(comparison, state) if comparison.is_kept else {}
        self._part_copies = {
            index: {number: _PartCopy(live, buffers.get(number), self._stream) for number, live in part.items()}
            for index, part in parts.items()
        }

    def _buffers(
        self, comparison: Comparison, state: Mapping[int, Sequence[torch.Tensor]]
    ) -> dict[int, list[torch.Tensor]]:
        steps, last = sorted(self._snapshots), dict[int, list[torch.Tensor]]()
        if comparison.step in self._snapshots:
            last = self._snapshots.pop(comparison.step).buffers
        elif len(steps) == _MOST_SNAPSHOTS:
            last = self._snapshots.pop(next(kept for kept in steps if kept != comparison.besides)).buffers
        older = {number: last.pop(number, []) for number in state}
        del last  # free unused buffers before allocating
        buffers = {number: buffers_for(live, older[number], self._empty_like) for number, live in state.items()}
        self._stream.follow()  # memory of new buffers may still be in use by earlier work
        self._snapshots[comparison.step] = _Snapshot(self._layout(), buffers)
        return buffers

    def process_piece(self) -> bool:
        """Process the next piece. Returns whether there was one."""
        return any(part.piece() for parts in self._part_copies.values() for part in parts.values())

    def finish_stage(self, index: int) -> None:
        """Finish the parts of a stage, before its step or the report."""
        self.checksums |= {number: part.finish() for number, part in self._part_copies.pop(index, {}).items()}

    def finish_all(self) -> dict[int, Checksum]:
        """Finish all parts. Returns the checksums by the numbers of `Stage.compared`."""
        for index in list(self._part_copies):
            self.finish_stage(index)
        return self.checksums

    def restore(self, step: int) -> bool:
        """Restore the snapshot after `step` with its stages and shards, and drop later ones; False if missing."""
        self.cancel()
        for later in [kept for kept in self._snapshots if kept > step]:
            del self._snapshots[later]
        if step not in self._snapshots:
            return False
        layout, buffers = self._snapshots[step]
        if self._hosted is not None:
            self._hosted.place(*layout)
            self._hosted.own_only(buffers.keys())
        for stage in self._stages.values():
            for number, part in stage.compared().items():
                if number in buffers:
                    copy_state(part.tensors, buffers[number])
        if self._hosted is not None:
            self._hosted.confirm()
        return True

    def _layout(self) -> HostedLayout:
        return ((), tuple(sorted(self._stages))) if self._hosted is None else self._hosted.layout

    def has_other_layout(self, step: int) -> bool:
        """Whether the snapshot after `step` has other stages than the worker hosts now."""
        return step in self._snapshots and self._snapshots[step].layout != self._layout()

    def cancel(self) -> None:
        """Discard the comparison in progress after its generation has ended; the next generation repeats it."""
        if self._part_copies and self._comparison is not None and self._comparison.is_kept:
            self._snapshots.pop(self._comparison.step, None)  # incomplete
        self._part_copies, self._comparison, self.checksums = {}, None, {}

    def clear(self) -> None:
        """Drop all snapshots, because the worker's state now comes from elsewhere."""
        self._snapshots.clear()
        self._part_copies, self._comparison, self.checksums = {}, None, {}
