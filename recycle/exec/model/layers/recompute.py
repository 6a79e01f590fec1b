"""Layers, or parts of them, that keep their input between F and I and run again in I.

`[model] recompute = "layers"` is what Megatron calls full recomputation of every layer, "selective" that of parts which
hold much and take little: those that `[model.config] recompute_modules` lists. What W needs is made again in I and
held from there on as ever. By torch's checkpointing, which restores the random state as it was.

Limits: of Megatron's parts, core attention, the feed-forward part and shared experts; its "layernorm" and "moe_act"
free an output that the next layer keeps here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from recycle.errors import JobError
from recycle.exec.model.weights import LAYERS, layers_of

PARTS: Mapping[str, str] = {
    "core_attn": "self_attention.core_attention",
    "mlp": "mlp",
    "moe": "mlp",
    "shared_experts": "mlp.shared_experts",
}
"""Name in `recompute_modules` -> the module of a layer."""
DEFAULT_PARTS = ("core_attn",)


class _Again:
    """A forward that is run again in the backward. As an attribute of its module it takes the place of the method."""

    def __init__(self, forward: Callable[..., Any], draws: bool) -> None:
        self._forward, self._draws = forward, draws

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        return checkpoint(self._forward, *arguments, use_reentrant=False, preserve_rng_state=self._draws, **named)


def recompute_layers(part: torch.nn.Module, draws: bool) -> None:
    """Have every layer of a part run again from its input.

    Args:
        draws: whether they draw random numbers.

    Raises:
        JobError: no layers are found in it.
    """
    if not any(name.rpartition(".")[2] == LAYERS for name, _ in part.named_modules()):
        raise JobError(f'[model] recompute: "layers" needs a list named `{LAYERS}` in every stage\'s module')
    for _, layer in layers_of(part, 0).values():
        layer.forward = _Again(layer.forward, draws)


def recompute_parts(part: torch.nn.Module, names: Sequence[str], draws: bool) -> None:
    """Have parts of every layer run again from their input. Raises JobError for a name that no layer has."""
    for name in names:
        if name not in PARTS:
            raise JobError(f"[model.config] recompute_modules: {name!r} is none of {', '.join(PARTS)}")
    modules = dict(part.named_modules())
    for place in layers_of(part, 0):
        if f"{place}.self_attention" not in modules:
            raise JobError('[model] recompute: "selective" knows the layers of megatron-core; take "layers" or "full"')
        for wanted in dict.fromkeys(PARTS[name] for name in names):
            found = modules.get(f"{place}.{wanted}")
            if found is not None:
                found.forward = _Again(found.forward, draws)
