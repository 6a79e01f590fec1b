"""Owners of the shards of optimizer state for any set of dead workers, and the units that workers host."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, strategies as st

from recycle import Job, Schedule, Shape, Worker
from recycle.ir.families import one_f_one_b, zb_v
from recycle.plans.hosting import Hosts, UnitRange, joined, layers_in, stage_units, stages_by_rank, without
from recycle.plans.shards import Shards, owners_of
from tests.exec.runs import job

HOSTS = [Worker(pipeline, 1) for pipeline in range(8)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Worker], list[Worker], int]:
    """Hosts of a stage, the live ones, and the number of copies."""
    hosts = HOSTS[: draw(st.integers(1, 8))]
    live = draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
    return hosts, sorted(live), draw(st.integers(1, 4))


@given(cases())
def test_every_shard_has_its_copies_and_owners_of_a_healthy_run_keep_theirs(case):
    hosts, live, copies = case
    healthy, now = owners_of(hosts, hosts, copies), owners_of(hosts, live, copies)
    for before, after in zip(healthy, now, strict=True):
        assert len(set(after)) == len(after) == min(copies, len(live))
        assert set(after) <= set(live)
        kept = [owner for owner in before if owner in live]
        assert list(after[: len(kept)]) == kept, "surviving owners come first, in the same order"
    load = Counter(owner for owners in now for owner in owners)
    assert set(load) == set(live)
    assert max(load.values()) - min(load.values()) <= (0 if len(live) == len(hosts) else max(2, copies))


@given(st.integers(2, 6), st.integers(2, 3), st.data())
def test_owners_of_a_shard_are_on_different_nodes_while_there_are_any(nodes, copies, data):
    hosts = [Worker(pipeline, 0) for pipeline in range(2 * nodes)]
    node_of = {host: host.pipeline // 2 for host in hosts}
    live = sorted(data.draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True)))
    live_nodes = {node_of[host] for host in live}
    healthy = owners_of(hosts, hosts, copies, node_of)
    for before, owners in zip(healthy, owners_of(hosts, live, copies, node_of), strict=True):
        wanted = min(len(live_nodes), len(owners)) if copies <= nodes else 1
        assert len({node_of[owner] for owner in owners}) >= wanted
        assert len({node_of[owner] for owner in before}) == min(copies, nodes)


JOB = Job.from_toml(
    """
[shape]
pipelines = 3
ranks = 2
chunks = 2
micro_batches = 2
[model]
kind = "emulated"
[train]
sharded_optimizer = true
"""
)


def test_owners_spare_hosts_and_nodes_follow_from_the_job():
    shards, workers = Shards(JOB, Hosts.at_start(JOB, None)), list(JOB.shape.workers())
    owned = shards.owned(workers)
    assert owned.count == 12
    assert owned.stages[Worker(0, 1)] == (3, 5, 9, 11)
    assert shards.anything().units[Worker(2, 0)] == ((0, 3), (6, 9))
    assert shards.spare(workers) == {0: 1, 1: 1, 2: 1, 3: 1}
    live = [worker for worker in workers if worker not in (Worker(0, 1), Worker(2, 1))]
    assert shards.spare(live) == {0: 1, 1: 0, 2: 1, 3: 0}
    assert shards.owned(live).stages[Worker(1, 1)] == (3, 4, 5, 9, 10, 11)
    # Two nodes: workers 0.0, 0.1 and 1.0 on one, 1.1, 2.0 and 2.1 on the other.
    two_nodes = Job.from_toml(JOB.to_toml().replace("workers_per_node = 1", "workers_per_node = 3"))
    a, b, c = (Worker(pipeline, 0) for pipeline in range(3))
    assert Shards(two_nodes, Hosts.at_start(two_nodes, None)).owners(workers)[0] == ((a, c), (b, c), (c, a))


ELASTIC = Job.from_toml(
    """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[model]
kind = "emulated"
layers = 2
[planner]
layout = "elastic"
[train]
sharded_optimizer = true
"""
)
"""Two stages of a layer each, so four units."""


@given(st.data())
def test_owners_of_a_healthy_run_keep_the_shards_of_units_that_they_still_host(data):
    workers = list(ELASTIC.shape.workers())
    at_start = Shards(ELASTIC, Hosts.at_start(ELASTIC, None))
    healthy = at_start.owned(workers)
    assert {len(numbers) for numbers in healthy.stages.values()} == {4}, "two units, two shards of each"
    live = sorted(data.draw(st.lists(st.sampled_from(workers), min_size=2, unique=True)))
    pairs = data.draw(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=len(live), max_size=len(live)))
    stages = dict(zip(live, pairs, strict=True))
    hosting = Hosts.of(ELASTIC, stages)
    then = Shards(ELASTIC, hosting)
    hosts = {stage: {worker for worker in live if stage in stages[worker]} for stage in (0, 1)}
    for stage, owners in then.owners(live).items():
        for number, workers_of in zip(then.numbers(stage), owners, strict=True):
            assert set(workers_of) <= hosts[stage]
            assert len(set(workers_of)) == len(workers_of) == min(2, len(hosts[stage]))
            before = {worker for worker in hosts[stage] if number in healthy.stages[worker]}
            assert before <= set(workers_of)
    assert at_start.moves(then, live) == any(stages[worker] != (worker.rank,) for worker in live)


def test_shards_of_units_are_counted_by_stage_of_the_job():
    shards = Shards(ELASTIC, Hosts.at_start(ELASTIC, None))
    assert [shards.named(number) for number in (0, 4, 11)] == [
        "shard 0 of the embedding", "shard 1 of layer 0", "shard 2 of the head"]  # fmt: skip
    assert (shards.numbers(1), shards.stage_of(7)) == (range(6, 12), 1)
    repartitioned = Hosts.of(ELASTIC, {Worker(0, 0): (0, 1), Worker(1, 0): (0,), Worker(2, 1): (1,)}, (1, 1))
    assert Shards(ELASTIC, repartitioned).spare([Worker(0, 0), Worker(1, 0), Worker(2, 1)]) == {0: 1, 1: 1}
    assert Shards(ELASTIC, repartitioned).spare([Worker(0, 0), Worker(1, 0)]) == {0: 1, 1: 0}


CUT = Shape(2, 2, 1, cut=(1, 2, 1))
CHAIN = {"0.0": [0], "1.0": [1], "0.1": [2]}


def units(ranges: tuple[UnitRange, ...]) -> set[int]:
    return {unit for begin, end in ranges for unit in range(begin, end)}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_every_unit_is_in_one_stage_and_every_layer_in_its_own(layers):
    ranges, units_in_all = stage_units(layers), sum(layers) + 2
    assert [unit for begin, end in ranges for unit in range(begin, end)] == list(range(units_in_all))
    hosted = [layers_in(units, units_in_all) for units in ranges]
    assert [end - begin for begin, end in hosted] == layers


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6).map(joined)


@given(RANGES, RANGES)
def test_ranges_are_sets_of_units_in_the_fewest_ranges(first, second):
    remaining = without(first, second)
    assert units(remaining) == units(first) - units(second)
    assert units(joined([*first, *second])) == units(first) | units(second)
    assert all(before[1] < after[0] for before, after in pairwise(remaining))


def test_neighboring_stages_of_a_worker_are_one_range():
    elastic = job(2, 2, 1, model={"layers": 4})
    schedule = Schedule.from_text(CUT, {}, placement={"0.0": [0, 1], "0.1": [2], "1.0": [0], "1.1": [1, 2]})
    assert Hosts.of_schedule(elastic, schedule).units == {
        Worker(0, 0): ((0, 4),),
        Worker(0, 1): ((4, 6),),
        Worker(1, 0): ((0, 2),),
        Worker(1, 1): ((2, 6),),
    }
    assert [schedule.unit_runs(worker) for worker in schedule.live] == [((0, 3),), ((3, 4),), ((0, 1),), ((1, 4),)]


def test_a_worker_outside_the_schedule_starts_with_the_stages_of_its_peers_or_empty():
    elastic = job(2, 2, 1, model={"layers": 4})
    usual = one_f_one_b(elastic.shape)
    assert Hosts.at_start(elastic, usual) == Hosts.at_start(elastic, None)
    chain = Schedule.from_text(CUT, {}, placement=CHAIN, failed=["1.1"])
    assert Hosts.at_start(elastic, chain).stages == {Worker(0, 0): (0,), Worker(0, 1): (2,), Worker(1, 0): (1,)}
    vee = zb_v(job(2, 2, 4, shape={"chunks": 2}).shape)
    assert stages_by_rank(vee) == {0: (0, 3), 1: (1, 2)}
    assert stages_by_rank(chain) is None
    unlike = Schedule.from_text(elastic.shape, {}, placement={"1.1": [0, 1]})
    assert stages_by_rank(unlike) is None
