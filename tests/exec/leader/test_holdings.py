"""Holdings of workers, lost units, and the copies that a plan needs; for units and shards."""

from collections.abc import Collection

from hypothesis import given, settings, strategies as st

from recycle import Worker
from recycle.exec.leader.holdings import Holdings, ShardHoldings
from recycle.exec.protocol import Copied, Copy
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts, UnitRange
from tests.exec.runs import job
from tests.exec.sharded import sharded
from tests.jobs import varied

JOB = job(3, 2, 2, model={"layers": 8})


EVERYBODY = set(JOB.shape.workers())


FIRST = Hosts.at_start(JOB, None)


def cut(stages: dict[str, tuple[int, ...]], config: tuple[int, ...]) -> Hosts:
    return Hosts.of(JOB, {Worker.parse(name): hosted for name, hosted in stages.items()}, config)


CHAINS = cut({"0.0": (0,), "1.0": (1, 2), "0.1": (3,), "2.0": (0, 1), "2.1": (2, 3)}, (2, 2, 1, 3))
"""One chain of three and one of two, without 1.1."""


def test_only_missing_units_are_copied_from_alternating_sources():
    holdings = Holdings(FIRST)
    live = EVERYBODY - {Worker(1, 1)}
    # 1.0 had layers 0 to 3 (units 0 to 4), and gets 2 to 4; 0.0 keeps two of its four.
    assert holdings.copies(CHAINS, live, live) == [Copy("1.0", "0.1", 5, 6)]
    holdings.set_current("chains", CHAINS)
    back = holdings.copies(FIRST, EVERYBODY, live)
    assert sorted((copy.worker, copy.source, copy.first, copy.last) for copy in back) == [
        ("0.0", "1.0", 3, 5),
        ("0.1", "2.1", 5, 6),
        ("1.0", "0.0", 0, 3),
        ("1.1", "2.1", 5, 10),
    ]


def test_initial_holdings_have_an_empty_name():
    holdings = Holdings(FIRST)
    assert holdings.target(None, EVERYBODY, EVERYBODY) == FIRST
    assert holdings.name_of("digest", FIRST) == ""
    assert holdings.name_of("digest", CHAINS) == "digest"
    holdings.set_current("digest", CHAINS)
    assert holdings.units_of(Worker(1, 0)) == ((3, 6),)
    holdings.start_over()
    assert (holdings.plan, holdings.units_of(Worker(1, 0))) == ("", ((0, 5),))


def test_units_without_a_live_holder_are_lost():
    holdings = Holdings(FIRST)
    assert holdings.lost(EVERYBODY) == ()
    assert holdings.lost({Worker(0, 0), Worker(1, 0)}) == ((5, 10),)
    assert holdings.describe((5, 10)) == "stage 1 has"
    assert holdings.describe((0, 10)) == "stages 0 1 have"
    holdings.set_current("chains", CHAINS)
    assert holdings.lost({Worker(2, 0), Worker(2, 1)}) == ()
    assert holdings.lost({Worker(0, 0), Worker(0, 1), Worker(2, 0)}) == ((5, 6),)
    assert holdings.describe((5, 6)) == "layer 4 has"
    assert holdings.describe((0, 3)) == "the embedding to layer 1 have"
    assert holdings.fewest_hosts([Worker(1, 0), Worker(2, 0)], EVERYBODY) == {Worker(1, 0): 2, Worker(2, 0): 2}
    assert holdings.fewest_hosts([Worker(2, 0)], {Worker(2, 0), Worker(0, 0)}) == {Worker(2, 0): 1}


@st.composite
def layouts(draw: st.DrawFn) -> Hosts:
    """Some of the workers in chains, each of which hosts the whole model."""
    workers = draw(st.permutations(sorted(EVERYBODY)))
    stages = {}
    while len(workers) > 0 and (not stages or draw(st.booleans())):
        length = draw(st.integers(1, min(4, len(workers))))
        ends = sorted(draw(st.sets(st.integers(1, 7), min_size=length - 1, max_size=length - 1)))
        for worker, begin, end in zip(workers[:length], [0, *ends], [*ends, 8], strict=True):
            stages[str(worker)] = tuple(range(begin, end))
        workers = workers[length:]
    return cut(stages, (1,) * 8)


@settings(max_examples=200)
@given(layouts(), layouts())
def test_copies_complete_the_planned_holdings(was, to):
    holdings = Holdings(FIRST)
    holdings.set_current("was", was)
    holders, live = set(was.stages), set(was.stages) | set(to.stages)
    copies = holdings.copies(to, live, holders)
    held = {worker: _units(was.units.get(worker, ())) for worker in live}
    for copy in copies:
        wanted = set(range(copy.first, copy.last))
        assert wanted <= _units(was.units[Worker.parse(copy.source)])
        assert not wanted & held[Worker.parse(copy.worker)]
        held[Worker.parse(copy.worker)] |= wanted
    assert all(held[worker] >= _units(units) for worker, units in to.units.items())
    assert sum(copy.last - copy.first for copy in copies) == sum(
        len(_units(units) - _units(was.units.get(worker, ()))) for worker, units in to.units.items()
    )


def _units(ranges: tuple[UnitRange, ...]) -> set[int]:
    return {unit for begin, end in ranges for unit in range(begin, end)}


# Shards.


SHARDED = sharded(job(3, 2, 2))
ALL = list(SHARDED.shape.workers())


def holdings() -> ShardHoldings:
    return ShardHoldings(SHARDED, Hosts.at_start(SHARDED, None), ALL)


def run(owned: ShardHoldings, live: Collection[Worker], holders: Collection[Worker]) -> list[Copy]:
    """A generation of these workers runs; what is copied for it, and then all that is copied while it runs."""
    wanted = owned.target(None, live, holders)
    copies = owned.copies(wanted, live, holders)
    owned.set_current(owned.name_of("", wanted), wanted)
    for copy in owned.background_copies(wanted, live):
        owned.add_copied(Worker.parse(copy.worker), (copy.first, copy.last))
    assert not owned.is_restoring
    return copies


def workers(*names: str) -> list[Worker]:
    return [Worker.parse(name) for name in names]


def test_shards_are_copied_after_a_death_and_again_after_the_rejoin():
    owned = holdings()
    run(owned, ALL, ALL)
    # Shards 0 to 2 of stage 0 lie on 0.0 and 1.0, 1.0 and 2.0, 2.0 and 0.0.
    left = [worker for worker in ALL if worker != Worker(1, 0)]
    wanted = owned.target(None, left, left)
    assert owned.copies(wanted, left, left) == [], "survivors continue at once"
    owned.set_current(owned.name_of("", wanted), wanted)
    assert owned.is_restoring
    assert owned.plan == "shards -1.0 ~0.0:1 ~2.0:0"
    assert owned.spare(left) == {0: 0, 1: 1}
    behind = sorted(owned.background_copies(wanted, left), key=lambda copy: copy.worker)
    assert behind == [Copy("0.0", "2.0", 1, 2), Copy("2.0", "0.0", 0, 1)]
    copies = [Copied("2.0", 1, 2, 8, 0.5), Copied("1.0", 3, 4, 8, 0.5), Copied("2.0", 4, 6, 8, 0.5)]
    assert owned.copy_events(copies) == [
        ({"shards": [f"shard {i} of stage {s}" for i, s in ((1, 0), (1, 1), (2, 1))]}, [copies[0], copies[2]]),
        ({"shards": ["shard 0 of stage 1"]}, [copies[1]]),
    ]
    owned.add_copied(Worker(0, 0), (1, 2))
    assert owned.plan == "shards -1.0 ~2.0:0"
    assert owned.lost(workers("0.0", "0.1", "2.1")) == (), "it has all shards of stage 0 by now"
    assert owned.lost(workers("2.0", "0.1", "2.1")) == ((0, 1),)
    owned.add_copied(Worker(2, 0), (0, 1))
    assert owned.spare(left) == {0: 1, 1: 1}
    assert run(owned, left, left) == []
    back = run(owned, ALL, left)
    assert {copy.worker for copy in back} == {"1.0"}
    assert {number for copy in back for number in range(copy.first, copy.last)} == {0, 1}
    assert run(owned, ALL, ALL) == []


def test_shard_without_an_owner_is_lost_and_named():
    owned = holdings()
    run(owned, ALL, ALL)
    assert owned.lost(workers("0.0", "2.0", "0.1", "1.1")) == ()
    lost = owned.lost(workers("2.0", "0.1", "1.1"))
    assert lost == ((0, 1),), "both owners of shard 0 of stage 0"
    assert owned.describe(lost[0]) == "shard 0 of stage 0's optimizer state has"
    assert owned.spare(ALL) == {0: 1, 1: 1}


def elastic() -> PricedJob:
    """Two stages of two layers: units 0 to 5."""
    return varied(sharded(job(3, 2, 2, model={"layers": 4})), planner={"layout": "elastic"})


def test_a_move_copies_the_shards_of_units_before_it_runs_and_a_death_on_the_way_takes_nothing_along():
    job_, positions = elastic(), list(elastic().shape.workers())
    given = Hosts.at_start(job_, None)
    owned = ShardHoldings(job_, given, positions)
    assert run(owned, positions, positions) == []
    assert owned.plan == "shards"
    left = [worker for worker in positions if worker != Worker(1, 1)]
    assert run(owned, left, left) == []
    before = owned.hosts
    # Units 0 to 2 | 3 | 4 and 5, as stages: 2.0 takes layer 2 on, and 0.1 gives it away.
    stages = {"0.0": (0,), "1.0": (0,), "2.0": (0, 1), "0.1": (2,), "2.1": (1, 2)}
    moved = Hosts.of(job_, {Worker.parse(name): values for name, values in stages.items()}, (2, 1, 1))
    wanted = owned.target(moved, left, left)
    copies = owned.copies(wanted, left, left)
    assert {(copy.worker, copy.source) for copy in copies} == {("2.0", "0.1")}, "it alone hosts a unit that it did not"
    owners = {number: [w for w in left if number in wanted.stages[w]] for number in range(9, 12)}
    assert all(own == workers("2.0", "2.1") for own in owners.values()), "its only hosts"
    assert owned.background_copies(wanted, left) == []
    name = owned.name_of("0123", wanted)
    assert name == "shards @0123 -1.1"
    assert owned.hosts is before, "until it runs positions holds what it held"
    fewer = [worker for worker in left if worker != Worker(2, 0)]
    again = owned.target(None, fewer, fewer)
    assert owned.copies(again, fewer, fewer) == []
    owned.set_current(name, wanted)
    assert owned.by_name(name, {"0123": moved}.get) == wanted
    assert owned.by_name(name, lambda plan: None) is None, "the plan is not there any more"
    assert owned.lost(workers("0.0", "1.0", "2.0", "0.1")) == ()
    assert owned.lost(workers("0.0", "1.0", "0.1"))[0] == (9, 12), "layer 2 is on 2.0 and 2.1 alone"
    assert owned.spare(left) == {0: 1, 1: 1}
    # 2.1 dies: in the same layout no copy precedes the generation.
    after = [worker for worker in left if worker != Worker(2, 1)]
    acting = owned.target(Hosts.of(job_, {w: moved.stages[w] for w in after}, (2, 1, 1)), after, after)
    assert owned.copies(acting, after, after) == []
    # With all workers back in the given stages 0.1 copies what it gave away.
    back = run(owned, positions, left)
    assert {copy.worker for copy in back} == {"1.1", "0.1"}
    assert owned.plan == "shards"
    assert {number for copy in back if copy.worker == "0.1" for number in range(copy.first, copy.last)} <= {9, 10, 11}
