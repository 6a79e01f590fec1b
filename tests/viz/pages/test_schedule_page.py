"""The page of schedule files: what it says of a plan whose layers move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recycle import Schedule, Shape, simulate
from recycle.plans import Move, Plan
from tests.viz.components import plain, words
from viz.pages.schedule_page import SchedulePage
from viz.sources import schedule_source

PROGRAMS = {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0", "1.0": "0F1.0 0B1.0", "1.1": "1F1.0 1B1.0"}


def moved_plan() -> Schedule:
    """Worker 0.0 had layers 0 and 1 of five, and takes on the others from 1.1 since 0.1 is dead."""
    placement = {"0.0": (0, 1), "1.0": (0,), "1.1": (1,)}
    shape = Shape(2, 2, 1, cut=(2, 3))
    schedule = Schedule.from_text(shape, PROGRAMS, placement=placement, failed=["0.1"])
    timeline = simulate(schedule)
    plan = Plan(schedule, timeline.makespan, timeline.period, 1.0, 0.0, "")
    return Schedule.loads(replace(plan, moves=(Move("0.0", "0.0", "1.1", 3e9, (2, 5), 0.5),)).text())


def test_the_layout_says_who_hosts_which_layers_and_what_is_copied_from_whom() -> None:
    page = SchedulePage([schedule_source(Path("moved.json"), moved_plan())])
    said = words(plain(page.layout_of(page.files[0])))
    assert said[0] == "Layout of moved.json: 1 worker takes on layers"
    assert said[1:6] == ["worker", "hosts layers", "of these it had", "copies layers", "bytes"]
    assert said[6:10] == ["0.0", "0–4", "0–1", "2–4 from 1.1"]
    assert said[11:14] == ["1.0", "0–1", "0–1"]
    assert "moved.json" in " ".join(words(plain(page.layout())))


def test_a_worker_may_host_several_runs_of_layers() -> None:
    placement = {"0.0": (0, 2), "0.1": (1, 3)}
    schedule = Schedule.from_text(Shape(1, 2, 1, 2, cut=(2, 3, 1, 2)), {}, placement=placement)
    page = SchedulePage([schedule_source(Path("runs.json"), schedule)])
    said = words(plain(page.layout_of(page.files[0])))
    assert said[6:9] == ["0.0", "0–1, 5", "0–1, 5"]
    assert said[11:14] == ["0.1", "2–4, 6–7", "2–4, 6–7"]


def test_a_schedule_of_the_given_stages_has_no_layout_card() -> None:
    schedule = Schedule.from_text(Shape(1, 2, 1), {"0.0": "0F0.0 0B0.0", "0.1": "1F0.0 1B0.0"})
    page = SchedulePage([schedule_source(Path("fixed.json"), schedule)])
    assert page.layout_of(page.files[0]) == []


def test_the_bound_of_a_cut_is_shown_where_the_period_is_the_plans() -> None:
    """The plan's hash is that of the given stages' prices, the timeline's that of the cut's."""
    page = SchedulePage([schedule_source(Path("moved.json"), moved_plan())])
    _, rows = page.figures()
    assert {row[0]: row[1] for row in rows}["bound"].startswith("1 (")
