import json

import pytest

from recycle.errors import PlanError
from recycle.ir.check import check
from recycle.job.shape import Worker
from recycle.plans import PlanLibrary, count_vectors, likely_vectors
from recycle.solve import filling
from recycle.solve.filling import library_vectors, plan_library, serve
from recycle.solve.planner import plan_vector
from tests.solve.jobs import job, worked_example

LARGE = job(32, 8, 32, 16)


def test_a_library_goes_on_where_it_stopped(tmp_path):
    tiny = job(3, 2, 2, 3, steps=100)
    plan_library(tiny, 1, tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json") if path.name != "manifest.json"}
    assert len(times) == 3
    told = []
    plans = plan_library(tiny, 2, tmp_path, told.append)
    assert [p.vector for p in plans] == list(likely_vectors(tiny.shape, 2))
    assert [(f.done, f.total) for f in told if f.made is not None and f.phase == "first plans"] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    assert {p.hash for p in PlanLibrary(tmp_path, tiny).plans()} == {p.hash for p in plans}


def test_a_damaged_file_is_planned_again(tmp_path):
    tiny = job(3, 2, 2, 3, steps=100)
    before = plan_library(tiny, 1, tmp_path)
    (tmp_path / before[1].file).write_text("half of")
    assert PlanLibrary(tmp_path, tiny).get(before[1].vector) is None
    assert [entry.hash for entry in plan_library(tiny, 1, tmp_path)] == [entry.hash for entry in before]
    assert PlanLibrary(tmp_path, tiny).get(before[1].vector) is not None


class _Stop(Exception):
    pass


def test_what_is_planned_outlives_an_interruption(tmp_path):
    made = worked_example(5, steps=2000)

    def stop(told):
        if told.phase == "searching" and told.done == 1:
            raise _Stop

    with pytest.raises(_Stop):
        plan_library(made, 1, tmp_path, stop)
    shelf = PlanLibrary(tmp_path, made)
    assert set(shelf.vectors()) == set(likely_vectors(made.shape, 1))
    searched = [plan for plan in shelf.plans() if not plan.planner["quick"]]
    assert len(searched) == 1  # the first plans of all, and the one that a search was made for
    kept = shelf.entry(searched[0].vector)
    again = plan_library(made, 1, tmp_path)
    assert kept in again
    assert not any(entry.quick for entry in again)


@pytest.mark.process
def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(filling, "WORTH_PROCESSES", 0)
    made = worked_example(5, steps=600)
    alone = plan_library(made, 1, tmp_path / "alone")
    together = plan_library(made, 1, tmp_path / "together", processes=2)
    # Not the hashes: of equal periods the first plan's is kept, for which half a second is there on any machine.
    assert [(e.vector, e.period) for e in alone] == [(e.vector, e.period) for e in together]
    assert [e.vector for e in alone] == list(likely_vectors(made.shape, 1))


@pytest.mark.soak
@pytest.mark.search
def test_plans_with_a_gap_are_searched_once_more_where_that_is_asked_for(tmp_path):
    hurried, patient = (job(3, 4, 6, 4, chunks=2, steps=steps) for steps in (60, 6000))
    before = plan_library(hurried, 1, tmp_path)
    assert not any(entry.quick for entry in before)
    assert plan_library(patient, 1, tmp_path) == before
    told = []
    after = plan_library(patient, 1, tmp_path, told.append, again=True)
    assert {f.vector for f in told} == {entry.vector for entry in before if entry.gap > 0}
    assert all(new.period <= old.period for new, old in zip(after, before, strict=True))
    assert sum(entry.period for entry in after) < sum(entry.period for entry in before)
    assert [entry for entry in before if entry.gap == 0] == [
        e for e in after if e.vector not in {f.vector for f in told}
    ]
    assert after == list(map(PlanLibrary(tmp_path, patient).entry, [entry.vector for entry in before]))


@pytest.mark.search
def test_a_search_that_finds_nothing_better_leaves_the_plan(tmp_path):
    patient, hurried = worked_example(5, steps=6000), worked_example(5, steps=2)
    before = plan_library(patient, 1, tmp_path)
    after = plan_library(hurried, 1, tmp_path, again=True)
    assert [(e.vector, e.hash, e.lower_bound) for e in after] == [(e.vector, e.hash, e.lower_bound) for e in before]


@pytest.mark.search
def test_too_little_time_is_said_and_what_is_planned_is_kept(tmp_path):
    with pytest.raises(PlanError, match=r"1e-09 seconds are too few: 5 of 5 vectors have no plan yet"):
        plan_library(worked_example(5), 1, tmp_path, seconds=1e-9)
    assert len(plan_library(worked_example(5), 1, tmp_path, seconds=4.0)) == 5


def test_where_all_vectors_are_too_many_each_set_finds_a_plan_all_the_same():
    vectors, complete = library_vectors(LARGE, 64)
    assert not complete
    assert sum(count_vectors(LARGE.shape, 64)) > 10**9
    assert len(vectors) == len(set(vectors)) == 270
    assert vectors[0] == (0,) * 8
    assert set(likely_vectors(LARGE.shape, 3)) <= set(vectors)
    assert {(k,) * 8 for k in range(1, 32)} <= set(vectors)
    assert {sum(vector) for vector in vectors} >= set(range(65))
    assert (3, 3, 3, 3, 2, 2, 2, 2) in vectors
    assert library_vectors(job(3, 4, 6), 8) == (list(likely_vectors(job(3, 4, 6).shape, 8)), True)


def test_a_set_that_the_library_has_no_plan_near_gets_one_on_the_spot(tmp_path):
    made = worked_example(6)
    shelf = PlanLibrary(tmp_path, made)
    shelf.add(plan_vector(made, (2, 2, 2, 2), quick=True))
    for library in (None, shelf):
        plan, roles, moves = serve(made, [Worker(1, 2)], library)
        assert (plan.vector, moves) == ((0, 0, 1, 0), [])  # (2, 2, 2, 2) could be filled, and takes twice as long
        assert plan.period <= 29
        assert set(roles) == set(made.shape.workers()) - {Worker(1, 2)}
        assert check(plan.schedule, limits=made.activation_limits()) == []
    near = [Worker(0, 1), Worker(1, 1), Worker(1, 2), Worker(2, 2)]
    assert serve(made, near, shelf)[0].vector == (2, 2, 2, 2)
    with pytest.raises(PlanError, match="no live worker is left for stage 0"):
        serve(made, [Worker(k, 0) for k in range(3)], shelf)


def test_workers_of_different_speed_get_a_plan_of_their_own(tmp_path):
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"speed": {"0.1": 2.0}}))
    made = job(3, 2, 2, 3, profile=str(path))
    shelf = PlanLibrary(tmp_path / "plans", made)
    with pytest.raises(PlanError, match="workers differ in speed"):
        shelf.lookup([Worker(1, 0)])
    plan, roles, _ = serve(made, [Worker(1, 0)], shelf)
    assert plan.schedule.failed == {Worker(1, 0)}
    assert all(process == role for process, role in roles.items())
