"""Copies of whole states with their checksums: what hosts compare, and what training goes back to where they differ.

A copy is made of the state that an iteration begins with, piece by piece, and is what the checksum is of. Two are held:
the one that is gone back to, and the one that is being compared. Which one is gone back to the caller knows: the last
one on which all hosts agreed, or where they replay each other's work an older one (verified_states.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from recycle.exec.model.checksum import PIECE, Checksum, RunningChecksum
from recycle.exec.model.stage import Stage, copy_state

_COPIES = 2
_Buffers = dict[int, list[torch.Tensor]]


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
    """

    def __init__(self, stages: Mapping[int, Stage], empty_like: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stages, self._empty_like = stages, empty_like
        self._kept: dict[int, _Buffers] = {}
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
        older = sorted(self._kept)
        if step in self._kept:
            buffers = self._kept.pop(step)
        elif len(older) == _COPIES:
            buffers = self._kept.pop(next(kept for kept in older if kept != besides))
        else:
            buffers = {i: [self._empty_like(one) for one in s.state_tensors()] for i, s in self._stages.items()}
        self._kept[step] = buffers
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
        """Have all stages be in the state after `step`, if it is kept; states of later steps count no more."""
        self.cancel()
        for later in [kept for kept in self._kept if kept > step]:
            del self._kept[later]
        if step not in self._kept:
            return False
        for index, buffers in self._kept[step].items():
            copy_state(self._stages[index].state_tensors(), buffers)
        return True

    def cancel(self) -> None:
        """The generation has ended: what was begun is begun anew in the next one."""
        if self._copying and self._begun is not None:
            self._kept.pop(self._begun, None)  # a part of it is missing
        self._copying, self._begun, self.checksums = {}, None, {}

    def clear(self) -> None:
        """The worker's states come from elsewhere now."""
        self._kept.clear()
        self._copying, self._begun, self.checksums = {}, None, {}
