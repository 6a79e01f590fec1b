"""The headline's figures, against published closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recycle import Profile, Schedule, Shape, simulate
from recycle.ir.families import FAMILIES, one_f_one_b
from viz.details import headline, usual_period
from viz.lane_cache import CachedLanes, Explainer
from viz.lanes import LaneTable
from viz.sources import schedule_source


def of(schedule: Schedule, profile: Profile | None = None, limits: tuple[float, ...] | None = None) -> dict[str, str]:
    timeline = simulate(schedule, profile or Profile.uniform())
    shown = CachedLanes(LaneTable.from_timeline(timeline), b"", Explainer(timeline, limits=limits))
    return {figure.name: figure.value for figure in headline(shown)}


def test_1f1b_has_its_published_figures() -> None:
    found = of(one_f_one_b(Shape(3, 4, 8)), limits=(4, 4, 4, 4))
    assert found == {"period": "33", "bubbles": "27.3 %", "peak memory": "4 of 4", "1F1B": "× 1"}


def test_a_plan_without_a_worker_is_compared_with_all_workers(broken: Schedule) -> None:
    found = of(broken)
    assert (found["period"], found["1F1B"]) == ("11", f"× {11 / 9:.3g}")
    assert found["bound"] == "10 (gap 10 %)"


def test_a_bound_of_other_times_is_left_out(broken: Schedule) -> None:
    assert "bound" not in of(broken, Profile.uniform(2, 3, 1))


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_chunks_are_compared_with_1f1b_of_the_same_work_per_worker(name: str) -> None:
    shape = Shape(1, 4, 8, chunks=2)
    halves = simulate(FAMILIES[name](shape), Profile.uniform(0.5, 0.5, 0.5))
    assert usual_period(halves) == pytest.approx(33)


def test_of_unlike_workers_there_is_no_usual_period() -> None:
    timeline = simulate(one_f_one_b(Shape(2, 2, 2)), replace(Profile.uniform(), speed={"0.0": 2.0}))
    assert usual_period(timeline) is None


def test_what_ran_has_no_period_and_lanes_alone_have_nothing() -> None:
    source = schedule_source(Path("x"), one_f_one_b(Shape(1, 2, 2)))
    ran = CachedLanes(source.lanes, b"", Explainer(source.timeline, executed=True))
    assert [figure.name for figure in headline(ran)] == ["makespan", "bubbles"]
    assert headline(CachedLanes(source.lanes, b"", None)) == []
