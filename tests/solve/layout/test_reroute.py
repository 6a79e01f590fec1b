"""Re-routing within a layout: workers keep their units, and all micro-batches run."""

import random
from typing import Any

import pytest

from recycle import PlanError, Worker, check, simulate
from recycle.exec.leader.holdings import Holdings
from recycle.job import PricedJob
from recycle.job.pricing import profile_of_layout
from recycle.plans import Plan
from recycle.plans.hosting import Hosts, layers_in
from recycle.solve.effort import Deadline
from recycle.solve.layout.elastic import quick_elastic_plan, reroute_in_layout
from recycle.solve.planner import plan, plan_for_training
from tests.exec.runs import job


def elastic(pipelines: int, ranks: int, micro_batches: int, layers: int, chunks: int = 1, **planner: Any) -> PricedJob:
    return job(
        pipelines,
        ranks,
        micro_batches,
        shape={"chunks": chunks},
        model={"layers": layers},
        memory={"limit": 4 * ranks * chunks, "state_limit": 1.5},
        planner={"layout": "elastic", **planner},
    )


def without_1_1(priced: PricedJob) -> Plan:
    planned = quick_elastic_plan(priced, [Worker(1, 1)], Deadline(None))
    assert planned.shape.cut
    return planned


@pytest.mark.search
@pytest.mark.parametrize("shape", [(3, 2, 4, 8), (4, 2, 3, 8), (2, 4, 6, 8), (3, 2, 4, 8, 2)])
@pytest.mark.parametrize("staggered", [True, False])
def test_live_workers_keep_their_units(shape, *, staggered):
    priced = elastic(*shape, staggered=staggered)
    before = without_1_1(priced).schedule
    dead = [w for w in before.live if all(len(before.hosts(s)) > 1 for s in before.stages_of(w))]
    for second in random.Random(0).sample(dead, min(3, len(dead))):
        planned = reroute_in_layout(priced, before, [Worker(1, 1), second], Deadline(None))
        after = planned.schedule
        assert after.failed == {Worker(1, 1), second}
        assert {w: after.unit_runs(w) for w in after.live} == {w: before.unit_runs(w) for w in after.live}
        assert planned.moves == ()
        profile = profile_of_layout(priced, priced.prices, after.shape)
        assert check(after, profile=profile, limits=priced.limits) == []
        assert simulate(after, profile).period == planned.period >= planned.lower_bound


@pytest.mark.search
def test_returned_worker_hosts_its_original_chunks():
    priced = elastic(3, 2, 4, 8, 2)
    before = without_1_1(priced).schedule
    after = reroute_in_layout(priced, before, [], Deadline(None)).schedule
    assert after.failed == frozenset()
    assert after.unit_runs(Worker(1, 1)) == ((2, 4), (6, 8))
    assert {w: after.unit_runs(w) for w in before.live} == {w: before.unit_runs(w) for w in before.live}
    assert check(after, profile=profile_of_layout(priced, priced.prices, after.shape), limits=priced.limits) == []


@pytest.mark.search
@pytest.mark.parametrize("chunks", [1, 2])
def test_copies_are_counted_from_the_current_layout(chunks):
    priced, second = elastic(4, 2, 4, 8, chunks), Worker(2, 0)
    now = without_1_1(priced).schedule
    dead = [Worker(1, 1), second]
    planned, anew = plan(priced, dead, steps=60, within=now), plan(priced, dead, steps=60)
    assert planned.period <= 1.02 * anew.period
    held, hosted = (Hosts.of_schedule(priced, schedule) for schedule in (now, planned.schedule))
    copies = Holdings(held).copies(hosted, list(hosted.units), list(hosted.units))
    assert {(move.worker, layer) for move in planned.moves for layer in range(*(move.units or ()))} == {
        (copy.worker, layer) for copy in copies for layer in range(*layers_in((copy.first, copy.last), hosted.count))
    }
    for move in planned.moves:
        source = Worker.parse(move.source)
        assert source not in dead
        assert set(range(*(move.units or ()))) <= {unit for run in now.unit_runs(source) for unit in range(*run)}


def test_unit_without_a_live_host_is_refused():
    priced = elastic(2, 4, 6, 8)
    before = without_1_1(priced).schedule
    hosts = before.hosts(0)
    with pytest.raises(PlanError, match="no live host"):
        reroute_in_layout(priced, before, [Worker(1, 1), *hosts], Deadline(None))


def test_training_passes_the_file_of_its_plan(tmp_path):
    priced = elastic(3, 2, 4, 8)
    before = without_1_1(priced)
    before.save(tmp_path / "before.json")
    dead = [Worker(1, 1), Worker(2, 0)]
    text = plan_for_training(priced, (1, 1), True, failed=dead, within=tmp_path / "before.json")
    expected = reroute_in_layout(priced, before.schedule, dead, Deadline(None))
    assert Plan.from_text(text).schedule.failed == expected.schedule.failed
    assert Plan.from_text(text).schedule.shape == expected.schedule.shape
