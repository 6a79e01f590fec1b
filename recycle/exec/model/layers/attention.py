"""Core attention for megatron-core's layers by torch's `scaled_dot_product_attention`, on any device.

Limits: no context parallelism, no bias, no packed sequences; the mask is causal.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import RunError


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Core attention by `scaled_dot_product_attention`. Takes megatron-core's constructor arguments."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise RunError("core attention: context parallelism is not supported")
        self._scale = softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Causal attention.

        Args:
            query: [sequence, batch, heads, dim]; key and value alike, with as many or fewer (grouped) heads.

        Returns:
            [sequence, batch, heads * dim].
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise RunError("core attention: a bias or packed sequences are not supported")
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=True,
            scale=self._scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        sequence, batch = output.shape[2], output.shape[0]
        return output.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
