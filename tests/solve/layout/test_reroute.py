"""Re-routing within a layout: nobody hosts anything else, all micro-batches run, and nothing takes long."""

from __future__ import annotations

import random
from typing import Any

import pytest

from recycle.errors import PlanError
from recycle.exec.leader.holdings import Holdings
from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.job.pricing import profile_of_layout
from recycle.job.shape import Worker
from recycle.plans import Plan
from recycle.plans.hosting import Hosts, layers_in
from recycle.solve.effort import Deadline
from recycle.solve.layout.elastic import listed_plan, rerouted_within
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


def without_1_1(of: PricedJob) -> Plan:
    made = listed_plan(of, [Worker(1, 1)], Deadline(None))
    assert made is not None
    assert made.shape.cut
    return made


@pytest.mark.search
@pytest.mark.parametrize("shape", [(3, 2, 4, 8), (4, 2, 3, 8), (2, 4, 6, 8), (3, 2, 4, 8, 2)])
@pytest.mark.parametrize("staggered", [True, False])
def test_whoever_is_left_hosts_what_it_hosted(shape: tuple[int, ...], *, staggered: bool) -> None:
    of = elastic(*shape, staggered=staggered)
    before = without_1_1(of).schedule
    dead = [w for w in before.live if all(len(before.hosts(s)) > 1 for s in before.stages_of(w))]
    for second in random.Random(0).sample(dead, min(3, len(dead))):
        made = rerouted_within(of, before, [Worker(1, 1), second], Deadline(None))
        after = made.schedule
        assert after.failed == {Worker(1, 1), second}
        assert {w: after.unit_runs(w) for w in after.live} == {w: before.unit_runs(w) for w in after.live}
        assert made.moves == ()
        profile = profile_of_layout(of, of.prices, after.shape)
        assert check(after, profile=profile, limits=of.limits) == []
        assert simulate(after, profile).period == made.period >= made.lower_bound


@pytest.mark.search
def test_who_comes_back_hosts_all_its_chunks_beside_a_layout() -> None:
    of = elastic(3, 2, 4, 8, 2)
    before = without_1_1(of).schedule
    after = rerouted_within(of, before, [], Deadline(None)).schedule
    assert after.failed == frozenset()
    assert after.unit_runs(Worker(1, 1)) == ((2, 4), (6, 8))
    assert {w: after.unit_runs(w) for w in before.live} == {w: before.unit_runs(w) for w in before.live}
    assert check(after, profile=profile_of_layout(of, of.prices, after.shape), limits=of.limits) == []


@pytest.mark.search
@pytest.mark.parametrize("chunks", [1, 2])
def test_copies_are_counted_from_the_layout_that_workers_are_in(chunks: int) -> None:
    of, second = elastic(4, 2, 4, 8, chunks), Worker(2, 0)
    now = without_1_1(of).schedule
    dead = [Worker(1, 1), second]
    made, anew = plan(of, dead, steps=60, within=now), plan(of, dead, steps=60)
    assert made.period <= 1.02 * anew.period
    held, hosted = (Hosts.of_schedule(of, schedule) for schedule in (now, made.schedule))
    copies = Holdings(held).copies(hosted, list(hosted.units), list(hosted.units))
    assert {(move.worker, layer) for move in made.moves for layer in range(*(move.units or ()))} == {
        (copy.worker, layer) for copy in copies for layer in range(*layers_in((copy.first, copy.last), hosted.count))
    }
    for move in made.moves:
        source = Worker.parse(move.source)
        assert source not in dead
        assert set(range(*(move.units or ()))) <= {unit for run in now.unit_runs(source) for unit in range(*run)}


def test_without_a_host_of_a_unit_there_is_no_plan_in_its_layout() -> None:
    of = elastic(2, 4, 6, 8)
    before = without_1_1(of).schedule
    hosts = before.hosts(0)
    with pytest.raises(PlanError, match="no live host"):
        rerouted_within(of, before, [Worker(1, 1), *hosts], Deadline(None))


def test_training_asks_for_it_by_the_file_of_the_plan_at_hand(tmp_path: Any) -> None:
    of = elastic(3, 2, 4, 8)
    before = without_1_1(of)
    before.save(tmp_path / "before.json")
    dead = [Worker(1, 1), Worker(2, 0)]
    text = plan_for_training(of, (1, 1), True, failed=dead, within=tmp_path / "before.json")
    expected = rerouted_within(of, before.schedule, dead, Deadline(None))
    assert Plan.from_text(text).schedule.failed == expected.schedule.failed
    assert Plan.from_text(text).schedule.shape == expected.schedule.shape
