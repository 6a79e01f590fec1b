"""Folders of Hugging Face models written by hand, and what is in the files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from recycle.hugging_face.architectures import model_of
from recycle.hugging_face.correspondence import blocks

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random tensors of a model, fp32."""
    generator = torch.Generator().manual_seed(1)
    shapes = {block.theirs: block.their_shape for block in blocks(model_of(config, "config.json"))}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_model(folder: Path, config: dict[str, Any] | None = None, shards: int = 1, **changes: Any) -> Path:
    """Write a folder with `config`, which `changes` add to, and its tensors in so many files."""
    config = (config or LLAMA) | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, tensors_of(config), shards)
    return folder


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    files = {name: f"model-{place % shards + 1:05d}-of-{shards:05d}.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have tensors of the same names, types and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )
