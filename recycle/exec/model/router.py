"""The router of mixtures of experts, and `stay_on_device` for modules that megatron-core moves to the current GPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from recycle.exec.model.rotary import Rotary
from recycle.exec.model.state.rules import BALANCE_RATE
from recycle.megatron_versions import stop_loss_logs, without_token_counts

_ROUTER_TYPES = {"fp32": torch.float32, "fp64": torch.float64}


@without_token_counts
class Router(TopKRouter):  # type: ignore[misc]
    """A router on the device of its weight, without token counts and logs of auxiliary losses.

    The expert bias of balancing without an auxiliary loss (https://arxiv.org/abs/2408.15664) is a parameter, so that it
    is part of its unit's state. Its gradient is the experts' excess load, and the optimizer moves it by
    `moe_router_bias_update_rate` against the sign.
    """

    def gating(self, input: Tensor) -> Tensor:
        computed_in = _ROUTER_TYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(computed_in)
        return torch.nn.functional.linear(input.to(computed_in), self.weight.to(computed_in), bias)

    def routing(self, logits: Tensor, *arguments: Any, **named: Any) -> Any:
        probs, routing_map = super().routing(logits, *arguments, **named)
        if self.expert_bias is not None and torch.is_grad_enabled():
            probs = _ExcessLoad.apply(probs, routing_map, self.expert_bias)  # type: ignore[no-untyped-call]
        return probs, routing_map

    def balance(self) -> None:
        """Make the expert bias a parameter."""
        bias = torch.nn.Parameter(torch.zeros(self.config.num_moe_experts, device=self.weight.device))
        setattr(bias, BALANCE_RATE, self.config.moe_router_bias_update_rate)
        for buffer in ("expert_bias", "local_tokens_per_expert"):
            self.__dict__.pop(buffer, None)
            self._buffers.pop(buffer, None)
        self.expert_bias, self.local_tokens_per_expert = bias, None


LOAD_SCALE = 2.0**-40
"""Factor of excess loads: small enough to vanish in the norm of all gradients, and large enough for exact sums."""


class _ExcessLoad(torch.autograd.Function):
    """Returns the probabilities; the gradient of the bias is each expert's number of tokens above the mean, scaled."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(routing_map, bias)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        routing_map, bias = ctx.saved_tensors
        loads = routing_map.sum(dim=0, dtype=torch.float32)
        return gradient, None, ((loads - loads.mean()) * LOAD_SCALE).to(bias.dtype)


_DEVICE_CLASSES = {RotaryEmbedding: Rotary, TopKRouter: Router}


def stay_on_device(part: torch.nn.Module) -> None:
    """Keep the modules of `part` on their device; call before moving the part."""
    for module in part.modules():
        for kind, staying in _DEVICE_CLASSES.items():
            if type(module) is kind:
                module.__class__ = staying  # type: ignore[assignment]
        if isinstance(module, Router):
            stop_loss_logs(module)
            if module.config.moe_router_enable_expert_bias and "expert_bias" not in module._parameters:  # noqa: SLF001
                module.balance()
