"""The weights of a model part: names in the whole model, splits between tensor ranks, and initial values.

Each parameter that recycle draws comes from a generator seeded by (seed, name in the whole model). The whole tensor is
drawn and then split, so any P and T start from equal bits. Other parameters are read from a checkpoint with any split.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn import Module, Parameter

from recycle.errors import JobError
from recycle.exec.model.attention import CausalAttention
from recycle.exec.model.state.optimizer import HALVES
from recycle.exec.model.state.rules import ROW_BLOCKS
from recycle.exec.model.stored_tensors import StoredTensors
from recycle.exec.model.tensor_ranks import first_expert
from recycle.job.sections import ModelSection

INITIAL_DEVIATION = 0.02
"""Default standard deviation of weights, as in GPT-2; divided by sqrt(2 L) if they write into the residual stream."""
SHARED_WEIGHT = "embedding.word_embeddings.weight"
"""The weight that a tied output layer shares, also the name of its copy on the last stage."""
LAYERS = "layers"
"""Name of the list of layers in a part, at any depth; its indices count from the part's first layer."""
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)")
_PREDICTION = "mtp."
"""Beginning of the names of layers for multi-token prediction, which belong to the head and count from 0."""
_LAYER_NUMBER = re.compile(rf"^(?!{_PREDICTION})(?:.*\.)?{LAYERS}\.([0-9]+)\.")
_RESIDUAL_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
_ZEROS = ("bias", "softmax_offset", "centered_weight")
"""Endings of the names of vectors that start at 0; others start at 1."""
_CUT: Mapping[type[Module], Mapping[str, int]] = {
    ColumnParallelLinear: {"weight": 0, "bias": 0},
    RowParallelLinear: {"weight": 1},
    VocabParallelEmbedding: {"weight": 0},
    CausalAttention: {"softmax_offset": 0},
}
"""Layer class -> parameters split between tensor ranks -> split dimension.

All ranks hold every other parameter, and every expert of a mixture unless experts are shared. megatron-core marks only
parameters that it initializes itself.
"""


def layers_of(part: Module, first_layer: int) -> dict[str, tuple[str, Module]]:
    """The layers of a part: name in the part -> (name in the whole model, layer); {} if none are found.

    A list named "layers" counts from the first layer of the part; a dict of that name has the whole model's names.
    """
    layers: dict[str, tuple[str, Module]] = {}
    for name, module in part.named_modules():
        if name.rpartition(".")[2] != LAYERS or any(name.startswith(f"{layer}.") for layer in layers):
            continue
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            first = 0 if name.startswith(_PREDICTION) else first_layer
            for place, layer in enumerate(module):
                layers[f"{name}.{place}"] = f"{name}.{first + place}", layer
        elif isinstance(module, torch.nn.ModuleDict):
            layers |= {f"{name}.{key}": (f"{name}.{key}", layer) for key, layer in module.items()}
    return layers


def global_names(part: Any, first_layer: int) -> dict[str, Parameter]:
    """The parameters of a part by name in the whole model, where layers and experts count from 0."""
    layers = layers_of(part, first_layer)
    is_tied = getattr(part, "share_embeddings_and_output_weights", False)
    expert = first_expert(part)
    names: dict[str, Parameter] = {}
    for name, parameter in part.named_parameters():
        for inside, (outside, _) in layers.items():
            if name.startswith(f"{inside}."):
                name = outside + name[len(inside) :]
                break
        if name == "output_layer.weight" and is_tied:
            name = SHARED_WEIGHT
        if expert:
            name = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + expert}", name)
        names[name] = parameter
    return names


def units_of(names: Iterable[str], layers: Sequence[int], stage: int) -> dict[str, int]:
    """The unit of the model that each parameter of a stage belongs to (see `recycle.plans.hosting`).

    Parameters outside of layers belong to the embedding on the first stage and to the head on the last stage. If a
    stage is both, parameters before the layers belong to the embedding and others to the head. On any other stage they
    belong to its first layer. Raises JobError if a middle stage without layers has parameters.

    Args:
        layers: of each stage.
    """
    first_layer, is_last = sum(layers[:stage]), stage == len(layers) - 1
    units, is_after_layers = dict[str, int](), False
    for name in names:
        match = _LAYER_NUMBER.search(name)
        number = int(match[1]) if match is not None else -1
        if first_layer <= number < first_layer + layers[stage]:
            units[name], is_after_layers = number + 1, True
        elif stage == 0 and not (is_last and is_after_layers):
            units[name] = 0
        elif is_last:
            units[name] = sum(layers) + 1
        elif layers[stage]:
            units[name] = first_layer + 1
        else:
            raise JobError(
                f"{name} is on a stage without layers, between the first and the last; give the stage a layer"
            )
    return units


def cut_dimensions(part: Any) -> dict[Parameter, int]:
    """Parameters of a part that are split into T equal parts -> the split dimension."""
    return {
        parameter: cut[name]
        for module in part.modules()
        for kind, cut in _CUT.items()
        if isinstance(module, kind) and not getattr(module, "is_expert", False)
        for name, parameter in module.named_parameters(recurse=False)
        if name in cut
    }


def per_head_parameters(part: Module) -> set[Parameter]:
    """Parameters that all tensor ranks use for their own heads, with partial gradients: norms of queries and keys."""
    return {
        parameter
        for name, module in part.named_modules()
        if name.rpartition(".")[2] in ("q_layernorm", "k_layernorm")
        for parameter in module.parameters()
    }


def gated_parameters(part: Module) -> set[Parameter]:
    """Parameters made of two stacked halves, gate and factor, which tensor ranks split separately."""
    layers = [module.linear_fc1 for module in part.modules() if isinstance(module, MLP)]
    return {
        parameter
        for layer in layers
        if layer.config.gated_linear_unit
        for parameter in (layer.weight, layer.bias)
        if parameter is not None
    }


def mark_row_blocks(part: Module) -> None:
    """Mark the matrices of queries, keys and values, and of gated layers, by `ROW_BLOCKS`."""
    for parameter in gated_parameters(part):
        setattr(parameter, ROW_BLOCKS, (1, (len(parameter) // 2, len(parameter) // 2)))
    for module in part.modules():
        if hasattr(module, "linear_qkv"):
            attention: Any = module
            groups, size = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
            queries = attention.num_attention_heads_per_partition // groups * size
            setattr(attention.linear_qkv.weight, ROW_BLOCKS, (groups, (queries, size, size)))


def part_of(whole: Tensor, dimension: int, rank: int, count: int, halves: int = 1) -> Tensor:
    """The part of tensor rank `rank` of `count` of a parameter split along a dimension, each half separately."""
    return torch.cat([half.chunk(count, dimension)[rank] for half in whole.chunk(halves, 0)])


@torch.no_grad()
def initialise(
    part: Module, model: ModelSection, first_layer: int, tensor_rank: int = 0, tensor_parallel: int = 1
) -> None:
    """Draw every parameter by its global name, on the CPU: matrices normal, biases and sinks 0, norm weights 1."""
    general: Any = model.config.get("init_method_std", INITIAL_DEVIATION)
    embedding: Any = model.config.get("embedding_init_method_std", general)
    cut, halves = cut_dimensions(part), gated_parameters(part)
    for name, parameter in global_names(part, first_layer).items():
        if parameter.dim() > 1:
            seed = hashlib.sha256(f"{model.seed}:{name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
            residual = name.endswith(_RESIDUAL_WEIGHTS)
            deviation = embedding if "embedding" in name else general
            deviation /= math.sqrt(2 * model.layers) if residual else 1.0
            if tensor_parallel == 1 or parameter not in cut:
                parameter.normal_(0.0, deviation, generator=generator)
                continue
            sizes = list(parameter.shape)
            sizes[cut[parameter]] *= tensor_parallel
            whole = torch.empty(sizes).normal_(0.0, deviation, generator=generator)
            count = 2 if parameter in halves else 1
            parameter.copy_(part_of(whole, cut[parameter], tensor_rank, tensor_parallel, count))
        else:
            parameter.fill_(0.0 if name.endswith(_ZEROS) else 1.0)


def named_weights(part: Module) -> dict[str, Tensor]:
    return {name: piece for name, _, piece in _pieces(part, 0)}


def _pieces(part: Module, first_layer: int) -> Iterator[tuple[str, Parameter, Tensor]]:
    halves = gated_parameters(part)
    for name, parameter in global_names(part, first_layer).items():
        pieces = zip(HALVES, parameter.chunk(2), strict=True) if parameter in halves else [("", parameter)]
        for half, piece in pieces:
            yield name + half, parameter, piece


@torch.no_grad()
def read_weights(
    part: Module, checkpoint: Path, first_layer: int, tensor_rank: int, tensor_parallel: int, prefix: str = ""
) -> None:
    """Copy a checkpoint's parameters into a part, one at a time, reading only this tensor rank's share.

    With `prefix` "exp_avg." it reads the first moments. Raises JobError if a parameter is missing or has another shape.
    """
    stored = StoredTensors(sorted(checkpoint.glob("*.safetensors")), JobError)
    cut = cut_dimensions(part)
    for name, parameter, piece in _pieces(part, first_layer):
        dimension, shape = cut.get(parameter, 0), list(piece.shape)
        rank, count = (tensor_rank, tensor_parallel) if parameter in cut else (0, 1)
        shape[dimension] *= count
        start = rank * piece.shape[dimension]
        piece.copy_(stored.rows(prefix + name, shape, dimension, start, start + piece.shape[dimension]))
