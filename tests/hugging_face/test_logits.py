"""Imported models compute what transformers computes, and train as its models do with torch's own AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recycle.exec import run
from recycle.exec.data.loading import load_batches
from recycle.exec.model.state.optimizer import decays
from recycle.hugging_face.conversion import export_model, import_model
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.job import Job
from tests.cli.conftest import here as here
from tests.exec.checkpoint.test_checkpoint import store
from tests.exec.drive import build_pipeline, small_job
from tests.exec.model.test_families import sharpened
from tests.hugging_face.hub_models import MODELS, hub_model, logits_of
from tests.hugging_face.ours import imported, job_of, our_logits

pytestmark = pytest.mark.slow

TOKENS = torch.arange(48).reshape(2, 24) * 7 % 256
CHECKPOINT = Path("checkpoint")
LOGITS_WITHIN, LOSSES_WITHIN = 1e-5, 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_whatever_the_split(name: str) -> None:
    expected = logits_of(imported(hub_model(name)), TOKENS)
    found = our_logits(job_of(CHECKPOINT), TOKENS)
    assert float((found - expected).abs().max()) <= LOGITS_WITHIN
    assert float(expected.std()) > 1
    for ranks, chunks in ((2, 1), (2, 2)):
        assert torch.equal(our_logits(job_of(CHECKPOINT, ranks, chunks), TOKENS), found)


TRAIN = """
[train]
schedule = "constant"
warmup = 0
learning_rate = 1e-3
steps = 20
[data]
micro_batch_size = 2
"""


def losses_of(model: Any, job: Job) -> list[float]:
    """What transformers and torch's AdamW make of the job's micro-batches."""
    train, batches = job.train, load_batches(job)
    matrices = [parameter for parameter in model.parameters() if decays(parameter)]
    vectors = [parameter for parameter in model.parameters() if not decays(parameter)]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, train.learning_rate, (train.beta1, train.beta2), train.epsilon)
    count = job.shape.global_micro_batches
    losses = []
    for step in range(train.steps):
        total = 0.0
        for number in range(count):
            batch = batches.batch(step, number)
            logits = model(batch["tokens"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            (loss / count).backward()
            total += loss.item() / count
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    "name", ["llama 3.1", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen 2", "qwen 3")), "mixtral"]
)
def test_training_goes_on_as_with_transformers_and_torchs_adamw(name: str) -> None:
    model = hub_model(name).train()
    imported(model)
    config = "[model.config]\nmoe_aux_loss_coeff = 0.0\n" if name == "mixtral" else ""
    job = job_of(CHECKPOINT, ranks=2, more=f"{config}{TRAIN}")
    found = run(zb_h1(job.shape), job).losses
    expected = losses_of(model, job)
    assert max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)) < LOSSES_WITHIN
    assert found[-1] < found[0] - 0.3
    assert run(one_f_one_b(job.shape), job, steps=3).losses == found[:3]


def test_bf16_trains_from_weights_that_are_kept_in_fp32() -> None:
    imported(hub_model("llama"))
    found = {}
    for precision in ("fp32", "bf16"):
        more = TRAIN.replace("[train]", f'[train]\nprecision = "{precision}"')
        job = job_of(CHECKPOINT, ranks=2, more=more)
        found[precision] = run(one_f_one_b(job.shape), job, steps=2).losses
    assert found["bf16"] == pytest.approx(found["fp32"], rel=2e-2)
    assert found["bf16"] != found["fp32"]


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "llama", "rotary_scaling": 8.0, "rotary_base": 5e5, "config": {"num_query_groups": 2}},
        {"kind": "qwen", "tied": True},
        {"kind": "mixtral", "ffn": 40, "config": {"num_moe_experts": 4, "moe_router_topk": 3}},
    ],
    ids=lambda model: model["kind"],
)
def test_a_model_that_recycle_drew_is_one_that_transformers_loads(model: dict[str, Any]) -> None:
    job = small_job(1, 2, 2, model={"layers": 2, "hidden": 32, "heads": 4, "sequence": 24} | model)
    pipeline = build_pipeline(job)
    sharpened(pipeline)
    folder = store(Path.cwd(), job, 0, pipeline)
    found = export_model(folder, Path("exported"))
    assert (found.stored, found.carried) == (("F32",), [])
    theirs = logits_of(Path("exported"), TOKENS)
    ours = our_logits(job_of(folder), TOKENS)
    assert float((ours - theirs).abs().max()) <= LOGITS_WITHIN
    assert float(theirs.std()) > 0.5
    import_model(Path("exported"), Path("again"))
    assert torch.equal(our_logits(job_of(Path("again")), TOKENS), ours)
