"""Oobleck: templates, the multiset of them and shares of the batch; shrink, borrow, merge; unequal pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, combinations_with_replacement, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Shape, Worker, check, lower, simulate
from recycle.ir import compiled
from recycle.ir.families import one_f_one_b
from recycle.systems.joint_iteration import computed, hosted, synchronised
from recycle.systems.oobleck.oobleck import Oobleck
from recycle.systems.oobleck.pipelines import assign_nodes, common_cut, copied, iteration, places, reconfigure
from recycle.systems.oobleck.template import distribute, instantiate, templates
from recycle.systems.setting import Split
from tests.systems.settings import Play, setting

quick = settings(derandomize=True, max_examples=60, deadline=None, database=None)


def template_seconds(stage_seconds: Sequence[float], micro_batches: int | None = None) -> float:
    """T of stages that take c_i per micro-batch; for N_b = 4 S micro-batches unless said."""
    stages = len(stage_seconds)
    slowest = max(range(stages), key=stage_seconds.__getitem__)
    count = 4 * stages if micro_batches is None else micro_batches
    return sum(stage_seconds) + (count - stages + slowest - 1) * stage_seconds[slowest] + sum(stage_seconds[slowest:])


def stage_seconds(layers: list[float], split: tuple[int, ...]) -> list[float]:
    ends = [0]
    for count in split:
        ends.append(ends[-1] + count)
    return [sum(layers[a:b]) for a, b in pairwise(ends)]


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_templates_are_what_the_formula_says_and_near_the_best_split(layers: list[int]) -> None:
    """Divide and conquer keeps the best of every part, which the whole may want otherwise; never by much here."""
    times = list(map(float, layers))
    for made in templates(times, len(layers)):
        assert sum(made.split) == len(layers)
        assert made.seconds == template_seconds(stage_seconds(times, made.split))
        splits = (
            tuple(b - a for a, b in pairwise([0, *cuts, len(layers)]))
            for cuts in combinations(range(1, len(layers)), made.stages - 1)
        )
        best = min(template_seconds(stage_seconds(times, split)) for split in splits)
        assert best <= made.seconds <= 1.1 * best


def test_compiled_and_plain_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [1.0, 3.0, 2.0, 2.0, 1.0, 4.0, 1.0]
    monkeypatch.setattr(compiled, "_compiled", {})
    plain = templates(layers, 7)
    monkeypatch.setattr(compiled, "COMPILE_FROM", 0)
    assert templates(layers, 7) == plain


fewer = settings(quick, max_examples=40)
weights = st.dictionaries(st.integers(2, 7), st.integers(1, 9).map(float), min_size=1, max_size=5)


def multisets(sizes: list[int], nodes: int) -> list[tuple[int, ...]]:
    most = nodes // min(sizes)
    return [
        chosen
        for count in range(1, most + 1)
        for chosen in combinations_with_replacement(sizes, count)
        if sum(chosen) == nodes
    ]


@fewer
@given(weights, st.integers(4, 16), st.integers(1, 3))
def test_nodes_become_the_multiset_with_most_micro_batches_per_second(
    of: dict[int, float], nodes: int, least: int
) -> None:
    def rate(chosen: Sequence[int]) -> float:
        return sum(1 / of[size] for size in chosen)

    found = instantiate(of, nodes, least, 12, lambda chosen: 0.0)
    able = [chosen for chosen in multisets(sorted(of), nodes) if least <= len(chosen) <= 12]
    assert (found is None) == (not able)
    if found is not None:
        assert sum(found) == nodes
        assert least <= len(found) <= 12
        assert rate(found) == pytest.approx(max(map(rate, able)))


def test_the_sync_counts_for_how_many_pipelines_there_are() -> None:
    of = {size: 1.0 / size**1.01 for size in range(4, 60)}
    slow = instantiate(of, 400, 2, 4096, lambda chosen: 100.0 * len(chosen))
    fast = instantiate(of, 400, 2, 4096, lambda chosen: 100.0 / len(chosen))
    assert slow is not None
    assert fast is not None
    assert len(slow) < len(fast)


cases = st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
    lambda weights: st.tuples(st.just([float(w) for w in weights]), st.integers(len(weights), len(weights) + 9))
)


def all_ways(count: int, batch: int) -> list[tuple[int, ...]]:
    return [ways for ways in product(range(1, batch + 1), repeat=count) if sum(ways) == batch]


@fewer
@given(cases)
def test_the_longest_is_as_short_as_can_be(case: tuple[list[float], int]) -> None:
    weights, batch = case
    shares = distribute(weights, batch)
    assert sum(shares) == batch
    assert min(shares) >= 1
    best = min(max(w * b for w, b in zip(weights, ways, strict=True)) for ways in all_ways(len(weights), batch))
    assert max(w * b for w, b in zip(weights, shares, strict=True)) == best


SIZES = range(3, 13)


@pytest.mark.parametrize(
    ("pipelines", "dead", "made"),
    [
        ("0123 456", {2}, "013 456, shrink"),
        # One with too few borrows of the largest; where nobody can spare one it is merged with the smallest.
        ("012 3456 789ab", {1}, "02b 3456 789a, borrow"),
        ("012 345 678", {1}, "34502 678, merge"),
        ("012 345", {0, 1, 2}, "345, shrink"),
    ],
)
def test_pipelines_are_made_of_what_is_left(pipelines: str, dead: set[int], made: str) -> None:
    found = reconfigure([tuple(int(node, 16) for node in each) for each in pipelines.split()], dead, SIZES)
    assert found is not None
    assert f"{' '.join(''.join(f'{node:x}' for node in each) for each in found[0])}, {found[1]}" == made


def test_templates_that_do_not_lead_there() -> None:
    assert reconfigure([(0, 1, 2), (3, 4, 5)], {0}, [3]) is None


STATE = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def test_places_of_one_and_of_several_workers_per_node() -> None:
    assert places((2, 1, 3), 1) == [(0, 2), (2, 3), (3, 6)]
    assert places((2, 1, 2, 1), 2) == [(0, 3), (3, 6)]


def test_everybody_sits_where_most_of_what_it_holds_is_wanted() -> None:
    held = {7: (4, 6), 8: (0, 3), 9: (2, 4)}
    assert assign_nodes([(0, 2), (2, 4), (4, 6)], [7, 8, 9], held, STATE) == [8, 9, 7]
    assert assign_nodes([(0, 3), (3, 6)], [7, 8, 9], held, STATE) == [8, 7]
    assert assign_nodes([(0, 3), (3, 6)], [1, 2], {}, STATE) == [1, 2]


def test_only_what_is_missing_is_copied() -> None:
    """Node 0 had layers 0 to 1 and takes 2 too; node 2 had 4 to 5 and takes 3; node 1, which had both, is gone, and
    pipeline 1 has all."""
    held = {0: (0, 2), 2: (4, 6), 3: (0, 3), 4: (3, 6)}
    busiest, total = copied([(3, 3), (3, 3)], [(0, 2), (3, 4)], held, STATE, 1)
    assert total == 4 + 8
    assert busiest == 8


def test_replicas_share_the_sending() -> None:
    """Two newcomers take all layers of stage 0, 3 bytes; one holder sends 6, two of them 3 each."""
    one = copied([(2, 4)] * 3, [(0, 9), (1, 9), (2, 9)], {2: (0, 2), 9: (2, 6)}, STATE, 1)
    assert one == (6, 6)
    two = copied([(2, 4)] * 4, [(0, 9), (1, 9), (2, 9), (3, 9)], {2: (0, 2), 3: (0, 2), 9: (2, 6)}, STATE, 1)
    assert two == (3, 6)


def test_what_another_worker_of_the_node_has_is_not_copied() -> None:
    assert copied([(1, 2, 2, 1)], [(5, 6)], {5: (0, 3), 6: (2, 6)}, STATE, 2)[1] == 0


def test_stages_are_what_lies_between_any_two_cuts() -> None:
    assert common_cut([(2, 2), (2, 2)]) == ((2, 2), 2)
    assert common_cut([(3, 3), (2, 2, 2)]) == ((1, 1, 1, 1, 1, 1), 3)
    assert common_cut([(4, 4), (3, 5)]) == ((3, 1, 2, 2), 2)
    assert common_cut([(1, 2), (2, 1)]) == ((1, 1, 1), 3), "two ranks would need four stages of three layers"
    assert list(hosted((3, 3), (1, 1, 1, 1, 1, 1))) == [(0, 1, 2), (3, 4, 5)]


@st.composite
def unequal(draw: st.DrawFn) -> tuple[list[Split], list[int]]:
    layers = draw(st.integers(1, 12))
    splits = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=5))) if layers > 1 else []
        splits.append(tuple(b - a for a, b in pairwise([0, *cuts, layers])))
    return splits, [draw(st.integers(1, 7)) for _ in splits]


def priced(split: Split, numbers: list[list[float]], link: float) -> Profile:
    """Per stage the sums of per-layer F, I and W, and of reduce and step."""
    ends = [0, *accumulate(split)]
    columns = [[sum(column[a:b]) for a, b in pairwise(ends)] for column in numbers]
    return Profile(*columns[:3], reduce=columns[3], step=columns[4], latency=link)


@pytest.mark.search
@settings(derandomize=True, max_examples=30, deadline=None, database=None)
@given(unequal(), st.data())
def test_random_pipelines_pass_check_take_their_time_and_beat_no_bound(
    case: tuple[list[Split], list[int]], data: st.DataObject
) -> None:
    splits, shares = case
    layers = sum(splits[0])
    draws = [data.draw(st.lists(st.integers(1, 4).map(float), min_size=layers, max_size=layers)) for _ in range(5)]
    link = data.draw(st.sampled_from([0.0, 0.5]))
    made, common = iteration(splits, shares)
    assert check(made) == check(lower(made), about_to_run=True) == []
    timeline = simulate(lower(made), priced(common, draws, link))
    workers = []
    for k, (split, share) in enumerate(zip(splits, shares, strict=True)):
        alone = computed(one_f_one_b(Shape(1, len(split), share)), priced(split, draws, link))
        workers += [(end, stages) for (end, _), stages in zip(alone, hosted(split, common), strict=True)]
        fine = priced(common, [*draws[:3], [0.0] * layers, [0.0] * layers], link)
        there = [end for end, _ in computed(made, fine)][len(workers) - len(split) : len(workers)]
        assert there == pytest.approx([end for end, _ in alone])
        seconds = [sum(times) for times in zip(*draws[:3], strict=True)]
        slowest = max(sum(seconds[a:b]) for a, b in pairwise([0, *accumulate(split)]))
        assert timeline.makespan >= share * slowest
        assert made.stages_of(Worker(k, 0))[0] == 0
    together = synchronised(workers, priced(common, draws, link), common)
    assert timeline.period == timeline.makespan == pytest.approx(together)


@pytest.mark.search
@settings(derandomize=True, max_examples=12, deadline=None, database=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 2)), max_size=12))
def test_whatever_dies_and_joins_its_schedules_pass_check(events: list[tuple[bool, int, int]]) -> None:
    layer = {"static": 1.0, "state": 1.0, "activation": 0.0}
    of = setting(3, 4, 8, layers=12, layer=layer, memory=(4.0,) * 4, node_of=tuple(range(13)))
    played = Play(Oobleck(of))
    for is_failure, first, count in events:
        live = played.state.live
        pool = sorted(live if is_failure else of.all_nodes - live)
        chosen = pool[first % max(1, len(pool)) :][:count]
        text = " ".join(map(str, chosen))
        state: Any = (played.change(text) if is_failure else played.change(joined=text)).state
        assert state.live == (live.difference(chosen) if is_failure else live.union(chosen))
        if hasattr(state, "shares"):
            used = [node for members in state.pipelines for node in members]
            assert len(used) == len(set(used))
            assert set(used) <= state.live
            assert sum(state.shares) == of.micro_batches
            ((schedule, profile),) = state.schedules()
            assert check(schedule) == []
            assert simulate(lower(schedule), profile).period == pytest.approx(state.period)
