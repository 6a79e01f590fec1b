"""Llama, Qwen and Mixtral: forwards and gradients of a plain reference, and the same bits however they are computed."""

from collections import Counter

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle import Job, JobError
from recycle.exec.model import config as model_config, gpt
from recycle.exec.model.config import transformer_config
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.state.rules import ROW_BLOCKS
from recycle.job.sections import RotaryScaling
from tests.exec.drive import build_pipeline, differing, gradients_by_name, run_deferred, run_pipelines, small_job
from tests.exec.model.test_other_layers import DelayedLinear

pytestmark = pytest.mark.slow

SMALL = {"hidden": 32, "heads": 4, "sequence": 16, "ffn": 48, "layers": 4}
MODELS = {
    "llama": {"kind": "llama", "config": {"num_query_groups": 2}},
    "llama 3.1": {"kind": "llama", "rotary_base": 5e5, "rotary_scaling": 8.0, "config": {"num_query_groups": 1}},
    "qwen 3": {"kind": "qwen", "tied": True, "rotary_base": 1e6, "config": {"num_query_groups": 2, "kv_channels": 16}},
    "qwen 2": {"kind": "qwen", "config": {"qk_layernorm": False, "add_qkv_bias": True}},
    "mixtral": {"kind": "mixtral", "config": {"num_moe_experts": 4, "num_query_groups": 2}},
    "qwen 3 moe": {
        "kind": "qwen_moe",
        "config": {"num_moe_experts": 4, "moe_router_topk": 3, "num_query_groups": 2, "kv_channels": 16},
    },
    "gemma": {
        "kind": "gemma",
        "tied": True,
        "rotary_base": 1e6,
        "local_rotary_base": 1e4,
        "rotary_scaling": RotaryScaling(8.0, "linear"),
        "config": {"window_size": [3, 0], "window_attn_skip_freq": 2, "num_query_groups": 2, "kv_channels": 16},
    },
    "windows and sinks": {
        "kind": "llama",
        "local_rotary_base": 1e3,
        "rotary_percent": 0.5,
        "rotary_scaling": RotaryScaling(4.0, "yarn", original_max_position_embeddings=8),
        "config": {"window_size": [3, 0], "window_attn_skip_freq": 2, "softmax_type": "learnable", "no_rope_freq": 4},
    },
    "expert bias": {
        "kind": "mixtral",
        "config": {
            "num_moe_experts": 4,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.01,
            "moe_shared_expert_intermediate_size": 16,
        },
    },
}


def family_job(model, **sections) -> Job:
    return small_job(model=SMALL | model, **sections)


def sharpened(stages: list[MegatronStage]):
    """Weights that tell: without norms at 1, biases at 0 and scores that are all alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for stage in stages:
            for name, parameter in sorted(stage.parameters.items()):
                scale = 10.0 if parameter.dim() > 1 else 1.0
                noise = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
                parameter.mul_(scale).add_(noise if parameter.dim() == 1 or "router" in name else 0.0)


def test_auxiliary_loss_follows_the_paper():
    """Switch Transformers, arXiv 2101.03961, equations 4 to 6, with k choices per token: it moves the router alone."""
    coefficient, results = 0.5, []
    for value in (0.0, coefficient):
        config = {"num_moe_experts": 4, "moe_aux_loss_coeff": value}
        tested_job = family_job({"kind": "mixtral", "layers": 1, "config": config}, ranks=1, micro_batches=1)
        stages = build_pipeline(tested_job)
        inputs = []
        stages[0]._part.module.decoder.layers[0].mlp.router.register_forward_pre_hook(
            lambda _, given, inputs=inputs: inputs.append(given[0].detach())
        )
        loss = run_pipelines([stages], 0, 1)
        results.append((loss, gradients_by_name(stages), inputs[0]))
    assert results[0][0] == results[1][0]  # not part of the loss that is reported
    name = "decoder.layers.0.mlp.router.weight"
    router = build_pipeline(tested_job)[0].parameters[name].detach().clone().requires_grad_()
    probabilities = (results[0][2].flatten(0, 1) @ router.T).softmax(-1)
    counts = probabilities.topk(2, -1).indices.flatten().bincount(minlength=4)
    share, probability = counts / counts.sum(), probabilities.mean(0)
    (coefficient * 4 * (share * probability).sum()).backward()
    torch.testing.assert_close(results[1][1][name] - results[0][1][name], router.grad, rtol=1e-3, atol=1e-7)


def test_expert_bias_follows_the_loads_of_all_micro_batches():
    """megatron-core's rule: rate times the sign of (mean load - load), after each iteration."""
    stages, loads = build_pipeline(family_job(MODELS["expert bias"], ranks=1)), []
    router = stages[0]._part.module.decoder.layers[0].mlp.router
    router.register_forward_hook(lambda _, given, output: loads.append(output[1].sum(0)))
    expected = torch.zeros(4)
    for step in range(3):
        loads.clear()
        run_pipelines([stages], step, 4)
        total = torch.stack(loads).sum(0).float()
        expected += 0.01 * torch.sign(total.mean() - total)
        stages[0].step(step, 1.0)
        torch.testing.assert_close(router.expert_bias.detach(), expected, rtol=0, atol=1e-6)
    assert expected.abs().sum() > 0


def test_weights_are_drawn_with_the_deviations_of_the_config():
    config = {"init_method_std": 0.1, "embedding_init_method_std": 0.3}
    weights = build_pipeline(family_job({"layers": 2, "hidden": 64, "config": config}, ranks=1))[0].parameters
    layer, residual = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
    expected = {"embedding.word_embeddings.weight": 0.3, layer: 0.1, residual: 0.05}
    assert {name: float(weights[name].detach().std()) for name in expected} == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["llama 3.1", "qwen 3", "expert bias"])
def test_matrices_in_one_parameter_are_marked(name):
    """With the widths of 4 heads, and of as many groups of keys and values as the model has."""
    config, widths = MODELS[name]["config"], Counter()
    for stage in build_pipeline(family_job(MODELS[name])):
        for parameter in stage.parameters.values():
            if blocks := getattr(parameter, ROW_BLOCKS, None):
                assert blocks[0] * sum(blocks[1]) == len(parameter)
                widths[blocks] += 1
    groups, size = config.get("num_query_groups", 4), config.get("kv_channels", 8)
    experts = config.get("num_moe_experts", 1)
    wanted = {(groups, (4 // groups * size, size, size)): 4, (1, (48, 48)): 4 * experts}
    if shared := config.get("moe_shared_expert_intermediate_size"):
        wanted[1, (shared, shared)] = 4
    assert widths == wanted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen 3", "expert bias"])
def test_fused_operations_have_the_bits_of_megatrons(name, precision, monkeypatch):
    tested_job = family_job(MODELS[name], train={"precision": precision, "accumulation": "fast"}, micro_batches=1)
    fused = iterate(tested_job)
    monkeypatch.setattr(gpt, "fuse", lambda part: None)
    plain = iterate(tested_job)
    assert fused[0] == plain[0]
    assert fused[1].keys() == plain[1].keys()
    assert [name for name in plain[1] if not torch.equal(fused[1][name], plain[1][name])] == []


def iterate(tested_job) -> tuple[float, dict[str, torch.Tensor]]:
    stages = build_pipeline(tested_job)
    sharpened(stages)
    loss = run_pipelines([stages], 0, 1)
    return loss, gradients_by_name(stages)


ASKED = {"transformer_impl": "transformer_engine"}


class Linear(DelayedLinear):
    """The constructor and result of megatron-core's wrappers around Transformer Engine's linear layers."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool, skip_bias_add: bool, **_
    ):
        assert config.delay_wgrad_compute
        super().__init__(input_size, output_size, bias)
        self.config, self.skips = config, skip_bias_add

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = self.product(inputs)
        if self.bias is None or self.skips:
            return output, self.bias
        return output + self.bias, None


class Norm(WrappedTorchNorm):
    pass


class Backend(LocalSpecProvider):
    def column_parallel_linear(self) -> type:
        return Linear

    row_parallel_linear = column_parallel_linear

    def layer_norm(self, rms_norm=False, for_qk=False) -> type:
        return Norm


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    monkeypatch.setattr(gpt, "backend", Backend)


def asked(model):
    return model | {"config": model.get("config", {}) | ASKED}


def gradients(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(gradients of four micro-batches, W in another order than I; which half of the backward each parameter has)."""
    stages = build_pipeline(job)
    run_deferred(stages, 5)
    return gradients_by_name(stages), {name: half for stage in stages for name, half in stage.placement().items()}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "model", [{"kind": "gpt"}, MODELS["llama"], MODELS["mixtral"]], ids=["gpt", "llama", "mixtral"]
)
def test_engine_layers_delay_weight_gradients_with_the_same_bits(model):
    (own_gradients, _), (engine_gradients, halves) = gradients(family_job(model)), gradients(family_job(asked(model)))
    assert differing(own_gradients, engine_gradients) == []
    linear = {name for name in halves if ".linear_" in name and name.endswith("weight")}
    assert len(linear) == 4 * (2 + 2 * (model.get("config", {}).get("num_moe_experts", 1)))
    assert {halves[name] for name in linear} == {"W"}


def test_missing_engine_is_refused():
    with pytest.raises(
        JobError, match=r'^\[model.config\] transformer_impl = "transformer_engine": Transformer Engine is'
    ):
        transformer_config(family_job(asked({})))


@pytest.mark.usefixtures("installed")
def test_engine_with_tensor_ranks_and_other_implementations_are_refused():
    with pytest.raises(JobError, match=r"cannot be used with \[shape\] tensor_parallel > 1; write \"local\"$"):
        transformer_config(family_job(asked({}), tensor_parallel=2))
    with pytest.raises(JobError, match=r"transformer_impl: 'inference_optimized' is none of auto, local, t"):
        transformer_config(family_job({"config": {"transformer_impl": "inference_optimized"}}))
