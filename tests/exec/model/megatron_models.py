"""Models of megatron-core's own layers, as a user's provider builds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle import Job
from recycle.exec.model.gpt import CausalAttention

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}
UNFUSED = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
FIELDS: dict[str, dict[str, Any]] = {
    "mixture of experts": EXPERTS,
    "first layer dense": EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
    "expert bias": EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "sliding window": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "attention sinks": {"softmax_type": "learnable"},
    "multi-token prediction": {"mtp_num_layers": 1},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}
"""Fields of TransformerConfig, by what they switch on."""


def build(
    job: Job,
    first: int,
    last: int,
    *,
    pre_process: bool,
    post_process: bool,
    fields: dict[str, Any],
    attention: type | None = None,
) -> GPTModel:
    """Build a stage from megatron-core's local layers, with its attention unless another is given."""
    model = job.model
    defaults: dict[str, Any] = {"use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        **defaults | UNFUSED | fields,
    )
    has_experts = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * model.layers
    layers = []
    for layer in range(first, last):
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts if has_experts[layer] else None)
        if attention is not None:
            spec.submodules.self_attention.submodules.core_attention = attention
        layers.append(spec)
    predicts = post_process and config.mtp_num_layers
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm),
        vocab_size=model.vocabulary,
        max_sequence_length=model.sequence,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        mtp_block_spec=_prediction(config, layers[-1]) if predicts else None,
    )


def _prediction(config: TransformerConfig, layer: ModuleSpec) -> ModuleSpec:
    return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)


def builder(name: str) -> Callable[..., GPTModel]:
    """Return the provider of a row of `FIELDS`."""
    return partial(build, fields=FIELDS[name])


def dense_then_experts(job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> GPTModel:
    """Build a model with a dense first layer, experts, multi-token prediction and dropout, for worker processes."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # where megatron-core logs the losses of predictions
    fields = FIELDS["first layer dense"] | FIELDS["multi-token prediction"] | FIELDS["dropout"]
    return build(
        job, first, last, pre_process=pre_process, post_process=post_process, fields=fields, attention=CausalAttention
    )


def masked(job: Job) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Return data whose micro-batches have masks of unlike lengths."""
    shape = job.data.micro_batch_size, job.model.sequence + 1

    def batch(iteration: int, micro_batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * iteration + micro_batch)
        tokens = torch.randint(job.model.vocabulary, shape, generator=generator)
        mask = torch.arange(job.model.sequence).expand(shape[0], -1) < 2 + 3 * micro_batch
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}

    return batch
