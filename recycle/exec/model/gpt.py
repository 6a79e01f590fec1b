"""One stage's part of a megatron-core GPTModel, with initial weights that depend on their name only.

The part runs on any device: it uses the local layer spec without fused kernels, and core attention by torch's
`scaled_dot_product_attention`. A mixture of experts drops no token. `[model.config] transformer_impl` replaces linear
layers and norms of the spec by Transformer Engine's, one for one and with the same parameter names; their delayed
weight gradients are computed by W (other_layers.py).

Limits: no context parallelism, attention bias or packed sequences; causal masks only; no sequence parallelism for a
mixture of experts. Transformer Engine is limited to one tensor rank, because it sums over its own groups in another
order than `TensorGroup`. Not run with Transformer Engine, which needs a GPU.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import RunError
from recycle.exec.model.config import TRANSFORMER_ENGINE, transformer_config
from recycle.exec.model.fused import fuse, stay_on_device
from recycle.exec.model.tensor_ranks import enable_sequence_parallel, groups_with_shared_experts, prepare_mixtures
from recycle.exec.model.weights import initialise, mark_row_blocks, read_weights
from recycle.job import Job
from recycle.job.architecture import is_rotary
from recycle.megatron_versions import installed, without_model_notice


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
        """Causal attention of query [sequence, batch, heads, dim], and key and value with as many or fewer heads.

        Returns [sequence, batch, heads * dim].
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


def backend() -> BackendSpecProvider:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # imports Apex if installed

    provider: BackendSpecProvider = TESpecProvider()
    return provider


def _with_engine(spec: Any, config: TransformerConfig) -> Any:
    local, engine, rms = LocalSpecProvider(), backend(), config.normalization == "RMSNorm"
    return _replaced(
        spec,
        {
            local.column_parallel_linear(): engine.column_parallel_linear(),
            local.row_parallel_linear(): engine.row_parallel_linear(),
            local.layer_norm(rms_norm=rms): engine.layer_norm(rms_norm=rms),
        },
    )


def _replaced(value: Any, by: dict[Any, Any]) -> Any:
    if isinstance(value, partial):
        named = {name: _replaced(part, by) for name, part in value.keywords.items()}
        return partial(_replaced(value.func, by), *(_replaced(part, by) for part in value.args), **named)
    if isinstance(value, type):
        return by.get(value, value)
    if isinstance(value, list):
        return [_replaced(part, by) for part in value]
    if is_dataclass(value):
        for field in fields(value):
            setattr(value, field.name, _replaced(getattr(value, field.name), by))
    return value


def _require_engine(part: GPTModel) -> None:
    for name, module in part.decoder.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            raise RunError(
                f"decoder.{name}: transformer_impl does not replace this layer with {installed()}; use"
                ' transformer_impl = "local"'
            )


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The local spec of a transformer layer, with `CausalAttention` or Transformer Engine's layers and norms."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    if config.transformer_impl == TRANSFORMER_ENGINE:
        return _with_engine(spec, config)
    return spec


def block_spec(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """Spec of `layers` layers and the final norm, listed one by one because a split may be uneven or empty."""
    block = TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * layers, layer_norm=WrappedTorchNorm)
    if config.transformer_impl == TRANSFORMER_ENGINE:
        return _with_engine(block, config)
    return block


def build_part(job: Job, stage: int, tensor_rank: int = 0, *, is_filled: bool = True) -> GPTModel:
    """Build the GPTModel part of `stage` on the CPU. Needs megatron-core's `parallel_state`.

    Without `is_filled` the weights stay uninitialized. Raises JobError if megatron-core refuses the configuration, or
    the checkpoint of `[model] weights` cannot be read.
    """
    layers, config = job.layers_per_stage(), transformer_config(job)
    balances, config.moe_router_enable_expert_bias = config.moe_router_enable_expert_bias, False  # buffers on a GPU
    with without_model_notice():
        part = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layers[stage]),
            vocab_size=job.model.vocabulary,
            max_sequence_length=job.model.sequence,
            pre_process=stage == 0,
            post_process=stage == len(layers) - 1,
            share_embeddings_and_output_weights=job.model.tied,
            position_embedding_type="rope" if is_rotary(job.model) else "learned_absolute",
            rotary_base=job.model.rotary_base,
            rope_scaling=job.model.rotary_scaling is not None,
            rope_scaling_factor=job.model.rotary_scaling or 1.0,
            pg_collection=groups_with_shared_experts() if job.grid.expert_parallel else None,
        )
    if config.transformer_impl == TRANSFORMER_ENGINE:
        _require_engine(part)
    config.moe_router_enable_expert_bias = balances
    prepare_mixtures(part)
    mark_row_blocks(part)
    fuse(part)
    stay_on_device(part)
    if job.grid.sequence_parallel:
        enable_sequence_parallel(part)
    first_layer, tensor = sum(layers[:stage]), (tensor_rank, job.grid.tensor_parallel)
    if not is_filled:
        return part
    if job.model.weights is None:
        initialise(part, job.model, first_layer, *tensor)
    else:
        read_weights(part, Path(job.model.weights), first_layer, *tensor)
    return part
