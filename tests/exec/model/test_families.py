"""Llama, Qwen and Mixtral: forwards and gradients of a plain reference, and the same bits however the work is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recycle import Job
from recycle.exec import run
from recycle.exec.data.loading import load_batches
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.ir.families import one_f_one_b, zb_h1
from tests.exec.drive import build_pipeline, differing, gradients_by_name, run_deferred, run_pipelines, small_job
from tests.exec.model import reference

pytestmark = pytest.mark.slow

SMALL = {"hidden": 32, "heads": 4, "sequence": 16, "ffn": 48, "layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "config": {"num_query_groups": 2}},
    "llama 3.1": {"kind": "llama", "rotary_base": 5e5, "rotary_scaling": 8.0, "config": {"num_query_groups": 1}},
    "qwen 3": {"kind": "qwen", "tied": True, "rotary_base": 1e6, "config": {"num_query_groups": 2, "kv_channels": 16}},
    "qwen 2": {"kind": "qwen", "config": {"qk_layernorm": False, "add_qkv_bias": True}},
    "mixtral": {"kind": "mixtral", "config": {"num_moe_experts": 4, "num_query_groups": 2}},
}


def family_job(model: dict[str, Any], **sections: Any) -> Job:
    return small_job(model=SMALL | model, **sections)


def sharpened(stages: list[MegatronStage]) -> None:
    """Weights that tell: without norms at 1, biases at 0 and scores that are all alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for stage in stages:
            for name, parameter in sorted(stage.parameters.items()):
                scale = 10.0 if parameter.dim() > 1 else 1.0
                noise = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
                parameter.mul_(scale).add_(noise if parameter.dim() == 1 or "router" in name else 0.0)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_those_of_the_reference(model: dict[str, Any]) -> None:
    # The auxiliary loss has a test of its own.
    without = {"moe_aux_loss_coeff": 0.0} if model["kind"] == "mixtral" else {}
    of = family_job(model | {"config": model["config"] | without}, ranks=1, micro_batches=1)
    stages = build_pipeline(of)
    sharpened(stages)
    found = run_pipelines([stages], 0, 1)
    batch = load_batches(of).batch(0, 0)
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in stages[0].parameters.items()}
    expected = reference.loss(of, weights, batch["tokens"], batch["labels"])
    assert found == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    gradients = gradients_by_name(stages)
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_auxiliary_loss_is_that_of_the_paper() -> None:
    """Switch Transformers, arXiv 2101.03961, equations 4 to 6, with k choices per token: it moves the router alone."""
    coefficient, found = 0.5, []
    for value in (0.0, coefficient):
        config = {"num_moe_experts": 4, "moe_aux_loss_coeff": value}
        of = family_job({"kind": "mixtral", "layers": 1, "config": config}, ranks=1, micro_batches=1)
        stages = build_pipeline(of)
        inputs: list[torch.Tensor] = []
        stages[0]._part.module.decoder.layers[0].mlp.router.register_forward_pre_hook(
            lambda _, given, inputs=inputs: inputs.append(given[0].detach())
        )
        loss = run_pipelines([stages], 0, 1)
        found.append((loss, gradients_by_name(stages), inputs[0]))
    assert found[0][0] == found[1][0]  # not part of the loss that is reported
    name = "decoder.layers.0.mlp.router.weight"
    router = build_pipeline(of)[0].parameters[name].detach().clone().requires_grad_()
    probabilities = (found[0][2].flatten(0, 1) @ router.T).softmax(-1)
    counts = probabilities.topk(2, -1).indices.flatten().bincount(minlength=4)
    share, probability = counts / counts.sum(), probabilities.mean(0)
    (coefficient * 4 * (share * probability).sum()).backward()
    torch.testing.assert_close(found[1][1][name] - found[0][1][name], router.grad, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_i_and_deferred_w_in_any_order_equal_whole_b(model: dict[str, Any], ranks: int) -> None:
    of = family_job(model, ranks=ranks)
    whole, deferred = build_pipeline(of), build_pipeline(of)
    run_pipelines([whole], 5, 4)
    run_deferred(deferred, 5)
    assert whole[-1].loss_sum() == deferred[-1].loss_sum()
    assert differing(gradients_by_name(whole), gradients_by_name(deferred)) == []


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_losses_are_the_same_bits_for_one_two_and_four_stages_and_any_schedule(model: dict[str, Any]) -> None:
    expected = run(one_f_one_b(family_job(model, ranks=1).shape), family_job(model, ranks=1), steps=3).losses
    assert len(set(expected)) == 3
    for ranks in (2, 4):
        of = family_job(model, ranks=ranks)
        assert run(zb_h1(of.shape), of, steps=3).losses == expected
