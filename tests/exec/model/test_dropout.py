"""Dropout: the same draws for a micro-batch whoever runs it and when, other draws for another one."""

from __future__ import annotations

import pytest
import torch

from recycle import MicroBatch
from recycle.exec import run
from recycle.exec.model.gpt import build_part
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.part import DropoutSeeds
from recycle.ir.families import one_f_one_b, zb_v
from tests.exec.drive import CPU, build_pipeline, small_job
from tests.exec.runs import Run, job

pytestmark = pytest.mark.slow

STEPS = 4
DROPS = {"dropout": 0.2, "attention_dropout": 0.1}


def outputs(stage: MegatronStage, iteration: int, batches: list[MicroBatch]) -> dict[MicroBatch, torch.Tensor]:
    stage.begin_iteration(iteration)
    return {batch: stage.forward(batch, None).clone() for batch in batches}


def test_draws_depend_on_iteration_and_micro_batch_and_not_on_order_or_the_process() -> None:
    # A text of one value only: what differs can only come of the draws.
    first, second = (build_pipeline(small_job(model=DROPS))[0] for _ in range(2))
    tokens = torch.full((1, 32), 65)
    for stage in (first, second):
        stage._data = type("Constant", (), {"batch": lambda self, iteration, number: {"tokens": tokens}})()
    a, b = MicroBatch(0, 0), MicroBatch(0, 1)
    torch.manual_seed(1)
    here = outputs(first, 3, [a, b])
    torch.manual_seed(2)
    there = outputs(second, 3, [b, a])
    assert here[a].equal(there[a])
    assert here[b].equal(there[b])
    assert not here[a].equal(here[b])
    assert not outputs(first, 4, [a])[a].equal(here[a])
    share = float((first._part.module.embedding(tokens, first._part._positions) == 0).float().mean())
    assert share == pytest.approx(0.2, abs=0.05)


def test_the_random_state_of_the_process_stays() -> None:
    stage = build_pipeline(small_job(model=DROPS))[0]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    outputs(stage, 0, [MicroBatch(0, 0)])
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize(
    "model", [pytest.param(DROPS, marks=pytest.mark.soak), DROPS | {"recompute": "full", "tied": True}]
)
def test_a_run_through_a_kill_has_the_bits_of_one_process(model: dict, launch: Run) -> None:
    of = job(2, 2, 3, kind="gpt", memory={"limit": 8}, model={"layers": 4} | model)
    one = job(1, 1, 6, kind="gpt", memory={"limit": 8}, model={"layers": 4} | model)
    result = launch(of, STEPS, "kill:1.1@1", "rejoin:1.1@3")
    assert result.losses == run(one_f_one_b(one.shape), one, steps=STEPS).losses
    vee = job(1, 2, 6, kind="gpt", shape={"chunks": 2}, memory={"limit": 12}, model={"layers": 4} | model)
    assert result.losses == run(zb_v(vee.shape), vee, steps=STEPS).losses


def test_tensor_ranks_draw_their_own_for_attention_and_alike_for_the_rest() -> None:
    of = small_job(ranks=1, model={"dropout": 0.2, "layers": 2})
    build_pipeline(of)  # megatron-core's groups
    found = []
    for tensor in ((0, 2), (1, 2), (1, 2)):
        part = build_part(of, 0)
        seeds = DropoutSeeds(part, 0, of.model.seed, CPU, tensor)
        heads: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        attention = part.decoder.layers[0].self_attention.core_attention
        attention.register_forward_hook(lambda _, __, output, heads=heads: heads.append(output))
        attention.register_forward_hook(lambda *_, states=states: states.append(torch.get_rng_state()))
        tokens = torch.arange(32)[None]
        with seeds.of(3, 1):
            part(input_ids=tokens, position_ids=tokens, attention_mask=None)
        found.append((heads[0], states[0]))
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[1][0], found[2][0])
    assert torch.equal(found[0][1], found[1][1])
