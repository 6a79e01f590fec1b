"""Compares the model arguments in a Megatron checkpoint with the model of a job.

Models of equal shapes can compute different results: 4 heads with 2 query groups have the matrices of 8 heads with 4.
Megatron-LM keeps its arguments as an `argparse.Namespace` in a pickle (`stored_common_state`); recycle's exports have a
dict under `EXPORTED`. No code of the pickle runs: classes and functions in it are replaced by an inert stand-in, and
only plain values of the arguments are read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle.errors import JobError
from recycle.exec.model.config import ACTIVATIONS
from recycle.job.architecture import is_rotary
from recycle.job.sections import ModelSection
from recycle.megatron_versions import stored_common_state

EXPORTED = "model_arguments"
"""Key of the common state in exported checkpoints."""
ROWS_DIVISIBLE_BY = 128
"""Default of Megatron-LM's `make_vocab_size_divisible_by`."""
_JOB_KEYS = {
    "num_attention_heads": "[model] heads",
    "ffn_hidden_size": "[model] ffn",
    "norm_epsilon": "[model.config] layernorm_epsilon",
    "activation": "[model.config] activation_func",
    "swiglu": "[model.config] gated_linear_unit",
    "untie_embeddings_and_output_weights": "[model] tied",
    "position_embedding_type": "[model] kind",
    "rotary_base": "[model] rotary_base",
    "use_rope_scaling": "[model] rotary_scaling",
    "rope_scaling_factor": "[model] rotary_scaling",
    "num_experts": "[model.config] num_moe_experts",
    "rotary_percent": "[model] rotary_percent",
    "apply_layernorm_1p": None,
}
"""Argument -> key of a job; None for a fixed value. Other arguments are fields of `[model.config]`."""
_RARE = (
    *(
        "rotary_interleaved",
        "multi_latent_attention",
        "mtp_num_layers",
        "window_size",
        "window_attn_skip_freq",
        "softmax_type",
        "softmax_scale",
        "qk_l2_norm",
    ),
    *("attention_output_gate", "apply_residual_connection_post_layernorm", "rotary_seq_len_interpolation_factor"),
    *("glu_linear_offset", "activation_func_clamp_value", "no_rope_freq", "moe_router_pre_softmax"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_score_function"),
)
"""Arguments that few models set: compared if a checkpoint has them, otherwise not listed."""
_NOT_LISTED = (
    *("ffn_hidden_size", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization"),
    *("untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size", "position_embedding_type"),
    "use_rope_scaling",
)
"""Arguments that tensor names and shapes determine, or that repeat another argument."""


class _InertObject:
    """Stand-in for an object of a pickle: keeps its state, runs no code."""

    def __init__(self, *_: Any) -> None: ...

    def __new__(cls, *_: Any) -> _InertObject:
        return super().__new__(cls)


def common_state(folder: Path) -> dict[str, Any]:
    """Return an iteration's non-tensor state; empty if it cannot be read without running code."""
    try:
        content = stored_common_state(folder)
        if content is None:
            return {}
        named = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        stand_ins: list[Any] = [(type("Inert", (_InertObject,), {}), name) for name in named]
        with torch.serialization.safe_globals(stand_ins):
            common = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # a damaged pickle can raise any exception
        return {}
    common = common[0] if isinstance(common, list) and common else common
    return common if isinstance(common, dict) else {}


def stated_arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a checkpoint's common state under unique names; empty if it has none."""
    arguments = common.get(EXPORTED) or getattr(common.get("args"), "__dict__", {})
    stated = {
        name: value
        for name, value in (arguments.items() if isinstance(arguments, Mapping) else ())
        if value is None or isinstance(value, bool | int | float | str | list | tuple)
    }
    if "norm_epsilon" not in stated and "layernorm_epsilon" in stated:
        stated["norm_epsilon"] = stated["layernorm_epsilon"]
    if stated.get("group_query_attention") is False or stated.get("num_query_groups", 0) is None:
        stated["num_query_groups"] = stated.get("num_attention_heads")
    if "swiglu" in stated and "activation" not in stated:
        names = {"swiglu": "silu", "squared_relu": "squared_relu", "quick_geglu": "quick_gelu"}
        stated["activation"] = next((name for key, name in names.items() if stated.get(key)), "gelu")
        stated["swiglu"] = bool(stated["swiglu"] or stated.get("quick_geglu"))
    if stated.get("use_rope_scaling") is False:
        stated["rope_scaling_factor"] = None
    return stated


def model_arguments(model: ModelSection, config: TransformerConfig) -> dict[str, Any]:
    activations = {function: name for name, function in ACTIVATIONS.items()}
    arguments: dict[str, Any] = {
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "ffn_hidden_size": config.ffn_hidden_size,
        "normalization": config.normalization,
        "norm_epsilon": config.layernorm_epsilon,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "activation": activations.get(config.activation_func),
        "swiglu": config.gated_linear_unit,
        "add_bias_linear": config.add_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "untie_embeddings_and_output_weights": not model.tied,
        "position_embedding_type": "rope" if is_rotary(model) else "learned_absolute",
    }
    if is_rotary(model):
        factor = getattr(model.rotary_scaling, "factor", model.rotary_scaling)
        arguments |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
        arguments |= {"use_rope_scaling": factor is not None, "rope_scaling_factor": factor}
    if config.num_moe_experts is not None:
        arguments |= {"num_experts": config.num_moe_experts, "moe_router_topk": config.moe_router_topk}
        arguments["moe_ffn_hidden_size"] = config.moe_ffn_hidden_size
    return arguments | {name: getattr(config, name, None) for name in _RARE}


def require_arguments(
    where: Path, stated: Mapping[str, Any], model: ModelSection, config: TransformerConfig
) -> tuple[str, ...]:
    """Compare the arguments in a checkpoint with the arguments of a job's model.

    Returns:
        "key = value" of the job's model for arguments that neither the checkpoint nor its tensors determine.

    Raises:
        JobError: an argument differs; names the argument and the key of the job.
    """
    unstated = []
    for name, job_value in model_arguments(model, config).items():
        key = _JOB_KEYS.get(name, f"[model.config] {name}")
        if name not in stated or (stated[name] is None and job_value is not None and name not in _RARE):
            if key is not None and name not in (*_RARE, *_NOT_LISTED):
                unstated.append(f"{key.partition('] ')[2]} = {job_value}")
            continue
        stored_value = stated[name]
        if stored_value != job_value and (stored_value or job_value):  # 0, False and None all mean absent
            change = "no job can state that" if key is None else f"correct {key} of the job"
            raise JobError(
                f"{where}: its model has {name} = {stored_value!r}, and the job's has {job_value!r}; {change}"
            )
    return tuple(unstated)


def padding_multiple(stated: Mapping[str, Any], tensor_parallel: int) -> int:
    """Return the number that divides the rows of a padded vocabulary, by Megatron-LM's rule.

    Args:
        tensor_parallel: number of parts of the embedding, for a checkpoint that does not state it.
    """
    divisor, size = stated.get("make_vocab_size_divisible_by"), stated.get("tensor_model_parallel_size")
    return (divisor if isinstance(divisor, int) and divisor > 0 else ROWS_DIVISIBLE_BY) * (
        size if isinstance(size, int) and size > 0 else tensor_parallel
    )
