"""A stage in an evaluation: the model as it is, without dropout, and nothing of training touched."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from recycle import Job, MicroBatch
from recycle.exec.data.loading import load_evaluation
from recycle.exec.leader.commit import evaluate, evaluation_report
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.job.sections import EvalSection
from tests.exec.drive import build_pipeline, gradients_by_name, run_pipelines, small_job

BATCHES = [MicroBatch(0, 0), MicroBatch(0, 1)]
DROPS = {"dropout": 0.2, "attention_dropout": 0.1}


def evaluated_job(ranks: int = 2, **sections: Any) -> Job:
    return msgspec.structs.replace(small_job(1, ranks, 2, **sections), evaluation=EvalSection(every=1))


def losses(stages: list[MegatronStage], batch: int = 0) -> list[tuple[float, float]]:
    """Of one batch of an evaluation, pipelined one micro-batch after the other."""
    for stage in stages:
        stage.begin_evaluation(batch)
    for micro_batch in BATCHES:
        activation = None
        for stage in stages:
            activation = stage.forward(micro_batch, activation)
            assert activation is None or not activation.requires_grad
    assert [stage.held_micro_batches() for stage in stages] == [0] * len(stages)
    assert [stage.evaluated() for stage in stages[:-1]] == [[]] * (len(stages) - 1)
    return stages[-1].evaluated()


def test_it_is_the_loss_of_the_model_on_these_tokens() -> None:
    job = evaluated_job(1)
    (stage,) = build_pipeline(job)
    found = losses([stage], batch=3)
    for (total, count), number in zip(found, range(2), strict=True):
        batch = load_evaluation(job).batch(3, number)
        positions = torch.arange(job.model.sequence)[None]
        of_tokens = stage._part.module(batch["tokens"], positions, None, labels=batch["labels"])
        assert (total, count) == (float(of_tokens.detach().sum()), job.model.sequence)


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_does_not_depend_on_the_number_of_stages_nor_on_dropout(ranks: int) -> None:
    plain = losses(build_pipeline(evaluated_job(1)))
    assert losses(build_pipeline(evaluated_job(ranks, model=DROPS))) == plain
    assert len(set(plain)) == 2


@pytest.mark.parametrize("recompute", ["none", "full", "layers", "selective"])
def test_training_goes_on_as_if_there_had_been_none(recompute: str) -> None:
    job = evaluated_job(model={**DROPS, "recompute": recompute})
    untouched, stages = build_pipeline(job), build_pipeline(job)
    digests = [stage.state_digest() for stage in stages]
    first = losses(stages)
    assert [stage.state_digest() for stage in stages] == digests
    assert run_pipelines([stages], 1, 2) == run_pipelines([untouched], 1, 2)
    gradients = gradients_by_name(stages)
    assert losses(stages) == first
    for name, gradient in gradients_by_name(untouched).items():
        assert torch.equal(gradient, gradients[name])


def test_sums_are_the_same_whoever_ran_which_micro_batch() -> None:
    torch.manual_seed(0)
    pairs = [(float(value), 3.0) for value in torch.randn(64) * 2.0 ** torch.randint(-20, 20, (64,))]
    whole = evaluate(4, {"0.0": evaluation_report(pairs)})
    assert whole.loss == math.fsum(loss for loss, _ in pairs) / 192
    assert (whole.step, whole.tokens) == (4, 192.0)
    for cut in (1, 17, 40):
        reports = {"1.0": evaluation_report(pairs[cut:]), "0.0": evaluation_report(pairs[:cut][::-1])}
        assert evaluate(4, reports) == whole
    with_ranks = {"0.0": evaluation_report(pairs), "0.0t1": evaluation_report(pairs)}
    assert evaluate(4, with_ranks) == whole
    assert math.isnan(evaluate(4, {"0.0": evaluation_report([(math.nan, 3.0)])}).loss)
    assert math.isnan(evaluate(4, {"0.0": evaluation_report([])}).loss)
