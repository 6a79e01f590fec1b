"""Bits flipped on purpose: each shows where a fault of the hardware would, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recycle.exec.faults.kinds import FLIPPED
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import flip_largest, flipped_tokens
from recycle.exec.model.stage import Stage
from recycle.job import Job
from tests.exec.drive import CPU, run_pipelines
from tests.exec.runs import job

ITERATIONS = 3
STRUCK = 1
SHOWS = {
    "weight": (STRUCK, STRUCK),
    "moment": (STRUCK + 1, STRUCK),
    "activation": (STRUCK, STRUCK),
    "gradient": (STRUCK + 1, STRUCK),
    "input": (STRUCK, STRUCK),
    "kernel": (STRUCK, STRUCK),
}
"""Target -> the first iteration whose loss shows it, and the first after which the state does."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"kind": "gpt"}},
    "llama": {"model": {"kind": "llama", "ffn": 48}},
    "bf16": {"model": {"kind": "gpt"}, "train": {"precision": "bf16"}},
    "full recomputation": {"model": {"kind": "gpt", "recompute": "full"}},
    "recomputed layers": {"model": {"kind": "gpt", "recompute": "layers"}},
}

ALWAYS = [("gpt", 0), ("llama", 1), ("bf16", 0), ("full recomputation", 1)]


def trained(of: Job, *struck: tuple[int, str, int]) -> tuple[list[float], list[list[str]]]:
    """Losses, and the digests of both stages after each iteration; `struck` are (stage, target, bit)."""
    stages: list[Stage] = list(build_stages(of, range(of.shape.stages), CPU).values())
    losses, digests = [], []
    for step in range(ITERATIONS):
        flips = struck if step == STRUCK else ()
        for stage, target, bit in flips:
            if target != "gradient":
                stages[stage].flip(target, bit)
        losses.append(run_pipelines([stages], step, of.shape.micro_batches))
        for stage, target, bit in flips:
            if target == "gradient":
                stages[stage].flip(target, bit)
        for one in stages:
            one.step(step, 1.0)
        digests.append([stage.state_digest() for stage in stages])
    return losses, digests


def first_difference(one: list[Any], other: list[Any]) -> int | None:
    return next((place for place, (left, right) in enumerate(zip(one, other, strict=True)) if left != right), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (name, stage) if (name, stage) in ALWAYS else pytest.param(name, stage, marks=pytest.mark.soak)
        for name in MODELS
        for stage in (0, 1)
    ],
)
def test_a_flip_shows_in_the_loss_and_the_state_of_a_real_model(name: str, stage: int) -> None:
    of = job(1, 2, 2, **MODELS[name])
    calm = trained(of)
    assert trained(of) == calm
    for target in FLIPPED:
        # Of an fp64 sum only the highest bits are left in fp32.
        losses, digests = trained(of, (stage, target, 51 if target == "gradient" else 20))
        expected: tuple[int, int | None] = SHOWS[target]
        if (name, stage, target) == ("full recomputation", 1, "activation"):
            expected = STRUCK, None  # the backward runs the forward again, and that is not struck
        seen = first_difference(losses, calm[0])
        if target in ("weight", "activation", "input", "kernel"):
            assert seen == expected[0], target
        else:  # the next losses need not show the one weight that it changes
            assert seen in (expected[0], None), target
        assert first_difference(digests, calm[1]) == expected[1], target


@pytest.mark.parametrize("stage", [0, 1])
def test_a_flip_spreads_through_emulated_stages_but_for_one_of_the_state(stage: int) -> None:
    """Nothing is computed from their state."""
    of = job(1, 2, 2)
    calm = trained(of)
    for target in FLIPPED:
        for bit in (20, 30):  # 31 is the sign of an error, which is 0
            losses, digests = trained(of, (stage, target, bit))
            of_loss, of_state = SHOWS[target]
            is_of_state = target in ("weight", "moment", "gradient")
            assert first_difference(losses, calm[0]) == (None if is_of_state else of_loss), (target, bit)
            assert first_difference(digests, calm[1]) == of_state, (target, bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bit", [0, 5, 15, 63])
def test_a_flip_changes_one_bit_of_the_largest_entry_and_a_second_one_takes_it_back(
    dtype: torch.dtype, bit: int
) -> None:
    tensor = torch.tensor([[0.5, -3.0], [2.0, 1.0]], dtype=dtype)
    before = tensor.clone()
    flip_largest(tensor, bit)
    assert (tensor != before).tolist() == [[False, True], [False, False]]
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    changed = (tensor.view(words) ^ before.view(words))[0, 1].item() % (1 << 8 * tensor.element_size())
    assert changed == 1 << bit % (8 * tensor.element_size())
    tensor.view(words)[0, 1] = before.view(words)[0, 1]
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("vocabulary", [2, 256, 257, 300])
def test_a_flipped_token_is_another_one_of_the_vocabulary(vocabulary: int) -> None:
    for first in {0, 1, vocabulary // 2, vocabulary - 1}:
        tokens = torch.tensor([[first, 1]])
        for bit in range(12):
            struck = flipped_tokens(tokens, vocabulary, bit)
            assert 0 <= int(struck[0, 0]) < vocabulary
            assert int(struck[0, 0]) != first
            assert int(struck[0, 1]) == 1
    assert flipped_tokens(torch.tensor([[0]]), 1, 3).tolist() == [[0]]
