"""Writes safetensors files shard by shard, with at most one shard in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from recycle.errors import RecycleError, first_line
from recycle.exec.checkpoint.checkpoint import SUFFIX, save_tensors

ByteProgress = Callable[[int, int], None]
"""Called with the bytes written and the total."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    Attributes:
        make: returns the tensor; called when its shard is written.
    """

    entries: int
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return self.entries * self.dtype.itemsize


def write_shards(
    folder: Path, stem: str, tensors: Mapping[str, PlannedTensor], most_bytes: int, progress: ByteProgress
) -> dict[str, str]:
    """Write tensors to `STEM.safetensors`, or to `STEM-00001-of-0000N.safetensors` and so on, in their order.

    Args:
        most_bytes: maximum size of a shard with several tensors.

    Returns:
        Tensor name -> file name.

    Raises:
        RecycleError: the disk is full, or the folder cannot be written.
    """
    shards = _shards(tensors, most_bytes)
    done, total = 0, sum(planned.bytes for planned in tensors.values())
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"{stem}{SUFFIX}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        shard: dict[str, Tensor] = {}
        for name in names:
            shard[name] = tensors[name].make().contiguous()
            done += tensors[name].bytes
            progress(done, total)
        _save(folder / file, shard)
        files |= dict.fromkeys(names, file)
    return files


def _shards(tensors: Mapping[str, PlannedTensor], most_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, planned in tensors.items():
        if shards[-1] and filled + planned.bytes > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += planned.bytes
    return shards


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_tensors(path, tensors, path.parent)
    except (SafetensorError, OSError) as error:
        raise RecycleError(f"{path}: cannot be written ({first_line(error)})") from None
