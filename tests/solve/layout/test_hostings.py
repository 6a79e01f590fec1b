"""Who hosts which units: cuts and chains, ranges, least copied, two hosts of each unit, and the exact model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.layout.chains import best_cut, candidates, shares_of
from recycle.solve.layout.exact import least_load
from recycle.solve.layout.hostings import every_hosting, hosting_as_held, hostings
from recycle.solve.layout.hosts import assign, homes_of, moves_to
from recycle.solve.layout.ranges import balanced, cheapest_ranges
from recycle.solve.layout.units import Parts, Units, common, count_of, ranges_of


def units(seconds: Sequence[float], most: float, whole: tuple[int, ...] = (), chunks: int = 1) -> Units:
    """Units of these F, each 1 of what a worker may hold `most` of."""
    prices = {"forward": np.array(seconds), "static": np.ones(len(seconds))}
    return Units(whole or (len(seconds),), prices, False, most, chunks)


def slowest(seconds: list[float], cut: tuple[int, ...]) -> float:
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *itertools.accumulate(cut)]))


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_has_a_faster_slowest_worker(seed: int) -> None:
    chance = random.Random(seed)
    seconds = [chance.choice([1.0, 1.0, 2.0, 5.0, 0.5]) for _ in range(chance.randint(2, 9))]
    count, most = len(seconds), chance.randint(1, 5)
    for workers in range(1, count + 1):
        ends = itertools.combinations(range(1, count), workers - 1)
        cuts = [tuple(b - a for a, b in itertools.pairwise([0, *inner, count])) for inner in ends]
        fitting = [cut for cut in cuts if max(cut) <= most]
        found = best_cut(units(seconds, most), workers)
        assert (found is None) == (not fitting)
        if found is not None:
            cut, time = found
            assert cut in fitting
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


@pytest.mark.parametrize("workers", [3, 8])
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


def test_neighbours_that_host_a_unit_both_share_it_and_every_host_runs_as_many_as_are_asked_for() -> None:
    """Three workers host two of four units each, and four each do 4 of 12 micro-batches' 48."""
    found = balanced(units([1.0] * 4, 2.0), [((0, 2),), ((1, 3),), ((2, 4),)], [1.0] * 3, 12)
    assert found is not None
    assert found[0] == 16
    assert found[1].tolist() == [[12, 4, 0, 0], [0, 8, 8, 0], [0, 0, 4, 12]]
    found = balanced(units([1.0] * 3, 3.0), [((0, 2),), ((0, 3),)], [1.0, 1.0], 8, least=1)
    assert found is not None
    assert (found[1][0, :2] >= 1).all()
    assert (found[1][1] >= 1).all()


@pytest.mark.parametrize(("factor", "copied"), [(1.3, 0), (1.02, 4), (1.0025, 7)])
def test_helpers_move_only_as_far_as_a_load_asks_for(factor: float, copied: int) -> None:
    """Of four pipelines of eight ranks with two units each the first worker is dead, and nobody can hold three."""
    model = units([1.0] * 16, 2.5, (2,) * 8)
    had = [((2 * r, 2 * r + 2),) for k in range(4) for r in range(8) if (k, r) != (0, 0)]
    least = 64 * 16 / 31
    found = cheapest_ranges(model, had, [1.0] * 31, 64, least * factor, [2] * 16)
    assert found is not None
    hosted = [parts for parts, _ in found]
    assert len(hosted) <= 31
    assert sum(parts not in had for parts in hosted) <= copied
    shared = balanced(model, hosted, [1.0] * len(hosted), 64_000)
    assert shared is not None
    assert shared[0] <= 1000 * least * factor * 1.001
    assert all(sum(a <= u < b for ((a, b),) in hosted) >= 2 for u in range(16))
    assert cheapest_ranges(model, had, [1.0] * 31, 64, least * 0.99, [1] * 16) is None, "less than an even share"


def test_blocks_never_cross_a_fault_free_stage() -> None:
    blocks, ends = units([0.0, 1.0, 2.0, 3.0], 3.0, (3, 1)).in_blocks(4)
    assert (blocks.whole, ends, blocks.seconds.tolist()) == ((2, 1), [0, 1, 3, 4], [0.0, 3.0, 3.0])


EIGHT = Units((2, 2, 2, 2), {"forward": np.ones(8), "static": np.full(8, 10.0)}, True, 40.0)


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


@pytest.mark.parametrize("seed", range(8))
def test_no_other_assignment_copies_less(seed: int) -> None:
    """Workers of two ranges each, of which nobody has just what is wanted."""
    chance = random.Random(seed)
    model = units([1.0] * 12, 12.0, (2,) * 6, chunks=3)
    live = chance.sample([Worker(k, r) for k in range(4) for r in range(2)], 5)
    hosted: list[Parts] = [((a, a + chance.randint(1, 3)),) for a in (chance.randint(0, 9) for _ in range(4))]
    found = assign(model, live, hosted)
    assert len(set(found)) == len(hosted)

    def copied(workers: Sequence[Worker]) -> int:
        pairs = zip(hosted, workers, strict=True)
        return sum(count_of(parts) - common(parts, model.held_before(worker)) for parts, worker in pairs)

    assert copied(found) == min(copied(workers) for workers in itertools.permutations(live, len(hosted)))


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


def test_of_two_chunks_a_worker_copies_what_lies_in_neither() -> None:
    """Rank 0 has units 0-1 and 4-5, rank 1 the others; without 0.1 a chain of 1.1 and 0.0 takes four units each."""
    two = Units((2, 2, 2, 2), EIGHT.prices, True, 40.0, chunks=2)
    shape, live = Shape(2, 2, 1, 2), [Worker(0, 0), Worker(1, 0), Worker(1, 1)]
    moves, _ = moves_to(two, shape, live, {Worker(0, 0): ((0, 5),), Worker(1, 1): ((3, 8),)}, Profile())
    told = [(move.worker, move.source, move.units) for move in moves]
    assert told == [("0.0", "1.1", (2, 4)), ("1.1", "0.0", (4, 6))]


def hosts(hosted: Sequence[Parts], count: int) -> list[int]:
    return [sum(begin <= unit < end for parts in hosted for begin, end in parts) for unit in range(count)]


@pytest.mark.search
@pytest.mark.parametrize(
    ("pipelines", "ranks", "layers", "count", "chunks"),
    [(2, 4, 8, 1, 1), (3, 4, 8, 4, 1), (4, 4, 16, 6, 1), (3, 4, 16, 4, 2), (3, 2, 12, 1, 3)],
)
def test_a_unit_that_has_two_hosts_keeps_two(pipelines: int, ranks: int, layers: int, count: int, chunks: int) -> None:
    each = layers // ranks
    model = units([3.0] * layers, 1.5 * each, (each // chunks,) * ranks * chunks, chunks)
    shape, made = Shape(pipelines, ranks, 8, chunks), 0
    for seed in range(4):
        dead = random.Random(seed).sample(list(shape.workers()), count)
        live = [worker for worker in shape.workers() if worker not in dead]
        left = hosts([model.given[worker.rank] for worker in live], layers)
        for hosting in hostings(model, shape, live, Profile(), {}, float("inf")):
            assert all(now >= min(2, before) for now, before in zip(hosts(hosting.parts, layers), left, strict=True))
            made += 1
    assert made


def test_what_workers_hold_already_is_shared_evenly_and_all_of_it_is_used() -> None:
    model, shape = units([3.0] * 8, 6.0, (4, 4)), Shape(3, 2, 4)
    held: dict[Worker, Parts] = {
        Worker(0, 0): ((0, 5),),
        Worker(0, 1): ((3, 8),),
        Worker(2, 0): ((0, 2), (4, 6)),
        Worker(2, 1): ((2, 4), (6, 8)),
    }
    hosting = hosting_as_held(model, shape, held, Profile())
    assert hosting is not None
    assert hosting.wanted == held
    assert (hosting.quotas.sum(axis=0) == 12).all()
    assert hosting.seconds == pytest.approx(3 * 12 * 8 / 4)
    assert hosting_as_held(model, shape, {Worker(0, 0): ((0, 5),), Worker(2, 1): ((6, 8),)}, Profile()) is None


def test_two_workers_that_hold_three_of_four_units_share_the_rest_evenly() -> None:
    model = units([3.0, 1.0, 1.0, 1.0], 3.0)
    assert least_load(model, [1.0, 1.0], 4, 20.0) == pytest.approx(12.0)
    assert least_load(model, [1.0, 2.0], 4, 20.0) == pytest.approx(16.0), "the fast one also runs one of the others"
    assert least_load(model, [1.0], 4, 20.0) is None, "nobody can hold the model"


@pytest.mark.search
def test_no_hosting_has_less_to_do_than_the_exact_model_allows() -> None:
    """Of twelve small jobs, most hostings reach it; none falls below."""
    equal = 0
    for seed in range(12):
        chance = random.Random(seed)
        pipelines, ranks, per_rank = chance.choice([(2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 3, 1)])
        seconds = [chance.choice([1.0, 1.0, 1.0, 2.0]) for _ in range(ranks * per_rank)]
        most = per_rank + chance.choice([0, 1])
        model, shape = units(seconds, most, (per_rank,) * ranks), Shape(pipelines, ranks, chance.choice([4, 6]))
        live = list(shape.workers())[chance.choice([0, 1]) :]
        found = list(every_hosting(model, shape, live, Profile(), {}, float("inf")))
        exact = least_load(model, [1.0] * len(live), shape.global_micro_batches, 20.0)
        assert exact is not None
        for made in found:
            assert made.seconds == pytest.approx((made.quotas @ model.seconds).max())
            assert (made.quotas.sum(axis=0) == shape.global_micro_batches).all()
            assert max(count_of(parts) for parts in made.parts) <= most
        best = min(made.seconds for made in found)
        assert best >= exact - 1e-6
        equal += best <= exact + 1e-6
    assert equal >= 6
