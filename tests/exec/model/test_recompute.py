"""Variants of the forward: recomputation, dropout, bf16, evaluation."""

import math
from functools import partial

import msgspec
import pytest
import torch

from recycle import Job, JobError, MicroBatch, RunError
from recycle.exec import run
from recycle.exec.data.loading import load_evaluation
from recycle.exec.leader.commit import evaluate, evaluation_report
from recycle.exec.model.build import build_stages, require_precision
from recycle.exec.model.gpt import build_part
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.part import DropoutSeeds, recompute_layers
from recycle.exec.profile.memory import allocated_by
from recycle.ir.families import one_f_one_b, zb_h1, zb_v
from recycle.job.sections import EvalSection
from tests.exec.drive import CPU, build_pipeline, gradients_by_name, run_pipelines, small_job
from tests.exec.runs import job

FULL = {"recompute": "full"}
BATCH = MicroBatch(0, 0)


CONFIG = {"recompute_modules": ["core_attn", "mlp"]}
AGAIN = [
    {"recompute": "full", "dropout": 0.2, "tied": True},
    {"recompute": "selective", "config": CONFIG},
    {"recompute": ["layers", "full"]},
    {"recompute": ["none", "selective"], "dropout": 0.1},
    {"recompute": "layers", "dropout": 0.1},
    {"recompute": "layers", "kind": "mixtral", "layers": 2, "hidden": 32},
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), [(FULL, "bf16"), *((model, "fp32") for model in AGAIN)], ids=str)
def test_recomputation_gives_the_same_bits(model, precision):
    kept = {key: value for key, value in model.items() if key not in ("recompute", "config")}
    losses = []
    for keys, family in ((kept, zb_h1), (model, one_f_one_b), (model, zb_h1)):
        tested_job = small_job(micro_batches=2, model=keys, train={"precision": precision})
        losses.append(run(family(tested_job.shape), tested_job, steps=2).losses)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["layers", "selective"])
def test_recomputation_holds_less_between_f_and_i(recompute):
    held = []
    for model in ({}, {"recompute": recompute, "config": {"recompute_modules": ["mlp"]}}):
        stage = build_pipeline(small_job(model=model))[0]
        stage.begin_iteration(0)
        stage.forward(MicroBatch(0, 1), None)
        held.append(allocated_by(partial(stage.forward, BATCH, None), torch.device("cpu")).kept)
    assert held[1] < (0.2 if recompute == "layers" else 0.6) * held[0]


@pytest.mark.slow
def test_unknown_recomputation_is_refused():
    with pytest.raises(JobError, match=r"\[model\] recompute: lists 1 stages, the shape has 2"):
        small_job(model={"recompute": ["full"]}).validate()
    config = {"recompute_modules": ["layernorm"]}
    with pytest.raises(JobError, match=r"\[model.config\] recompute_modules: 'layernorm' is none of core_attn"):
        build_pipeline(small_job(model={"recompute": "selective", "config": config}))


STEPS = 4
DROPS = {"dropout": 0.2, "attention_dropout": 0.1}


def outputs(stage: MegatronStage, iteration: int, batches: list[MicroBatch]) -> dict[MicroBatch, torch.Tensor]:
    stage.begin_iteration(iteration)
    return {batch: stage.forward(batch, None).clone() for batch in batches}


@pytest.mark.slow
def test_dropout_depends_on_iteration_and_micro_batch_only():  # All tokens are equal, so differences come from dropout.
    first, second = (build_pipeline(small_job(model=DROPS))[0] for _ in range(2))
    tokens = torch.full((1, 32), 65)
    for stage in (first, second):
        stage._data = type("Constant", (), {"batch": lambda self, iteration, number: {"tokens": tokens}})()
    a, b = MicroBatch(0, 0), MicroBatch(0, 1)
    torch.manual_seed(1)
    first_outputs = outputs(first, 3, [a, b])
    torch.manual_seed(2)
    second_outputs = outputs(second, 3, [b, a])
    assert first_outputs[a].equal(second_outputs[a])
    assert first_outputs[b].equal(second_outputs[b])
    assert not first_outputs[a].equal(first_outputs[b])
    assert not outputs(first, 4, [a])[a].equal(first_outputs[a])
    share = float((first._part.module.embedding(tokens, first._part._positions) == 0).float().mean())
    assert share == pytest.approx(0.2, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(DROPS, marks=pytest.mark.soak), DROPS | {"recompute": "full", "tied": True}]
)
def test_run_with_dropout_and_a_kill_has_the_bits_of_one_process(model, launch):
    tested_job = job(2, 2, 3, kind="gpt", memory={"limit": 8}, model={"layers": 4} | model)
    single = job(1, 1, 6, kind="gpt", memory={"limit": 8}, model={"layers": 4} | model)
    result = launch(tested_job, STEPS, "kill:1.1@1", "rejoin:1.1@3")
    assert result.losses == run(one_f_one_b(single.shape), single, steps=STEPS).losses
    vee = job(1, 2, 6, kind="gpt", shape={"chunks": 2}, memory={"limit": 12}, model={"layers": 4} | model)
    assert result.losses == run(zb_v(vee.shape), vee, steps=STEPS).losses


@pytest.mark.slow
def test_tensor_ranks_draw_separately_for_attention_only():
    tested_job = small_job(ranks=1, model={"dropout": 0.2, "layers": 2})
    build_pipeline(tested_job)  # megatron-core's groups
    draws = []
    for tensor in ((0, 2), (1, 2), (1, 2)):
        part = build_part(tested_job, 0)
        seeds = DropoutSeeds(part, 0, tested_job.model.seed, CPU, tensor)
        heads = []
        states = []
        attention = part.decoder.layers[0].self_attention.core_attention
        attention.register_forward_hook(lambda _, __, output, heads=heads: heads.append(output))
        attention.register_forward_hook(lambda *_, states=states: states.append(torch.get_rng_state()))
        tokens = torch.arange(32)[None]
        with seeds.seeded(3, 1):
            part(input_ids=tokens, position_ids=tokens, attention_mask=None)
        draws.append((heads[0], states[0]))
    assert not torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[1][0], draws[2][0])
    assert torch.equal(draws[0][1], draws[1][1])


@pytest.mark.slow
def test_tensor_ranks_draw_again_for_a_recomputed_layer_what_they_drew_for_its_micro_batch():
    tested_job = small_job(ranks=1, model={"dropout": 0.2, "layers": 2})
    build_pipeline(tested_job)  # megatron-core's groups
    tokens, gradients = torch.arange(32)[None], []
    for is_recomputed in (False, True):
        part = build_part(tested_job, 0)
        seeds = DropoutSeeds(part, 0, tested_job.model.seed, CPU, (1, 2))
        if is_recomputed:
            recompute_layers(part, seeds)
        outputs = []
        for micro_batch in range(2):
            with seeds.seeded(3, micro_batch):
                outputs.append(part(input_ids=tokens, position_ids=tokens, attention_mask=None))
        outputs[0].square().sum().backward()  # after the forward of another micro-batch
        gradients.append([parameter.grad for parameter in part.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *gradients))


HALF = {"precision": "bf16"}


def test_bf16_weights_are_rounded_fp32_weights():
    (half,), (full,) = build_pipeline(small_job(ranks=1, train=HALF)), build_pipeline(small_job(ranks=1))
    layer = 1
    assert half.layout.units()[layer].state_tensors()[0].equal(full.layout.units()[layer].state_tensors()[0])
    small = 1e-6  # far below what bf16 can tell from a weight, so only fp32 keeps it
    run_pipelines([[half]], 0, 4)
    before = half.layout.units()[layer].state_tensors()[0].clone()
    half.step(0, small)
    after, *_, working = half.layout.units()[layer].state_tensors()
    assert not after.equal(before)
    assert working.equal(after.bfloat16())
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert half.parameters[name].data_ptr() in range(working.data_ptr(), working.data_ptr() + working.nbytes)


def test_device_without_bf16_is_refused(monkeypatch):
    def refuse(*_):
        raise RuntimeError("\"layer_norm\" not implemented for 'BFloat16'\nand a second line")

    monkeypatch.setattr(torch.nn.functional, "layer_norm", refuse)
    tested_job = small_job(train=HALF)
    with pytest.raises(RunError, match=r"\[train\] precision: cpu cannot compute in bf16 .*; use fp32") as error:
        build_stages(tested_job, [0], CPU)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    require_precision("bf16", CPU)


BATCHES = [MicroBatch(0, 0), MicroBatch(0, 1)]


def evaluated_job(ranks=2, **sections) -> Job:
    return msgspec.structs.replace(small_job(1, ranks, 2, **sections), evaluation=EvalSection(every=1))


def losses(stages: list[MegatronStage], batch=0) -> list[tuple[float, float]]:
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


def test_evaluation_is_the_loss_of_the_model():
    job = evaluated_job(1)
    (stage,) = build_pipeline(job)
    results = losses([stage], batch=3)
    for (total, count), number in zip(results, range(2), strict=True):
        batch = load_evaluation(job).batch(3, number)
        positions = torch.arange(job.model.sequence)[None]
        of_tokens = stage._part.module(batch["tokens"], positions, None, labels=batch["labels"])
        assert (total, count) == (float(of_tokens.detach().sum()), job.model.sequence)


@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluation_does_not_depend_on_stages_or_dropout(ranks):
    plain = losses(build_pipeline(evaluated_job(1)))
    assert losses(build_pipeline(evaluated_job(ranks, model=DROPS))) == plain
    assert len(set(plain)) == 2


@pytest.mark.parametrize("recompute", ["full", "layers"])
def test_evaluation_does_not_change_training(recompute):
    job = evaluated_job(model={**DROPS, "recompute": recompute})
    untouched, stages = build_pipeline(job), build_pipeline(job)
    digests = [stage.digests() for stage in stages]
    first = losses(stages)
    assert [stage.digests() for stage in stages] == digests
    assert run_pipelines([stages], 1, 2) == run_pipelines([untouched], 1, 2)
    gradients = gradients_by_name(stages)
    assert losses(stages) == first
    for name, gradient in gradients_by_name(untouched).items():
        assert torch.equal(gradient, gradients[name])


def test_evaluation_does_not_depend_on_which_worker_ran_a_micro_batch():
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
