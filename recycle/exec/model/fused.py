"""Replaces classes of megatron-core's modules, to keep them on their device and to fuse their operations.

megatron-core's rotary positions and router move themselves to the current GPU; `stay_on_device` makes them stay. It
also fuses rotary positions (rotary.py).

`fuse` makes norms and gates each a single node of the autograd graph, without copies of intermediate results, and with
the same bits as megatron-core's. Autograd adds the gradients of a tensor in the order of the graph, so a norm returns
the two parts of its input gradient separately.

Limits: RMSNorm on the CPU only; SwiGLU without clamp and offset.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter

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

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        computed_in = _ROUTER_TYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(computed_in)
        return torch.nn.functional.linear(input.to(computed_in), self.weight.to(computed_in), bias)

    def routing(self, logits: torch.Tensor, *arguments: Any, **named: Any) -> Any:
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
    def forward(ctx: Any, probs: torch.Tensor, routing_map: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(routing_map, bias)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
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


def fuse(part: torch.nn.Module) -> None:
    """Replace the classes of modules in `part`, including experts, that have a fused implementation."""
    for module in part.modules():
        if type(module) is torch.nn.RMSNorm and module.elementwise_affine:
            module.__class__ = _Norm
        elif type(module) is MLP and _is_swiglu(module.config):
            module.__class__ = _GatedMLP


class _Norm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cpu or self.eps is None or len(self.normalized_shape) != 1:
            return super().forward(x)
        normed: torch.Tensor = _RmsNorm.apply(x, x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in fp32; takes x once per use."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        wide, gradient = x.float(), gradient.float()
        weight_gradient = (wide * scale).mul_(gradient).sum_to_size(weight.shape).to(weight.dtype)
        weighted = gradient * weight
        scale_gradient = (weighted * wide).sum(-1, keepdim=True)
        mean_gradient = (-0.5 * scale_gradient * scale.pow(3)) / x.shape[-1]
        direct, through_scale = weighted.mul_(scale), wide * (2 * mean_gradient)
        if x.dtype == torch.float32:
            return direct, through_scale, weight_gradient, None
        return direct.add_(through_scale).to(x.dtype), None, weight_gradient, None  # summed before rounding


class _GatedMLP(MLP):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any) -> Any:
        both, bias = self.linear_fc1(hidden_states)
        product: torch.Tensor = _SwiGLU.apply(both if bias is None else both + bias)  # type: ignore[no-untyped-call]
        if per_token_scale is not None:
            product = (product * per_token_scale.unsqueeze(-1)).to(product.dtype)
        output, output_bias = self.linear_fc2(product)
        if per_token_scale is not None and output_bias is not None:
            output = output + output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)
            output_bias = None
        return output, output_bias


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        opened = torch.nn.functional.silu(gate)
        ctx.save_for_backward(both, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        both, opened = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        both_gradient = torch.empty_like(both)
        gate_gradient, up_gradient = both_gradient.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
        torch.mul(gradient, opened, out=up_gradient)
        return both_gradient


def _is_swiglu(config: Any) -> bool:
    return (
        config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
        and not config.bias_activation_fusion
        and not config.use_te_activation_func
    )
