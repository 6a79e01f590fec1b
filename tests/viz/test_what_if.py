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
from recycle.plans import Plan, PlanLibrary, dead_roles
from recycle.solve.filling import plan_library
from recycle.solve.planner import plan
from tests.viz.components import drawn, of_type, plain, words
from viz.condition import named_workers, parse
from viz.export import export
from viz.pages.page import Workspace
from viz.pages.plans_page import PlansPage
from viz.pages.scenario import worker_buttons
from viz.what_if import WhatIf

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
        answer = what_if.outcome([Worker.parse(name)])
        assert answer.source == "library"
        assert {str(worker) for worker in answer.plan.schedule.failed} == {name}
        assert check(lower(answer.plan.schedule)) == []
        assert answer.timeline.period == pytest.approx(answer.plan.period)
    assert recorder.asked == []


def test_a_plan_missing_in_the_library_is_planned_once_and_cached(library: Path) -> None:
    recorder = Recorder()
    what_if = WhatIf(JOB, PlanLibrary(library, JOB), recorder)
    failed = [Worker(0, 0), Worker(2, 1)]
    answer = what_if.outcome(failed)
    assert (answer.source, answer.failed) == ("planned", frozenset(failed))
    assert answer.plan.schedule.failed == frozenset(failed)
    assert what_if.outcome(failed) is answer
    assert len(recorder.asked) == 1
    assert max(peak for peak in answer.timeline.peak_activations if peak is not None) <= 3


def test_a_library_states_its_shape(library: Path, tmp_path: Path) -> None:
    assert WhatIf(None, PlanLibrary(library), None).shape == JOB.shape
    with pytest.raises(RecycleError, match="no plan can be read in it, and no job file was given"):
        WhatIf(None, PlanLibrary(tmp_path), None)


def test_a_plan_that_moves_layers_is_shown_next_to_one_that_does_not() -> None:
    text = "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 6\n[model]\nlayers = 8\n[planner]\nlayout = 'elastic'\n"
    job = Job.from_toml(text)
    what_if = WhatIf(job, None, lambda failed: plan(job, failed, steps=5), lambda failed: plan(job, failed, quick=True))
    moved, rerouted = what_if.outcome([Worker(0, 1)]), what_if.without_moves([Worker(0, 1)])
    assert (bool(moved.plan.moves), bool(rerouted.plan.moves)) == (True, False)
    assert moved.plan.period < rerouted.plan.period
    assert moved.timeline.period == moved.plan.period
    page, first = PlansPage(Workspace(what_if=what_if)), moved.plan.moves[0]
    texts = words(plain(page.outcome_cards("0.1", [])))
    assert texts[texts.index("bytes") + 1] == first.worker
    assert texts[texts.index("bytes") + 3].endswith(f"from {first.source}")
    assert WhatIf(JOB, None, lambda failed: plan(JOB, failed, quick=True)).without_moves([]) is None


def failed_workers(page: PlansPage, text: str) -> frozenset[Worker]:
    return parse(text, page.what_if.shape).failed


@pytest.fixture(scope="module")
def page() -> PlansPage:
    return PlansPage(Workspace(what_if=WhatIf(JOB, None, lambda failed: plan(JOB, failed, quick=True))))


@pytest.mark.parametrize(
    ("pressed", "text", "expected"),
    [
        ({"workers": "1.1"}, "", "1.1"),
        ({"workers": "0.0"}, "1.1", "0.0,1.1"),
        ({"workers": "1.1"}, "0.0,1.1", "0.0"),
        ({"workers": "0.0"}, "9.9", "0.0,2.1"),  # without a plan, a press applies to the text before
        ({"workers": "0.0"}, "stage:1", "0.0,2.1"),
        ("plans-restore", "1.1", ""),
    ],
)
def test_a_press_fails_a_worker_and_another_restores_it(
    page: PlansPage, pressed: Any, text: str, expected: str
) -> None:
    assert page.apply_press(pressed, 1, text, "2.1") == expected


def test_an_outcome_is_shown_next_to_the_previous_and_the_fault_free_one(page: PlansPage) -> None:
    texts = words(plain(page.outcome_cards("0.0,1.1", ["", "1.1"])))
    assert {"without 0.0, 1.1", "before: without 1.1", "all workers"} <= set(texts)
    row = texts.index("period")
    outcomes = [page.what_if.outcome(failed_workers(page, names)) for names in ("0.0,1.1", "1.1", "")]
    assert texts[row + 1 : row + 4] == [f"{outcome.plan.period:.3g}" for outcome in outcomes]


def test_a_downloaded_plan_passes_the_checker(page: PlansPage, tmp_path: Path) -> None:
    saved = page.download("1.1")
    assert saved["filename"] == "plan-1.1.json"
    (tmp_path / "plan.json").write_text(saved["content"])
    schedule = Schedule.load(tmp_path / "plan.json")
    assert {str(worker) for worker in schedule.failed} == {"1.1"}
    assert check(lower(schedule)) == []
    assert json.loads(saved["content"])["metadata"]["vector"] == [0, 1]


def test_buttons_fail_or_restore_workers_pipelines_and_nodes(page: PlansPage) -> None:
    buttons = of_type(plain(worker_buttons(JOB.shape, failed_workers(page, "1.0 1.1"))), "Button")
    pressed = {button["id"]["workers"]: button["aria-pressed"] == "true" for button in buttons}
    groups = [f"{name}:{k}{size}" for k in range(3) for name, size in (("pipeline", ""), ("node", "/2"))]
    assert set(pressed) == {*map(str, JOB.shape.workers()), *groups}
    assert {name for name in pressed if pressed[name]} == {"1.0", "1.1", "pipeline:1", "node:1/2"}
    text = page.toggle("", named_workers("pipeline:1", page.what_if.shape))
    assert text == "1.0,1.1"
    assert page.toggle(text, [Worker(1, 0), Worker(1, 1)]) == ""
    with pytest.raises(PlanError, match="no live worker is left for stage 1: all 3 of its workers are dead; the run"):
        page.toggle("", named_workers("stage:1", page.what_if.shape))


def test_a_slow_worker_stays_slow_when_another_fails() -> None:
    def for_job(job: Job) -> WhatIf:
        return WhatIf(job, None, partial(plan, job, quick=True), for_job=for_job)

    page = PlansPage(Workspace(what_if=for_job(JOB)))
    texts = words(plain(page.outcome_cards("0.1=2", [""])))
    assert {"All workers, 0.1=2", "before: all workers"} <= set(texts)
    row = texts.index("period")
    assert float(texts[row + 1]) > float(texts[row + 2]) == page.what_if.outcome([]).plan.period
    (entry,) = drawn(page.cache, page.lanes("0.1=2", []))
    lane = slice(*entry.table.offsets[1:3].tolist())
    assert set((entry.table.end - entry.table.start)[lane]) <= {0.0, 2.0, 4.0}  # steps, halves and whole backwards
    both = page.toggle("0.1=2", [Worker(1, 1)])
    assert (both, page.toggle(both, [Worker(0, 1)])) == ("1.1,0.1=2", "0.1,1.1")
    with pytest.raises(PlanError, match="planning needs a job file"):
        WhatIf(JOB, None, None).under(parse("0.1=2", JOB.shape))


def test_the_library_is_listed_by_failures_with_its_figures(library: Path) -> None:
    page = PlansPage(Workspace(what_if=WhatIf(JOB, PlanLibrary(library, JOB), None)))
    component = plain(page.library())
    assert [button["id"]["vector"] for button in of_type(component, "Button")] == ["0,0", "0,1", "1,0"]
    assert {"none", "1 on rank 0", "1 on rank 1", "100 %"} <= set(words(component))
    assert page.what_if.outcome(dead_roles(page.what_if.shape, [0, 1])).source == "library"


@pytest.mark.parametrize(("profile", "unit"), [('profile = "analytic"', "s"), ("forward = 2.0", "")])
def test_plans_are_in_seconds_where_the_profile_is(profile: str, unit: str) -> None:
    job = Job.from_toml(f"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n[times]\n{profile}\n")
    assert WhatIf(job, None, partial(plan, job, quick=True)).outcome([]).timed.table.unit == unit


@pytest.mark.slow
def test_a_longer_search_replaces_a_plan_with_a_longer_period() -> None:
    job = Job.from_toml("[shape]\npipelines = 2\nranks = 3\nmicro_batches = 5\n[memory]\nlimit = 3\n")
    what_if = WhatIf(job, None, partial(plan, job, quick=True), searcher=partial(plan, job, steps=1000))
    page = PlansPage(Workspace(what_if=what_if))
    quick = what_if.outcome([Worker(1, 1)]).plan.period
    is_better, message = page.search("1.1")
    best = what_if.outcome([Worker(1, 1)]).plan
    assert best.period == best.lower_bound < quick
    assert message.endswith(f"changed the period by {100 * best.period / quick - 100:.3g} %.")
    assert is_better
    is_better, message = page.search("1.1")
    assert not is_better
    assert message == "A longer search found no plan with a shorter period."


def test_a_job_is_exported_with_its_plan_and_library(library: Path, tmp_path: Path) -> None:
    what_if = WhatIf(JOB, PlanLibrary(library, JOB), None)
    export(tmp_path / "job.html", [], what_if)
    page = (tmp_path / "job.html").read_text(encoding="utf-8")
    for text in ("Plan with all workers", "1 on rank 1", 'data-address="data:application/gzip;base64,'):
        assert text in page
    assert "Show the plan for" not in page
    with pytest.raises(RecycleError, match=r"job.svg: plans of a job and comparisons can only be exported as .html"):
        export(tmp_path / "job.svg", [], what_if)


@pytest.mark.parametrize("choice", [{}, {"lane": 9}, {"lane": "1"}, {"lane": 1, "from": 0, "to": 1}])
def test_only_a_press_on_a_workers_name_fails_it(page: PlansPage, choice: dict[str, Any]) -> None:
    assert page.pressed_worker({**choice, "name": "plans-all"}) is None
