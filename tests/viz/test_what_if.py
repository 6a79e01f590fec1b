"""What-if answers, from the library or a planner, and the page on which workers are failed, restored and undone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from recycle import RecycleError, Schedule, Worker, check, lower
from recycle.errors import PlanError
from recycle.job import Job
from recycle.plans import Plan, PlanLibrary
from recycle.solve.filling import plan_library
from recycle.solve.planner import plan
from tests.viz.components import canvases, of_type, plain, words
from viz.export import export
from viz.pages.plans_page import PlansPage, _moved, _what
from viz.pages.scenario import group, parse, worker_buttons
from viz.what_if import KEPT, WhatIf

JOB = Job.from_toml("[shape]\npipelines = 3\nranks = 2\nmicro_batches = 2\n[memory]\nlimit = 3\n")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("library")
    plan_library(replace(JOB, planner=replace(JOB.planner, steps=0)), 1, directory)
    return directory


class Recorder:
    """A planner that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[frozenset[Worker]] = []

    def __call__(self, failed: frozenset[Worker]) -> Plan:
        self.asked.append(failed)
        return plan(JOB, failed, quick=True)


def test_the_library_answers_for_any_set_with_its_vector(library: Path) -> None:
    recorder = Recorder()
    what_if = WhatIf(JOB, PlanLibrary(library, JOB), recorder)
    for name in ("0.1", "1.1", "2.1"):
        answer = what_if.answer([Worker.parse(name)])
        assert answer.source == "library"
        assert {str(worker) for worker in answer.plan.schedule.failed} == {name}
        assert check(lower(answer.plan.schedule)) == []
        assert answer.timeline.period == pytest.approx(answer.plan.period)
    assert recorder.asked == []


def test_what_the_library_lacks_is_planned_once_and_then_kept(library: Path) -> None:
    recorder = Recorder()
    what_if = WhatIf(JOB, PlanLibrary(library, JOB), recorder)
    failed = [Worker(0, 0), Worker(2, 1)]
    answer = what_if.answer(failed)
    assert (answer.source, answer.failed) == ("planned", frozenset(failed))
    assert answer.plan.schedule.failed == frozenset(failed)
    assert what_if.answer(failed) is answer
    assert len(recorder.asked) == 1
    assert max(peak for peak in answer.timeline.peak_activations if peak is not None) <= 3


def test_without_a_planner_the_nearest_plan_serves_and_the_idle_are_named(library: Path) -> None:
    kept = PlanLibrary(library, JOB)
    for vector in list(kept.vectors()):
        if sum(vector) == 1 and vector[0]:
            what_if = WhatIf(JOB, kept, None)
            assert what_if.answer([Worker(0, 0)]).idle == []
    with pytest.raises(PlanError, match="no plan for failure vector"):
        WhatIf(JOB, kept, None).answer([Worker(0, 0), Worker(1, 0), Worker(0, 1)])


def test_a_library_tells_its_own_shape(library: Path, tmp_path: Path) -> None:
    assert WhatIf(None, PlanLibrary(library), None).shape == JOB.shape
    with pytest.raises(RecycleError, match="no plan can be read in it, and no job file was given"):
        WhatIf(None, PlanLibrary(tmp_path), None)


def test_a_stage_without_workers_has_no_plan() -> None:
    with pytest.raises(PlanError, match="no live worker is left for stage 1"):
        WhatIf(JOB, None, Recorder()).answer([Worker(k, 1) for k in range(3)])


def test_a_bounded_number_of_answers_is_kept() -> None:
    recorder = Recorder()
    what_if = WhatIf(JOB, None, recorder)
    sets = [[Worker(a, 0), Worker(b, 1)] for a in range(3) for b in range(3)]
    sets += [[Worker(a, r)] for a in range(3) for r in range(2)] + [[], [Worker(0, 0), Worker(1, 0)]]
    for failed in sets:
        what_if.answer(failed)
    assert len(sets) > KEPT
    planned = len(recorder.asked)
    for failed in sets[-KEPT:]:
        what_if.answer(failed)
    assert len(recorder.asked) == planned
    what_if.answer(sets[0])
    assert len(recorder.asked) == planned + 1


def test_peaks_of_a_librarys_plans_keep_to_the_limit(library: Path) -> None:
    what_if = WhatIf(JOB, PlanLibrary(library, JOB), None)
    entries = what_if.entries()
    assert [entry.failures for entry in entries] == [0, 1, 1]
    assert all(peak is not None and 0 < peak <= 3 for peak in what_if.peaks(entries))


def test_where_layers_may_move_the_answer_without_moving_stands_beside() -> None:
    text = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 6\n[model]\nlayers = 8\n[planner]\nlayout = 'elastic'\n"
    job = Job.from_toml(text)
    what_if = WhatIf(job, None, lambda failed: plan(job, failed, steps=5), lambda failed: plan(job, failed, quick=True))
    moved = what_if.answer([Worker(0, 1)])
    rerouted = what_if.without_moving([Worker(0, 1)])
    assert moved.plan.moves
    assert not rerouted.plan.moves
    assert moved.plan.period < rerouted.plan.period
    assert moved.timeline.period == moved.plan.period
    assert what_if.answer([Worker(0, 1)]) is moved
    assert what_if.without_moving([Worker(0, 1)]) is rerouted
    first = moved.plan.moves[0]
    assert f"{first.worker} copies {_what(first)} from {first.source}" in _moved(moved)
    assert WhatIf(JOB, None, lambda failed: plan(JOB, failed, quick=True)).without_moving([]) is None


GROUPS = (("pipeline", ""), ("node", "/2"))


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


def test_the_answer_stands_beside_the_one_before_and_the_fault_free_one(page: PlansPage) -> None:
    texts = words(plain(page.answer("0.0,1.1", ["", "1.1"])))
    assert {"without 0.0, 1.1", "before: without 1.1", "all workers"} <= set(texts)
    row = texts.index("period")
    whole, before, now = (page.what_if.answer(dead(page, names)) for names in ("", "1.1", "0.0,1.1"))
    expected = [f"{answer.plan.period:.3g}" for answer in (now, before, whole)]
    assert texts[row + 1 : row + 4] == expected
    assert any(text.startswith("The plan is planned now, in ") for text in texts)


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
    shown = of_type(plain(worker_buttons(JOB.shape, dead(page, "1.0 1.1"))), "Button")
    groups = {one["id"]["workers"]: one["aria-pressed"] for one in shown if ":" in one["id"]["workers"]}
    assert groups == {f"{name}:{k}{size}": str(k == 1).lower() for k in range(3) for name, size in GROUPS}
    text = page.toggled("", group("pipeline:1", page.what_if.shape))
    assert text == "1.0,1.1"
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
