"""What Gemma 3 (https://arxiv.org/abs/2503.19786) has and other families lack: centered norms, norms before the
residual sums, and scaled embeddings. Its windows and rotary positions are fields that every family has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class CenteredNorm(torch.nn.Module):
    """RMSNorm whose weights are stored as their differences from 1. Takes megatron-core's constructor arguments."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.centered_weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], 1 + self.centered_weight.float(), self.eps)
        return normed.to(x.dtype)


class NormedResidual(CenteredNorm):
    """Sum of the residual stream and the norm of a sublayer's output, in place of `get_bias_dropout_add`."""

    def forward(self, is_training: bool, is_fused: bool) -> Callable[..., Tensor]:  # type: ignore[override]
        return partial(self._add, is_training)

    def _add(self, is_training: bool, output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        normed = super().forward(output_and_bias[0])
        return residual + torch.nn.functional.dropout(normed, dropout, is_training)


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        embedded: Tensor = super().forward(*arguments, **named)
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype)


def adapt_block(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Give layers of the local spec, and the block, Gemma's norms."""
    residual = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    block.layer_norm = CenteredNorm
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = CenteredNorm
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=NormedResidual, params=residual)


def adapt_part(part: Any) -> None:
    """Scale a part's embedding."""
    if hasattr(part, "embedding"):
        part.embedding.__class__ = ScaledEmbedding
