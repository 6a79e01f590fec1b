"""One stage's part of a megatron-core GPTModel of any family, with weights that depend on nothing but their name.

They are drawn, or those of a checkpoint.

The part runs on any device: the local layer spec with a core attention around torch's `scaled_dot_product_attention`
and no fused kernel, or with Transformer Engine's linear layers and norms in it (layers/transformer_engine.py). A
mixture of experts drops no token; its tensor ranks have all experts each, or share them.

Limits: no context parallelism; a mixture of experts has no sequence parallelism.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.exec.model.config import transformer_config
from recycle.exec.model.layers import transformer_engine
from recycle.exec.model.layers.attention import CausalAttention
from recycle.exec.model.layers.expert_parallel import groups_with_shared_experts, prepare_mixtures
from recycle.exec.model.layers.fused import fuse
from recycle.exec.model.layers.sequence_parallel import cut_sequences
from recycle.exec.model.stored_weights import read_weights
from recycle.exec.model.weights import initialise
from recycle.job import Job
from recycle.job.architecture import is_rotary


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The local spec of a transformer layer, with `CausalAttention`, or with Transformer Engine's layers and norms."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    if config.transformer_impl == transformer_engine.NAME:
        transformer_engine.put_into(spec, config)
    return spec


def block_spec(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    """So many layers and the norm behind the last, stated one by one, as a split need not be even or may have none."""
    block = TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * layers, layer_norm=WrappedTorchNorm)
    if config.transformer_impl == transformer_engine.NAME:
        transformer_engine.put_into(block, config)
    return block


def build_part(job: Job, stage: int, tensor_rank: int = 0, *, is_filled: bool = True) -> GPTModel:
    """The GPTModel part of `stage`, with its initial weights, on the CPU. megatron-core's `parallel_state` must stand.

    Args:
        tensor_rank: which part of the stage's weights it is, of as many as the job's tensor parallelism.
        is_filled: it gets its initial weights; else whatever is in memory, for weights that come from elsewhere.

    Raises:
        JobError: megatron-core's configuration cannot be that which the job states, or the checkpoint of
            `[model] weights` cannot be read.
    """
    layers, config = job.layers_per_stage(), transformer_config(job)
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
    prepare_mixtures(part)
    fuse(part)
    if job.grid.sequence_parallel:
        cut_sequences(part)
    first_layer, tensor = sum(layers[:stage]), (tensor_rank, job.grid.tensor_parallel)
    if not is_filled:
        return part
    if job.model.weights is None:
        initialise(part, job.model, first_layer, *tensor)
    else:
        read_weights(part, Path(job.model.weights), first_layer, *tensor)
    return part
