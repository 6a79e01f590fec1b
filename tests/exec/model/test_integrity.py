"""Checksums of states and of replayed work, and bits flipped on purpose that show in them."""

import random
from typing import Any

import pytest
import torch

from recycle import Job, MicroBatch
from recycle.exec.checksums import NOTHING, BitPlace, Checksum, MicroBatchChecksums, differing_bit, locate
from recycle.exec.faults.kinds import FLIPPED
from recycle.exec.model import integrity
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import (
    RunningChecksum,
    flipped_tokens,
    layout_of,
)
from recycle.exec.model.stage import Stage
from tests.exec.drive import CPU, run_pipelines
from tests.exec.runs import job

MINE, OTHER = MicroBatch(0, 0), MicroBatch(1, 1)
MODELS = {
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


def pipeline(tested_job: Job) -> list[Stage]:
    stages = list(build_stages(tested_job, range(tested_job.shape.stages), CPU).values())
    for stage in stages:
        stage.begin_iteration(3)
    return stages


def trained(stages: list[Stage], micro_batch: MicroBatch, split: bool) -> list[tuple[Any, Any]]:
    """One micro-batch through the pipeline; the input of each stage, and the gradient by its output."""
    given = [None]
    for stage in stages:
        given.append(stage.forward(micro_batch, given[-1]))
    gradients = [None]
    for stage in reversed(stages):
        gradients.append((stage.backward_input if split else stage.backward)(micro_batch, gradients[-1]))
    if split:
        for stage in stages:
            stage.backward_weight(micro_batch)
    return list(zip(given[:-1], gradients[-2::-1], strict=True))


def replayed(stages: list[Stage], given: list[tuple[Any, Any]]) -> list[MicroBatchChecksums]:
    replays = []
    for stage, (activation, gradient) in zip(stages, given, strict=True):
        copies = [None if tensor is None else tensor.clone() for tensor in (activation, gradient)]
        replays.append(stage.replay(OTHER, *copies).finish())
    return replays


def sums(stages: list[Stage]) -> list[torch.Tensor]:
    return [buffer.clone() for stage in stages for buffer in (*stage.gradient_buffers(), *stage.tied_buffers())]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", MANY)
def test_replay_gives_the_same_checksums_and_keeps_no_state(name, split):
    tested_job = job(2, 2, 2, **MODELS[name])
    home, peer, alone = pipeline(tested_job), pipeline(tested_job), pipeline(tested_job)
    for stage in home:
        stage.watch([OTHER])
    trained(peer, MINE, split)
    before, losses = sums(peer), [stage.loss_sum() for stage in peer]
    given = trained(home, OTHER, split)
    replays = replayed(peer, given)
    assert [stage.watched_checksums() for stage in home] == [{OTHER: checksums} for checksums in replays]
    assert [checksums.input_gradient == NOTHING for checksums in replays] == [True, False]
    assert all(NOTHING not in (checksums.activation, checksums.weight_gradient) for checksums in replays)
    assert all(torch.equal(tensor, other) for tensor, other in zip(sums(peer), before, strict=True))
    assert [stage.loss_sum() for stage in peer] == losses
    assert [stage.held_micro_batches() for stage in peer] == [0, 0]
    # That it is watched changes nothing of the home's own sums.
    trained(alone, OTHER, split)
    assert all(torch.equal(tensor, other) for tensor, other in zip(sums(home), sums(alone), strict=True))
    assert [stage.watched_checksums() for stage in alone] == [{}, {}]


@pytest.mark.parametrize("name", ["emulated", "gpt"])
@pytest.mark.parametrize("target", ["activation", "input", "kernel"])
@pytest.mark.parametrize("stage", [0, 1])
def test_flip_on_one_host_shows_in_the_comparison(name, target, stage):
    """A flip of the input is made on the way into the forward, as in memory of the host that runs it."""
    tested_job = job(2, 2, 2, **MODELS[name])
    for struck in (0, 1):
        sides = pipeline(tested_job), pipeline(tested_job)
        home, peer = sides
        for host in home:
            host.watch([OTHER])
        sides[struck][stage].flip(target, 20)
        replays = replayed(peer, trained(home, OTHER, False))
        unlike = [checksums != host.watched_checksums()[OTHER] for host, checksums in zip(home, replays, strict=True)]
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


def trained_struck(tested_job: Job, *struck: tuple[int, str, int]) -> tuple[list[float], list[list[str]]]:
    """Losses, and the digests of both stages after each iteration; `struck` are (stage, target, bit)."""
    stages = list(build_stages(tested_job, range(tested_job.shape.stages), CPU).values())
    losses, digests = [], []
    for step in range(ITERATIONS):
        flips = struck if step == STRUCK else ()
        for stage, target, bit in flips:
            if target != "gradient":
                stages[stage].flip(target, bit)
        losses.append(run_pipelines([stages], step, tested_job.shape.micro_batches))
        for stage, target, bit in flips:
            if target == "gradient":
                stages[stage].flip(target, bit)
        for host in stages:
            host.step(step, 1.0)
        digests.append([stage.digests() for stage in stages])
    return losses, digests


def first_difference(first, second) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), None)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("emulated", 0),
        ("emulated", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt", 0), ("bf16", 0), ("full recomputation", 1))),
    ],
)
def test_flip_shows_in_loss_and_state(name, stage):
    tested_job = job(1, 2, 2, **MODELS[name])
    calm = trained_struck(tested_job)
    for target in FLIPPED:
        # Of an fp64 sum only the highest bits remain in fp32.
        losses, digests = trained_struck(tested_job, (stage, target, 51 if target == "gradient" else 20))
        of_loss, of_state = SHOWS[target]
        is_recomputed = (name, stage, target) == ("full recomputation", 1, "activation")
        seen = first_difference(losses, calm[0])
        if target in ("weight", "moment", "gradient"):
            # Emulated stages compute nothing from their state; the next losses need not show a moment or a sum.
            expected = (None,) if name == "emulated" else (of_loss, None) if target != "weight" else (of_loss,)
            assert seen in expected, target
        else:
            assert seen == of_loss, target
        assert first_difference(digests, calm[1]) == (None if is_recomputed else of_state), target


@pytest.mark.parametrize("vocabulary", [2, 256, 257, 300])
def test_flipped_token_is_another_token_of_the_vocabulary(vocabulary):
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


def words_of(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


def test_checksum_does_not_depend_on_the_split_into_tensors(monkeypatch):
    words = words_of(1000)
    expected = Checksum(
        sum(words.tolist()) % (1 << 64), sum(place * word for place, word in enumerate(words.tolist())) % (1 << 64)
    )
    assert checksum_of([words]) == expected
    monkeypatch.setattr(integrity, "PIECE", 7)
    assert checksum_of([words[:1], words[:0], words[1:400].view(torch.float32), words[400:]]) == expected


def test_single_differing_bit_is_located():
    draw, words = random.Random(3), words_of(5000)
    right = checksum_of([words])
    for bit in range(32):
        place = draw.randrange(len(words))
        wrong = words.clone()
        wrong[place] ^= torch.tensor(1 << bit).to(torch.int32)
        assert differing_bit(checksum_of([wrong]), right) == BitPlace(place, bit)
        assert differing_bit(right, checksum_of([wrong])) == BitPlace(place, bit)


def test_difference_of_several_bits_is_not_explained_by_one():
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
def test_differing_bit_of_a_state_is_named_by_tensor(precision):
    tested_job = job(1, 2, 2, kind="gpt", train={"precision": precision})
    stage = build_stages(tested_job, [1], CPU)[1]
    state = stage.state_tensors()
    named = stage.named_state(state)
    layout = layout_of(state, named)
    assert {place.name for place in layout} == set(named)
    right = checksum_of(state)
    draw = random.Random(7)
    for name in draw.sample(sorted(named), 12):
        flat = named[name].view(-1)
        index, bits = draw.randrange(len(flat)), 8 * flat.element_size()
        bit = draw.randrange(bits)
        words = flat[index : index + 1].view({16: torch.int16, 32: torch.int32}[bits])
        words.bitwise_xor_(torch.ones_like(words) << bit)
        bit_place = differing_bit(checksum_of(state), right)
        description = locate(bit_place, layout)
        first = next(place.first for place in layout if place.name == name)
        shared = [place.name for place in layout if place.first == first]
        assert (description[0] in shared, description[1:]) == (True, (index, bit))
        words.bitwise_xor_(torch.ones_like(words) << bit)
    assert checksum_of(state) == right
