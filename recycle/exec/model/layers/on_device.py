"""Modules of megatron-core that take it for granted that they compute on a GPU, kept on whatever device they are on.

Rotary positions and the router of a mixture of experts move themselves to the current GPU when they first compute, and
fail where there is none; the router does too without Transformer Engine. `stay_on_device` gives the modules of a part
classes that do not; results are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.router import TopKRouter

_ROUTER_TYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary positions on the device of their frequencies."""

    inv_freq: torch.Tensor

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of positions, [max_seq_len, 1, 1, channels that are rotated]."""
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        if self.rotary_interleaved:
            angles = torch.stack((freqs.view(-1, 1), freqs.view(-1, 1)), dim=-1).view(freqs.shape[0], -1)
        else:
            angles = torch.cat((freqs, freqs), dim=-1)
        return angles[:, None, None, :]

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """As megatron-core's, which keeps the angles of each length, without the groups that the executor has not."""
        return self.get_emb(max_seq_len, offset)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        # The frequencies are no buffer there: they stay in fp32, but follow the module to its device.
        moved = super()._apply(function, recurse)
        self.inv_freq = self.inv_freq.to(function(torch.empty(0)).device)
        return moved


class Router(TopKRouter):  # type: ignore[misc]
    """A router on the device of its weight, which keeps no count of tokens and no log of auxiliary losses."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Scores of all experts, [sequence, batch, experts]."""
        computed_in = _ROUTER_TYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(computed_in)
        return torch.nn.functional.linear(input.to(computed_in), self.weight.to(computed_in), bias)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        # megatron-core compiles this even where there is nothing to do.
        if self.enable_expert_bias:
            super()._apply_expert_bias(routing_map, padding_mask=padding_mask)


_STAYING = {RotaryEmbedding: Rotary, TopKRouter: Router}


def stay_on_device(part: torch.nn.Module) -> None:
    """Keep the modules of `part` on the device that they are on; before the part is moved to it."""
    for module in part.modules():
        for kind, staying in _STAYING.items():
            if type(module) is kind:
                module.__class__ = staying  # type: ignore[assignment]
        if isinstance(module, Router):
            # With a number it adds to a log that all models of a process share, and that has the first one's size.
            module.layer_number = None
