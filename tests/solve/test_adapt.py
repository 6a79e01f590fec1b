"""A schedule adapted to dead workers: its placement, near its order, valid, and no shorter than the work."""

import pytest

from recycle import Job, PlanError, Shape, check, simulate
from recycle.ir.families import FAMILIES
from recycle.job import PricedJob, price
from recycle.job.sections import MemorySection, ShapeSection
from recycle.solve.adapt import adapt


def job(limit: int | None = None) -> PricedJob:
    return price(Job(grid=ShapeSection(3, 4, 8, 2), memory=MemorySection(limit=limit)))


@pytest.mark.parametrize("family", ["zb-v", "v-half", "dualpipe-v", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("vector", [(0, 0, 0, 0), (0, 1, 0, 0), (2, 0, 1, 2)])
def test_adapted_schedule_is_valid_on_its_placement(family, vector):
    like = FAMILIES[family](Shape(3, 4, 8, 2))
    plan = adapt(job(), like, vector)
    assert check(plan.schedule) == []
    assert plan.vector == vector
    assert plan.schedule.placement == like.placement
    assert plan.period == simulate(plan.schedule).period
    work = 48 * 3 / (3 - max(vector))
    assert plan.lower_bound == work
    assert work <= plan.period < 1.35 * work + 12
    if not any(vector):
        assert plan.period <= simulate(like).period


def test_micro_batches_of_dead_workers_are_spread_evenly():
    like = FAMILIES["zb-v"](Shape(3, 4, 8, 2))
    schedule = adapt(job(), like, (0, 0, 1, 0)).schedule
    forwards = {
        str(worker): [i.micro_batch for i in schedule.program(worker) if str(i).startswith("2F")]
        for worker in schedule.live
        if worker.rank == 2
    }
    assert sorted(forwards) == ["0.2", "1.2"]
    for pipeline, name in enumerate(sorted(forwards)):
        assert sum(batch.pipeline == pipeline for batch in forwards[name]) == 8
        assert sum(batch.pipeline == 2 for batch in forwards[name]) == 4


def test_memory_limits_are_kept():
    like = FAMILIES["v-min"](Shape(3, 4, 8, 2))
    plan = adapt(job(limit=6), like, (1, 0, 0, 1))
    assert max(peak for peak in simulate(plan.schedule).peak_activations if peak is not None) <= 6
    with pytest.raises(PlanError, match="no live worker is left for stage 1"):
        adapt(job(), like, (0, 3, 0, 0))
