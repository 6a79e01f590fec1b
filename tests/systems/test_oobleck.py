"""Oobleck: templates, the multiset of them and shares of the batch; shrink, borrow, merge; unequal pipelines."""

from collections.abc import Sequence
from itertools import accumulate, combinations, combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given, settings, strategies as st

from recycle import Profile, Shape, Worker, check, lower, simulate
from recycle.ir import compiled
from recycle.ir.families import one_f_one_b
from recycle.systems.joint_iteration import hosted_stages, iteration_seconds, worker_times
from recycle.systems.oobleck.oobleck import Oobleck
from recycle.systems.oobleck.pipelines import (
    assign_nodes,
    copy_bytes,
    iteration_schedule,
    reconfigure,
)
from recycle.systems.oobleck.template import distribute, instantiate, templates
from recycle.systems.scenario import Split
from tests.systems.scenarios import Play, scenario

quick = settings(max_examples=60)


def template_seconds(stage_seconds: Sequence[float]) -> float:
    """T of stages that take c_i per micro-batch, for N_b = 4 S micro-batches."""
    stages = len(stage_seconds)
    slowest = max(range(stages), key=stage_seconds.__getitem__)
    return sum(stage_seconds) + (3 * stages + slowest - 1) * stage_seconds[slowest] + sum(stage_seconds[slowest:])


def stage_seconds(layers: list[float], split: tuple[int, ...]) -> list[float]:
    ends = [0]
    for count in split:
        ends.append(ends[-1] + count)
    return [sum(layers[a:b]) for a, b in pairwise(ends)]


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_templates_follow_the_formula_near_the_best_split(layers):
    """Divide and conquer keeps the best of every part, which the whole may want otherwise; never by much here."""
    times = list(map(float, layers))
    for template in templates(times, len(layers)):
        assert sum(template.split) == len(layers)
        assert template.seconds == template_seconds(stage_seconds(times, template.split))
        splits = (
            tuple(b - a for a, b in pairwise([0, *cuts, len(layers)]))
            for cuts in combinations(range(1, len(layers)), template.stages - 1)
        )
        best = min(template_seconds(stage_seconds(times, split)) for split in splits)
        assert best <= template.seconds <= 1.1 * best


def test_compiled_templates_equal_python(monkeypatch):
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
def test_instantiation_maximizes_micro_batches_per_second(seconds, nodes, least):
    def rate(chosen):
        return sum(1 / seconds[size] for size in chosen)

    result = instantiate(seconds, nodes, least, 12, lambda chosen: 0.0)
    able = [chosen for chosen in multisets(sorted(seconds), nodes) if least <= len(chosen) <= 12]
    assert (result is None) == (not able)
    if result is not None:
        assert sum(result) == nodes
        assert least <= len(result) <= 12
        assert rate(result) == pytest.approx(max(map(rate, able)))


def test_instantiation_counts_the_sync():
    seconds = {size: 1.0 / size**1.01 for size in range(4, 60)}
    slow = instantiate(seconds, 400, 2, 4096, lambda chosen: 100.0 * len(chosen))
    fast = instantiate(seconds, 400, 2, 4096, lambda chosen: 100.0 / len(chosen))
    assert len(slow) < len(fast)


cases = st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
    lambda weights: st.tuples(st.just([float(w) for w in weights]), st.integers(len(weights), len(weights) + 9))
)


def all_shares(count: int, batch: int) -> list[tuple[int, ...]]:
    return [shares for shares in product(range(1, batch + 1), repeat=count) if sum(shares) == batch]


@fewer
@given(cases)
def test_shares_minimize_the_slowest_pipeline(case):
    weights, batch = case
    shares = distribute(weights, batch)
    assert sum(shares) == batch
    assert min(shares) >= 1
    best = min(max(w * b for w, b in zip(weights, other, strict=True)) for other in all_shares(len(weights), batch))
    assert max(w * b for w, b in zip(weights, shares, strict=True)) == best


SIZES = range(3, 13)


@pytest.mark.parametrize(
    ("pipelines", "dead", "expected"),
    [
        ("0123 456", {2}, "013 456, shrink"),
        # Too few nodes: borrow one from the largest pipeline, or merge with the smallest.
        ("012 3456 789ab", {1}, "02b 3456 789a, borrow"),
        ("012 345 678", {1}, "34502 678, merge"),
        ("012 345", {0, 1, 2}, "345, shrink"),
    ],
)
def test_damaged_pipelines_shrink_borrow_or_merge(pipelines, dead, expected):
    result = reconfigure([tuple(int(node, 16) for node in each) for each in pipelines.split()], dead, SIZES)
    text = result and f"{' '.join(''.join(f'{node:x}' for node in each) for each in result[0])}, {result[1]}"
    assert text == expected


def test_pipelines_that_fit_no_template_are_instantiated_again():
    assert reconfigure([(0, 1, 2), (3, 4, 5)], {0}, [3]) is None


STATE = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


@pytest.mark.parametrize(
    ("splits", "pipelines", "held", "workers_per_node", "expected"),
    [
        # Node 0 has layers 0 to 1 and takes 2; node 2 has 4 to 5 and takes 3; pipeline 1 lacks nothing.
        ([(3, 3)] * 2, [(0, 2), (3, 4)], {0: (0, 2), 2: (4, 6), 3: (0, 3), 4: (3, 6)}, 1, (8, 12)),
        # Two new nodes take the 3 bytes of stage 0: one holder sends 6, two holders send 3 each.
        ([(2, 4)] * 3, [(0, 9), (1, 9), (2, 9)], {2: (0, 2), 9: (2, 6)}, 1, (6, 6)),
        ([(2, 4)] * 4, [(0, 9), (1, 9), (2, 9), (3, 9)], {2: (0, 2), 3: (0, 2), 9: (2, 6)}, 1, (3, 6)),
        # A worker copies nothing that another worker of its node holds.
        ([(1, 2, 2, 1)], [(5, 6)], {5: (0, 3), 6: (2, 6)}, 2, (0, 0)),
    ],
)
def test_missing_layers_are_copied_from_all_holders(splits, pipelines, held, workers_per_node, expected):
    assert copy_bytes(splits, pipelines, held, STATE, workers_per_node) == expected


def test_nodes_keep_most_of_their_layers():
    held = {7: (4, 6), 8: (0, 3), 9: (2, 4)}
    assert assign_nodes([(0, 2), (2, 4), (4, 6)], [7, 8, 9], held, STATE) == [8, 9, 7]
    assert assign_nodes([(0, 3), (3, 6)], [7, 8, 9], held, STATE) == [8, 7]
    assert assign_nodes([(0, 3), (3, 6)], [1, 2], {}, STATE) == [1, 2]


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
@settings(max_examples=30)
@given(unequal(), st.data())
def test_unequal_pipelines_pass_check_and_beat_no_bound(case, data):
    splits, shares = case
    layers = sum(splits[0])
    draws = [data.draw(st.lists(st.integers(1, 4).map(float), min_size=layers, max_size=layers)) for _ in range(5)]
    link = data.draw(st.sampled_from([0.0, 0.5]))
    schedule, common = iteration_schedule(splits, shares)
    assert check(schedule) == check(lower(schedule), about_to_run=True) == []
    timeline = simulate(lower(schedule), priced(common, draws, link))
    workers = []
    for k, (split, share) in enumerate(zip(splits, shares, strict=True)):
        alone = worker_times(one_f_one_b(Shape(1, len(split), share)), priced(split, draws, link))
        workers += [(end, stages) for (end, _), stages in zip(alone, hosted_stages(split, common), strict=True)]
        fine = priced(common, [*draws[:3], [0.0] * layers, [0.0] * layers], link)
        own_ends = [end for end, _ in worker_times(schedule, fine)][len(workers) - len(split) : len(workers)]
        assert own_ends == pytest.approx([end for end, _ in alone])
        seconds = [sum(times) for times in zip(*draws[:3], strict=True)]
        slowest = max(sum(seconds[a:b]) for a, b in pairwise([0, *accumulate(split)]))
        assert timeline.makespan >= share * slowest
        assert schedule.stages_of(Worker(k, 0))[0] == 0
    together = iteration_seconds(workers, priced(common, draws, link), common)
    assert timeline.period == timeline.makespan == pytest.approx(together)


@pytest.mark.search
@settings(max_examples=12)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 2)), max_size=12))
def test_any_deaths_and_joins_give_valid_schedules(events):
    layer = {"static": 1.0, "state": 1.0, "activation": 0.0}
    common = scenario(3, 4, 8, layers=12, layer=layer, memory=(4.0,) * 4, node_of=tuple(range(13)))
    played = Play(Oobleck(common))
    for is_failure, first, count in events:
        live = played.state.live
        pool = sorted(live if is_failure else common.all_nodes - live)
        chosen = pool[first % max(1, len(pool)) :][:count]
        text = " ".join(map(str, chosen))
        state = (played.change(text) if is_failure else played.change(joined=text)).state
        assert state.live == (live.difference(chosen) if is_failure else live.union(chosen))
        if hasattr(state, "shares"):
            used = [node for members in state.pipelines for node in members]
            assert len(used) == len(set(used))
            assert set(used) <= state.live
            assert sum(state.shares) == common.micro_batches
            ((schedule, profile),) = state.schedules()
            assert check(schedule) == []
            assert simulate(lower(schedule), profile).period == pytest.approx(state.period)
