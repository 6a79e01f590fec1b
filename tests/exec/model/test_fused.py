"""What is computed in one step of the graph has the bits of megatron-core's several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recycle.exec.model import gpt
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines
from tests.exec.model.test_families import MODELS, family_job, sharpened

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_are_those_of_megatrons_operations_to_the_bit(
    model: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = family_job(model, train={"precision": precision, "accumulation": "fast"}, micro_batches=1)
    fused = iterate(of)
    monkeypatch.setattr(gpt, "fuse", lambda part: None)
    plain = iterate(of)
    assert fused[0] == plain[0]
    assert fused[1].keys() == plain[1].keys()
    assert [name for name in plain[1] if not torch.equal(fused[1][name], plain[1][name])] == []


def iterate(of: Any) -> tuple[float, dict[str, torch.Tensor]]:
    stages = build_pipeline(of)
    sharpened(stages)
    loss = run_pipelines([stages], 0, 1)
    return loss, gradients_by_name(stages)
