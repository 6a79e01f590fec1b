"""The names that a stage's state has in checkpoints, and which of it tensor ranks cut.

Tensor ranks cut each half of a gated layer by itself, so each half has a name of its own. Of tied stages the first
stores the shared weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from recycle.exec.model.state.optimizer import COUNTED, SHAPED, StateNames
from recycle.exec.model.stored_tensors import piece_name, piece_of

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
            for half in self._halves_of(name)
        }

    def _halves_of(self, name: str) -> Sequence[str]:
        return HALVES if name in self.halved else ("",)

    def between(
        self,
        shapes: Mapping[str, torch.Size],
        places: Mapping[str, int],
        begin: int,
        end: int,
        tells_shapes: bool = False,
    ) -> StateNames:
        """The names of a range of the state.

        Args:
            shapes: of parameters.
            places: their first elements in one flat layout.
            begin, end: elements of it at which the range begins and ends.
            tells_shapes: as of `piece_name`.
        """
        shaped: dict[str, tuple[int, int, torch.Size]] = {}
        for name, shape in shapes.items():
            part = torch.Size([shape[0] // 2, *shape[1:]]) if name in self.halved else shape
            for number, half in enumerate(self._halves_of(name)):
                first = places[name] + number * part.numel()
                low, high = max(first, begin), min(first + part.numel(), end)
                if low < high:
                    piece = piece_name(name + half, low - first, high - first, part, tells_shapes)
                    shaped[piece] = low - begin, high - begin, part
        return StateNames(shaped, {name: place - begin for name, place in places.items() if begin <= place < end})


def without_shared(named: Mapping[str, torch.Tensor], shared: str) -> dict[str, torch.Tensor]:
    """The same tensors but those of the shared weight, or of a piece of it."""
    dropped = {f"{prefix}{shared}" for prefix in (*SHAPED, COUNTED)}
    return {name: view for name, view in named.items() if (piece_of(name) or (name,))[0] not in dropped}
