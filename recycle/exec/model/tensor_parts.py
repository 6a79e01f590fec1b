"""Which parameters of a model part are cut between tensor ranks, and where.

A parameter is cut along one dimension into T equal parts, tensor rank t having the t-th, or held by every rank alike.
megatron-core marks a parameter only where it initialises it itself, so the layers say it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

_CUT: Mapping[type[torch.nn.Module], Mapping[str, int]] = {
    ColumnParallelLinear: {"weight": 0, "bias": 0},
    RowParallelLinear: {"weight": 1},
    VocabParallelEmbedding: {"weight": 0},
}
"""Layer -> its parameters that are cut -> along which dimension; every other is held by all ranks."""


def cut_dimensions(part: Any) -> dict[torch.nn.Parameter, int]:
    """Each parameter of a model part that is cut -> the dimension along which."""
    return {
        parameter: cut[name]
        for module in part.modules()
        for kind, cut in _CUT.items()
        if isinstance(module, kind)
        for name, parameter in module.named_parameters(recurse=False)
        if name in cut
    }
