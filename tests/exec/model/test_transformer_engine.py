"""Families with Transformer Engine's linear layers and norms, for which layers of the same interface stand in here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from recycle import Job
from recycle.errors import JobError
from recycle.exec.model import config as model_config
from recycle.exec.model import gpt
from recycle.exec.model.config import transformer_config
from tests.exec.drive import build_pipeline, differing, gradients_by_name, run_deferred
from tests.exec.model.test_families import MODELS, family_job
from tests.exec.model.test_other_layers import Delays

pytestmark = pytest.mark.slow
ASKED = {"transformer_impl": "transformer_engine"}


def of_weight(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t().matmul(inputs.reshape(-1, inputs.shape[-1]))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, store: Delays) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.store = store
        return torch.matmul(inputs, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        ctx.store.put([inputs, gradient], of_weight)
        return gradient.matmul(weight), None, None


class Linear(torch.nn.Linear):
    """The constructor of megatron-core's wrappers around Transformer Engine's linear layers, and their answer."""

    fuse_wgrad_accumulation = False

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool, skip_bias_add: bool, **_: Any
    ) -> None:
        assert config.delay_wgrad_compute
        super().__init__(input_size, output_size, bias)
        self.config, self.wgrad_store, self.skips = config, Delays(), skip_bias_add

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        output: torch.Tensor = Product.apply(inputs, self.weight, self.wgrad_store)  # type: ignore[no-untyped-call]
        if self.bias is None or self.skips:
            return output, self.bias
        return output + self.bias, None

    def backward_dw(self) -> None:
        self.weight.grad, _ = self.wgrad_store.pop()


class Norm(WrappedTorchNorm):  # type: ignore[misc]
    pass


class Backend(LocalSpecProvider):  # type: ignore[misc]
    def column_parallel_linear(self) -> type:
        return Linear

    row_parallel_linear = column_parallel_linear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    monkeypatch.setattr(gpt, "backend", Backend)


def asked(model: dict[str, Any]) -> dict[str, Any]:
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
def test_linear_layers_delay_their_weight_gradients_and_names_and_bits_are_those_of_the_own_ones(
    model: dict[str, Any],
) -> None:
    (own, _), (theirs, halves) = gradients(family_job(model)), gradients(family_job(asked(model)))
    assert differing(own, theirs) == []
    linear = {name for name in halves if ".linear_" in name and name.endswith("weight")}
    assert len(linear) == 4 * (2 + 2 * (model.get("config", {}).get("num_moe_experts", 1)))
    assert {halves[name] for name in linear} == {"W"}


@pytest.mark.usefixtures("installed")
def test_every_linear_layer_and_norm_of_a_layer_is_replaced_and_the_head_is_not() -> None:
    stages = build_pipeline(family_job(asked(MODELS["qwen 3"])))
    kinds = [type(module).__name__ for stage in stages for module in stage._part.module.modules()]
    assert kinds.count("Linear") == 4 * 4
    assert kinds.count("ColumnParallelLinear") == 1


def test_where_it_is_not_installed_a_job_that_asks_for_it_is_refused() -> None:
    with pytest.raises(
        JobError, match=r'^\[model.config\] transformer_impl = "transformer_engine": Transformer Engine is'
    ):
        transformer_config(family_job(asked({})))


@pytest.mark.usefixtures("installed")
def test_tensor_ranks_and_other_values_are_refused() -> None:
    with pytest.raises(JobError, match=r"cannot be used with \[shape\] tensor_parallel > 1; write \"local\"$"):
        transformer_config(family_job(asked({}), tensor_parallel=2))
    with pytest.raises(JobError, match=r"transformer_impl: 'inference_optimized' is none of local, t"):
        transformer_config(family_job({"config": {"transformer_impl": "inference_optimized"}}))
