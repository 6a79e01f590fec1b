"""Conversion between Hugging Face models and checkpoints of recycle, tensor by tensor in little memory.

An imported checkpoint holds the weights in fp32, which represents every bf16 and fp16 exactly, and no optimizer
moments. It also holds the files that came with the model (`model_folder.COMPANION_FILES`), its `config.json` and a note
about the original files. An export therefore returns the imported bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from recycle.errors import JobError, RecycleError, errors_as
from recycle.exec.checkpoint.checkpoint import hashes, verify_files, write_untrained
from recycle.exec.model.stored_tensors import StoredTensors
from recycle.exec.protocol import StoredFile
from recycle.files import require_absent, whole_folder
from recycle.hugging_face.architectures import HubArchitecture, architecture_of, config_json, hub_architecture, model_of
from recycle.hugging_face.correspondence import TensorBlock, blocks
from recycle.hugging_face.model_folder import (
    CONFIG,
    INDEX,
    copy_companions,
    read_object,
    require_tokenizer_within,
    weight_files,
    write_object,
)
from recycle.hugging_face.shards import ByteProgress, PlannedTensor, write_shards
from recycle.job import Job
from recycle.job.manifest import HUGGING_FACE, carried_files, computed_keys, model_of_checkpoint
from recycle.job.sections import ModelSection, ShapeSection

PART_BYTES = 1 << 27
"""Maximum bytes per file of an imported checkpoint."""
SHARD_BYTES = 2 << 30
"""Default maximum bytes per exported file."""
NOTE = "import.json"
DTYPES: Mapping[str, tuple[str, torch.dtype]] = {
    "F32": ("float32", torch.float32),
    "BF16": ("bfloat16", torch.bfloat16),
    "F16": ("float16", torch.float16),
}
"""Type in a safetensors file -> its names in `config.json` and torch."""
Precision = Literal["auto", "fp32", "bf16", "fp16"]
_STORED: Mapping[Precision, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_COPIES = ("rotary_emb.inv_freq",)
"""Name endings of redundant tensors in old checkpoints, which follow from the configuration."""


class ImportNote(msgspec.Struct):
    """Form of the original files of an imported checkpoint.

    Attributes:
        dtype: the type of all tensors, as in `DTYPES`; "F32" for mixed types.
    """

    dtype: str = "F32"
    batched_experts: bool = False


@dataclass(frozen=True)
class ConvertedModel:
    """The outcome of a conversion.

    Attributes:
        stored: types of the tensors read, or the type written, as in `DTYPES`.
        carried: names of the accompanying files.
    """

    architecture: str
    parameters: int
    stored: tuple[str, ...]
    carried: Sequence[str]


def import_model(source: Path, target: Path, progress: ByteProgress = lambda *_: None) -> ConvertedModel:
    """Make a checkpoint from a Hugging Face model.

    Args:
        source: folder with `config.json` and safetensors files.

    Raises:
        JobError: recycle does not support the model, or the files do not match it.
        RecycleError: the checkpoint exists already or cannot be written; no partial checkpoint remains.
    """
    if not source.is_dir():
        raise JobError(f"{source}: does not exist; name the folder of a model")
    config = read_object(source / CONFIG)
    where = str(source / CONFIG)
    architecture, model = architecture_of(config, where), model_of(config, where)
    with errors_as(JobError, where):
        Job(grid=ShapeSection(1, 1, 1), model=model).validate()
    require_tokenizer_within(source, model.vocabulary)
    stored = StoredTensors(weight_files(source), JobError)
    note = ImportNote(batched_experts=any(name.endswith(".mlp.experts.gate_up_proj") for name in stored.places))
    blocks_by_tensor: dict[str, list[TensorBlock]] = defaultdict(list)
    for block in blocks(model, note.batched_experts):
        _require_block(source, stored, block)  # a config.json that claims a billion layers fails here
        blocks_by_tensor[block.ours].append(block)
    expected = {block.theirs for tensor_blocks in blocks_by_tensor.values() for block in tensor_blocks}
    _require_no_others(stored, expected, model)
    types = tuple(sorted({stored.places[name].dtype for name in expected}))
    note.dtype = types[0] if len(types) == 1 else "F32"
    planned = {
        name: PlannedTensor(
            math.prod(tensor_blocks[0].our_shape), torch.float32, partial(_our_tensor, stored, tensor_blocks)
        )
        for name, tensor_blocks in blocks_by_tensor.items()
    }
    with whole_folder(target) as folder:
        files = sorted(set(write_shards(folder, "weights", planned, PART_BYTES, progress).values()))
        carried_folder = folder / HUGGING_FACE
        carried = copy_companions(source, carried_folder)
        write_object(carried_folder / CONFIG, config)
        write_object(carried_folder / NOTE, msgspec.to_builtins(note))
        digests = zip(files, hashes([folder / name for name in files]), strict=True)
        write_untrained(
            folder, model, {name: StoredFile((folder / name).stat().st_size, digest) for name, digest in digests}
        )
    return ConvertedModel(architecture.name, sum(tensor.entries for tensor in planned.values()), types, carried)


def _require_block(source: Path, stored: StoredTensors, block: TensorBlock) -> None:
    name, place = block.theirs, stored.places.get(block.theirs)
    if place is None:
        raise JobError(f"{source}: has no tensor {name}, which a model of this {CONFIG} needs")
    if place.shape != block.their_shape:
        raise JobError(f"{place.path}: {name} is {list(place.shape)}, and by {CONFIG} it is {list(block.their_shape)}")
    if place.dtype not in DTYPES:
        raise JobError(f"{place.path}: {name} is {place.dtype}; {', '.join(DTYPES)} are supported")


def _require_no_others(stored: StoredTensors, expected: Collection[str], model: ModelSection) -> None:
    for name, path in stored.copies.items():
        raise JobError(f"{path}: has the tensor {name}, which {stored.places[name].path.name} has too")
    for name, place in stored.places.items():
        if name in expected or name.endswith(_COPIES):
            continue
        if model.tied and name == "lm_head.weight":
            if torch.equal(stored.read(name), stored.read("model.embed_tokens.weight")):
                continue
            raise JobError(
                f"{place.path}: {name} is not the embedding, though {CONFIG} sets tie_word_embeddings; correct one of"
                " the two"
            )
        raise JobError(f"{place.path}: has a tensor {name}, which a model of this {CONFIG} does not have")


def _our_tensor(stored: StoredTensors, tensor_blocks: Sequence[TensorBlock]) -> torch.Tensor:
    tensor = torch.empty(tensor_blocks[0].our_shape, dtype=torch.float32)
    for block in tensor_blocks:
        block.copy_in(tensor, stored.read(block.theirs, block.their_index))
    if not tensor.isfinite().all():
        place = stored.places[tensor_blocks[0].theirs]
        raise JobError(
            f"{place.path}: {tensor_blocks[0].theirs} has values that are NaN or infinite;"
            " fetch it again, or use an earlier checkpoint of the model"
        )
    return tensor


def export_model(
    checkpoint: Path,
    target: Path,
    precision: Precision = "auto",
    most_bytes: int = SHARD_BYTES,
    progress: ByteProgress = lambda *_: None,
) -> ConvertedModel:
    """Make a folder that transformers can load from a checkpoint, imported or of a run.

    Args:
        precision: type of the tensors; "auto" for the imported type, or fp32 for a run's model that was not imported.
        most_bytes: maximum size of a file with several tensors.

    Raises:
        JobError: the checkpoint does not exist, or no architecture computes its model.
        RecycleError: the checkpoint is damaged, or the folder exists already or cannot be written.
    """
    model = model_of_checkpoint(checkpoint)
    require_absent(target)
    manifest = verify_files(checkpoint).manifest
    architecture = hub_architecture(model, str(checkpoint))
    carried_folder = carried_files(checkpoint)
    note = _note_in(carried_folder)
    stored_as = note.dtype if precision == "auto" else _STORED[precision]
    config_name, dtype = DTYPES[stored_as]
    stored = StoredTensors([checkpoint / name for name in sorted(manifest.files)], RecycleError)
    blocks_by_tensor: dict[str, list[TensorBlock]] = defaultdict(list)
    for block in blocks(model, note.batched_experts):
        stored.require(block.ours)
        blocks_by_tensor[block.theirs].append(block)
    planned = {
        name: PlannedTensor(
            math.prod(tensor_blocks[0].their_shape), dtype, partial(_their_tensor, stored, tensor_blocks, dtype)
        )
        for name, tensor_blocks in blocks_by_tensor.items()
    }
    config = _config(model, architecture, None if carried_folder is None else carried_folder / CONFIG)
    config["torch_dtype" if "dtype" not in config else "dtype"] = config_name
    with whole_folder(target) as folder:
        files = write_shards(folder, "model", planned, most_bytes, progress)
        if len(set(files.values())) > 1:
            total = sum(tensor.bytes for tensor in planned.values())
            write_object(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
        write_object(folder / CONFIG, config)
        carried = [] if carried_folder is None else copy_companions(carried_folder, folder)
    parameters = sum(tensor.entries for tensor in planned.values())
    return ConvertedModel(architecture.name, parameters, (stored_as,), carried)


def _their_tensor(stored: StoredTensors, tensor_blocks: Sequence[TensorBlock], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(tensor_blocks[0].their_shape, dtype=dtype)
    for block in tensor_blocks:
        ours = stored.whole(block.ours, block.our_shape)
        if not ours.isfinite().all():
            raise RecycleError(f"{block.ours}: has values that are NaN or infinite; export an earlier checkpoint")
        block.copy_out(tensor, ours)
    if dtype == torch.float16 and not tensor.isfinite().all():
        raise RecycleError(
            f"{tensor_blocks[0].theirs}: has numbers beyond the range of fp16; export it with --dtype bf16"
        )
    return tensor


def _note_in(folder: Path | None) -> ImportNote:
    if folder is None or not (folder / NOTE).is_file():
        return ImportNote()
    try:
        note = msgspec.convert(read_object(folder / NOTE), ImportNote)
    except msgspec.ValidationError as error:
        raise JobError(f"{folder / NOTE}: {error}") from None
    if note.dtype not in DTYPES:
        raise JobError(f"{folder / NOTE}: dtype: {note.dtype!r} is none of {', '.join(DTYPES)}")
    return note


def _config(model: ModelSection, architecture: HubArchitecture, imported: Path | None) -> dict[str, Any]:
    if imported is None or not imported.is_file():
        return config_json(model, architecture)
    config = read_object(imported)
    stated = model_of(config, str(imported))
    theirs, ours = computed_keys(stated), computed_keys(model)
    for key in {**theirs, **ours}:
        if theirs.get(key) != ours.get(key):
            differs = f"{key} is {theirs.get(key)!r} by it, and {ours.get(key)!r} in the checkpoint"
            raise JobError(f"{imported}: {differs}; move the file away, so that one is written from the checkpoint")
    if stated.sequence < model.sequence:
        config["max_position_embeddings"] = model.sequence
    return config
