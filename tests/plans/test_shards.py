"""Who owns which shard of a stage's optimizer state: properties of the rule, whoever is dead.

Units: which of them a stage is made of, and which each worker of a schedule hosts.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from recycle import Schedule, Shape, Worker
from recycle.ir.families import one_f_one_b, zb_v
from recycle.job import Job
from recycle.plans.hosting import Hosts, UnitRange, joined, layers_in, stage_units, stages_by_rank, without
from recycle.plans.shards import Shards, owners_of
from tests.exec.runs import job

HOSTS = [Worker(pipeline, 1) for pipeline in range(8)]


@st.composite
def settings(draw: st.DrawFn) -> tuple[list[Worker], list[Worker], int]:
    """Hosts of a stage, those that are alive, and the copies."""
    hosts = HOSTS[: draw(st.integers(1, 8))]
    live = draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
    return hosts, sorted(live), draw(st.integers(1, 4))


@given(settings())
def test_every_shard_has_its_copies_as_far_as_there_are_hosts(setting: tuple[list[Worker], list[Worker], int]) -> None:
    hosts, live, copies = setting
    owners = owners_of(hosts, live, copies)
    assert len(owners) == len(hosts)
    for mine in owners:
        assert len(set(mine)) == len(mine) == min(copies, len(live))
        assert set(mine) <= set(live)
    load = Counter(owner for mine in owners for owner in mine)
    assert set(load) == set(live)
    if len(live) == len(hosts):
        assert len(set(load.values())) == 1, "all own as much in a healthy run"
    assert max(load.values()) - min(load.values()) <= max(2, copies)


@given(settings(), st.data())
def test_a_death_takes_no_shard_from_a_healthy_runs_owners(
    setting: tuple[list[Worker], list[Worker], int], data: st.DataObject
) -> None:
    hosts, live, copies = setting
    healthy, now = owners_of(hosts, hosts, copies), owners_of(hosts, live, copies)
    for before, after in zip(healthy, now, strict=True):
        kept = [owner for owner in before if owner in live]
        assert list(after[: len(kept)]) == kept, "who is left comes first, in the same order"
    dead = data.draw(st.sampled_from(hosts))
    one = owners_of(hosts, [host for host in hosts if host != dead], copies)
    unlike = [place for place in range(len(hosts)) if one[place] != healthy[place]]
    assert unlike == [place for place in range(len(hosts)) if dead in healthy[place]]
    assert owners_of(hosts, hosts, copies) == healthy, "who comes back has what it had"


@given(st.integers(2, 6), st.integers(2, 3), st.data())
def test_owners_of_a_shard_are_on_different_nodes_while_there_are_any(
    nodes: int, copies: int, data: st.DataObject
) -> None:
    hosts = [Worker(pipeline, 0) for pipeline in range(2 * nodes)]
    node_of = {host: host.pipeline // 2 for host in hosts}
    live = sorted(data.draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True)))
    left = {node_of[host] for host in live}
    healthy = owners_of(hosts, hosts, copies, node_of)
    for before, mine in zip(healthy, owners_of(hosts, live, copies, node_of), strict=True):
        wanted = min(len(left), len(mine)) if copies <= nodes else 1
        assert len({node_of[owner] for owner in mine}) >= wanted
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


def test_shards_are_numbered_through_the_model_and_held_like_units() -> None:
    shards = Shards(JOB, Hosts.at_start(JOB, None))
    assert shards.number(2, 1) == 7
    assert shards.place(7) == (2, 1)
    assert shards.named(7) == "shard 1 of stage 2"
    everybody = list(JOB.shape.workers())
    owned = shards.owned(everybody)
    assert owned.count == 12
    assert owned.stages[Worker(0, 1)] == (3, 5, 9, 11)
    assert owned.units[Worker(0, 1)] == ((3, 4), (5, 6), (9, 10), (11, 12))
    assert shards.anything().units[Worker(2, 0)] == ((0, 3), (6, 9))
    assert shards.spare(everybody) == {0: 1, 1: 1, 2: 1, 3: 1}
    left = [worker for worker in everybody if worker not in (Worker(0, 1), Worker(2, 1))]
    assert shards.spare(left) == {0: 1, 1: 0, 2: 1, 3: 0}
    assert shards.owned(left).stages[Worker(1, 1)] == (3, 4, 5, 9, 10, 11)


def test_nodes_are_those_of_the_job() -> None:
    job = Job.from_toml(JOB.to_toml().replace("workers_per_node = 1", "workers_per_node = 3"))
    shards = Shards(job, Hosts.at_start(job, None))
    # Two nodes: workers 0.0, 0.1 and 1.0 on one, 1.1, 2.0 and 2.1 on the other.
    a, b, c = (Worker(pipeline, 0) for pipeline in range(3))
    assert shards.owners(list(job.shape.workers()))[0] == ((a, c), (b, c), (c, a))


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
def test_shards_of_units_stay_with_who_hosts_them_in_the_given_stages(data: st.DataObject) -> None:
    everybody = list(ELASTIC.shape.workers())
    given = Shards(ELASTIC, Hosts.at_start(ELASTIC, None))
    healthy = given.owned(everybody)
    assert {len(mine) for mine in healthy.stages.values()} == {4}, "two units, two shards of each"
    live = sorted(data.draw(st.lists(st.sampled_from(everybody), min_size=2, unique=True)))
    pairs = data.draw(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=len(live), max_size=len(live)))
    stages = dict(zip(live, pairs, strict=True))
    hosting = Hosts.of(ELASTIC, stages)
    then = Shards(ELASTIC, hosting)
    hosts = {stage: {worker for worker in live if stage in stages[worker]} for stage in (0, 1)}
    for stage, owners in then.owners(live).items():
        for number, mine in zip(then.numbers(stage), owners, strict=True):
            assert set(mine) <= hosts[stage]
            assert len(set(mine)) == len(mine) == min(2, len(hosts[stage]))
            had = {worker for worker in hosts[stage] if number in healthy.stages[worker]}
            assert had <= set(mine), "who owns it in a healthy run goes on with it where it hosts the unit"
    assert given.moves(then, live) == any(stages[worker] != (worker.rank,) for worker in live)


def test_shards_of_units_are_named_by_their_unit_and_told_by_stage() -> None:
    of = Shards(ELASTIC, Hosts.at_start(ELASTIC, None))
    assert [of.named(number) for number in (0, 4, 8, 11)] == [
        "shard 0 of the embedding",
        "shard 1 of layer 0",
        "shard 2 of layer 1",
        "shard 2 of the head",
    ]
    everybody = list(ELASTIC.shape.workers())
    assert of.numbers(1) == range(6, 12)
    assert of.stage_of(7) == 1
    assert of.spare(everybody) == {0: 1, 1: 1}
    cut = Hosts.of(ELASTIC, {Worker(0, 0): (0, 1), Worker(1, 0): (0,), Worker(2, 1): (1,)}, (1, 1))
    assert Shards(ELASTIC, cut).spare([Worker(0, 0), Worker(1, 0), Worker(2, 1)]) == {0: 1, 1: 1}
    assert Shards(ELASTIC, cut).spare([Worker(0, 0), Worker(1, 0)]) == {0: 1, 1: 0}


CUT = Shape(2, 2, 1, cut=(1, 2, 1))
CHAIN = {"0.0": [0], "1.0": [1], "0.1": [2]}


def units(ranges: tuple[UnitRange, ...]) -> set[int]:
    return {unit for begin, end in ranges for unit in range(begin, end)}


def test_the_embedding_goes_with_the_first_stage_and_the_head_with_the_last() -> None:
    assert stage_units([2, 2]) == [(0, 3), (3, 6)]
    assert stage_units([3]) == [(0, 5)]
    assert stage_units([0, 2, 0, 1]) == [(0, 1), (1, 3), (3, 3), (3, 5)]
    assert [layers_in(of, 6) for of in stage_units([2, 2])] == [(0, 2), (2, 4)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_every_unit_is_in_one_stage(layers: list[int]) -> None:
    found = [unit for begin, end in stage_units(layers) for unit in range(begin, end)]
    assert found == list(range(sum(layers) + 2))


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6).map(joined)


@given(RANGES, RANGES)
def test_ranges_are_sets_of_units_in_as_few_pieces_as_can_be(
    one: tuple[UnitRange, ...], other: tuple[UnitRange, ...]
) -> None:
    left = without(one, other)
    assert units(left) == units(one) - units(other)
    assert units(joined([*one, *other])) == units(one) | units(other)
    assert all(first[1] < second[0] for first, second in pairwise(left))


def test_neighbouring_stages_of_a_worker_are_one_range() -> None:
    of = job(2, 2, 1, model={"layers": 4})
    schedule = Schedule.from_text(CUT, {}, placement={"0.0": [0, 1], "0.1": [2], "1.0": [0], "1.1": [1, 2]})
    assert Hosts.of_schedule(of, schedule).units == {
        Worker(0, 0): ((0, 4),),
        Worker(0, 1): ((4, 6),),
        Worker(1, 0): ((0, 2),),
        Worker(1, 1): ((2, 6),),
    }
    assert [schedule.unit_runs(worker) for worker in schedule.live] == [((0, 3),), ((3, 4),), ((0, 1),), ((1, 4),)]


def test_who_a_schedule_leaves_out_starts_with_what_its_peers_host_or_with_nothing() -> None:
    of = job(2, 2, 1, model={"layers": 4})
    usual = one_f_one_b(of.shape)
    assert Hosts.at_start(of, usual) == Hosts.at_start(of, None)
    chain = Schedule.from_text(CUT, {}, placement=CHAIN, failed=["1.1"])
    assert Hosts.at_start(of, chain).stages == {Worker(0, 0): (0,), Worker(0, 1): (2,), Worker(1, 0): (1,)}
    vee = zb_v(job(2, 2, 4, shape={"chunks": 2}).shape)
    assert stages_by_rank(vee) == {0: (0, 3), 1: (1, 2)}
    assert stages_by_rank(chain) is None
    unlike = Schedule.from_text(of.shape, {}, placement={"1.1": [0, 1]})
    assert stages_by_rank(unlike) is None
