"""Holdings of shards: what is copied when who is alive changes, what is lost, and how it is named in the register."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest

from recycle.errors import JobError
from recycle.exec.leader.holdings import ShardHoldings
from recycle.exec.protocol import Copied, Copy
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts
from recycle.plans.shards import Shards
from tests.exec.runs import job
from tests.exec.sharded import sharded

JOB = sharded(job(3, 2, 2))
FOUR = sharded(job(4, 1, 2))
EVERYBODY = list(JOB.shape.workers())


def holdings() -> ShardHoldings:
    return ShardHoldings(JOB, Hosts.at_start(JOB, None), EVERYBODY)


def run(of: ShardHoldings, live: Collection[Worker], holders: Collection[Worker]) -> list[Copy]:
    """A generation of these workers runs; what is copied for it, and then all that is copied while it runs."""
    wanted = of.wanted(None, live, holders)
    copies = of.copies(wanted, live, holders)
    of.take_up(of.name_of("", wanted), wanted)
    for copy in of.behind(wanted, live):
        of.copied(Worker.parse(copy.worker), (copy.first, copy.last))
    assert not of.is_restoring
    return copies


def workers(*names: str) -> list[Worker]:
    return [Worker.parse(name) for name in names]


def test_processes_that_begin_copy_nothing_whoever_is_there() -> None:
    assert run(holdings(), EVERYBODY, EVERYBODY) == []
    left = workers("0.0", "2.0", "1.1")
    assert run(holdings(), left, left) == []
    assert holdings().lost(workers("0.0", "1.1")) == ()
    assert holdings().lost(workers("0.0", "1.0")) == ((3, 6),), "stage 1 has no host"


def test_a_death_has_its_shards_copied_from_who_is_left_and_a_rejoin_back() -> None:
    of = holdings()
    run(of, EVERYBODY, EVERYBODY)
    # Shards 0 to 2 of stage 0 lie on 0.0 and 1.0, 1.0 and 2.0, 2.0 and 0.0.
    left = [worker for worker in EVERYBODY if worker != Worker(1, 0)]
    wanted = of.wanted(None, left, left)
    assert of.copies(wanted, left, left) == [], "who is left goes on at once"
    of.take_up(of.name_of("", wanted), wanted)
    assert of.is_restoring
    assert of.plan == "shards -1.0 ~0.0:1 ~2.0:0"
    assert of.spare(left) == {0: 0, 1: 1}
    behind = sorted(of.behind(wanted, left), key=lambda copy: copy.worker)
    assert behind == [Copy("0.0", "2.0", 1, 2), Copy("2.0", "0.0", 0, 1)]
    copies = [Copied("2.0", 1, 2, 8, 0.5), Copied("1.0", 3, 4, 8, 0.5), Copied("2.0", 4, 6, 8, 0.5)]
    assert of.copy_events(copies) == [
        ({"shards": [f"shard {i} of stage {s}" for i, s in ((1, 0), (1, 1), (2, 1))]}, [copies[0], copies[2]]),
        ({"shards": ["shard 0 of stage 1"]}, [copies[1]]),
    ]
    of.copied(Worker(0, 0), (1, 2))
    assert of.plan == "shards -1.0 ~2.0:0"
    assert of.lost(workers("0.0", "0.1", "2.1")) == (), "it has all shards of stage 0 by now"
    assert of.lost(workers("2.0", "0.1", "2.1")) == ((0, 1),)
    of.copied(Worker(2, 0), (0, 1))
    assert of.spare(left) == {0: 1, 1: 1}
    assert run(of, left, left) == []
    back = run(of, EVERYBODY, left)
    assert {copy.worker for copy in back} == {"1.0"}
    assert {number for copy in back for number in range(copy.first, copy.last)} == {0, 1}
    assert run(of, EVERYBODY, EVERYBODY) == []


def test_what_no_owner_has_is_lost_and_named() -> None:
    of = holdings()
    run(of, EVERYBODY, EVERYBODY)
    assert of.lost(workers("0.0", "2.0", "0.1", "1.1")) == ()
    lost = of.lost(workers("2.0", "0.1", "1.1"))
    assert lost == ((0, 1),), "both owners of shard 0 of stage 0"
    assert of.described(lost[0]) == "shard 0 of stage 0's optimizer state has"
    assert of.spare(EVERYBODY) == {0: 1, 1: 1}


def test_the_register_names_holdings_by_who_is_dead() -> None:
    of = holdings()
    dead = workers("1.0", "2.1")
    for live in (EVERYBODY, [worker for worker in EVERYBODY if worker not in dead]):
        wanted = of.wanted(None, live, live)
        name = of.name_of("a plan", wanted)
        assert of.named(name, lambda plan: None) == wanted
    assert name == "shards -1.0 -2.1"


def test_who_holds_what_it_is_not_to_own_goes_on_as_long_as_somebody_has_yet_to_copy_it() -> None:
    of = ShardHoldings(FOUR, Hosts.at_start(FOUR, None), list(FOUR.shape.workers()))
    everybody = list(FOUR.shape.workers())
    run(of, everybody, everybody)
    run(of, everybody[1:], everybody[1:])  # shard 0 lay on 0.0 and 1.0
    assert of.plan == "shards -0.0"
    (other,) = (worker for worker in everybody[2:] if 0 in of.hosts.stages[worker])
    left = [worker for worker in everybody[1:] if worker != Worker(1, 0)]
    wanted = of.wanted(None, left, left)
    name = of.name_of("", wanted)
    assert of.named(name, lambda plan: None) == wanted
    assert 0 in wanted.stages[other], "it alone holds the shard"
    of.take_up(name, wanted)
    for copy in of.behind(wanted, left):
        assert Worker.parse(copy.source) in left
        of.copied(Worker.parse(copy.worker), (copy.first, copy.last))
    assert of.spare(left) == {0: 1}
    after = of.wanted(None, left, left)
    assert after == Shards(FOUR, Hosts.at_start(FOUR, None)).owned(left), "then it is theirs who are to own it"


def test_a_stage_needs_a_host_in_each_pipeline() -> None:
    stages = dict(Hosts.at_start(JOB, None).stages) | {Worker(2, 1): ()}
    with pytest.raises(JobError, match=r"stage 1 has 2 hosts, dead ones too, and needs one in each of 3 pipelines"):
        Shards(JOB, Hosts.of(JOB, stages))


def elastic() -> PricedJob:
    """Two stages of two layers: units 0 to 5."""
    of = sharded(job(3, 2, 2, model={"layers": 4}))
    return of.with_sections(planner=msgspec.structs.replace(of.planner, layout="elastic"))


def test_a_move_copies_the_shards_of_units_before_it_runs_and_a_death_on_the_way_takes_nothing_along() -> None:
    job_, everybody = elastic(), list(elastic().shape.workers())
    given = Hosts.at_start(job_, None)
    of = ShardHoldings(job_, given, everybody)
    assert run(of, everybody, everybody) == []
    assert of.plan == "shards"
    left = [worker for worker in everybody if worker != Worker(1, 1)]
    assert run(of, left, left) == []
    before = of.hosts
    # Units 0 to 2 | 3 | 4 and 5, as stages: 2.0 takes layer 2 on, and 0.1 gives it away.
    stages = {"0.0": (0,), "1.0": (0,), "2.0": (0, 1), "0.1": (2,), "2.1": (1, 2)}
    moved = Hosts.of(job_, {Worker.parse(name): its for name, its in stages.items()}, (2, 1, 1))
    wanted = of.wanted(moved, left, left)
    copies = of.copies(wanted, left, left)
    assert {(copy.worker, copy.source) for copy in copies} == {("2.0", "0.1")}, "it alone hosts a unit that it did not"
    owners = {number: [w for w in left if number in wanted.stages[w]] for number in range(9, 12)}
    assert all(mine == workers("2.0", "2.1") for mine in owners.values()), "its only hosts"
    assert of.behind(wanted, left) == []
    name = of.name_of("0123", wanted)
    assert name == "shards @0123 -1.1"
    assert of.hosts is before, "until it runs everybody holds what it held"
    fewer = [worker for worker in left if worker != Worker(2, 0)]
    again = of.wanted(None, fewer, fewer)
    assert of.copies(again, fewer, fewer) == []
    of.take_up(name, wanted)
    assert of.named(name, {"0123": moved}.get) == wanted
    assert of.named(name, lambda plan: None) is None, "the plan is not there any more"
    assert of.lost(workers("0.0", "1.0", "2.0", "0.1")) == ()
    assert of.lost(workers("0.0", "1.0", "0.1"))[0] == (9, 12), "layer 2 is on 2.0 and 2.1 alone"
    assert of.spare(left) == {0: 1, 1: 1}
    # 2.1 dies: in the same layout nobody copies before it runs.
    after = [worker for worker in left if worker != Worker(2, 1)]
    acting = of.wanted(Hosts.of(job_, {w: moved.stages[w] for w in after}, (2, 1, 1)), after, after)
    assert of.copies(acting, after, after) == []
    # With everybody back in the given stages 0.1 copies what it gave away.
    back = run(of, everybody, left)
    assert {copy.worker for copy in back} == {"1.1", "0.1"}
    assert of.plan == "shards"
    assert {number for copy in back if copy.worker == "0.1" for number in range(copy.first, copy.last)} <= {9, 10, 11}
