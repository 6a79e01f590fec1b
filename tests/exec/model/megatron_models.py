"""Models of megatron-core's own layers, as a user's provider builds them."""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from recycle import Job
from recycle.exec.data.loading import load_batches
from recycle.exec.model.attention import CausalAttention
from recycle.exec.model.loss import masked_sum
from recycle.exec.model.providers import Providers
from recycle.exec.model.weights import initialise

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
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale_all_dim": 1.0,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
}
FIELDS = {
    "mixture of experts": EXPERTS,
    "first layer dense": EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
    "expert bias": EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "sliding window": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "attention sinks": {"softmax_type": "learnable"},
    "multi-token prediction": {"mtp_num_layers": 1},
    "multi-latent attention": LATENT,
    "multi-latent attention, plain positions": LATENT
    | {"rope_type": "rope", "q_lora_rank": None, "qk_layernorm": False},
    "documents": {},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}
"""Fields of TransformerConfig, by what they switch on."""
PACKED = {"provider": f"{__name__}:packed", "reset_attention": True}
"""Keys of `[data]` for rows of several documents."""


def build(
    job: Job,
    first: int,
    last: int,
    *,
    pre_process: bool,
    post_process: bool,
    fields,
) -> GPTModel:
    """Build a stage from megatron-core's local layers; its core attention cannot be built for latent attention."""
    model, is_latent = job.model, "multi_latent_attention" in fields
    defaults = {"use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        **defaults | UNFUSED | fields,
    )
    has_experts = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * model.layers
    layers = []
    for layer in range(first, last):
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if has_experts[layer] else None,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=is_latent,
            normalization=config.normalization,
        )
        if is_latent:
            spec.submodules.self_attention.submodules.core_attention = CausalAttention
        layers.append(spec)
    predicts = post_process and config.mtp_num_layers
    module = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm),
        vocab_size=model.vocabulary,
        max_sequence_length=model.sequence,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        mtp_block_spec=_prediction(config, layers[-1]) if predicts else None,
    )
    initialise(module, model, first)  # the embedding is on the last stage, too, for predictions
    return module


def _prediction(config: TransformerConfig, layer: ModuleSpec) -> ModuleSpec:
    return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)


def own_gradients(whole: torch.nn.Module, stages, job: Job) -> tuple[float, dict[str, torch.Tensor]]:
    """Give a whole model the weights of stages, and run forward and backward of its first micro-batch."""
    weights = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
    parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    batch = load_batches(job, Providers.from_job(job).data).batch(0, 0)
    losses = whole(
        input_ids=batch["tokens"],
        position_ids=torch.arange(job.model.sequence)[None],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
    )
    total, count = masked_sum(losses, batch)
    loss = total / count
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in parameters.items()}


def builder(name: str) -> Callable[..., GPTModel]:
    """Return the provider of a row of `FIELDS`."""
    return partial(build, fields=FIELDS[name])


def latent_with_experts(job: Job, first: int, last: int, pre_process: bool, post_process: bool) -> GPTModel:
    """Build a model of latent attention, a dense first layer, experts, multi-token prediction and dropout."""
    fields = LATENT | FIELDS["first layer dense"] | FIELDS["multi-token prediction"] | FIELDS["dropout"]
    return build(job, first, last, pre_process=pre_process, post_process=post_process, fields=fields)


def packed(job: Job) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Return data of two documents in each row, of other lengths in each micro-batch, with their masks."""
    shape, length = (job.data.micro_batch_size, job.model.sequence + 1), job.model.sequence

    def batch(iteration, micro_batch):
        generator = torch.Generator().manual_seed(10 * iteration + micro_batch)
        tokens = torch.randint(job.model.vocabulary, shape, generator=generator)
        documents = (torch.arange(length) >= 3 + 2 * micro_batch).long()
        attended = (documents[:, None] == documents[None]).tril()
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": (torch.arange(length) != 2 + 2 * micro_batch).expand(shape[0], -1),
            "attention_mask": ~attended.expand(shape[0], 1, -1, -1),
        }

    return batch


def masked(job: Job) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Return data whose micro-batches have masks of unlike lengths."""
    shape = job.data.micro_batch_size, job.model.sequence + 1

    def batch(iteration, micro_batch):
        generator = torch.Generator().manual_seed(10 * iteration + micro_batch)
        tokens = torch.randint(job.model.vocabulary, shape, generator=generator)
        mask = torch.arange(job.model.sequence).expand(shape[0], -1) < 2 + 3 * micro_batch
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}

    return batch
