"""Core attention by torch's `scaled_dot_product_attention`, for the layers of megatron-core on any device."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from recycle.errors import RunError


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of one layer, optionally with a window, a sink per head, and a mask of documents.

    Takes megatron-core's constructor arguments, by name, and reads `window_size`, `window_attn_skip_freq` and
    `softmax_type` of the configuration. Limits: no context parallelism, attention bias or `packed_seq_params`.

    Attributes:
        window: tokens before the query that it attends; None for all.
        softmax_offset: score of each head's sink, [heads]; None without sinks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise RunError("core attention: context parallelism is not supported")
        self._scale = softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] if is_windowed else None
        self.softmax_offset: Tensor | None
        scores = torch.zeros(config.num_attention_heads // config.tensor_model_parallel_size)
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(scores)
        else:
            is_plain = config.softmax_type == "vanilla"
            self.register_buffer("softmax_offset", None if is_plain else scores, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of query [sequence, batch, heads, dim], and key and value with as many or fewer heads.

        `attention_mask` [batch or 1, 1, sequence, sequence] is true where a query does not attend a key; positions
        behind the query are masked in any case. Returns [sequence, batch, heads * dim of value].
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise RunError("core attention: a bias or packed_seq_params are not supported; use an attention mask")
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        scores = self._added_scores(query, attention_mask)
        if self.softmax_offset is not None:
            key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))  # a sink is a key without a value
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=scores,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=scores is None,
            scale=self._scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _added_scores(self, query: Tensor, masked: Tensor | None) -> Tensor | None:
        if masked is None and self.window is None and self.softmax_offset is None:
            return None
        rows, heads, length, _ = query.shape
        attended = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if self.window is not None:
            attended = attended.triu(-self.window)
        if masked is not None:
            attended = attended & ~masked
        if self.softmax_offset is None:
            return attended
        scores = torch.zeros_like(attended, dtype=query.dtype).masked_fill(~attended, -torch.inf)
        sinks = self.softmax_offset.to(query.dtype).view(1, -1, 1, 1).expand(rows, heads, length, 1)
        return torch.cat([scores.expand(rows, heads, length, length), sinks], dim=-1)
