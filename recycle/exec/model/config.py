"""megatron-core's configuration of a job's model, from `[model]` and `[model.config]`.

Accepts listed fields only: supported ones that keep results independent of the worker. megatron-core checks values.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any, get_type_hints

import msgspec
import torch
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import JobError, first_line
from recycle.job import Job
from recycle.job.architecture import config_of
from recycle.job.sections import AUTO
from recycle.megatron_versions import installed

ACTIVATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "fast_gelu": fast_gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Functions by name of `activation_func` in a job file."""

TRANSFORMER_ENGINE = "transformer_engine"
"""Value of `transformer_impl` that selects Transformer Engine's modules; "local" and "auto" select megatron-core's."""
_REASONS: Mapping[str, str] = {
    "[model] layers sets it": "num_layers",
    "[model] hidden sets it": "hidden_size",
    "[model] heads sets it": "num_attention_heads",
    "[model] ffn sets it": "ffn_hidden_size",
    "[model] dropout sets it": "hidden_dropout",
    "[model] attention_dropout sets it": "attention_dropout",
    "[shape] tensor_parallel sets it": "tensor_model_parallel_size",
    "[shape] sequence_parallel sets it": "sequence_parallel",
    "[shape] expert_parallel sets it": "expert_model_parallel_size",
    "[model] recompute sets it": """
        recompute_granularity recompute_method recompute_num_layers
        num_microbatches_with_partial_activation_checkpoints moe_layer_recompute
    """,
    "[train] precision sets it": "params_dtype pipeline_dtype bf16",
    "[shape], [model] split and the schedule set it": """
        pipeline_model_parallel_size virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        microbatch_group_size_per_vp_stage
    """,
    "its value is a function, which a job file cannot state; build the model with [model] provider": """
        init_method output_layer_init_method embedding_init_method timers grad_scale_func
        finalize_model_grads_func no_sync_func grad_sync_func param_sync_func quant_recipe
    """,
    "it needs kernels of Transformer Engine or Apex, which the executor does not use": """
        use_te_activation_func use_te_rng_tracker use_kitchen use_kitchen_attention kitchen_attention_backend
        masked_softmax_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope
        persist_layer_norm memory_efficient_layer_norm moe_permute_fusion layernorm_zero_centered_gamma
        moe_router_fusion moe_grouped_gemm moe_latent_size moe_use_legacy_grouped_gemm moe_enable_deepep
        cross_entropy_loss_fusion tp_comm_overlap use_fused_weighted_squared_relu batch_invariant_mode
        delay_wgrad_compute
    """,
    "its scales (amax) depend on the micro-batches that a worker ran, and are not part of its units' state": """
        fp8 fp4 fp8_param fp4_param
    """,
    "the executor does not have such a process group": """
        context_parallel_size hierarchical_context_parallel_sizes hybrid_context_parallel
        expert_tensor_parallel_size cp_comm_type overlap_moe_expert_parallel_comm moe_shared_expert_overlap
        moe_token_dispatcher_type moe_flex_dispatcher_backend distribute_saved_activations
        moe_router_topk_limited_devices
    """,
    "the executor keeps activations on the device": """
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        fine_grained_activation_offloading offload_modules
    """,
    "the executor does not capture CUDA graphs": """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope
    """,
    "recycle does not build such layers; build the model with [model] provider": """
        mtp_num_layers multi_latent_attention experimental_attention_variant is_hybrid_model
        heterogeneous_block_specs linear_attention_freq mrope_section attention_output_gate moe_layer_freq
    """,
    "it updates state between iterations that workers do not copy": "qk_clip log_max_attention_logit",
    "its random numbers depend on the worker that runs the micro-batch": """
        moe_input_jitter_eps moe_router_force_load_balancing
    """,
    "tokens are never dropped, so that results do not depend on the worker": """
        moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
    """,
    "attention is torch's scaled_dot_product_attention": """
        attention_backend flash_decode apply_query_key_layer_scaling attention_softmax_in_fp32
    """,
    '[train] precision is "fp32" or "bf16"': "fp16 enable_autocast autocast_dtype",
    "the experts of a token are not stored between runs": "moe_enable_routing_replay",
    "it adds to one buffer in the order of execution, during I": "gradient_accumulation_fusion",
    "the schedule decides when W of the output layer runs": "defer_embedding_wgrad_compute",
    "[train] per_token_loss sets it": "calculate_per_token_loss",
    "messages between stages have one shape": "variable_seq_lengths",
    "weights are drawn on the host": "init_model_with_meta_device use_cpu_initialization",
    "weights are drawn by name": "perform_initialization",
    "the run directory contains the resolved job": "config_logger_dir",
}
"""Reason -> fields that cannot be set."""
_UNSUPPORTED = {field: why for why, refused in _REASONS.items() for field in refused.split()}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SUPPORTED = _names(
    """
    activation_func activation_func_clamp_value add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm
    deterministic_mode disable_bf16_reduced_precision_matmul embedding_init_method_std fp32_residual_connection
    gated_linear_unit glu_linear_offset init_method_std kv_channels layernorm_epsilon no_rope_freq normalization
    num_query_groups qk_l2_norm qk_layernorm recompute_modules rotary_interleaved softmax_scale softmax_type
    transformer_impl window_attn_skip_freq window_size

    moe_apply_probs_on_input moe_aux_loss_coeff moe_ffn_hidden_size moe_per_layer_logging moe_router_bias_update_rate
    moe_router_dtype moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size moe_z_loss_coeff
    num_moe_experts
    """
)
"""Fields that change what recycle's stages compute."""
_WITHOUT_EFFECT = _names(
    """
    activation_func_fp8_input_store async_tensor_model_parallel_allreduce barrier_with_L1_time batch_p2p_comm
    batch_p2p_sync clone_scatter_output_in_embedding cpu_offloading_double_buffering cross_entropy_fusion_impl
    cuda_graph_retain_backward_graph cuda_graph_use_single_mempool cuda_graph_warmup_steps deallocate_pipeline_outputs
    disable_parameter_transpose_cache dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_topk
    dsa_indexer_use_sparse_loss ep_overlap_early_attn_memory_release first_last_layers_bf16 fp4_quantizer_factory
    fp4_recipe fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
    fp8_multi_head_attention fp8_quantizer_factory fp8_recipe fp8_wgrad hetereogenous_dist_checkpoint
    inference_fuse_tp_communication inference_rng_tracker inference_sampling_seed linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_head_dim
    mamba_num_groups mamba_num_heads mamba_state_dim max_seqlen_per_dp_cp_rank min_offloaded_tensor_size
    mlp_chunks_for_prefill moe_deepep_num_sms moe_extended_tp moe_hybridep_num_sms moe_router_padding_for_fp8
    moe_router_padding_for_quantization mtp_loss_scaling_factor mtp_standalone num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 overlap_p2p_comm overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend
    qk_clip_alpha qk_clip_threshold symmetric_ar_type test_mode tp_comm_atomic_ag tp_comm_atomic_rs
    tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    tp_only_amax_red use_inference_optimized_layers use_mamba_mem_eff_path use_ring_exchange_p2p wgrad_deferral_limit
    """
)
"""Fields of features that recycle's stages do not have; accepted and ignored."""
_VALUES: Mapping[str, Sequence[str]] = {
    "transformer_impl": (AUTO, "local", TRANSFORMER_ENGINE),
    "activation_func": tuple(ACTIVATIONS),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
}
"""Field -> supported values; "global_aux_loss" and "quantile_balancing" have state that workers do not copy."""


def transformer_config(job: Job, **changes: Any) -> TransformerConfig:
    """Configure megatron-core for the job's model; `changes` add or replace fields. Raises JobError."""
    model = job.model
    settings: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "ffn_hidden_size": model.ffn if model.ffn is not None else 4 * model.hidden,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout if model.attention_dropout is None else model.attention_dropout,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        # Weights are drawn in fp32; with bf16 the optimizer keeps them and the part gets rounded copies.
        "bf16": job.train.precision == "bf16",
        "tensor_model_parallel_size": job.grid.tensor_parallel,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
    }
    settings |= converted_fields(config_of(model))
    if "num_moe_experts" in settings:
        # A worker has all experts of its layers: each is split over the tensor ranks or whole on one of them.
        settings |= {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "allgather"}
        settings.setdefault("moe_ffn_hidden_size", settings["ffn_hidden_size"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core warns of settings that it then changes itself
            config = TransformerConfig(**(settings | changes))
    except (AssertionError, ValueError, TypeError, ZeroDivisionError) as error:
        raise JobError(f"[model.config]: megatron-core refuses these values: {first_line(error)}") from None
    prepare_for_engine(config)
    return config


def converted_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[model.config]`, converted for megatron-core. Raises JobError naming a bad field."""
    known, converted = _types(), dict[str, Any]()
    for name, value in config.items():
        key = f"[model.config] {name}"
        if name in _UNSUPPORTED:
            raise JobError(f"{key}: cannot be set: {_UNSUPPORTED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise JobError(f"{key}: megatron-core's TransformerConfig has no such field{hint}")
        if name not in _SUPPORTED | _WITHOUT_EFFECT:
            raise JobError(f"{key}: cannot be set: recycle was not tested with this field of {installed()}")
        values = _VALUES.get(name)
        if values is not None and not all(each in values for each in (value if isinstance(value, list) else [value])):
            raise JobError(f"{key}: {value!r} is none of {', '.join(values)}")
        if name == "activation_func":
            converted[name] = ACTIVATIONS[str(value)]
            continue
        if (name, value) == ("transformer_impl", AUTO):
            value = "local"
        try:
            converted[name] = msgspec.convert(value, known[name])
        except (msgspec.ValidationError, TypeError) as error:
            raise JobError(f"{key}: {error}") from None
        if name == "window_size" and not (converted[name][0] >= 0 == converted[name][1]):
            raise JobError(f"{key}: {value!r} is not [tokens before the query, 0]")
        if name.endswith("init_method_std") and not (isinstance(value, float | int) and 0 < value < math.inf):
            raise JobError(f"{key}: {value!r} must be a number above 0")
    return converted


@cache
def _types() -> dict[str, Any]:
    hints = get_type_hints(TransformerConfig)
    return {field.name: hints[field.name] for field in fields(TransformerConfig) if field.init and field.name[0] != "_"}


def prepare_for_engine(config: TransformerConfig) -> None:
    """Make linear layers delay their weight gradients, if the configuration selects Transformer Engine.

    Raises JobError if Transformer Engine is not installed, or there are several tensor ranks.
    """
    if config.transformer_impl != TRANSFORMER_ENGINE:
        return
    key = f'[model.config] transformer_impl = "{TRANSFORMER_ENGINE}"'
    if config.tensor_model_parallel_size > 1:
        raise JobError(f'{key}: cannot be used with [shape] tensor_parallel > 1; write "local"')
    if not HAVE_TE:
        raise JobError(f'{key}: Transformer Engine is not installed: pip install "transformer-engine[pytorch]"')
    # Set after megatron-core's checks, which allow this only together with expert overlap.
    config.delay_wgrad_compute = True
