"""Checksums of tensors (`recycle.exec.checksums`). Sums of whole numbers do not depend on the order, so a state may be
summed piece by piece, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recycle.exec.checksums import Checksum, StateTensor

PIECE = 1 << 18
"""Words that are gone through at a time."""
_MODULUS = 1 << 64


class RunningChecksum:
    """The checksum of tensors, taken piece by piece.

    Args:
        tensors: contiguous, of a multiple of 4 bytes each; not changed before `finish`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._words = [tensor.view(-1).view(torch.int32) for tensor in tensors if tensor.numel()]
        device = self._words[0].device if self._words else torch.device("cpu")
        self._sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._places = torch.empty(0, dtype=torch.int64)
        self._tensor = self._start = self._before = 0

    @torch.no_grad()
    def piece(self) -> bool:
        """Go through the next piece; whether there was one."""
        if self._tensor == len(self._words):
            return False
        words = self._words[self._tensor]
        stop = min(self._start + PIECE, len(words))
        wide = words[self._start : stop].to(torch.int64)
        if len(self._places) < len(wide):
            self._places = torch.arange(len(wide), device=wide.device)
        total = wide.sum()
        self._sums[0] += total
        self._sums[1] += wide.mul_(self._places[: len(wide)]).sum() + total * (self._before + self._start)
        self._start = stop
        if stop == len(words):
            self._before += stop
            self._tensor, self._start = self._tensor + 1, 0
        return True

    def finish(self) -> Checksum:
        """Go through what is left; the checksum."""
        while self.piece():
            pass
        words, places = (value % _MODULUS for value in self._sums.tolist())
        return Checksum(words, places)


def layout_of(state: Sequence[torch.Tensor], named: dict[str, torch.Tensor]) -> list[StateTensor]:
    """Where the named views of a state's tensors lie in it, in order."""
    found: list[StateTensor] = []
    before = 0
    for tensor in state:
        begin, size = tensor.data_ptr(), tensor.nbytes
        found += (
            StateTensor(name, before + view.data_ptr() - begin, view.numel(), view.element_size())
            for name, view in named.items()
            if view.numel() and begin <= view.data_ptr() < begin + size
        )
        before += size
    return sorted(found, key=lambda one: one.first)
