"""Architectures of the models that recycle builds: the families of `[model] kind`, and the sizes of their layers.

A family is a set of fields of megatron-core's TransformerConfig, which `[model.config]` extends or overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recycle.job.sections import ModelSection

_LLAMA: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
}
_QWEN: Mapping[str, Any] = {**_LLAMA, "layernorm_epsilon": 1e-6, "qk_layernorm": True}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "emulated": {},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen": _QWEN,
    "qwen_moe": {**_QWEN, "num_moe_experts": 128, "moe_router_topk": 8, "moe_aux_loss_coeff": 0.001},
    "gemma": {
        **_QWEN,
        "activation_func": "gelu_tanh",
        "window_size": [511, 0],
        "window_attn_skip_freq": 6,
    },
    "mixtral": {**_LLAMA, "num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02},
}
"""`[model] kind` -> fields of TransformerConfig.

GPT-2 has LayerNorm, GELU, biases and learned positions; Llama has RMSNorm, SwiGLU, rotary positions and no biases.
Mistral from version 0.2 computes what Llama does. Qwen 3 adds norms of queries and keys, with 128 experts in its
mixtures (arXiv 2505.09388); Gemma 3 has GeGLU, windows of 512 tokens except in every sixth layer, and norms before and
after each part of a layer (arXiv 2503.19786). Mixtral adds experts and the auxiliary loss of its paper (arXiv
2401.04088).
"""


CHOSEN_BY_JOBS = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "recompute_modules")
"""Fields of `[model.config]` that affect training, not the function that the model computes."""


def config_of(model: ModelSection) -> dict[str, Any]:
    """Return the family's fields of TransformerConfig, overridden by `[model.config]`."""
    return {**FAMILIES[model.kind], **model.config}


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model's layers.

    Attributes:
        hidden: entries of a token's activation.
        query, key: entries of all queries of a token; of all its keys, and as many of its values.
        groups: groups of heads that share a key.
        ffn: units of the feed-forward part, or of one expert.
        vocabulary: rows of the embedding and of the output layer.
        positions: rows of the table of learned positions; 0 with rotary positions.
        experts, active: feed-forward parts of a layer; how many of them process each token.
        inner: matrices from `hidden` to `ffn` in each feed-forward part; 2 with a gate.
        vectors: parameters of a layer outside matrices: norms, biases.
        final: parameters of the norm before the output layer.
    """

    hidden: int
    query: int
    key: int
    groups: int
    normed: bool
    ffn: int
    vocabulary: int
    positions: int
    experts: int
    active: int
    inner: int
    vectors: int
    final: int

    @classmethod
    def of(cls, model: ModelSection) -> Architecture:
        fields = config_of(model)
        hidden, head = model.hidden, int(fields.get("kv_channels", model.hidden // model.heads))
        groups = int(fields.get("num_query_groups", model.heads))
        query, key = head * model.heads, head * groups
        wide = model.ffn if model.ffn is not None else 4 * hidden
        experts = int(fields.get("num_moe_experts", 0))
        ffn = int(fields.get("moe_ffn_hidden_size", wide)) if experts else wide
        biased, layer_norm = bool(fields.get("add_bias_linear", True)), fields.get("normalization") != "RMSNorm"
        inner, norm = 2 if fields.get("gated_linear_unit") else 1, 2 if layer_norm else 1
        vectors = (4 if model.kind == "gemma" else 2) * norm * hidden
        if fields.get("softmax_type") == "learnable":
            vectors += model.heads
        if fields.get("qk_layernorm"):
            vectors += 2 * norm * head
        if biased or fields.get("add_qkv_bias"):
            vectors += query + 2 * key
        if biased:
            vectors += hidden + max(experts, 1) * (inner * ffn + hidden)
        if fields.get("moe_router_enable_expert_bias"):
            vectors += experts
        return cls(
            hidden=hidden,
            query=query,
            key=key,
            groups=groups,
            normed=bool(fields.get("qk_layernorm")),
            ffn=ffn,
            vocabulary=model.vocabulary,
            positions=0 if is_rotary(model) else model.sequence,
            experts=max(experts, 1),
            active=int(fields.get("moe_router_topk", 2)) if experts else 1,
            inner=inner,
            vectors=vectors,
            final=norm * hidden,
        )

    @property
    def attention_matrices(self) -> int:
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def expert_matrices(self) -> int:
        return (self.inner + 1) * self.hidden * self.ffn

    @property
    def router(self) -> int:
        """Entries of the matrix that scores the experts; 0 without experts."""
        return self.experts * self.hidden if self.experts > 1 else 0

    @property
    def layer(self) -> int:
        return self.attention_matrices + self.experts * self.expert_matrices + self.router + self.vectors

    @property
    def products(self) -> int:
        """Multiplications by a layer's matrices per token."""
        return self.attention_matrices + self.active * self.expert_matrices + self.router


def is_rotary(model: ModelSection) -> bool:
    """Whether the model uses rotary positions instead of a learned table."""
    return model.kind not in ("gpt", "emulated")
