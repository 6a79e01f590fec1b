"""The plan browser: workers are failed and restored, undone, linked to and saved; the old plan stays as a ghost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import RecycleError, Schedule, Worker, check, lower
from recycle.errors import PlanError
from recycle.job import Job
from recycle.plans import PlanLibrary
from recycle.solve.filling import plan_library
from recycle.solve.planner import plan
from tests.viz.components import canvases, of_type, plain, words
from viz.export import export
from viz.pages.plans_page import PlansPage
from viz.pages.scenario_panel import worker_buttons
from viz.scenario import group, parse
from viz.what_if import WhatIf

JOB = Job.from_toml("[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n")


def dead(page: PlansPage, text: str) -> frozenset[Worker]:
    return parse(text, page.what_if.shape).failed


@pytest.fixture(scope="module")
def page() -> PlansPage:
    return PlansPage(WhatIf(JOB, None, lambda failed: plan(JOB, failed, quick=True)))


def press(page: PlansPage, pressed: Any, text: str, trail: list[str]) -> tuple[str, list[str]] | None:
    """(text, trail) after a press and the answer to it."""
    changed = page.changed(pressed, 1, text, trail)
    if changed is None:
        return None
    text, trail = changed
    return text, trail if trail[-1] == text else [*trail, text]


def test_a_press_fails_a_worker_another_restores_it_and_undo_goes_back(page: PlansPage) -> None:
    text, trail = "", [""]
    for worker, expected in (("1.1", "1.1"), ("0.0", "0.0,1.1"), ("1.1", "0.0")):
        after = press(page, {"type": "fail", "workers": worker}, text, trail)
        text, trail = after
        assert text == expected
    for expected in ("0.0,1.1", "1.1", ""):
        after = press(page, "plans-undo", text, trail)
        text, trail = after
        assert (text, trail[-1]) == (expected, expected)
    assert press(page, "plans-undo", text, trail) is None
    assert press(page, "plans-restore", "1.1", ["", "1.1"]) == ("", ["", "1.1", ""])


@pytest.mark.parametrize("refused", ["9.9", "stage:1"])
def test_after_a_text_without_a_plan_presses_go_on_from_the_one_before(page: PlansPage, refused: str) -> None:
    trail = ["", "1.1"]
    assert page.changed("plans-undo", 1, refused, trail) == ("1.1", trail)
    assert page.changed({"type": "fail", "workers": "0.0"}, 1, refused, trail) == ("0.0,1.1", trail)


def test_what_has_no_plan_changes_nothing(page: PlansPage) -> None:
    with pytest.raises(PlanError, match="no live worker is left for stage 1"):
        page.toggled("0.1,1.1", [Worker(2, 1)])


def test_the_answer_stands_beside_the_one_before_and_the_fault_free_one(page: PlansPage) -> None:
    texts = words(plain(page.answer("0.0,1.1", ["", "1.1"])))
    assert {"without 0.0, 1.1", "before: without 1.1", "all workers"} <= set(texts)
    row = texts.index("period")
    whole, before, now = (page.what_if.answer(dead(page, names)) for names in ("", "1.1", "0.0,1.1"))
    expected = [f"{answer.plan.period:.3g}" for answer in (now, before, whole)]
    assert texts[row + 1 : row + 4] == expected
    assert any(text.startswith("The plan is planned now, in ") for text in texts)


def test_the_old_plan_is_outlined_over_the_new_ones_lanes(page: PlansPage) -> None:
    (now,) = canvases(plain(page.lanes("1.1", [""])))
    (before,) = canvases(plain(page.lanes("", [])))
    assert now["data-ghost"] == before["data-address"]
    assert "data-ghost" not in before
    spans = [page.what_if.answer(dead(page, names)).timeline.makespan for names in ("1.1", "")]
    assert float(now["data-span"]) == max(spans)
    shown = page.cache.get(Path(now["data-address"]).stem)
    assert [shown.table.labels[lane] for lane in np.flatnonzero(shown.table.failed)] == ["1.1"]


def test_what_is_saved_is_a_plan_that_checks(page: PlansPage, tmp_path: Path) -> None:
    saved = page.saved("1.1")
    assert saved["filename"] == "plan-without-1.1.json"
    (tmp_path / "plan.json").write_text(saved["content"])
    schedule = Schedule.load(tmp_path / "plan.json")
    assert {str(worker) for worker in schedule.failed} == {"1.1"}
    assert check(lower(schedule)) == []
    assert json.loads(saved["content"])["metadata"]["vector"] == [0, 1]


def test_every_worker_has_a_button_that_says_whether_it_is_pressed(page: PlansPage) -> None:
    shown = of_type(plain(worker_buttons(JOB.shape, [Worker(1, 1)])), "Button")
    buttons = [button for button in shown if ":" not in button["id"]["workers"]]
    assert [button["id"]["workers"] for button in buttons] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert [button["aria-pressed"] for button in buttons] == ["false"] * 3 + ["true"] + ["false"] * 2
    assert buttons[3]["children"] == "✕ 1.1"


def test_a_press_fails_a_pipeline_or_a_node_another_restores_it(page: PlansPage) -> None:
    shown = [one["id"]["workers"] for one in of_type(plain(worker_buttons(JOB.shape, ())), "Button")]
    groups = [word for word in shown if ":" in word]
    assert groups == ["pipeline:0", "pipeline:1", "pipeline:2", "node:0/2", "node:1/2", "node:2/2"]
    text = page.toggled("", group("pipeline:1", page.what_if.shape))
    assert text == "1.0,1.1"
    pressed = of_type(plain(worker_buttons(JOB.shape, dead(page, "1.0 1.1"))), "Button")
    assert {one["children"] for one in pressed if one["aria-pressed"] == "true"} >= {"✕ pipeline 1", "✕ node 1"}
    assert page.toggled(text, [Worker(1, 0), Worker(1, 1)]) == ""
    with pytest.raises(PlanError, match="no live worker is left for stage 1: all 3 of its workers are dead; the run"):
        page.toggled("", group("stage:1", page.what_if.shape))


def test_a_slow_worker_is_planned_for_and_stays_slow_when_another_dies() -> None:
    def of_job(job: Job) -> WhatIf:
        return WhatIf(job, None, partial(plan, job, quick=True), of_job=of_job)

    page = PlansPage(of_job(JOB))
    texts = words(plain(page.answer("0.1=2", [""])))
    assert {"All workers, 0.1 2 times as long", "before: all workers"} <= set(texts)
    row = texts.index("period")
    assert float(texts[row + 1]) > float(texts[row + 2]) == page.what_if.answer([]).plan.period
    (canvas,) = canvases(plain(page.lanes("0.1=2", [])))
    shown = page.cache.get(Path(canvas["data-address"]).stem)
    table = shown.table
    lane = slice(int(table.offsets[1]), int(table.offsets[2]))
    assert set((table.end - table.start)[lane]) <= {0.0, 2.0, 4.0}  # reduces and steps, halves and whole backwards
    both = page.toggled("0.1=2", [Worker(1, 1)])
    assert both == "1.1,0.1=2"
    assert page.toggled(both, [Worker(0, 1)]) == "0.1,1.1"
    with pytest.raises(PlanError, match="only a job can be planned for"):
        WhatIf(JOB, None, None).with_slow([(Worker(0, 1), 2.0)])


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


@pytest.mark.slow
def test_a_longer_search_takes_the_place_of_a_longer_plan() -> None:
    job = Job.from_toml("[shape]\npipelines = 2\nranks = 3\nmicro_batches = 5\n[memory]\nlimit = 3\n")
    what_if = WhatIf(job, None, partial(plan, job, quick=True), searcher=partial(plan, job, steps=1000))
    page = PlansPage(what_if)
    quick = what_if.answer([Worker(1, 1)]).plan.period
    is_better, said = page.searched("1.1")
    best = what_if.answer([Worker(1, 1)]).plan
    assert best.period == best.lower_bound < quick
    assert f"took the period from {quick:g} to {best.period:g}." in said
    assert is_better
    is_better, said = page.searched("1.1")
    assert not is_better
    assert said == f"A longer search found no plan with a shorter period than {best.period:g}."


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
