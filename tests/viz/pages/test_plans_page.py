"""The plan browser: workers are failed and restored, undone, linked to and saved; the old plan stays as a ghost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dash import no_update

from recycle import RecycleError, Schedule, Worker, check, lower
from recycle.errors import PlanError
from recycle.job import Job
from recycle.plans import PlanLibrary
from recycle.solve.library.filling import plan_library
from recycle.solve.planner import plan
from tests.viz.components import canvases, of_type, plain, words
from viz.condition import group, parse
from viz.export import export
from viz.pages.plans_page import BUTTONS, PlansPage
from viz.what_if import WhatIf

JOB = Job.from_toml("[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n")
EMPTY: dict[str, Any] = {"failed": [], "history": []}


@pytest.fixture(scope="module")
def page() -> PlansPage:
    return PlansPage(WhatIf(JOB, None, lambda failed: plan(JOB, failed, quick=True)))


def test_a_press_fails_a_worker_another_restores_it_and_undo_goes_back(page: PlansPage) -> None:
    one = page.toggled(EMPTY, Worker(1, 1))
    assert one == {"failed": ["1.1"], "history": [[]]}
    two = page.toggled(one, Worker(0, 0))
    assert two["failed"] == ["0.0", "1.1"]
    back = page.toggled(two, Worker(1, 1))
    assert back["failed"] == ["0.0"]
    assert page.undone(back) == two
    assert page.undone(page.undone(page.undone(back))) == EMPTY
    assert page.undone(EMPTY) == EMPTY


def test_what_has_no_plan_changes_nothing(page: PlansPage) -> None:
    state = {"failed": ["0.1", "1.1"], "history": []}
    with pytest.raises(PlanError, match="no live worker is left for stage 1"):
        page.toggled(state, Worker(2, 1))
    assert page.changed(state, frozenset({Worker(0, 1), Worker(1, 1)})) is state


def test_the_answer_stands_beside_the_one_before_and_the_fault_free_one(page: PlansPage) -> None:
    state = {"failed": ["0.0", "1.1"], "history": [[], ["1.1"]]}
    texts = words(plain(page.answer(state)))
    assert {"without 0.0, 1.1", "before: without 1.1", "all workers"} <= set(texts)
    row = texts.index("period")
    whole, before, now = (page.what_if.answer(page.what_if.parse(names)) for names in ("", "1.1", "0.0,1.1"))
    expected = [f"{answer.plan.period:.5g}" for answer in (now, before, whole)]
    assert texts[row + 1 : row + 4] == expected
    assert any(text.startswith("The plan is planned now, in ") for text in texts)


def test_the_old_plan_is_outlined_over_the_new_ones_lanes(page: PlansPage) -> None:
    (now,) = canvases(plain(page.lanes({"failed": ["1.1"], "history": [[]]})))
    (before,) = canvases(plain(page.lanes(EMPTY)))
    assert now["data-ghost"] == before["data-address"]
    assert "data-ghost" not in before
    spans = [page.what_if.answer(page.what_if.parse(names)).timeline.makespan for names in ("1.1", "")]
    assert float(now["data-span"]) == max(spans)
    shown = page.cache.get(Path(now["data-address"]).stem)
    assert shown is not None
    assert [shown.table.labels[lane] for lane in np.flatnonzero(shown.table.failed)] == ["1.1"]
    assert shown.explainer is not None


def test_the_address_restores_the_failures(page: PlansPage) -> None:
    assert page.from_address("?fail=1.1,0.0") == (frozenset({Worker(1, 1), Worker(0, 0)}), ())
    assert page.from_address("?fail=0.0=1.5") == (frozenset(), ((Worker(0, 0), 1.5),))
    assert page.from_address("?plan=x") is None
    assert page.from_address(None) is None
    with pytest.raises(PlanError):
        page.from_address("?fail=<script>")


def test_what_is_saved_is_a_plan_that_checks(page: PlansPage, tmp_path: Path) -> None:
    saved = page.saved({"failed": ["1.1"], "history": []})
    assert saved["filename"] == "plan-without-1.1.json"
    (tmp_path / "plan.json").write_text(saved["content"])
    schedule = Schedule.load(tmp_path / "plan.json")
    assert {str(worker) for worker in schedule.failed} == {"1.1"}
    assert check(lower(schedule)) == []
    assert json.loads(saved["content"])["metadata"]["vector"] == [0, 1]


def test_every_worker_has_a_button_that_says_whether_it_is_pressed(page: PlansPage) -> None:
    shown = of_type(plain(page.workers([Worker(1, 1)])), "Button")
    buttons = [button for button in shown if "worker" in button["id"]]
    assert [button["id"]["worker"] for button in buttons] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert [button["aria-pressed"] for button in buttons] == ["false"] * 3 + ["true"] + ["false"] * 2
    assert buttons[3]["children"] == "✕ 1.1"


def test_a_press_fails_a_pipeline_or_a_node_another_restores_it(page: PlansPage) -> None:
    groups = [one["id"]["group"] for one in of_type(plain(page.workers(())), "Button") if "group" in one["id"]]
    assert groups == ["pipeline:0", "pipeline:1", "pipeline:2", "node:0/2", "node:1/2", "node:2/2"]
    state = page.toggled(EMPTY, *group("pipeline:1", page.what_if.shape))
    assert state["failed"] == ["1.0", "1.1"]
    pressed = of_type(plain(page.workers(page.what_if.parse("1.0 1.1"))), "Button")
    assert {one["children"] for one in pressed if one["aria-pressed"] == "true"} >= {"✕ pipeline 1", "✕ node 1"}
    assert page.toggled(state, Worker(1, 0), Worker(1, 1))["failed"] == []
    with pytest.raises(PlanError, match="no live worker is left for stage 1: all 3 of its workers are dead; the run"):
        page.toggled(EMPTY, *group("stage:1", page.what_if.shape))


def test_a_slow_worker_is_planned_for_and_stays_slow_when_another_dies() -> None:
    def of_job(job: Job) -> WhatIf:
        return WhatIf(job, None, partial(plan, job, quick=True), of_job=of_job)

    page = PlansPage(of_job(JOB))
    slow = page.named_anew(EMPTY, parse("0.1=2", page.what_if.shape))
    assert slow["failed"] == ["0.1=2"]
    texts = words(plain(page.answer(slow)))
    assert {"All workers, 0.1 2 times as long", "all workers"} <= set(texts)
    row = texts.index("period")
    assert float(texts[row + 1]) > float(texts[row + 2]) == page.what_if.answer([]).plan.period
    (canvas,) = canvases(plain(page.lanes(slow)))
    shown = page.cache.get(Path(canvas["data-address"]).stem)
    assert shown is not None
    table = shown.table
    lane = slice(int(table.offsets[1]), int(table.offsets[2]))
    assert set((table.end - table.start)[lane]) <= {0.0, 2.0, 4.0}  # reduces and steps, halves and whole backwards
    both = page.toggled(slow, Worker(1, 1))
    assert both["failed"] == ["1.1", "0.1=2"]
    assert page.toggled(both, Worker(0, 1))["failed"] == ["0.1", "1.1"]
    with pytest.raises(PlanError, match="only a job can be planned for"):
        WhatIf(JOB, None, None).with_slow([(Worker(0, 1), 2.0)])


def test_too_many_workers_are_named_instead() -> None:
    job = Job.from_toml("[shape]\npipelines = 65\nranks = 8\nmicro_batches = 1\n")
    assert job.shape.worker_count > BUTTONS
    texts = words(plain(PlansPage(WhatIf(job, None, None)).workers(())))
    assert texts == ["520 workers: type names, or press a lane below."]


def test_the_library_is_listed_by_failures_with_its_figures(tmp_path: Path) -> None:
    from msgspec.structs import replace

    plan_library(replace(JOB, planner=replace(JOB.planner, steps=0)), 1, tmp_path)
    page = PlansPage(WhatIf(JOB, PlanLibrary(tmp_path, JOB), None))
    component = plain(page.library())
    assert [button["id"]["vector"] for button in of_type(component, "Button")] == ["0,0", "0,1", "1,0"]
    texts = words(component)
    assert "100 %" in texts
    assert {"none", "1 on rank 0", "1 on rank 1"} <= set(texts)
    dead = page.what_if.dead_of([0, 1])
    assert page.what_if.answer(dead).source == "library"
    assert "No library of plans was given." in words(plain(PlansPage(WhatIf(JOB, None, None)).library()))


def test_all_of_many_workers_are_drawn_and_the_answer_stays_small() -> None:
    job = Job.from_toml("[shape]\npipelines = 16\nranks = 8\nmicro_batches = 16\n[memory]\nlimit = 8\n")
    page = PlansPage(WhatIf(job, None, lambda failed: plan(job, failed, quick=True)))
    component = plain(page.lanes({"failed": ["7.5"], "history": [[]]}))
    (view,) = canvases(component)
    shown = page.cache.get(Path(view["data-address"]).stem)
    assert shown is not None
    assert shown.table.lanes == 128
    assert len(shown.table) > 3 * 16 * 16 * 8
    assert len(json.dumps(component)) < 20_000
    assert page.chosen({"lane": 61, "address": view["data-address"], "name": "plans-all"}) == Worker(7, 5)


@pytest.mark.slow
def test_a_longer_search_takes_the_place_of_a_longer_plan() -> None:
    job = Job.from_toml("[shape]\npipelines = 2\nranks = 3\nmicro_batches = 5\n[memory]\nlimit = 3\n")
    what_if = WhatIf(job, None, partial(plan, job, quick=True), searcher=partial(plan, job, steps=1000))
    page = PlansPage(what_if)
    state = page.changed(EMPTY, frozenset([Worker(1, 1)]))
    quick = what_if.answer([Worker(1, 1)]).plan.period
    found, said = page.searched(state)
    best = what_if.answer([Worker(1, 1)]).plan
    assert best.period == best.lower_bound < quick
    assert f"took the period from {quick:g} to {best.period:g}." in said
    assert {**found, "searched": 0} == {**state, "searched": 0}
    again, said = page.searched(found)
    assert again is no_update
    assert said == f"A longer search found no plan with a shorter period than {best.period:g}."


def test_who_cannot_search_says_so_and_has_no_button(page: PlansPage) -> None:
    assert page.searched(EMPTY) == (no_update, "no planner is loaded: give a job file, recycle view job.toml")
    assert "Search longer" not in words(plain(page.layout()))
    searching = PlansPage(WhatIf(JOB, None, partial(plan, JOB, quick=True), searcher=partial(plan, JOB)))
    assert "Search longer" in words(plain(searching.layout()))


def test_a_job_is_exported_with_its_plan_and_library(tmp_path: Path) -> None:
    from msgspec.structs import replace

    plan_library(replace(JOB, planner=replace(JOB.planner, steps=0)), 1, tmp_path / "plans")
    what_if = WhatIf(JOB, PlanLibrary(tmp_path / "plans", JOB), None)
    export(tmp_path / "job.html", [], what_if)
    page = (tmp_path / "job.html").read_text(encoding="utf-8")
    assert "Plan with all workers" in page
    assert "1 on rank 1" in page
    assert 'data-address="data:application/gzip;base64,' in page
    assert "Show the plan for" not in page
    with pytest.raises(RecycleError, match=r"job.svg: plans of a job and comparisons are exported as .html"):
        export(tmp_path / "job.svg", [], what_if)


@pytest.mark.parametrize(
    "choice", [{}, {"lane": 9}, {"lane": -1}, {"lane": "1"}, {"operation": 3}, {"lane": 1, "from": 0, "to": 1}]
)
def test_what_is_no_workers_name_fails_nobody(page: PlansPage, choice: dict[str, Any]) -> None:
    assert page.chosen({**choice, "name": "plans-all"}) is None


def test_a_name_pressed_in_another_mode_fails_nobody(page: PlansPage) -> None:
    assert page.chosen({"lane": 1, "name": "plans-all"}) == Worker(0, 1)
    assert page.chosen({"lane": 1, "name": "schedules-0"}) is None
    assert page.chosen(None) is None
