"""config.json and [model], each from the other."""

import pytest

from recycle import JobError
from recycle.hugging_face.architectures import ARCHITECTURES, config_json, hub_architecture, model_of
from recycle.job.sections import ModelSection
from tests.hugging_face.written import LLAMA

SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODEL_TYPES = {architecture.name: architecture.model_type for architecture in ARCHITECTURES}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}


def config(name="LlamaForCausalLM", **changes):
    return LLAMA | {"architectures": [name], "model_type": MODEL_TYPES[name], "sliding_window": None} | changes


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}, {"architectures": []}])
@pytest.mark.parametrize("name", [architecture.name for architecture in ARCHITECTURES])
def test_model_type_replaces_missing_architectures(name, architectures):
    left_out = {key: value for key, value in config(name).items() if key != "architectures"}
    assert model_of(left_out | architectures, "c") == model_of(config(name), "c")
    with pytest.raises(JobError, match="c: model_type: 'gemma2' is not supported"):
        model_of(left_out | architectures | {"model_type": "gemma2"}, "c")


def test_configs_of_transformers_4_and_5_are_equal():
    older = model_of(config(rope_theta=5e5, rope_scaling=SCALED, head_dim=16, torch_dtype="bfloat16"), "c")
    newer = model_of(config(rope_parameters=SCALED | {"rope_theta": 5e5}, head_dim=16, dtype="bfloat16"), "c")
    assert older == newer
    assert (older.rotary_base, older.rotary_scaling) == (5e5, 32.0)
    assert older.config == {"num_query_groups": 1, "kv_channels": 16, "layernorm_epsilon": 1e-5}


def test_missing_keys_have_the_defaults_of_the_architecture():
    left_out = ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings")
    short = {key: LLAMA[key] for key in LLAMA if key not in left_out}
    short |= {"num_attention_heads": 32, "hidden_size": 64, "sliding_window": None}
    models = {
        architecture.name: model_of(
            short | {"architectures": [architecture.name], "model_type": architecture.model_type}, "c"
        )
        for architecture in ARCHITECTURES
    }
    figures = {
        name: (model.config["num_query_groups"], model.config["kv_channels"], model.config["layernorm_epsilon"])
        for name, model in models.items()
    }
    assert figures == {
        "LlamaForCausalLM": (32, 2, 1e-6),
        "MistralForCausalLM": (8, 2, 1e-6),
        "Qwen2ForCausalLM": (32, 2, 1e-6),
        "Qwen3ForCausalLM": (32, 128, 1e-6),
        "Qwen3MoeForCausalLM": (4, 2, 1e-6),
        "MixtralForCausalLM": (8, 2, 1e-5),
        "Gemma3ForCausalLM": (4, 256, 1e-6),
    }
    assert [model.rotary_base for model in models.values()] == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e6]
    assert [model.sequence for model in models.values()] == [2048, 131072, 32768, 32768, 32768, 131072, 131072]


@pytest.mark.parametrize(
    "given",
    [
        config(rope_theta=5e5, rope_scaling=SCALED),
        config("Qwen2ForCausalLM", tie_word_embeddings=True, use_sliding_window=False, sliding_window=4096),
        config("Qwen3ForCausalLM", head_dim=16, layer_types=["full_attention"] * 2),
        config("MixtralForCausalLM", **EXPERTS),
        config("MistralForCausalLM", sliding_window=None),
        config("MistralForCausalLM", sliding_window=16),
        config("Gemma3ForCausalLM", sliding_window=16, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        config(
            "Gemma3ForCausalLM",
            sliding_window=16,
            layer_types=["full_attention", "sliding_attention"],
            query_pre_attn_scalar=24,
        ),
        config("Qwen2ForCausalLM", rope_scaling={"type": "yarn", "factor": 4.0, "beta_fast": 16}),
        config("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20),
        config("Qwen3MoeForCausalLM", **EXPERTS, moe_intermediate_size=20, norm_topk_prob=True),
    ],
    ids=lambda given: given["architectures"][0],
)
def test_config_of_a_model_reads_back_equal(given):
    model = model_of(given, "c")
    written = config_json(model, hub_architecture(model, "checkpoint"))
    assert written["architectures"] == given["architectures"]
    assert model_of(written, "c") == model


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"c: architectures: 'GemmaForCausalLM' is not supported; LlamaFor"),
        ({"architectures": None}, r"c: has neither architectures nor model_type"),
        ({"hidden_size": None}, r"c: Object missing required field `hidden_size`"),
        ({"num_hidden_layers": "2"}, r"c: Expected `int`, got `str` - at `num_hidden_layers`"),
        ({"hidden_act": "gelu"}, r"c: hidden_act: 'gelu' is not supported, only .silu. is"),
        ({"attention_bias": True}, r"c: attention_bias: True is not supported, only false is"),
        ({"quantization_config": {"bits": 4}}, r"c: quantization_config: .* is not supported, only null is"),
        ({"rms_norm_eps": float("nan")}, r"c: Expected `float` > 0.* - at `rms_norm_eps`"),
        ({"rope_theta": float("inf")}, r"c: rope_scaling.rope_theta: inf must be a number of at least 1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"c: layer_types: 'sliding_attention' is not"),
        ({"layer_types": ["full_attention"]}, r"c: layer_types: 1 of num_hidden_layers 2"),
        ({"layer_types": ["chunked_attention"] * 2}, r"c: Invalid enum value 'chunked_attention' - at `layer_types"),
        ({"partial_rotary_factor": 0.5}, r"c: partial_rotary_factor: 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, r"c: rope_scaling.rope_type: 'dynamic' is not supp"),
        ({"rope_scaling": {"type": "yarn"}}, r"c: rope_scaling: Object missing required field `factor`"),
        ({"rope_parameters": {"full_attention": {}}}, r"c: rope_parameters.full_attention is not supported"),
        ({"rope_scaling": SCALED | {"low_freq_factor": 0}}, r"c: rope_scaling: Expected `float` > 0.* `low_freq"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            r"c: final_logit_softcapping: 30.0 is not supported, only null is",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            r"c: num_experts_per_tok: 9 of num_local_experts 8",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, r"c: mlp_only_layers: \[0\] is not"),
    ],
)
def test_unsupported_config_is_refused_by_key(changes, complaint):
    given = LLAMA | {"model_type": None} | changes
    given = {key: value for key, value in given.items() if value is not None or key == "architectures"}
    with pytest.raises(JobError, match=complaint):
        model_of(given, "c")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (
            ModelSection(),
            r'x: \[model\] kind: "gpt" cannot be exported; llama, mistral, qwen, qwen_moe, mixtral, gemma can',
        ),
        (ModelSection(kind="llama", provider="a:b"), r"x: \[model\] provider: a model of a:b cannot be exported"),
        (ModelSection(kind="llama", config={"normalization": "LayerNorm"}), r"\[model.config\] normalization: "),
        (ModelSection(kind="llama", config={"num_moe_experts": 4}), r"\[model.config\] num_moe_experts: "),
        (ModelSection(kind="llama", config={"qk_layernorm": True}), r"no architecture of this kind has qk_layernorm"),
        (ModelSection(kind="qwen", config={"qk_layernorm": False}), r"no architecture of this kind has neither"),
    ],
)
def test_model_without_architecture_is_refused_by_key(model, complaint):
    with pytest.raises(JobError, match=complaint):
        hub_architecture(model, "x")
