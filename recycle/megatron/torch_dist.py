"""A model and its optimizer to and from megatron-core's checkpoint format `torch_dist`, in one process without a GPU.

Such a checkpoint is one of `torch.distributed.checkpoint`, whose tensors are whole tensors of the model under names
that do not depend on any parallelism (layers lie in one tensor, along its first dimension), beside a `metadata.json`.
So it is written whole here, and `megatron.core.dist_checkpointing.load` gives each rank of any T, P and V its part.
Which part of a whole tensor a parameter is, is asked of megatron-core: `sharded_state_dict` of the unsplit model. The
moments of a parameter lie beside it, under its name behind `optimizer.state.exp_avg.` and `.exp_avg_sq.`: so save
megatron-core's plain optimizer, and its distributed one in the formats that can be resharded.

Megatron-LM looks for a folder `iter_0000012` below the one that it is told, and for a file that names the newest.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recycle.errors import JobError, RecycleError

NEWEST = "latest_checkpointed_iteration.txt"
"""File of Megatron-LM that says which iteration's checkpoint is the newest."""
OF_OPTIMIZER = "optimizer.state."
"""Before the name of a moment, or "fp32_param", and the parameter's."""


@torch.no_grad()
def write(
    folder: Path,
    states: Iterable[tuple[str, torch.nn.Module]],
    iteration: int,
    optimizer: Mapping[str, Any] | None = None,
) -> None:
    """Write an unsplit model as Megatron-LM's checkpoint of an iteration.

    Args:
        folder: exists; gets `iter_NNNNNNN` and the file that names it.
        states: (what is put before names, model of megatron-core on the CPU with all layers) each; the first is the
            model itself, with nothing before its names.
        iteration: how many were done.
        optimizer: what of its state is no tensor of a parameter's shape, as its `state_dict` has it.

    Raises:
        RecycleError: it cannot be written.
    """
    whole: dict[str, Any] = {}
    for prefix, model in states:
        for piece in _pieces(model):
            if isinstance(piece, ShardedObject):
                whole.setdefault(piece.unique_key, [piece.data])
                continue
            key = prefix + piece.key
            if key not in whole:
                whole[key] = torch.empty(piece.global_shape, dtype=piece.data.dtype)
            _part(whole[key], piece).copy_(piece.data)
    common: dict[str, Any] = {"iteration": iteration, "checkpoint_version": 3.0}
    if optimizer is not None:
        common["optimizer"] = optimizer
    inside = folder / f"iter_{iteration:07d}"
    try:
        inside.mkdir()
        save(
            whole,
            storage_writer=FileSystemWriter(inside),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
        torch.save(common, inside / COMMON_STATE_FNAME)
        (inside / CONFIG_FNAME).write_text(json.dumps(asdict(CheckpointingConfig("torch_dist"))))
        (folder / NEWEST).write_text(str(iteration))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise RecycleError(f"{folder}: cannot be written ({error})") from None


@torch.no_grad()
def read(folder: Path, model: torch.nn.Module, prefix: str = "") -> int:
    """Fill an unsplit model with the weights of a checkpoint of any T, P and V, or with what lies beside them.

    Rows of embedding and output layer beyond the model's vocabulary, which Megatron-LM pads, are left out. The folder's
    index is a pickle, so it is only to be read where it is trusted.

    Args:
        folder: one iteration's, or the one above it, of which the newest is taken.
        model: of megatron-core, with all layers, on the CPU.
        prefix: before the names there: `OF_OPTIMIZER + "exp_avg."` reads the first moments in place of the weights.

    Returns:
        number of tensors that were read.

    Raises:
        JobError: it is no such checkpoint, or not of this model.
    """
    inside = iteration_folder(folder)
    reader = FileSystemReader(inside)
    try:
        there = reader.read_metadata().state_dict_metadata
        pieces = [piece for piece in _pieces(model) if isinstance(piece, ShardedTensor)]
        whole: dict[str, Any] = {}
        for piece in pieces:
            whole[prefix + piece.key] = _space_for(piece, there.get(prefix + piece.key), inside, prefix)
        load(whole, storage_reader=reader, no_dist=True)
        for piece in pieces:
            piece.data.copy_(_part(whole[prefix + piece.key], piece))
    except (CheckpointException, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise JobError(f"{inside}: cannot be read ({error})") from None
    return len(whole)


def iteration_folder(folder: Path) -> Path:
    """The folder of one iteration's checkpoint: the one given, or the newest below it. Raises JobError without one."""
    if not folder.is_dir():
        raise JobError(f"{folder}: there is no such folder")
    inside = folder
    if (folder / NEWEST).is_file():
        newest = (folder / NEWEST).read_text(errors="replace").strip()
        inside = folder / (f"iter_{int(newest):07d}" if newest.isascii() and newest.isdigit() else newest)
    try:
        backend = json.loads((inside / CONFIG_FNAME).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        raise JobError(f"{inside}: is no distributed checkpoint of Megatron's, it has no {CONFIG_FNAME}") from None
    if backend != "torch_dist":
        raise JobError(f"{inside}: is of the format {backend!r}; convert it to torch_dist with Megatron-LM")
    return inside


def _pieces(model: Any) -> Iterator[Any]:
    """What the model's checkpoint consists of; the data of tensors are views of the parameters."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    yield from nested_values(state)


def _part(whole: torch.Tensor, piece: ShardedTensor) -> torch.Tensor:
    """What of the whole tensor a piece is, in the piece's shape."""
    place = list(piece.global_offset[: piece.prepend_axis_num])
    sizes = zip(piece.global_offset[piece.prepend_axis_num :], piece.local_shape, strict=True)
    return whole[(*place, *(slice(start, start + size) for start, size in sizes))]


def has(folder: Path, prefix: str) -> bool:
    """Whether a checkpoint of an iteration has tensors whose names begin so; False when it cannot be read."""
    try:
        return any(name.startswith(prefix) for name in FileSystemReader(folder).read_metadata().state_dict_metadata)
    except (CheckpointException, OSError, RuntimeError, ValueError, pickle.UnpicklingError):
        return False


def steps_taken(folder: Path, iteration: int) -> int:
    """How many steps the optimizer of an iteration's checkpoint has taken: what it says, else one per iteration."""
    try:
        common = torch.load(folder / COMMON_STATE_FNAME, weights_only=True)
        return int(common["optimizer"]["state"]["common_step"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        return iteration  # it has objects of Megatron's own beside, which are not worth running code for


def _space_for(piece: ShardedTensor, stored: Any, inside: Path, prefix: str) -> torch.Tensor:
    """An empty tensor for the whole one that a piece is part of. Raises JobError if the checkpoint's is another."""
    if not isinstance(stored, TensorStorageMetadata):
        raise JobError(f"{inside}: has no tensor {prefix}{piece.key}, which the job's model needs")
    wanted, found = list(piece.global_shape), list(stored.size)
    is_padded = piece.allow_shape_mismatch and found[1:] == wanted[1:] and found[0] >= wanted[0]
    if found != wanted and not is_padded:
        raise JobError(f"{inside}: {piece.key} is {found}, and by the job's [model] it is {wanted}")
    return torch.empty(stored.size, dtype=stored.properties.dtype)
