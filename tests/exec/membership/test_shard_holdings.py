"""Holdings of shards: what is copied when who is alive changes, what is lost, and how it is named in the register."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from recycle.errors import JobError
from recycle.exec.membership.messages import Copy
from recycle.exec.membership.shard_holdings import ShardHoldings
from recycle.plans.hosting import Hosts
from recycle.plans.shards import StageShards
from recycle.shape import Worker
from tests.exec.runs import job
from tests.exec.sharded import sharded

JOB = sharded(job(3, 2, 2))
FOUR = sharded(job(4, 1, 2))
EVERYBODY = list(JOB.shape.workers())


def holdings() -> ShardHoldings:
    return ShardHoldings(StageShards(JOB, Hosts.at_start(JOB, None).hosts_of_stages()), EVERYBODY)


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
    assert of.event_fields((1, 2)) == {"shards": ["shard 1 of stage 0"]}
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
    of = ShardHoldings(StageShards(FOUR, Hosts.at_start(FOUR, None).hosts_of_stages()), list(FOUR.shape.workers()))
    everybody = list(FOUR.shape.workers())
    run(of, everybody, everybody)
    run(of, everybody[1:], everybody[1:])  # shard 0 lay on 0.0 and 1.0
    assert of.plan == "shards -0.0"
    (other,) = (worker for worker in everybody[2:] if 0 in of.hosts.stages[worker])
    left = [worker for worker in everybody[1:] if worker != Worker(1, 0)]
    wanted = of.wanted(None, left, left)
    assert wanted is not None
    name = of.name_of("", wanted)
    assert of.named(name, lambda plan: None) == wanted
    assert 0 in wanted.stages[other], "it alone holds the shard"
    of.take_up(name, wanted)
    for copy in of.behind(wanted, left):
        assert Worker.parse(copy.source) in left
        of.copied(Worker.parse(copy.worker), (copy.first, copy.last))
    assert of.spare(left) == {0: 1}
    after = of.wanted(None, left, left)
    assert after == StageShards(FOUR, {0: everybody}).owned(left), "then it is theirs who are to own it"


def test_a_stage_needs_a_host_in_each_pipeline() -> None:
    hosts = Hosts.at_start(JOB, None).hosts_of_stages()
    with pytest.raises(JobError, match=r"stage 1 has 2 hosts, dead ones too, and needs one in each of 3 pipelines"):
        StageShards(JOB, hosts | {1: hosts[1][:2]})
