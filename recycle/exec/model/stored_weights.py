"""The weights that a model part starts with, read from a checkpoint of any split into stages and tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from recycle.errors import JobError
from recycle.exec.model.state.stored_names import HALVES
from recycle.exec.model.stored_tensors import StoredTensors
from recycle.exec.model.weights import cut_dimensions, gated, global_names


def named_weights(part: torch.nn.Module, first_layer: int = 0) -> dict[str, torch.Tensor]:
    """Views of a part's parameters by the names that they have in checkpoints, the halves of gated layers apart."""
    return {name: piece for name, _, piece in _pieces(part, first_layer)}


def _pieces(part: torch.nn.Module, first_layer: int) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    halves = gated(part)
    for name, parameter in global_names(part, first_layer).items():
        pieces = zip(HALVES, parameter.chunk(2), strict=True) if parameter in halves else [("", parameter)]
        for half, piece in pieces:
            yield name + half, parameter, piece


@torch.no_grad()
def read_weights(
    part: torch.nn.Module,
    checkpoint: Path,
    first_layer: int,
    tensor_rank: int,
    tensor_parallel: int,
    prefix: str = "",
) -> None:
    """Copy a checkpoint's parameters into a part, one at a time, and of each what this tensor rank has.

    Args:
        part: a part of recycle's own model, on the CPU.
        first_layer: of the part, in the whole model.
        prefix: of the names there: "exp_avg." reads the first moments into the place of the parameters.

    Raises:
        JobError: a parameter is missing there, or has another shape.
    """
    stored = StoredTensors(sorted(checkpoint.glob("*.safetensors")), JobError)
    cut = cut_dimensions(part)
    for name, parameter, piece in _pieces(part, first_layer):
        dimension, shape = cut.get(parameter, 0), list(piece.shape)
        rank, count = (tensor_rank, tensor_parallel) if parameter in cut else (0, 1)
        shape[dimension] *= count
        start = rank * piece.shape[dimension]
        piece.copy_(stored.rows(prefix + name, shape, dimension, start, start + piece.shape[dimension]))
