"""Translation between `config.json` of Hugging Face and `[model]` of a job.

Each architecture is a row of `ARCHITECTURES`. Keys that do not affect the computation are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from recycle.errors import JobError
from recycle.job.architecture import CHOSEN_BY_JOBS, FAMILIES, config_of, is_rotary
from recycle.job.sections import ModelSection, Positive, RotaryScaling

_SLIDING, _FULL = "sliding_attention", "full_attention"
_SCALING_KEYS: Mapping[str, Sequence[str]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_position_embeddings"),
}
"""`rope_type` -> its keys besides `factor`."""


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


_QWEN_3 = {"qk_layernorm": True, "add_qkv_bias": False}
ARCHITECTURES = (
    HubArchitecture("LlamaForCausalLM", "llama", "llama", defaults={"max_position_embeddings": 2048}),
    HubArchitecture(
        "MistralForCausalLM",
        "mistral",
        "mistral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    HubArchitecture(
        "Qwen2ForCausalLM", "qwen2", "qwen", {"qk_layernorm": False, "add_qkv_bias": True}, {"num_key_value_heads": 32}
    ),
    HubArchitecture("Qwen3ForCausalLM", "qwen3", "qwen", _QWEN_3, {"num_key_value_heads": 32, "head_dim": 128}),
    HubArchitecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "qwen_moe",
        _QWEN_3,
        {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "moe_intermediate_size": 768,
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
            "sliding_window": None,
        },
    ),
    HubArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "gemma",
        _QWEN_3,
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
        {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
    ),
)


class _Config(msgspec.Struct):
    """Keys of `config.json` that affect the computation; `HubArchitecture.defaults` come before these defaults."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-6
    max_position_embeddings: Positive = 32768
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
    sliding_window: Positive | None = None
    sliding_window_pattern: Positive = 2**31 - 1
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    rope_local_base_freq: float | None = None
    query_pre_attn_scalar: Annotated[float, msgspec.Meta(gt=0)] | None = None
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
_WRITTEN = (*_QUERIES_AND_KEYS, "kv_channels", "num_query_groups", "layernorm_epsilon", "window_size")
"""Fields with keys in `config.json`, or implied by the architecture's name."""
_WRITTEN_OF_GEMMA = ("window_attn_skip_freq", "softmax_scale")
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
    given = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    try:
        read = msgspec.convert({**architecture.defaults, **given}, _Config)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {str(error).replace('`$.', '`')}") from None
    base, scaling, local_base = _rotary(read, architecture, where)
    fields: dict[str, Any] = {
        "num_query_groups": read.num_key_value_heads or read.num_attention_heads,
        "kv_channels": read.head_dim or read.hidden_size // read.num_attention_heads,
        "layernorm_epsilon": read.rms_norm_eps,
        **architecture.config,
        **_windows(read, architecture, where),
    }
    if read.query_pre_attn_scalar is not None and architecture.kind == "gemma":
        fields["softmax_scale"] = read.query_pre_attn_scalar**-0.5
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
        local_rotary_base=local_base,
    )


def _windows(config: _Config, architecture: HubArchitecture, where: str) -> dict[str, Any]:
    kinds, is_gemma = config.layer_types, architecture.kind == "gemma"
    window = config.sliding_window if "sliding_window" in architecture.defaults else None
    if kinds is not None and len(kinds) != config.num_hidden_layers:
        raise JobError(f"{where}: layer_types: {len(kinds)} of num_hidden_layers {config.num_hidden_layers}")
    if kinds is not None and _SLIDING in kinds and (window is None or (_FULL in kinds and not is_gemma)):
        raise JobError(f"{where}: layer_types: '{_SLIDING}' is not supported, only '{_FULL}' is")
    if kinds is None:
        every: int | list[int] = min(config.sliding_window_pattern, config.num_hidden_layers + 1)
    else:
        every = _in_short([int(kind == _SLIDING) for kind in kinds])
    if is_gemma:
        return {"window_size": [(window or 1) - 1, 0], "window_attn_skip_freq": 1 if window is None else every}
    return {} if window is None or every == 1 else {"window_size": [window - 1, 0]}


def _in_short(windows: list[int]) -> int | list[int]:
    every = (*windows, 0).index(0) + 1
    return every if windows == [int(place % every != 0) for place in range(1, len(windows) + 1)] else windows


def _rotary(
    config: _Config, architecture: HubArchitecture, where: str
) -> tuple[float, float | RotaryScaling | None, float | None]:
    key = "rope_parameters" if config.rope_parameters is not None else "rope_scaling"
    stated, local_base = config.rope_parameters or config.rope_scaling or {}, config.rope_local_base_freq
    both = [part for part in (stated.get(_FULL), stated.get(_SLIDING)) if isinstance(part, dict)]
    if architecture.kind == "gemma" and len(both) == 2:
        (stated, local), key = both, f"{key}.{_FULL}"
        local_base = local.get("rope_theta", local_base)
        if local.get("rope_type", "default") != "default":
            raise JobError(f"{where}: rope_parameters.{_SLIDING}.rope_type: {local['rope_type']!r} is not supported")
    kind = stated.get("rope_type", stated.get("type", "default"))
    base = stated.get("rope_theta", config.rope_theta)
    nested = next((name for name, value in stated.items() if isinstance(value, dict)), None)
    if nested is not None or kind not in ("default", *_SCALING_KEYS):
        what = f"{key}.{nested}" if nested is not None else f"{key}.rope_type: {kind!r}"
        supported = ", ".join(("default", *_SCALING_KEYS))
        raise JobError(f"{where}: {what} is not supported, only {supported}, equal for all layers, are")
    if (share := stated.get("partial_rotary_factor", 1.0)) != 1.0:
        raise JobError(f"{where}: {key}.partial_rotary_factor: {share!r} is not supported, only 1 is")
    for name, number in (("rope_theta", base), ("rope_local_base_freq", 1.0 if local_base is None else local_base)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number < math.inf:
            raise JobError(f"{where}: {key}.{name}: {number!r} must be a number of at least 1")
    scaling = None if kind == "default" else _scaling(kind, stated, config, f"{where}: {key}")
    return float(base), scaling, None if local_base is None or architecture.kind != "gemma" else float(local_base)


class _Scaling(RotaryScaling, frozen=True, forbid_unknown_fields=False):
    mscale: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    mscale_all_dim: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def _scaling(kind: str, stated: Mapping[str, Any], config: _Config, where: str) -> float | RotaryScaling:
    given = {name: value for name, value in stated.items() if value is not None} | {"rope_type": kind}
    if kind == "yarn":
        given = {"original_max_position_embeddings": config.max_position_embeddings} | given
    try:
        read = msgspec.convert(given, _Scaling)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {str(error).replace('`$.', '`')}") from None
    kept = {name: getattr(read, name) for name in ("factor", "rope_type", *_SCALING_KEYS[kind])}
    if not read.factor < math.inf:
        raise JobError(f"{where}.factor: {read.factor!r} must be a number of at least 1")
    if kind == "yarn" and read.mscale and read.mscale_all_dim and read.attention_factor is None:
        above, below = (0.1 * scale * math.log(read.factor) + 1 for scale in (read.mscale, read.mscale_all_dim))
        kept["attention_factor"] = above / below
    scaling = RotaryScaling(**kept)
    return read.factor if scaling == RotaryScaling(read.factor) else scaling


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
    if model.kind == "gemma":
        written.update(_WRITTEN_OF_GEMMA)
    if "sliding_window" not in same_kind[0].defaults:
        written.discard("window_size")
    for key in ("rotary_percent", *(("local_rotary_base",) if model.kind != "gemma" else ())):
        if getattr(model, key) != getattr(ModelSection(), key):
            raise JobError(f"{where}: [model] {key}: no supported architecture of Hugging Face has it")
    for name, value in fields.items():
        if name not in written and family.get(name) != value:
            raise JobError(f"{where}: [model.config] {name}: no supported architecture of Hugging Face has {value!r}")
    for architecture in same_kind:
        if all(fields.get(name, False) == architecture.config.get(name, False) for name in _QUERIES_AND_KEYS):
            return architecture
    has = " and ".join(name for name in _QUERIES_AND_KEYS if fields.get(name)) or "neither"
    raise JobError(f"{where}: [model.config] qk_layernorm and add_qkv_bias: no architecture of this kind has {has}")


def _written_scaling(scaling: float | RotaryScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    scaling = scaling if isinstance(scaling, RotaryScaling) else RotaryScaling(scaling)
    values = {name: getattr(scaling, name) for name in ("rope_type", "factor", *_SCALING_KEYS[scaling.rope_type])}
    return {name: value for name, value in values.items() if value is not None}


def config_json(model: ModelSection, architecture: HubArchitecture) -> dict[str, Any]:
    """Return the `config.json` of a model, as transformers 4 and 5 read it, without the type of its weights."""
    fields = config_of(model)
    ffn = model.ffn if model.ffn is not None else 4 * model.hidden
    scaling, window = _written_scaling(model.rotary_scaling), fields.get("window_size")
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
    if "sliding_window" in architecture.defaults:
        config["sliding_window"] = None if window is None else window[0] + 1
    if architecture.kind == "gemma":
        del config["hidden_act"]
        skip = fields["window_attn_skip_freq"]
        skips = skip if isinstance(skip, list) else [layer % skip for layer in range(1, model.layers + 1)]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(fields.get("softmax_scale", config["head_dim"] ** -0.5) ** -2),
            "rope_local_base_freq": model.local_rotary_base or model.rotary_base,
            "layer_types": [_SLIDING if is_windowed else _FULL for is_windowed in skips],
        }
    if architecture.kind == "qwen_moe":
        config |= {
            "num_experts": fields["num_moe_experts"],
            "moe_intermediate_size": fields.get("moe_ffn_hidden_size", ffn),
            "norm_topk_prob": not fields.get("moe_router_pre_softmax", False),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config
