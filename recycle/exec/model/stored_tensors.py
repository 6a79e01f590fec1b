"""Lazy access to tensors in safetensors files.

A checkpoint has separate names for the T equal parts of a tensor that is split between tensor ranks (`part_name`).
Pieces of sharded optimizer state also have separate names (`piece_name`). `StoredTensors` joins them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from recycle.errors import RecycleError, first_line
from recycle.files import require_content

if TYPE_CHECKING:  # not imported by processes that only need names
    import torch

_PIECE = re.compile(r"(.*)\.elements-(\d+)-(\d+)(?:-of-(\d+(?:x\d+)*))?")
_FIRST_PART = re.compile(r"(.*)\.tensor-0-of-(\d+)")


def part_name(name: str, rank: int, size: int) -> str:
    """Name of tensor rank `rank`'s part of a tensor, out of `size` parts."""
    return f"{name}.tensor-{rank}-of-{size}"


def piece_name(name: str, begin: int, end: int, shape: Sequence[int], tells_shape: bool = False) -> str:
    """Name of the elements `begin` to `end` - 1 of a tensor, in row-major order.

    `tells_shape` includes the shape in the name, which is needed to join the parts of tensor ranks.
    """
    if end - begin == math.prod(shape):
        return name
    return f"{name}.elements-{begin}-{end}" + (f"-of-{'x'.join(map(str, shape))}" if tells_shape else "")


def shape_told(piece: str) -> tuple[int, ...] | None:
    """Shape of a piece's tensor, if the name of the piece states it."""
    match = _PIECE.fullmatch(piece)
    return tuple(map(int, match[4].split("x"))) if match is not None and match[4] else None


def with_part(name: str, rank: int, size: int) -> str:
    match = _PIECE.fullmatch(name)
    whole = name if match is None else match[1]
    return part_name(whole, rank, size) + name[len(whole) :]


def piece_of(name: str) -> tuple[str, int, int] | None:
    """(tensor, first element, end) of the piece `name`; None for the name of a whole tensor or part."""
    match = _PIECE.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def pieces_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of pieces in `names`, in order, by tensor."""
    pieces_by_tensor: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if (piece := piece_of(name)) is not None:
            pieces_by_tensor.setdefault(piece[0], []).append((piece[1], name))
    return {name: [piece for _, piece in sorted(pieces)] for name, pieces in pieces_by_tensor.items()}


@dataclass(frozen=True)
class TensorPlace:
    """Location of a stored tensor; `dtype` is safetensors' name, such as "F32" or "BF16"."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class StoredTensors:
    """The tensors of a set of files. Raises `refusal` if a file is missing or not in safetensors format.

    Attributes:
        places: by name in the files.
        copies: name of a tensor stored in two files, such as the shared weight of tied stages -> the second file.
    """

    def __init__(self, paths: Iterable[Path], refusal: type[RecycleError]) -> None:
        self._refusal = refusal
        self.copies: dict[str, Path] = {}
        places: dict[str, TensorPlace] = {}
        for path in paths:
            try:
                require_content(path, refusal)
                with _open(path) as file:
                    names: list[str] = file.keys()
                    for name in names:
                        if name in places:
                            self.copies[name] = path
                            continue
                        piece = file.get_slice(name)
                        places[name] = TensorPlace(path, tuple(piece.get_shape()), str(piece.get_dtype()))
            except (SafetensorError, OSError) as error:
                raise self._unreadable(path, error) from None
        self.places: Mapping[str, TensorPlace] = places
        self._pieces = pieces_of(places)
        matches = [match for name in (*places, *self._pieces) if (match := _FIRST_PART.fullmatch(name))]
        self._cut = {match[1]: int(match[2]) for match in matches}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read a tensor by its name in the files, or a block of it. Raises `refusal` on failure."""
        path = self.places[name].path
        try:
            with _open(path) as file:
                read: torch.Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
                return read
        except (SafetensorError, OSError) as error:
            raise self._unreadable(path, error) from None

    def whole(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Read a tensor of the whole model, of this shape, from any number of parts. Raises `refusal`."""
        return self.rows(name, shape, 0, 0, shape[0])

    def rows(self, name: str, shape: Sequence[int], dimension: int, start: int, stop: int) -> torch.Tensor:
        """Read entries `start` to `stop` - 1 along a dimension of a tensor of the whole model.

        Raises `refusal` if the tensor is missing or has another shape.
        """
        import torch

        if name in self._pieces:
            return self._joined_pieces(name, tuple(shape)).narrow(dimension, start, stop - start)
        parts = self._parts(name)
        joined = self._joined(name, [self._shape(part) for part in parts], tuple(shape))
        index = [slice(None)] * len(shape)
        blocks, begin = [], 0
        for part in parts:
            end = begin + self._shape(part)[joined]
            low, high = (max(start, begin), min(stop, end)) if joined == dimension else (start, stop)
            if low < high:
                offset = begin if joined == dimension else 0
                index[dimension] = slice(low - offset, high - offset)
                block = tuple(index)
                blocks.append(self.read(part, block) if part in self.places else self._tensor(part)[block])
            begin = end
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, joined)

    def part(self, name: str, dimension: int | None, rank: int, size: int, shape: Sequence[int]) -> torch.Tensor:
        """Read the part of tensor rank `rank` of `size`, from any number of stored parts.

        The part is flat if it is stored in pieces whose names omit the shape. `dimension` is None if all ranks hold the
        whole tensor. Raises `refusal` if the tensor is missing or has another shape.
        """
        own_part = name if dimension is None or size == 1 else part_name(name, rank, size)
        if dimension is None or own_part in self.places or own_part in self._pieces:
            return self._tensor(own_part)
        length = shape[dimension]
        whole = [*shape[:dimension], size * length, *shape[dimension + 1 :]]
        return self.rows(name, whole, dimension, rank * length, (rank + 1) * length)

    def _tensor(self, name: str) -> torch.Tensor:
        if name in self._pieces:
            return self._joined_pieces(name, self._shape(name))
        if name not in self.places:
            raise self._refusal(f"{self._where()}: has no tensor {name}")
        return self.read(name)

    def require(self, name: str) -> None:
        if name not in self._pieces:
            self._parts(name)

    def _shape(self, part: str) -> tuple[int, ...]:
        if part in self.places:
            return self.places[part].shape
        pieces = self._pieces[part]
        return shape_told(pieces[0]) or (sum(math.prod(self.places[piece].shape) for piece in pieces),)

    def _joined_pieces(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        stated = shape_told(self._pieces[name][0])
        if stated not in (None, shape):
            raise self._refusal(f"{self._where()}: {name} is {list(stated)}, and the model's is {list(shape)}")
        flat = torch.cat([self.read(piece) for piece in self._pieces[name]])
        if len(flat) != math.prod(shape):
            raise self._refusal(f"{self._where()}: {name} has {len(flat)} elements, and the model's is {list(shape)}")
        return flat.view(shape)

    def _parts(self, name: str) -> list[str]:
        if name in self.places:
            return [name]
        count = self._cut.get(name, 0)
        parts = [part_name(name, rank, count) for rank in range(count)]
        stored = {*self.places, *self._pieces}
        missing = next((part for part in parts or [name] if part not in stored), None)
        if missing is not None:
            raise self._refusal(f"{self._where()}: has no tensor {missing}")
        return parts

    def _joined(self, name: str, parts: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> int:
        for dimension, size in enumerate(shape):
            piece = (*shape[:dimension], size // len(parts), *shape[dimension + 1 :])
            if size % len(parts) == 0 and all(part == piece for part in parts):
                return dimension
        stored_shape = list(parts[0]) if len(parts) == 1 else f"{len(parts)} parts of {list(parts[0])}"
        raise self._refusal(f"{self._where()}: {name} is {stored_shape}, and the model's is {list(shape)}")

    def _where(self) -> Path:
        return next(iter(self.places.values())).path.parent if self.places else Path()

    def _unreadable(self, path: Path, error: Exception) -> RecycleError:
        return self._refusal(f"{path}: cannot be read as safetensors ({first_line(error)}); fetch it again")


def _open(path: Path) -> Any:
    opened: Any = safe_open(str(path), framework="pt")
    return opened
