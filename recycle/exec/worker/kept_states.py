"""Copies of whole states with their checksums: what hosts compare, and what training goes back to where they differ.

A copy is made of the state that an iteration begins with, piece by piece, and is what the checksum is of. Two are held:
the one that is gone back to, and the one that is being compared. Which one is gone back to the caller knows: the last
one on which all hosts agreed, or where they replay each other's work an older one (verified_states.py).

A copy is of the stages that the worker hosted then. Where layers have moved since, it hosts those again when it goes
back, and what the next generation wants is copied from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from recycle.exec.model.checksum import PIECE, Checksum, RunningChecksum
from recycle.exec.model.stage import Stage, copy_state

_COPIES = 2
HostedStages = tuple[tuple[int, ...], tuple[int, ...]]
"""Units of each stage of the model where the layout cuts it, and the stages that a worker hosts of it."""


class StageHost(Protocol):
    """Who hosts the stages; `recycle.exec.worker.hosted.Hosted` of a worker whose layers may move."""

    @property
    def layout(self) -> HostedStages:
        """What is hosted now."""

    def place(self, cut: Sequence[int], indices: Sequence[int]) -> bool:
        """Host these stages from now on; whether they are others than before."""

    def confirm(self) -> None:
        """The state of all stages is complete, and nothing else counts from now on."""


class _Kept(NamedTuple):
    """A copy: of what was hosted, by stage."""

    layout: HostedStages
    buffers: dict[int, list[torch.Tensor]]


class _Copying:
    """The copy of one stage's state, on its way."""

    def __init__(self, live: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        self._pieces = [
            pair
            for one, other in zip(live, into, strict=True)
            for pair in zip(torch.split(one.view(-1), PIECE), torch.split(other.view(-1), PIECE), strict=True)
        ]
        self._is_awaited = any(one.is_cuda and not other.is_cuda for one, other in zip(live, into, strict=True))
        self._checksum = RunningChecksum(into)

    @torch.no_grad()
    def piece(self) -> bool:
        """Copy the next piece, or else go through one of the copy; whether there was one."""
        if self._pieces:
            live, into = self._pieces.pop()
            into.copy_(live, non_blocking=True)
            if not self._pieces and self._is_awaited:
                torch.cuda.current_stream().synchronize()
            return True
        return self._checksum.piece()

    def finish(self) -> Checksum:
        while self.piece():
            pass
        return self._checksum.finish()


class KeptStates:
    """The kept states of one worker.

    Args:
        stages: that it hosts, at any time.
        empty_like: makes a buffer for a tensor of a state.
        hosting: hosts them; None where it always hosts the same.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        empty_like: Callable[[torch.Tensor], torch.Tensor],
        hosting: StageHost | None = None,
    ) -> None:
        self._stages, self._empty_like, self._hosting = stages, empty_like, hosting
        self._kept: dict[int, _Kept] = {}
        self._copying: dict[int, _Copying] = {}
        self._begun: int | None = None
        self.checksums: dict[int, Checksum] = {}

    def begin(self, step: int, besides: int | None = None) -> None:
        """The state after `step`, which all stages have now and which is committed, is to be kept and compared.

        Args:
            besides: the step of the state that stays kept besides; the newest one when left out.
        """
        if self._begun == step:
            return
        self._begun, self.checksums = step, {}
        older, layout, last = sorted(self._kept), self._layout(), None
        if step in self._kept:
            last = self._kept.pop(step)
        elif len(older) == _COPIES:
            last = self._kept.pop(next(kept for kept in older if kept != besides))
        if last is not None and last.layout == layout:
            buffers = last.buffers
        else:
            del last  # its memory is for the new one
            buffers = {i: [self._empty_like(one) for one in s.state_tensors()] for i, s in self._stages.items()}
        self._kept[step] = _Kept(layout, buffers)
        self._copying = {i: _Copying(s.state_tensors(), buffers[i]) for i, s in self._stages.items()}

    def piece(self) -> bool:
        """Do a piece of what was begun; whether there was one."""
        return any(copying.piece() for copying in self._copying.values())

    def finish(self, index: int) -> None:
        """Do all that is left of a stage: it steps next, or the worker reports."""
        if index in self._copying:
            self.checksums[index] = self._copying.pop(index).finish()

    def finish_all(self) -> dict[int, Checksum]:
        """Do all that is left; the checksums of all stages."""
        for index in list(self._copying):
            self.finish(index)
        return self.checksums

    def go_back(self, step: int) -> bool:
        """Have all stages be in the state after `step`, if it is kept; states of later steps count no more.

        The stages are those that were hosted then.
        """
        self.cancel()
        for later in [kept for kept in self._kept if kept > step]:
            del self._kept[later]
        if step not in self._kept:
            return False
        layout, of_stages = self._kept[step]
        if self._hosting is not None:
            self._hosting.place(*layout)
        for index, buffers in of_stages.items():
            copy_state(self._stages[index].state_tensors(), buffers)
        if self._hosting is not None:
            self._hosting.confirm()
        return True

    def _layout(self) -> HostedStages:
        return ((), tuple(sorted(self._stages))) if self._hosting is None else self._hosting.layout

    def is_of_others(self, step: int) -> bool:
        """Whether the state after `step` is kept, of other stages than those that are hosted now."""
        return step in self._kept and self._kept[step].layout != self._layout()

    def cancel(self) -> None:
        """The generation has ended: what was begun is begun anew in the next one."""
        if self._copying and self._begun is not None:
            self._kept.pop(self._begun, None)  # a part of it is missing
        self._copying, self._begun, self.checksums = {}, None, {}

    def clear(self) -> None:
        """The worker's states come from elsewhere now."""
        self._kept.clear()
        self._copying, self._begun, self.checksums = {}, None, {}
