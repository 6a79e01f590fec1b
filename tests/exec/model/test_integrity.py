"""Checksums of states and of replayed work, and bits flipped on purpose that show in them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from recycle.exec.checksums import NOTHING, BitPlace, Checksum, MicroBatchChecksums, described, differing_bit
from recycle.exec.faults.kinds import FLIPPED
from recycle.exec.model import integrity
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import (
    RunningChecksum,
    flipped_tokens,
    layout_of,
)
from recycle.exec.model.stage import Stage
from recycle.job import Job
from recycle.job.shape import MicroBatch
from tests.exec.drive import CPU, run_pipelines
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
    assert [stage.watched_checksums() for stage in home] == [{OTHER: made} for made in again]
    assert [made.input_gradient == NOTHING for made in again] == [True, False]
    assert all(NOTHING not in (made.activation, made.weight_gradient) for made in again)
    assert all(torch.equal(one, other) for one, other in zip(sums(peer), before, strict=True))
    assert [stage.loss_sum() for stage in peer] == losses
    assert [stage.held_micro_batches() for stage in peer] == [0, 0]
    # That it is watched changes nothing of the home's own sums.
    trained(alone, OTHER, split)
    assert all(torch.equal(one, other) for one, other in zip(sums(home), sums(alone), strict=True))
    assert [stage.watched_checksums() for stage in alone] == [{}, {}]


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
        unlike = [made != one.watched_checksums()[OTHER] for one, made in zip(home, again, strict=True)]
        assert unlike == [place == stage for place in range(2)]


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


def trained_struck(of: Job, *struck: tuple[int, str, int]) -> tuple[list[float], list[list[str]]]:
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
@pytest.mark.parametrize(("name", "stage"), [("gpt", 0), ("llama", 1), ("bf16", 0), ("full recomputation", 1)])
def test_a_flip_shows_in_the_loss_and_the_state_of_a_real_model(name: str, stage: int) -> None:
    of = job(1, 2, 2, **MODELS[name])
    calm = trained_struck(of)
    assert trained_struck(of) == calm
    for target in FLIPPED:
        # Of an fp64 sum only the highest bits are left in fp32.
        losses, digests = trained_struck(of, (stage, target, 51 if target == "gradient" else 20))
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
    calm = trained_struck(of)
    for target in FLIPPED:
        for bit in (20, 30):  # 31 is the sign of an error, which is 0
            losses, digests = trained_struck(of, (stage, target, bit))
            of_loss, of_state = SHOWS[target]
            is_of_state = target in ("weight", "moment", "gradient")
            assert first_difference(losses, calm[0]) == (None if is_of_state else of_loss), (target, bit)
            assert first_difference(digests, calm[1]) == of_state, (target, bit)


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


def checksum_of(tensors: list[torch.Tensor]) -> Checksum:
    return RunningChecksum(tensors).finish()


def words_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


def test_it_is_that_of_all_words_behind_each_other_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(1000)
    expected = Checksum(
        sum(words.tolist()) % (1 << 64), sum(place * word for place, word in enumerate(words.tolist())) % (1 << 64)
    )
    assert checksum_of([words]) == expected
    monkeypatch.setattr(integrity, "PIECE", 7)
    assert checksum_of([words[:1], words[:0], words[1:400].view(torch.float32), words[400:]]) == expected


def test_any_single_bit_that_differs_is_found_in_its_place() -> None:
    draw, words = random.Random(3), words_of(5000)
    right = checksum_of([words])
    for bit in range(32):
        place = draw.randrange(len(words))
        wrong = words.clone()
        wrong[place] ^= torch.tensor(1 << bit).to(torch.int32)
        assert differing_bit(checksum_of([wrong]), right) == BitPlace(place, bit)
        assert differing_bit(right, checksum_of([wrong])) == BitPlace(place, bit)


def test_what_takes_more_than_one_bit_is_not_explained_by_one() -> None:
    words = words_of(100)
    right = checksum_of([words])
    assert differing_bit(right, right) is None
    wrong = words.clone()
    wrong[3] ^= 0b101
    assert checksum_of([wrong]) != right
    assert differing_bit(checksum_of([wrong]), right) is None
    exchanged = words.clone()
    exchanged[[4, 9]] = words[[9, 4]]
    assert checksum_of([exchanged]) != right
    assert differing_bit(checksum_of([exchanged]), right) is None


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bit_of_a_real_state_is_named_by_its_tensor(precision: str) -> None:
    of = job(1, 2, 2, kind="gpt", train={"precision": precision})
    stage = build_stages(of, [1], CPU)[1]
    state = stage.state_tensors()
    named = stage.named_state(state)
    layout = layout_of(state, named)
    assert {one.name for one in layout} == set(named)
    right = checksum_of(state)
    draw = random.Random(7)
    for name in draw.sample(sorted(named), 12):
        flat = named[name].view(-1)
        index, bits = draw.randrange(len(flat)), 8 * flat.element_size()
        bit = draw.randrange(bits)
        words = flat[index : index + 1].view({16: torch.int16, 32: torch.int32}[bits])
        words.bitwise_xor_(torch.ones_like(words) << bit)
        place = differing_bit(checksum_of(state), right)
        assert place is not None
        found = described(place, layout)
        assert found is not None
        shared = [one.name for one in layout if one.first == next(x for x in layout if x.name == name).first]
        assert (found[0] in shared, found[1:]) == (True, (index, bit))
        words.bitwise_xor_(torch.ones_like(words) << bit)
    assert checksum_of(state) == right
