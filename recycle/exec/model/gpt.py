"""One stage's part of a megatron-core GPTModel, with initial weights that depend on their name only.

The part runs on any device: it uses the local layer spec without fused kernels, and `CausalAttention`. A mixture of
experts drops no token. `[model.config] transformer_impl` replaces linear layers and norms of the spec by Transformer
Engine's, one for one and with the same parameter names; their delayed weight gradients are computed by W
(other_layers.py).

Limits: no context parallelism. Transformer Engine is limited to one tensor rank, because it sums over its own groups in
another order than `TensorGroup`. Not run with Transformer Engine, which needs a GPU.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import RunError
from recycle.exec.model.attention import CausalAttention
from recycle.exec.model.config import TRANSFORMER_ENGINE, transformer_config
from recycle.exec.model.fused import fuse, stay_on_device
from recycle.exec.model.gemma import adapt_block, adapt_part
from recycle.exec.model.rotary import prepare_rotary
from recycle.exec.model.tensor_ranks import enable_sequence_parallel, groups_with_shared_experts, prepare_mixtures
from recycle.exec.model.weights import initialise, mark_row_blocks, read_weights
from recycle.job import Job
from recycle.job.architecture import is_rotary
from recycle.megatron_versions import installed, without_model_notice


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
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        normalization=config.normalization,
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
    block = block_spec(config, layers[stage])
    if job.model.kind == "gemma":
        adapt_block(block, config)
    with without_model_notice():
        part = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=job.model.vocabulary,
            max_sequence_length=job.model.sequence,
            pre_process=stage == 0,
            post_process=stage == len(layers) - 1,
            share_embeddings_and_output_weights=job.model.tied,
            position_embedding_type="rope" if is_rotary(job.model) else "learned_absolute",
            rotary_percent=job.model.rotary_percent,
            rotary_base=job.model.rotary_base,
            pg_collection=groups_with_shared_experts() if job.grid.expert_parallel else None,
        )
    if config.transformer_impl == TRANSFORMER_ENGINE:
        _require_engine(part)
    prepare_mixtures(part)
    mark_row_blocks(part)
    prepare_rotary(part, job.model)
    if job.model.kind == "gemma":
        adapt_part(part)
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
