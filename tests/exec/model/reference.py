"""Llama, Qwen and Mixtral in plain PyTorch, from their papers and nothing of megatron-core: what forwards are held to.

It takes the weights of a built model by their names there: queries, keys and values of a group lie side by side in
`linear_qkv`, gate and up projection one above the other in `linear_fc1`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy, silu

from recycle.job import Job
from recycle.job.architecture import config_of

Weights = Mapping[str, torch.Tensor]


def loss(job: Job, weights: Weights, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, of tokens and labels [rows, sequence]; auxiliary losses apart."""
    return cross_entropy(logits(job, weights, tokens).flatten(0, 1), labels.flatten())


def logits(job: Job, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, sequence, vocabulary]."""
    hidden = weights["embedding.word_embeddings.weight"][tokens]
    for number in range(job.model.layers):
        start = f"decoder.layers.{number}."
        layer = {name.removeprefix(start): weight for name, weight in weights.items() if name.startswith(start)}
        hidden = hidden + attention(job, layer, norm(job, hidden, layer["input_layernorm.weight"]))
        hidden = hidden + mixture(job, layer, norm(job, hidden, layer["pre_mlp_layernorm.weight"]))
    hidden = norm(job, hidden, weights["decoder.final_layernorm.weight"])
    tied = weights["embedding.word_embeddings.weight"] if job.model.tied else None
    return hidden @ (tied if tied is not None else weights["output_layer.weight"]).T


def norm(job: Job, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""
    epsilon = config_of(job.model)["layernorm_epsilon"]
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon) * weight


def attention(job: Job, layer: Weights, hidden: torch.Tensor) -> torch.Tensor:
    fields, heads = config_of(job.model), job.model.heads
    groups, channels = fields.get("num_query_groups", heads), fields.get("kv_channels", job.model.hidden // heads)
    rows, sequence, _ = hidden.shape
    mixed = hidden @ layer["self_attention.linear_qkv.weight"].T
    if "self_attention.linear_qkv.bias" in layer:
        mixed = mixed + layer["self_attention.linear_qkv.bias"]
    mixed = mixed.view(rows, sequence, groups, heads // groups + 2, channels)
    query = mixed[..., :-2, :].reshape(rows, sequence, heads, channels)
    key, value = (mixed[..., -place, :].repeat_interleave(heads // groups, dim=2) for place in (2, 1))
    if fields.get("qk_layernorm"):
        query = norm(job, query, layer["self_attention.q_layernorm.weight"])
        key = norm(job, key, layer["self_attention.k_layernorm.weight"])
    angles = rotary_angles(job, sequence, channels)
    query, key = rotated(query, angles), rotated(key, angles)
    scores = torch.einsum("bshc,bthc->bhst", query, key) / math.sqrt(channels)
    later = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    taken = scores.masked_fill(later, -math.inf).softmax(-1)
    result = torch.einsum("bhst,bthc->bshc", taken, value).flatten(2)
    return result @ layer["self_attention.linear_proj.weight"].T


def rotary_angles(job: Job, sequence: int, channels: int) -> torch.Tensor:
    """Angle of each position and pair of channels, [sequence, channels / 2] (RoFormer, arXiv 2104.09864)."""
    frequencies = []
    for pair in range(channels // 2):
        frequency = job.model.rotary_base ** (-2 * pair / channels)
        if job.model.rotary_scaling is not None:
            # Llama 3.1: slow ones are divided, fast ones stay, those between go from one to the other.
            wave, share = 2 * math.pi / frequency, 8192 * frequency / (2 * math.pi)
            between = min(max((share - 1) / (4 - 1), 0.0), 1.0) if wave > 8192 / 4 else 1.0
            frequency = (1 - between) * frequency / job.model.rotary_scaling + between * frequency
        frequencies.append(frequency)
    return torch.arange(sequence)[:, None] * torch.tensor(frequencies)[None]


def rotated(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Channel i is turned together with channel i + channels / 2."""
    first, second = states.chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def feed_forward(weights: Weights, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer, arXiv 2002.05202)."""
    gate, up = (hidden @ weights[f"{prefix}linear_fc1.weight"].T).chunk(2, dim=-1)
    return (silu(gate) * up) @ weights[f"{prefix}linear_fc2.weight"].T


def mixture(job: Job, layer: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Each token through its experts, weighed by the softmax of their scores (Mixtral, arXiv 2401.04088, section 2)."""
    fields: dict[str, Any] = config_of(job.model)
    if "num_moe_experts" not in fields:
        return feed_forward(layer, "mlp.", hidden)
    flat = hidden.flatten(0, 1)
    scores, chosen = (flat @ layer["mlp.router.weight"].T).topk(fields["moe_router_topk"], dim=-1)
    shares, rows = scores.softmax(-1), []
    for token, share, experts in zip(flat, shares, chosen.tolist(), strict=True):
        outputs = [feed_forward(layer, f"mlp.experts.local_experts.{expert}.", token[None])[0] for expert in experts]
        rows.append(sum(weight * output for weight, output in zip(share, outputs, strict=True)))
    return torch.stack(rows).view(hidden.shape)
