"""Rotary positions: frequencies, angles, and a rotation that is a single node of the autograd graph.

megatron-core moves the frequencies to the current GPU; here they stay with their module. The fused rotation has the
bits of megatron-core's. Limits: interleaved positions are not fused, nor positions for a share of the channels.

Sources: Su et al., https://arxiv.org/abs/2104.09864; YaRN: Peng et al., https://arxiv.org/abs/2309.00071, section 3;
Llama 3's scaling: https://github.com/meta-llama/llama-models, models/llama3/model.py, `apply_scaling`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import attention
from torch import Tensor

from recycle.job.sections import ModelSection, RotaryScaling


def scaled_frequencies(plain: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    """Apply a scaling to frequencies of rotary positions, radians per position, fp32 [rotated channels / 2]."""
    length = scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((length / (2 * math.pi / plain) - low) / (high - low)).clamp(0, 1)
    else:
        channels = 2 * len(plain)
        first, last = (
            channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, channels - 1)
        kept = 1 - ((torch.arange(len(plain), device=plain.device) - first) / max(last - first, 0.001)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def prepare_rotary(part: Any, model: ModelSection) -> None:
    """Give a part the scaling of `[model] rotary_scaling`, and other angles to layers with a window."""
    rotary, scaling = getattr(part, "rotary_pos_emb", None), model.rotary_scaling
    if rotary is None:
        return
    if scaling is not None:
        scaling = RotaryScaling(scaling) if isinstance(scaling, float) else scaling
        rotary.inv_freq = scaled_frequencies(rotary.inv_freq, model.rotary_base, scaling)
        if scaling.rope_type == "yarn":
            rotary.attention_factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    if model.local_rotary_base is None:
        return
    rotary.local = RotaryEmbedding(
        2 * len(rotary.inv_freq),
        rotary_percent=1.0,
        rotary_interleaved=rotary.rotary_interleaved,
        rotary_base=model.local_rotary_base,
        use_cpu_initialization=True,
        cp_group=rotary.cp_group,
    )
    for module in part.modules():
        if isinstance(module, attention.SelfAttention) and module.core_attention.window is not None:
            module.register_forward_pre_hook(_use_local_angles, with_kwargs=True)


def _use_local_angles(_: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return arguments, named | {"rotary_pos_emb": named["rotary_pos_emb"].local}


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary positions on the device of their module.

    Attributes:
        attention_factor: factor of cosines and sines.
    """

    inv_freq: Tensor
    attention_factor = 1.0
    _last: tuple[tuple[Any, ...], Any] | None = None

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of positions, [max_seq_len, 1, 1, rotated channels]."""
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        if self.rotary_interleaved:
            angles = torch.stack((freqs.view(-1, 1), freqs.view(-1, 1)), dim=-1).view(freqs.shape[0], -1)
        else:
            angles = torch.cat((freqs, freqs), dim=-1)
        return angles[:, None, None, :]

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """As megatron-core's forward, with the angles of the last length kept, without context parallelism."""
        key = max_seq_len, offset, self.inv_freq.device
        if self._last is None or self._last[0] != key:
            angles: Any = self.get_emb(max_seq_len, offset)
            angles.factor = self.attention_factor
            if not self.rotary_interleaved:
                angles.turns = angles.cos() * angles.factor, angles.sin() * angles.factor
            if "local" in self._modules:
                angles.local = self.local(max_seq_len, offset)
            self._last = key, angles
        return self._last[1]

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        # The frequencies are not a buffer in megatron-core: they stay in fp32, but must follow the module's device.
        moved = super()._apply(function, recurse)
        self.inv_freq = self.inv_freq.to(function(torch.empty(0)).device)
        return moved


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, -1), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    (first, second), (first_sin, second_sin) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    result = x * cos
    first_result, second_result = result.chunk(2, dim=-1)
    if direction > 0:
        first_result.sub_(second * first_sin)
        second_result.add_(first * second_sin)
    else:
        first_result.add_(second * second_sin)
        second_result.sub_(first * first_sin)
    return result


_megatron_rotary = attention.apply_rotary_pos_emb


def _apply_rotary(
    x: torch.Tensor, angles: torch.Tensor, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, **named: Any
) -> torch.Tensor:
    cos_sin = getattr(angles, "turns", None)
    is_plain = cu_seqlens is None and mscale == 1.0 and not config.apply_rope_fusion
    if cos_sin is None or angles.shape[-1] != x.shape[-1] or not is_plain:
        scale = mscale * getattr(angles, "factor", 1.0)
        rotated: torch.Tensor = _megatron_rotary(x, angles, config, cu_seqlens, mscale=scale, **named)
        return rotated
    rotated = _Rotation.apply(x, *(part.to(x.dtype) for part in cos_sin))  # type: ignore[no-untyped-call]
    return rotated


attention.apply_rotary_pos_emb = _apply_rotary  # megatron-core handles the angles of other models
