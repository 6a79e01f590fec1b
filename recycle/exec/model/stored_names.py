"""The names that a stage's state has in checkpoints, and which of it tensor ranks cut.

Tensor ranks cut each half of a gated layer by itself, so each half has a name of its own. Of tied stages the first
stores the shared weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from recycle.exec.model.optimizer import COUNTED, SHAPED
from recycle.exec.model.stored_tensors import piece_of

HALVES = (".gate", ".up")
"""Behind the name of a gated layer's parameter: its halves."""


class StoredNames:
    """The names of one stage.

    Args:
        cut: parameter -> the dimension that tensor ranks cut; None where each has one of its own.
        halved: parameters of gated layers.

    Attributes:
        cut, halved: as given.
    """

    def __init__(self, cut: Mapping[str, int | None], halved: Collection[str]) -> None:
        self.cut, self.halved = dict(cut), set(halved)

    def cuts(self) -> Mapping[str, int | None]:
        """As `Stage.cuts`."""
        counts = {f"{COUNTED}{name}": None for name, dimension in self.cut.items() if dimension is None}
        return counts | {
            f"{prefix}{name}{half}": dimension
            for prefix in SHAPED
            for name, dimension in self.cut.items()
            for half in (HALVES if name in self.halved else ("",))
        }

    def in_halves(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors with those of gated layers in halves."""
        for prefix in SHAPED:
            for name in self.halved & {known.removeprefix(prefix) for known in named if known.startswith(prefix)}:
                both = named.pop(f"{prefix}{name}").chunk(2, 0)
                named |= {f"{prefix}{name}{half}": view for half, view in zip(HALVES, both, strict=True)}
        return named


def without_shared(named: Mapping[str, torch.Tensor], shared: str) -> dict[str, torch.Tensor]:
    """The same tensors but those of the shared weight, or of a piece of it."""
    dropped = {f"{prefix}{shared}" for prefix in (*SHAPED, COUNTED)}
    return {name: view for name, view in named.items() if (piece_of(name) or (name,))[0] not in dropped}
