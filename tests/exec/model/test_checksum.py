"""Checksums of states: every bit counts, and the one that differs is found."""

from __future__ import annotations

import random

import pytest
import torch

from recycle.exec.checksums import BitPlace, Checksum, described, differing_bit
from recycle.exec.model import integrity
from recycle.exec.model.build import build_stages
from recycle.exec.model.integrity import RunningChecksum, layout_of
from tests.exec.drive import CPU
from tests.exec.runs import job


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
    running = RunningChecksum([words])
    assert sum(running.piece() for _ in range(1000)) == 143
    assert running.finish() == expected


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
