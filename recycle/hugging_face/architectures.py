"""Translation between `config.json` of Hugging Face and `[model]` of a job.

Each architecture is a row of `ARCHITECTURES`. Keys that do not affect the computation are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from recycle.errors import JobError
from recycle.job.architecture import CHOSEN_BY_JOBS, FAMILIES, config_of, is_rotary
from recycle.job.sections import ModelSection, Positive

LLAMA_3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of megatron-core's scaling of rotary positions; only its factor can be chosen."""


@dataclass(frozen=True)
class HubArchitecture:
    """A Hugging Face architecture and its family in recycle.

    Attributes:
        config: fields of `[model.config]` that distinguish it from others of the kind.
        defaults: values of keys that a `config.json` may leave out.
        only: as `_SUPPORTED_VALUES`, further keys of this architecture.
    """

    name: str
    model_type: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether its layers are mixtures of experts."""
        return "num_moe_experts" in FAMILIES[self.kind]


ARCHITECTURES = (
    HubArchitecture(
        "LlamaForCausalLM", "llama", "llama", defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    ),
    HubArchitecture(
        "MistralForCausalLM",
        "mistral",
        "mistral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        only={"sliding_window": (None,)},
    ),
    HubArchitecture(
        "Qwen2ForCausalLM",
        "qwen2",
        "qwen",
        {"qk_layernorm": False, "add_qkv_bias": True},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    ),
    HubArchitecture(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen",
        {"qk_layernorm": True, "add_qkv_bias": False},
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    ),
    HubArchitecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "qwen_moe",
        {"qk_layernorm": True, "add_qkv_bias": False},
        {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "moe_intermediate_size": 768,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
        {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    HubArchitecture(
        "MixtralForCausalLM",
        "mixtral",
        "mixtral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        only={"sliding_window": (None,)},
    ),
)


class _Config(msgspec.Struct):
    """Keys of `config.json` that affect the computation; the defaults hold for all architectures."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    max_position_embeddings: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    num_experts: Positive | None = None
    num_local_experts: Positive | None = None
    num_experts_per_tok: Positive = 1
    norm_topk_prob: bool = True
    moe_intermediate_size: Positive | None = None
    router_aux_loss_coef: float = 0.001


_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "router_jitter_noise": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}
"""Key -> values that recycle's models compute; the first one is the default."""
_QUERIES_AND_KEYS = ("qk_layernorm", "add_qkv_bias")
_WRITTEN = (*_QUERIES_AND_KEYS, "kv_channels", "num_query_groups", "layernorm_epsilon")
"""Fields with keys in `config.json`, or implied by the architecture's name."""
_WRITTEN_OF_EXPERTS = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")


def architecture_of(config: Mapping[str, Any], where: str) -> HubArchitecture:
    """Return the architecture that `config.json` names, by `architectures` or, where that is null, by `model_type`.

    Raises:
        JobError: another architecture, several, or two that contradict each other; begins with `where`.
    """
    known = {architecture.name: architecture for architecture in ARCHITECTURES}
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    named, model_type = config.get("architectures"), config.get("model_type")
    if not named:
        if model_type is None:
            raise JobError(f"{where}: has neither architectures nor model_type; {', '.join(known)} are supported")
        if not isinstance(model_type, str) or model_type not in by_type:
            raise JobError(f"{where}: model_type: {model_type!r} is not supported; {', '.join(by_type)} are")
        return by_type[model_type]
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(name, str) or name not in known:
        raise JobError(f"{where}: architectures: {name!r} is not supported; {', '.join(known)} are")
    if model_type not in (None, known[name].model_type):
        raise JobError(f"{where}: model_type: {model_type!r} contradicts architectures, {name}; correct one of the two")
    return known[name]


def model_of(config: Mapping[str, Any], where: str) -> ModelSection:
    """Return the `[model]` section that computes what `config.json` describes.

    Raises:
        JobError: a key is missing, has another type, or states something unsupported; names the key.
    """
    architecture = architecture_of(config, where)
    for key, values in {**_SUPPORTED_VALUES, **architecture.only}.items():
        value = config.get(key, architecture.defaults.get(key, values[0]))
        if value not in values:
            raise JobError(f"{where}: {key}: {value!r} is not supported, only {json.dumps(values[0])} is")
    _require_full_attention(config, where)
    given = {key: value for key, value in config.items() if value is not None}
    try:
        read = msgspec.convert({**architecture.defaults, **given}, _Config)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {str(error).replace('`$.', '`')}") from None
    base, scaling = _rotary(read, architecture, where)
    fields: dict[str, Any] = {
        "num_query_groups": read.num_key_value_heads or read.num_attention_heads,
        "kv_channels": read.head_dim or read.hidden_size // read.num_attention_heads,
        "layernorm_epsilon": read.rms_norm_eps,
        **architecture.config,
    }
    if architecture.has_experts:
        experts = read.num_local_experts or read.num_experts  # transformers 5 writes the first, 4 of Qwen the second
        if experts is None or read.num_experts_per_tok > experts:
            raise JobError(f"{where}: num_experts_per_tok: {read.num_experts_per_tok} of num_local_experts {experts}")
        fields |= {
            "num_moe_experts": experts,
            "moe_router_topk": read.num_experts_per_tok,
            "moe_aux_loss_coeff": read.router_aux_loss_coef,
        }
        if architecture.kind == "qwen_moe" and not read.norm_topk_prob:
            fields["moe_router_pre_softmax"] = True
    return ModelSection(
        kind=architecture.kind,  # type: ignore[arg-type]
        config=fields,
        layers=read.num_hidden_layers,
        hidden=read.hidden_size,
        heads=read.num_attention_heads,
        sequence=read.max_position_embeddings,
        vocabulary=read.vocab_size,
        ffn=(read.moe_intermediate_size if architecture.has_experts else None) or read.intermediate_size,
        tied=read.tie_word_embeddings,
        rotary_base=base,
        rotary_scaling=scaling,
    )


def _require_full_attention(config: Mapping[str, Any], where: str) -> None:
    kinds = config.get("layer_types") or []
    other = next((kind for kind in kinds if kind != "full_attention"), None) if isinstance(kinds, list) else kinds
    if other is not None:
        raise JobError(f"{where}: layer_types: {other!r} is not supported, only 'full_attention' is")


def _rotary(config: _Config, architecture: HubArchitecture, where: str) -> tuple[float, float | None]:
    key = "rope_parameters" if config.rope_parameters is not None else "rope_scaling"
    stated = config.rope_parameters or config.rope_scaling or {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    base = stated.get("rope_theta", config.rope_theta)
    nested = next((name for name, value in stated.items() if isinstance(value, dict)), None)
    if nested is not None or kind not in ("default", "llama3"):
        what = f"{key}.{nested}" if nested is not None else f"{key}.rope_type: {kind!r}"
        raise JobError(f"{where}: {what} is not supported, only 'default' and 'llama3', equal for all layers, are")
    known: dict[str, Any] = {"partial_rotary_factor": 1.0, **(LLAMA_3_SCALING if kind == "llama3" else {})}
    for name, value in known.items():
        if stated.get(name, value) != value:
            raise JobError(f"{where}: {key}.{name}: {stated[name]!r} is not supported, only {value:g} is")
    factor = stated.get("factor") if kind == "llama3" else None
    for name, number in (("rope_theta", base), ("factor", 1.0 if factor is None else factor)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number < math.inf:
            raise JobError(f"{where}: {key}.{name}: {number!r} must be a number of at least 1")
    return float(base), None if factor is None else float(factor)


def hub_architecture(model: ModelSection, where: str) -> HubArchitecture:
    """Return the Hugging Face architecture that computes what `[model]` does.

    Raises:
        JobError: none does; begins with `where` and names the key.
    """
    if model.provider is not None:
        raise JobError(
            f"{where}: [model] provider: a model of {model.provider} cannot be exported, only recycle's own models"
        )
    same_kind = [architecture for architecture in ARCHITECTURES if architecture.kind == model.kind]
    if not same_kind or not is_rotary(model):
        known = ", ".join(dict.fromkeys(architecture.kind for architecture in ARCHITECTURES))
        raise JobError(f'{where}: [model] kind: "{model.kind}" cannot be exported; {known} can')
    fields, family = config_of(model), FAMILIES[model.kind]
    written = {*_WRITTEN, *CHOSEN_BY_JOBS}
    if same_kind[0].has_experts:
        written.update(_WRITTEN_OF_EXPERTS)
    if model.kind == "qwen_moe":
        written.add("moe_router_pre_softmax")
    for name, value in fields.items():
        if name not in written and family.get(name) != value:
            raise JobError(f"{where}: [model.config] {name}: no supported architecture of Hugging Face has {value!r}")
    for architecture in same_kind:
        if all(fields.get(name, False) == architecture.config.get(name, False) for name in _QUERIES_AND_KEYS):
            return architecture
    has = " and ".join(name for name in _QUERIES_AND_KEYS if fields.get(name)) or "neither"
    raise JobError(f"{where}: [model.config] qk_layernorm and add_qkv_bias: no architecture of this kind has {has}")


def config_json(model: ModelSection, architecture: HubArchitecture) -> dict[str, Any]:
    """Return the `config.json` of a model, as transformers 4 and 5 read it, without the type of its weights."""
    fields = config_of(model)
    ffn = model.ffn if model.ffn is not None else 4 * model.hidden
    scaling = None
    if model.rotary_scaling is not None:
        scaling = {"rope_type": "llama3", "factor": model.rotary_scaling, **LLAMA_3_SCALING}
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": fields.get("num_query_groups", model.heads),
        "head_dim": fields.get("kv_channels", model.hidden // model.heads),
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence,
        "rms_norm_eps": fields["layernorm_epsilon"],
        "tie_word_embeddings": model.tied,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if architecture.has_experts:
        config |= {
            "num_local_experts": fields["num_moe_experts"],
            "num_experts_per_tok": fields["moe_router_topk"],
            "router_aux_loss_coef": fields["moe_aux_loss_coeff"],
        }
    if architecture.kind == "mixtral":
        config["intermediate_size"] = fields.get("moe_ffn_hidden_size", ffn)
    if architecture.kind in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if architecture.kind == "qwen_moe":
        config |= {
            "num_experts": fields["num_moe_experts"],
            "moe_intermediate_size": fields.get("moe_ffn_hidden_size", ffn),
            "norm_topk_prob": not fields.get("moe_router_pre_softmax", False),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config
