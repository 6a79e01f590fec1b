import json

import pytest

from recycle import PlanError, Worker
from recycle.plans import PlanLibrary, count_vectors, likely_vectors
from recycle.solve import filling
from recycle.solve.filling import library_vectors, plan_library
from tests.solve.jobs import job, worked_example

LARGE = job(32, 8, 32, 16)


def test_library_is_continued(tmp_path):
    tiny = job(3, 2, 2, 3, steps=100)
    plan_library(tiny, 1, tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json") if path.name != "manifest.json"}
    assert len(times) == 3
    reports = []
    plans = plan_library(tiny, 2, tmp_path, reports.append)
    assert [p.vector for p in plans] == list(likely_vectors(tiny.shape, 2))
    assert [(f.done, f.total) for f in reports if f.entry is not None and f.phase == "first plans"] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    assert {p.hash for p in PlanLibrary(tmp_path, tiny).plans()} == {p.hash for p in plans}


class _Stop(Exception):
    pass


def test_plans_survive_an_interruption(tmp_path):
    priced = worked_example(5, steps=2000)

    def stop(report):
        if report.phase == "searching" and report.done == 1:
            raise _Stop

    with pytest.raises(_Stop):
        plan_library(priced, 1, tmp_path, stop)
    shelf = PlanLibrary(tmp_path, priced)
    assert set(shelf.vectors()) == set(likely_vectors(priced.shape, 1))
    searched = [plan for plan in shelf.plans() if not plan.planner["quick"]]
    assert len(searched) == 1  # the first plans of all, and the one that a search was made for
    kept = shelf.entry(searched[0].vector)
    again = plan_library(priced, 1, tmp_path)
    assert kept in again
    assert not any(entry.quick for entry in again)


@pytest.mark.process
def test_result_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(filling, "WORTH_PROCESSES", 0)
    priced = worked_example(5, steps=600)
    alone = plan_library(priced, 1, tmp_path / "alone")
    together = plan_library(priced, 1, tmp_path / "together", processes=2)
    # Not the hashes: of equal periods the first plan's is kept, for which half a second is there on any machine.
    assert [(e.vector, e.period) for e in alone] == [(e.vector, e.period) for e in together]
    assert [e.vector for e in alone] == list(likely_vectors(priced.shape, 1))


@pytest.mark.search
def test_plan_stays_if_a_search_finds_nothing_better(tmp_path):
    patient, hurried = worked_example(5, steps=6000), worked_example(5, steps=2)
    before = plan_library(patient, 1, tmp_path)
    after = plan_library(hurried, 1, tmp_path, again=True)
    assert [(e.vector, e.hash, e.lower_bound) for e in after] == [(e.vector, e.hash, e.lower_bound) for e in before]


@pytest.mark.search
def test_too_little_time_is_reported_and_plans_are_kept(tmp_path):
    priced = worked_example(5, steps=100)
    with pytest.raises(PlanError, match=r"1e-09 seconds are too few: 5 of 5 vectors have no plan yet"):
        plan_library(priced, 1, tmp_path, seconds=1e-9)
    assert len(plan_library(priced, 1, tmp_path, seconds=60.0)) == 5


def test_library_of_too_many_vectors_covers_every_set():
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


def test_lookup_is_refused_if_workers_differ_in_speed(tmp_path):
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"speed": {"0.1": 2.0}}))
    library = PlanLibrary(tmp_path / "plans", job(3, 2, 2, 3, profile=str(path)))
    with pytest.raises(PlanError, match="workers differ in speed"):
        library.lookup([Worker(1, 0)])
