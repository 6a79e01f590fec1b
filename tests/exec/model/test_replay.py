"""A host that runs a micro-batch of its peer again makes the same bits, changes nothing of its own, and sees flips."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recycle.exec.checksums import NOTHING, MicroBatchChecksums
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import ChecksumBuilder, RunningChecksum, word_sums
from recycle.exec.model.stage import Stage
from recycle.job import Job
from recycle.job.shape import MicroBatch
from tests.exec.drive import CPU
from tests.exec.runs import job

MINE, OTHER = MicroBatch(0, 0), MicroBatch(1, 1)
MODELS: dict[str, dict[str, Any]] = {
    "emulated": {"model": {"kind": "emulated"}},
    "gpt": {"model": {"kind": "gpt"}},
    "dropout": {"model": {"kind": "gpt", "dropout": 0.1}},
    "llama": {"model": {"kind": "llama", "ffn": 48}},
    "bf16": {"model": {"kind": "gpt"}, "train": {"precision": "bf16"}},
    "fast": {"model": {"kind": "gpt"}, "train": {"accumulation": "fast"}},
    "full recomputation": {"model": {"kind": "gpt", "recompute": "full"}},
    "recomputed layers": {"model": {"kind": "gpt", "recompute": "layers"}},
    "tied": {"model": {"kind": "gpt", "tied": True}},
}
MANY = [pytest.param(name, marks=() if name in ("emulated", "gpt", "bf16") else pytest.mark.slow) for name in MODELS]


def pipeline(of: Job) -> list[Stage]:
    stages = list(build_stages(of, range(of.shape.stages), CPU).values())
    for stage in stages:
        stage.begin_iteration(3)
    return stages


def trained(stages: list[Stage], micro_batch: MicroBatch, split: bool) -> list[tuple[Any, Any]]:
    """One micro-batch through the pipeline; the input of each stage, and the gradient by its output."""
    given: list[Any] = [None]
    for stage in stages:
        given.append(stage.forward(micro_batch, given[-1]))
    gradients: list[Any] = [None]
    for stage in reversed(stages):
        gradients.append((stage.backward_input if split else stage.backward)(micro_batch, gradients[-1]))
    if split:
        for stage in stages:
            stage.backward_weight(micro_batch)
    return list(zip(given[:-1], gradients[-2::-1], strict=True))


def replayed(stages: list[Stage], given: list[tuple[Any, Any]]) -> list[MicroBatchChecksums]:
    again = []
    for stage, (activation, gradient) in zip(stages, given, strict=True):
        copies = [None if one is None else one.clone() for one in (activation, gradient)]
        again.append(stage.replay(OTHER, *copies).finish())
    return again


def sums(stages: list[Stage]) -> list[torch.Tensor]:
    return [buffer.clone() for stage in stages for buffer in (*stage.gradient_buffers(), *stage.tied_buffers())]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", MANY)
def test_a_peer_makes_the_same_bits_and_keeps_nothing_of_them(name: str, split: bool) -> None:
    of = job(2, 2, 2, **MODELS[name])
    home, peer, alone = pipeline(of), pipeline(of), pipeline(of)
    for stage in home:
        stage.watch([OTHER])
    trained(peer, MINE, split)
    before, losses = sums(peer), [stage.loss_sum() for stage in peer]
    given = trained(home, OTHER, split)
    again = replayed(peer, given)
    assert [stage.made() for stage in home] == [{OTHER: made} for made in again]
    assert [made.input_gradient == NOTHING for made in again] == [True, False]
    assert all(NOTHING not in (made.activation, made.weight_gradient) for made in again)
    assert all(torch.equal(one, other) for one, other in zip(sums(peer), before, strict=True))
    assert [stage.loss_sum() for stage in peer] == losses
    assert [stage.held_micro_batches() for stage in peer] == [0, 0]
    # That it is watched changes nothing of the home's own sums.
    trained(alone, OTHER, split)
    assert all(torch.equal(one, other) for one, other in zip(sums(home), sums(alone), strict=True))
    assert [stage.made() for stage in alone] == [{}, {}]


@pytest.mark.parametrize("name", ["emulated", "gpt", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["activation", "input", "kernel"])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_strikes_one_of_the_two_makes_them_differ(name: str, target: str, stage: int) -> None:
    """A flip of the input is made on the way into the forward, as in memory of the host that runs it."""
    of = job(2, 2, 2, **MODELS[name])
    for struck in (0, 1):
        sides = pipeline(of), pipeline(of)
        home, peer = sides
        for one in home:
            one.watch([OTHER])
        sides[struck][stage].flip(target, 20)
        again = replayed(peer, trained(home, OTHER, False))
        unlike = [made != one.made()[OTHER] for one, made in zip(home, again, strict=True)]
        assert unlike == [place == stage for place in range(2)]


def test_the_sums_of_words_are_those_of_a_state_whatever_the_type() -> None:
    drawn = torch.Generator().manual_seed(0)
    for dtype, count in ((torch.float32, 300_001), (torch.float64, 77), (torch.bfloat16, 4)):
        tensor = torch.randn(count, generator=drawn).to(dtype)
        words, places = (int(one) % (1 << 64) for one in word_sums(tensor))
        assert (words, places) == RunningChecksum([tensor]).finish()
    parts = tensor.float().split(1)
    whole, one_by_one = ChecksumBuilder(), ChecksumBuilder()
    whole.weight_gradient(5, tensor.float())
    for place in (2, 0, 3, 1):
        one_by_one.weight_gradient(5 + place, parts[place])
    assert whole.finish() == one_by_one.finish()
    odd = torch.ones(3, dtype=torch.bfloat16)
    assert word_sums(odd).tolist() == [3 * 0x3F80, 3 * 0x3F80]
