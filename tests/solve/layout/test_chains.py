"""Chains of live workers: cuts, shares and numbers of them against trying everything."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from recycle.solve.layout.chains import best_cut, candidates, shares_of
from recycle.solve.layout.units import Units


def units(seconds: list[float], most: float) -> Units:
    count = len(seconds)
    return Units((count,), {"forward": np.array(seconds), "static": np.ones(count)}, False, most)


def all_cuts(count: int, parts: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, count), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise([0, *inner, count])) for inner in ends]


def slowest(seconds: list[float], cut: tuple[int, ...]) -> float:
    ends = [0, *itertools.accumulate(cut)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("seed", range(12))
def test_no_cut_has_a_faster_slowest_worker(seed: int) -> None:
    chance = random.Random(seed)
    seconds = [chance.choice([1.0, 1.0, 2.0, 5.0, 0.5]) for _ in range(chance.randint(2, 9))]
    most = chance.randint(1, 5)
    for workers in range(1, len(seconds) + 1):
        fitting = [cut for cut in all_cuts(len(seconds), workers) if max(cut) <= most]
        found = best_cut(units(seconds, most), workers)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        cut, time = found
        assert len(cut) == workers
        assert sum(cut) == len(seconds)
        assert max(cut) <= most
        assert time == pytest.approx(slowest(seconds, cut))
        assert time == pytest.approx(min(slowest(seconds, other) for other in fitting))


@pytest.mark.parametrize("seed", range(6))
def test_no_shares_end_earlier(seed: int) -> None:
    chance = random.Random(seed)
    seconds = [chance.choice([1.0, 1.25, 1.5, 3.0]) for _ in range(3)]
    batches = chance.randint(1, 14)
    shares, time = shares_of(seconds, batches)
    assert sum(shares) == batches
    splits = ((a, b, batches - a - b) for a in range(batches + 1) for b in range(batches + 1 - a))
    best = min(max(s * t for s, t in zip(split, seconds, strict=True)) for split in splits)
    assert time == pytest.approx(best)


@pytest.mark.parametrize("workers", [3, 5, 8])
def test_no_other_chains_of_the_workers_run_more_micro_batches_a_second(workers: int) -> None:
    """Before whole micro-batches are dealt: of each number of chains the best lengths."""
    model = units([1.0] * 6, 4)
    pace = {n: 1 / found[1] for n in range(1, 7) if (found := best_cut(model, n))}
    lengths = [
        chosen
        for chains in range(1, workers + 1)
        for chosen in itertools.combinations_with_replacement(pace, chains)
        if sum(chosen) <= workers
    ]
    best = max(sum(pace[n] for n in chosen) for chosen in lengths)
    found_chains = candidates(model, workers, 5_000)
    assert found_chains[0].seconds == pytest.approx(5_000 / best, rel=2e-3)
    for chains in found_chains:
        assert sum(map(len, chains.cuts)) <= workers
        assert sum(chains.shares) == 5_000
