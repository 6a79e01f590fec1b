"""Recomputation: between F and I only the input is held, and every bit is as without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from recycle import JobError, MicroBatch
from recycle.exec import run
from recycle.exec.profile.memory import allocated_by
from recycle.ir.families import one_f_one_b, zb_h1
from tests.exec.drive import build_pipeline, differing, iterated, small_job

pytestmark = pytest.mark.slow

FULL = {"recompute": "full"}
BATCH = MicroBatch(0, 0)


@pytest.mark.parametrize("model", [{}, {"dropout": 0.2}, {"tied": True}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_are_those_without(model: dict, precision: str, ranks: int) -> None:
    (loss, gradients), (again_loss, again) = (
        iterated(small_job(ranks=ranks, model=keys, train={"precision": precision}), 1)
        for keys in (model, model | FULL)
    )
    assert again_loss == loss
    assert differing(gradients, again) == []


CONFIG = {"recompute_modules": ["core_attn", "mlp"]}
AGAIN: list[dict[str, Any]] = [
    FULL,
    {"recompute": "layers"},
    {"recompute": "selective"},
    {"recompute": "selective", "config": CONFIG},
    {"recompute": ["layers", "full"]},
    {"recompute": ["none", "selective"], "dropout": 0.1},
    {"recompute": "layers", "dropout": 0.1},
    {"recompute": "layers", "kind": "mixtral"},
]


@pytest.mark.parametrize("model", AGAIN, ids=str)
def test_what_runs_again_gives_the_same_bits_and_counts_once(model: dict[str, Any]) -> None:
    kept = {key: value for key, value in model.items() if key not in ("recompute", "config")}
    losses = []
    for each in (kept, model):
        of = small_job(ranks=2, model=each)
        losses += [run(family(of.shape), of, steps=2).losses for family in (one_f_one_b, zb_h1)]
    assert losses[0] == losses[1] == losses[2] == losses[3]


@pytest.mark.parametrize("recompute", ["layers", "selective"])
def test_less_is_held_between_f_and_i(recompute: str) -> None:
    held = []
    for model in ({}, {"recompute": recompute, "config": {"recompute_modules": ["mlp"]}}):
        stage = build_pipeline(small_job(model=model))[0]
        stage.begin_iteration(0)
        stage.forward(MicroBatch(0, 1), None)
        held.append(allocated_by(partial(stage.forward, BATCH, None), torch.device("cpu")).kept)
    assert held[1] < (0.2 if recompute == "layers" else 0.6) * held[0]


def test_what_cannot_run_again_is_refused() -> None:
    with pytest.raises(JobError, match=r"\[model\] recompute: lists 1 stages, the shape has 2"):
        small_job(model={"recompute": ["full"]}).validate()
    config = {"recompute_modules": ["layernorm"]}
    with pytest.raises(JobError, match=r"\[model.config\] recompute_modules: 'layernorm' is none of core_attn"):
        build_pipeline(small_job(model={"recompute": "selective", "config": config}))
