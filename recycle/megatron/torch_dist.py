"""Reads and writes a model and its optimizer in megatron-core's checkpoint format `torch_dist`, without a GPU.

The format is a `torch.distributed.checkpoint` of whole tensors and a `metadata.json`. Names do not depend on any
parallelism: the layers share one tensor, stacked along its first dimension; layers that differ have one each. One
process writes the whole checkpoint, and `megatron.core.dist_checkpointing.load` gives each rank of any T, P and V its
part. `sharded_state_dict` of the unsplit model maps parameters to parts of whole tensors. The moments of a parameter
have its name after `optimizer.state.exp_avg.` and `.exp_avg_sq.`, as megatron-core's plain optimizer saves them, and
its distributed one in reshardable formats.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Module

from recycle.errors import JobError, RecycleError, first_line
from recycle.exec.model.state.rules import BALANCE_RATE
from recycle.job.manifest import MANIFEST
from recycle.megatron.arguments import common_state, padding_multiple, stated_arguments
from recycle.megatron_versions import common_state_path

NEWEST = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file that names the newest iteration."""
_LONGEST_NAME = 200
"""Characters read of that file."""
_CONVERT = (
    "convert it with Megatron-LM: --ckpt-convert-format torch_dist --ckpt-convert-save DIR, with the script's arguments"
)
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EMBEDDING = "embedding.word_embeddings.weight"
OPTIMIZER_PREFIX = "optimizer.state."
"""Prefix of the names of moments and of "fp32_param"."""


@torch.no_grad()
def write(folder: Path, states: Iterable[tuple[str, Module]], iteration: int, further: Mapping[str, Any]) -> None:
    """Write an unsplit model as Megatron-LM's checkpoint of an iteration.

    Args:
        folder: existing folder; gets `iter_NNNNNNN` and the file that names it.
        states: pairs (name prefix, megatron-core model on the CPU with all layers); the first is the model itself, with
            an empty prefix.
        further: further content of the common state: the model's arguments, and as "optimizer" the optimizer state
            that is not a tensor of a parameter's shape, in the form of its `state_dict`.

    Raises:
        RecycleError: the checkpoint cannot be written.
    """
    whole: dict[str, Any] = {}
    for prefix, model in states:
        for piece in _pieces(model, has_moments=bool(prefix)):
            if isinstance(piece, ShardedObject):
                whole.setdefault(piece.unique_key, [piece.data])
                continue
            key = prefix + piece.key
            if key not in whole:
                whole[key] = torch.empty(piece.global_shape, dtype=piece.data.dtype)
            _part(whole[key], piece).copy_(piece.data)
    common: dict[str, Any] = {"iteration": iteration, "checkpoint_version": 3.0, **further}
    target = folder / f"iter_{iteration:07d}"
    try:
        target.mkdir()
        save(
            whole,
            storage_writer=FileSystemWriter(target),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
        torch.save(common, common_state_path(target))
        (target / CONFIG_FNAME).write_text(json.dumps(asdict(CheckpointingConfig("torch_dist"))))
        (folder / NEWEST).write_text(str(iteration))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise RecycleError(f"{folder}: cannot be written ({first_line(error)})") from None


class TorchDistCheckpoint:
    """A `torch_dist` checkpoint of one iteration; its files exist and have the sizes in its index.

    The index is a pickle: open only trusted checkpoints.

    Args:
        folder: folder of the iteration, or its parent, which selects the newest.

    Raises:
        JobError: the folder holds another kind of checkpoint, a damaged one, or none.

    Attributes:
        arguments: arguments of the model (`stated_arguments`); empty if not stated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = iteration_folder(folder)
        self.common = common_state(self.folder)
        self.arguments = stated_arguments(self.common)
        try:
            metadata = FileSystemReader(self.folder).read_metadata()
            tensors, places = metadata.state_dict_metadata, metadata.storage_data.values()
            self._tensors = {name: at for name, at in tensors.items() if isinstance(at, TensorStorageMetadata)}
            lengths: dict[str, int] = {}
            for place in places:
                lengths[place.relative_path] = max(lengths.get(place.relative_path, 0), place.offset + place.length)
        except Exception as error:  # a damaged pickle can raise any exception
            raise JobError(f"{self.folder / '.metadata'}: is not a whole index ({first_line(error)})") from None
        for name, length in sorted(lengths.items()):
            path = self.folder / name
            if not path.is_file():
                raise JobError(f"{path}: missing, though the checkpoint's index names it; copy it too")
            if path.stat().st_size < length:
                raise JobError(f"{path}: cut off, {path.stat().st_size} bytes of at least {length}; copy it again")

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._tensors)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, padding included. Raises JobError without an embedding."""
        if _EMBEDDING not in self._tensors:
            raise JobError(f"{self.folder}: has no tensor {_EMBEDDING}, so it is not a checkpoint of a language model")
        return int(self._tensors[_EMBEDDING].size[0])

    @torch.no_grad()
    def read(self, model: Module, prefix: str = "") -> None:
        """Fill an unsplit model with the checkpoint's weights or moments, written with any T, P and V.

        Megatron-LM's padding rows of embedding and output layer are dropped. With a prefix, the expert bias keeps its
        values: it is a buffer there.

        Args:
            prefix: prefix of the names: `OPTIMIZER_PREFIX + "exp_avg."` reads the first moments instead of the weights.

        Raises:
            JobError: the tensors belong to another model, cannot be read, or are not finite.
        """
        is_stacked = not any("decoder.layers.0." in name for name in self._tensors)
        is_hybrid = any("decoder.final_norm." in name for name in self._tensors)
        candidates = _pieces(model, has_moments=bool(prefix), is_stacked=is_stacked)
        pieces = [piece for piece in candidates if isinstance(piece, ShardedTensor)]
        for piece in pieces if is_hybrid else ():
            piece.key = _hybrid_name(piece.key)
        whole = {prefix + piece.key: self._space_for(piece, prefix) for piece in pieces}
        if not prefix:
            other = next((name for name in self._tensors if name not in whole and "optimizer." not in name), None)
            if other is not None:
                raise JobError(f"{self.folder}: has the tensor {other}, which the job's [model] does not have")
        try:
            load(dict[str, Any](whole), storage_reader=FileSystemReader(self.folder), no_dist=True)
        except (CheckpointException, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise JobError(f"{self.folder}: cannot be read ({first_line(error)})") from None
        for piece in pieces:
            piece.data.copy_(_part(whole[prefix + piece.key], piece))
            if not piece.data.isfinite().all():
                values = f"{prefix}{piece.key} has values that are NaN or infinite"
                raise JobError(f"{self.folder}: {values}; use an earlier checkpoint")

    def _space_for(self, piece: ShardedTensor, prefix: str) -> Tensor:
        name, wanted = prefix + piece.key, list(piece.global_shape)
        if name not in self._tensors:
            raise JobError(f"{self.folder}: has no tensor {name}, which the job's model needs")
        stored = self._tensors[name]
        shape = list(stored.size)
        if shape != wanted:
            if not piece.allow_shape_mismatch or shape[1:] != wanted[1:] or shape[0] < wanted[0]:
                raise JobError(f"{self.folder}: {name} is {shape}, and by the job's [model] it is {wanted}")
            self._require_padding(name, stored, wanted[0])
        return torch.empty(stored.size, dtype=stored.properties.dtype)

    def _require_padding(self, name: str, stored: TensorStorageMetadata, vocabulary: int) -> None:
        rows, smallest = stored.size[0], self.arguments.get("vocab_size")
        multiple = padding_multiple(self.arguments, len({chunk.offsets[0] for chunk in stored.chunks}))
        if "make_vocab_size_divisible_by" in self.arguments:
            is_padding = rows == -(-vocabulary // multiple) * multiple
        else:
            is_padding = rows < vocabulary + multiple
        if not is_padding or (isinstance(smallest, int) and vocabulary < smallest):
            raise JobError(
                f"{self.folder}: {name} has {rows} rows, which is not [model] vocabulary = {vocabulary} padded to a"
                f" multiple of {multiple}; set vocabulary to the number of the tokenizer's tokens, or to {rows} to keep"
                " every row"
            )


def iteration_folder(folder: Path) -> Path:
    """Return the folder of an iteration: `folder` itself, or the newest below it. Raises JobError if neither exists."""
    if not folder.is_dir():
        raise JobError(f"{folder}: does not exist; name the folder of a checkpoint")
    selected = folder
    if (folder / NEWEST).is_file():
        newest = (folder / NEWEST).read_text(errors="replace").strip()[:_LONGEST_NAME]
        selected = folder / (f"iter_{int(newest):07d}" if newest.isascii() and newest.isdigit() else newest)
        if not selected.is_dir():
            others = sorted(path.name for path in folder.glob("iter_*") if path.is_dir())
            instead = f"name an existing one, such as {folder / others[-1]}" if others else "copy it too"
            raise JobError(f"{folder / NEWEST}: names {selected.name}, which does not exist; {instead}")
    try:
        backend = json.loads((selected / CONFIG_FNAME).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        raise JobError(f"{selected}: {_other_kind(selected)}") from None
    if backend != "torch_dist":
        raise JobError(f"{selected}: is of the format {backend!r}; {_CONVERT}")
    return selected


def _other_kind(folder: Path) -> str:
    if any(folder.glob("mp_rank_*")):
        return f"is a checkpoint of Megatron-LM's format 'torch' ({next(folder.glob('mp_rank_*')).name}); {_CONVERT}"
    if (folder / CONFIG_FNAME).exists():
        return f"its {CONFIG_FNAME} does not name the checkpoint's format (sharded_backend); copy it again"
    if (folder / ".metadata").exists():
        return (
            f"is a checkpoint of torch.distributed.checkpoint without Megatron's {CONFIG_FNAME}, such as torchtitan"
            " writes; have torchtitan write it in Hugging Face's format, which recycle import-hf reads"
        )
    if (folder / MANIFEST).exists():
        return "is already a checkpoint of recycle; name it as [model] weights"
    if any(folder.glob("*.safetensors")):
        return "is a model of Hugging Face; use recycle import-hf"
    iterations = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    hint = f"; use one of its iterations, such as {iterations[-1]}" if iterations else ""
    return f"is not a distributed checkpoint of Megatron: it has no {CONFIG_FNAME}{hint}"


def _pieces(model: Any, *, has_moments: bool, is_stacked: bool = True) -> Iterator[Any]:
    """The model's parts of whole tensors: with `has_moments` only of parameters that Adam updates.

    Layers that differ are not stacked: their names have numbers.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": not is_stacked})
    apply_factories(state)
    for piece in nested_values(state):
        if not (has_moments and hasattr(piece.data, BALANCE_RATE)):
            yield piece


def _hybrid_name(name: str) -> str:
    """A name in a checkpoint of HybridModel, where attention and feed-forward part of a layer are two layers."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    is_feed_forward = match[2].startswith(("mlp.", "pre_mlp_layernorm."))
    return f"decoder.layers.{2 * int(match[1]) + is_feed_forward}.{match[2]}"


def _part(whole: Tensor, piece: ShardedTensor) -> Tensor:
    place = list(piece.global_offset[: piece.prepend_axis_num])
    sizes = zip(piece.global_offset[piece.prepend_axis_num :], piece.local_shape, strict=True)
    return whole[(*place, *(slice(start, start + size) for start, size in sizes))]
