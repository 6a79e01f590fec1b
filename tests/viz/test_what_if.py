"""What-if answers: from the library at once, else from the planner, in the names that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from recycle import RecycleError, Worker, check, lower
from recycle.errors import PlanError
from recycle.job import Job
from recycle.plans import Plan, PlanLibrary
from recycle.solve.filling import plan_library
from recycle.solve.planner import plan
from viz import what_if as what_if_module
from viz.pages.plans_page import _moved, _what
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


def test_large_answers_are_forgotten_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if_module, "KEPT_ROWS", 150)
    recorder = Recorder()
    what_if = WhatIf(JOB, None, recorder)
    workers = list(JOB.shape.workers())
    for worker in [*workers, *workers[-2:]]:
        what_if.answer([worker])
    assert len(recorder.asked) == len(workers)
    what_if.answer([workers[-3]])
    assert len(recorder.asked) == len(workers) + 1


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
