"""Hostings: cuts and chains, ranges with the fewest copies, and two hosts of each unit."""

import itertools
import random
from collections.abc import Sequence

import mip
import numpy as np
import pytest

from recycle import Profile, Shape, Worker
from recycle.solve.layout.chains import best_cut, candidates, share_micro_batches
from recycle.solve.layout.hostings import hosting_from_layout, hostings
from recycle.solve.layout.hosts import assign, plan_copies
from recycle.solve.layout.ranges import balanced, cheapest_ranges
from recycle.solve.layout.units import Parts, Units, count_shared, count_units


def units(seconds: Sequence[float], most: float, whole: tuple[int, ...] = (), chunks: int = 1) -> Units:
    """Units of these F, each 1 of what a worker may hold `most` of."""
    prices = {"forward": np.array(seconds), "static": np.ones(len(seconds))}
    return Units(whole or (len(seconds),), prices, False, most, chunks)


def slowest(seconds: list[float], cut: tuple[int, ...]) -> float:
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *itertools.accumulate(cut)]))


@pytest.mark.parametrize("seed", range(8))
def test_best_cut_equals_brute_force(seed):
    chance = random.Random(seed)
    seconds = [chance.choice([1.0, 1.0, 2.0, 5.0, 0.5]) for _ in range(chance.randint(2, 9))]
    count, most = len(seconds), chance.randint(1, 5)
    for workers in range(1, count + 1):
        ends = itertools.combinations(range(1, count), workers - 1)
        cuts = [tuple(b - a for a, b in itertools.pairwise([0, *inner, count])) for inner in ends]
        fitting = [cut for cut in cuts if max(cut) <= most]
        result = best_cut(units(seconds, most), workers)
        assert (result is None) == (not fitting)
        if result is not None:
            cut, time = result
            assert cut in fitting
            assert time == pytest.approx(slowest(seconds, cut))
            assert time == pytest.approx(min(slowest(seconds, other) for other in fitting))


@pytest.mark.parametrize("seed", range(6))
def test_shares_equal_brute_force(seed):
    chance = random.Random(seed)
    seconds = [chance.choice([1.0, 1.25, 1.5, 3.0]) for _ in range(3)]
    batches = chance.randint(1, 14)
    shares, time = share_micro_batches(seconds, batches)
    assert sum(shares) == batches
    splits = ((a, b, batches - a - b) for a in range(batches + 1) for b in range(batches + 1 - a))
    best = min(max(s * t for s, t in zip(split, seconds, strict=True)) for split in splits)
    assert time == pytest.approx(best)


@pytest.mark.parametrize("workers", [3, 8])
def test_chains_have_the_highest_rate(workers):
    model = units([1.0] * 6, 4)
    pace = {n: 1 / cut_and_seconds[1] for n in range(1, 7) if (cut_and_seconds := best_cut(model, n))}
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


def test_hosts_of_a_unit_share_its_micro_batches():
    result = balanced(units([1.0] * 4, 2.0), [((0, 2),), ((1, 3),), ((2, 4),)], [1.0] * 3, 12)
    assert result[0] == 16
    assert result[1].tolist() == [[12, 4, 0, 0], [0, 8, 8, 0], [0, 0, 4, 12]]
    result = balanced(units([1.0] * 3, 3.0), [((0, 2),), ((0, 3),)], [1.0, 1.0], 8, least=1)
    assert (result[1][0, :2] >= 1).all()
    assert (result[1][1] >= 1).all()


@pytest.mark.parametrize(("factor", "copied"), [(1.3, 0), (1.02, 4), (1.0025, 7)])
def test_helpers_copy_no_more_than_the_load_requires(factor, copied):
    """Four pipelines of eight ranks with two units each, without the first worker; no worker can hold three."""
    model = units([1.0] * 16, 2.5, (2,) * 8)
    had = [((2 * r, 2 * r + 2),) for k in range(4) for r in range(8) if (k, r) != (0, 0)]
    least = 64 * 16 / 31
    ranges = cheapest_ranges(model, had, [1.0] * 31, 64, least * factor, [2] * 16)
    hosted = [parts for parts, _ in ranges]
    assert len(hosted) <= 31
    assert sum(parts not in had for parts in hosted) <= copied
    shared = balanced(model, hosted, [1.0] * len(hosted), 64_000)
    assert shared[0] <= 1000 * least * factor * 1.001
    assert all(sum(a <= u < b for ((a, b),) in hosted) >= 2 for u in range(16))
    assert cheapest_ranges(model, had, [1.0] * 31, 64, least * 0.99, [1] * 16) is None, "less than an even share"


EIGHT = Units((2, 2, 2, 2), {"forward": np.ones(8), "static": np.full(8, 10.0)}, True, 40.0)


@pytest.mark.parametrize("seed", range(8))
def test_assignment_copies_least(seed):
    """Workers with two ranges each, none of which matches a wanted range exactly."""
    chance = random.Random(seed)
    model = units([1.0] * 12, 12.0, (2,) * 6, chunks=3)
    live = chance.sample([Worker(k, r) for k in range(4) for r in range(2)], 5)
    hosted = [((a, a + chance.randint(1, 3)),) for a in (chance.randint(0, 9) for _ in range(4))]
    assigned = assign(model, live, hosted)
    assert len(set(assigned)) == len(hosted)

    def copied(workers: Sequence[Worker]) -> int:
        pairs = zip(hosted, workers, strict=True)
        return sum(count_units(parts) - count_shared(parts, model.present_parts(worker)) for parts, worker in pairs)

    assert copied(assigned) == min(copied(workers) for workers in itertools.permutations(live, len(hosted)))


def test_copies_come_from_live_workers_one_at_a_time():
    """Pipeline 0 lost rank 1: its three workers take 3, 3 and 2 units, and two of them lack one."""
    shape, live = Shape(2, 4, 1), [Worker(0, 0), Worker(0, 2), Worker(0, 3), *(Worker(1, r) for r in range(4))]
    ranges = [((0, 3),), ((3, 6),), ((6, 8),)]
    workers = assign(EIGHT, live, ranges, [0, 0, 0])
    assert workers == live[:3]
    moves = plan_copies(EIGHT, shape, live, dict(zip(workers, ranges, strict=True)), Profile(bandwidth=5.0))
    copies = [(move.worker, move.source, move.units, move.bytes, move.seconds) for move in moves]
    assert copies == [("0.0", "1.1", (2, 3), 10.0, 2.0), ("0.2", "1.1", (3, 4), 10.0, 2.0)]


def hosts(hosted: Sequence[Parts], count: int) -> list[int]:
    return [sum(begin <= unit < end for parts in hosted for begin, end in parts) for unit in range(count)]


@pytest.mark.search
@pytest.mark.parametrize(
    ("pipelines", "ranks", "layers", "count", "chunks"),
    [(2, 4, 8, 1, 1), (3, 4, 8, 4, 1), (4, 4, 16, 6, 1), (3, 4, 16, 4, 2), (3, 2, 12, 1, 3)],
)
def test_hostings_keep_two_hosts_per_unit(pipelines, ranks, layers, count, chunks):
    each = layers // ranks
    model = units([3.0] * layers, 1.5 * each, (each // chunks,) * ranks * chunks, chunks)
    shape, hosting_count = Shape(pipelines, ranks, 8, chunks), 0
    for seed in range(2):
        dead = random.Random(seed).sample(list(shape.workers()), count)
        live = [worker for worker in shape.workers() if worker not in dead]
        hosts_before = hosts([model.fault_free[worker.rank] for worker in live], layers)
        for hosting in hostings(model, shape, live, Profile(), {}, float("inf")):
            assert all(
                now >= min(2, before) for now, before in zip(hosts(hosting.parts, layers), hosts_before, strict=True)
            )
            assert hosting.seconds == pytest.approx((hosting.quotas @ model.seconds).max())
            assert (hosting.quotas.sum(axis=0) == shape.global_micro_batches).all()
            assert max(count_units(parts) for parts in hosting.parts) <= model.most_static
            hosting_count += 1
    assert hosting_count


def test_hosting_from_a_layout_is_even_and_uses_all_units():
    model, shape = units([3.0] * 8, 6.0, (4, 4)), Shape(3, 2, 4)
    held = {
        Worker(0, 0): ((0, 5),),
        Worker(0, 1): ((3, 8),),
        Worker(2, 0): ((0, 2), (4, 6)),
        Worker(2, 1): ((2, 4), (6, 8)),
    }
    hosting = hosting_from_layout(model, shape, held, Profile())
    assert hosting.wanted == held
    assert (hosting.quotas.sum(axis=0) == 12).all()
    assert hosting.seconds == pytest.approx(3 * 12 * 8 / 4)
    assert hosting_from_layout(model, shape, {Worker(0, 0): ((0, 5),), Worker(2, 1): ((6, 8),)}, Profile()) is None


def least_load(units: Units, speeds: Sequence[float], micro_batches: int, seconds: float) -> float | None:
    """The least seconds of the busiest of workers with these speed factors, each with a run of neighboring units.

    Ignores the order, warm-up, hand-overs and updates, so it bounds the load of every hosting. None without a proof.
    """
    model = mip.Model(solver_name="HiGHS")
    model.verbose = 0
    count = len(units)
    windows = [
        (a, b)
        for a in range(count)
        for b in range(a + 1, count + 1)
        if float(units.static[a:b].sum()) <= units.most_static
    ]
    busiest = model.add_var()
    model.objective = mip.minimize(busiest)
    runs, numbers = [], []
    for worker, speed in enumerate(speeds):
        hosts = [model.add_var(var_type=mip.BINARY) for _ in windows]
        mine = [model.add_var(var_type=mip.INTEGER, ub=micro_batches) for _ in range(count)]
        model += mip.xsum(hosts) <= 1
        for u, run in enumerate(mine):
            covering = mip.xsum(host for host, (a, b) in zip(hosts, windows, strict=True) if a <= u < b)
            model += run <= micro_batches * covering
        model += speed * mip.xsum(float(units.seconds[u]) * run for u, run in enumerate(mine)) <= busiest
        # break the symmetry of workers with equal speed by the place of their window
        number = mip.xsum((i + 1) * host for i, host in enumerate(hosts))
        if worker and speeds[worker - 1] == speed:
            model += numbers[-1] <= number
        numbers.append(number)
        runs.append(mine)
    for u in range(count):
        model += mip.xsum(mine[u] for mine in runs) == micro_batches
    status = model.optimize(max_seconds=seconds)
    return float(model.objective_value) if status == mip.OptimizationStatus.OPTIMAL else None


def test_least_load_shares_what_the_workers_do_not_all_hold():
    model = units([3.0, 1.0, 1.0, 1.0], 3.0)
    assert least_load(model, [1.0, 1.0], 4, 20.0) == pytest.approx(12.0)
    assert least_load(model, [1.0, 2.0], 4, 20.0) == pytest.approx(16.0), "the fast worker also runs another unit"
    assert least_load(model, [1.0], 4, 20.0) is None, "no worker can hold the model"


@pytest.mark.search
def test_no_hosting_has_a_smaller_load_than_the_exact_model_allows():
    """Of the small jobs with a hosting, most reach it; none falls below."""
    count = equal = 0
    for seed in range(12):
        chance = random.Random(seed)
        pipelines, ranks, per_rank = chance.choice([(2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 3, 1)])
        seconds = [chance.choice([1.0, 1.0, 1.0, 2.0]) for _ in range(ranks * per_rank)]
        most = per_rank + chance.choice([0, 1])
        model, shape = units(seconds, most, (per_rank,) * ranks), Shape(pipelines, ranks, chance.choice([4, 6]))
        live = list(shape.workers())[chance.choice([0, 1]) :]
        exact = least_load(model, [1.0] * len(live), shape.global_micro_batches, 20.0)
        loads = [hosting.seconds for hosting in hostings(model, shape, live, Profile(), {}, float("inf"))]
        assert all(load >= exact - 1e-6 for load in loads)
        count += bool(loads)
        equal += bool(loads) and min(loads) <= exact + 1e-6
    assert count >= 6
    assert 2 * equal >= count
