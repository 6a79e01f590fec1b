"""Who plays which position: everybody once, and as little is copied as can be."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.layout.hosts import _matched, assign, homes_of, moves_to
from recycle.solve.layout.units import Parts, Units, common, count_of, ranges_of

EIGHT = Units((2, 2, 2, 2), {"forward": np.ones(8), "static": np.full(8, 10.0)}, True, 40.0)


def new_units(wanted: Parts, had: Parts) -> int:
    return count_of(wanted) - common(wanted, had)


def chained(live: list[Worker], cuts: list[tuple[int, ...]]) -> list[list[Worker]]:
    """The workers of each chain."""
    groups = [k for k, cut in enumerate(cuts) for _ in cut]
    homes = homes_of(live, len(cuts))
    everybody = assign(EIGHT, live, [(part,) for cut in cuts for part in ranges_of(cut)], [homes[k] for k in groups])
    return [[worker for worker, mine in zip(everybody, groups, strict=True) if mine == k] for k in range(len(cuts))]


def wanted(chains: list[list[Worker]], cuts: list[tuple[int, ...]]) -> dict[Worker, Parts]:
    return {
        worker: (part,)
        for mine, cut in zip(chains, cuts, strict=True)
        for worker, part in zip(mine, ranges_of(cut), strict=True)
    }


@pytest.mark.parametrize("seed", range(10))
def test_no_other_matching_copies_less_where_workers_have_several_ranges(seed: int) -> None:
    chance = random.Random(seed)
    given: list[Parts] = [((2 * r, 2 * r + 2), (2 * r + 6, 2 * r + 8)) for r in range(3)]
    had = chance.choices(given, k=6)
    wanted: list[Parts] = [((a, a + chance.randint(2, 5)),) for a in (chance.randint(0, 7) for _ in range(4))]
    wanted.append(given[0])
    found = _matched(wanted, had)
    assert len(set(found)) == len(wanted)
    best = min(
        sum(new_units(want, had[j]) for want, j in zip(wanted, js, strict=True))
        for js in itertools.permutations(range(len(had)), len(wanted))
    )
    assert sum(new_units(want, had[j]) for want, j in zip(wanted, found, strict=True)) == best


def test_whole_pipelines_stay_as_they_are() -> None:
    shape = Shape(3, 4, 1)
    chains = chained(list(shape.workers()), [(2, 2, 2, 2)] * 3)
    assert sorted(map(tuple, chains)) == [tuple(Worker(k, r) for r in range(4)) for k in range(3)]
    assert moves_to(EIGHT, shape, list(shape.workers()), wanted(chains, [(2, 2, 2, 2)] * 3), Profile()) == ((), 0.0)


def test_a_shorter_chain_copies_only_what_its_workers_lack() -> None:
    """Pipeline 0 lost rank 1: its three workers take 3, 3 and 2 units, and each lacks one at most."""
    shape, dead = Shape(2, 4, 1), Worker(0, 1)
    live = [worker for worker in shape.workers() if worker != dead]
    cuts = [(2, 2, 2, 2), (3, 3, 2)]
    chains = chained(live, cuts)
    assert chains == [[Worker(1, r) for r in range(4)], [Worker(0, 0), Worker(0, 2), Worker(0, 3)]]
    moves, seconds = moves_to(EIGHT, shape, live, wanted(chains, cuts), Profile(bandwidth=5.0))
    told = [(move.worker, move.source, move.units, move.bytes, move.seconds) for move in moves]
    assert told == [("0.0", "1.1", (2, 3), 10.0, 2.0), ("0.2", "1.1", (3, 4), 10.0, 2.0)]
    assert seconds == 4.0, "both come from 1.1, the only one that is left of rank 1"


@pytest.mark.parametrize("seed", range(8))
def test_everybody_plays_one_position_at_most(seed: int) -> None:
    chance = random.Random(seed)
    shape = Shape(4, 4, 1)
    live = sorted(chance.sample(list(shape.workers()), 13))
    cuts = [(2, 2, 2, 2), (3, 3, 2), (3, 3, 2)]
    chains = chained(live, cuts)
    everybody = [worker for mine in chains for worker in mine]
    assert [len(mine) for mine in chains] == [4, 3, 3]
    assert len(set(everybody)) == len(everybody)
    assert set(everybody) <= set(live)


def test_ranges_go_to_who_has_them_and_else_to_who_lacks_least() -> None:
    """Of five workers, two have just what is wanted; 1.1 lacks unit 4, and 1.3 unit 5."""
    live = [Worker(0, 0), Worker(0, 2), Worker(1, 1), Worker(1, 3), Worker(1, 0)]
    ranges: list[Parts] = [((0, 2),), ((3, 5),), ((4, 6),), ((5, 8),)]
    assert assign(EIGHT, live, ranges) == [Worker(0, 0), Worker(1, 1), Worker(0, 2), Worker(1, 3)]


def test_of_two_chunks_a_worker_copies_what_lies_in_neither() -> None:
    """Rank 0 has units 0-1 and 4-5, rank 1 the others; without 0.1 a chain of 1.1 and 0.0 takes four units each."""
    two = Units((2, 2, 2, 2), EIGHT.prices, True, 40.0, chunks=2)
    assert two.given == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    shape, live = Shape(2, 2, 1, 2), [Worker(0, 0), Worker(1, 0), Worker(1, 1)]
    moves, _ = moves_to(two, shape, live, {Worker(0, 0): ((0, 5),), Worker(1, 1): ((3, 8),)}, Profile())
    assert [(move.worker, move.source, move.units) for move in moves] == [
        ("0.0", "1.1", (2, 4)),
        ("1.1", "0.0", (4, 6)),
    ]
