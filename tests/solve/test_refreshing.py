from shutil import copytree

import pytest

from recycle import PlanError, Profile
from recycle.plans import PlanLibrary
from recycle.solve.filling import plan_library
from recycle.solve.refreshing import refresh
from tests.solve.jobs import job


def under(tmp_path, name, limit=3, **times):
    path = tmp_path / f"{name}.json"
    Profile(**times).save(path)
    return job(3, 4, 3, limit, profile=str(path), steps=60)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library of single failures under unit times."""
    folder = tmp_path_factory.mktemp("library")
    plan_library(under(folder, "unit"), 1, folder / "plans")
    return folder / "plans"


@pytest.fixture
def shelf(tmp_path, library):
    """A copy of the library that the test may change."""
    return copytree(library, tmp_path / "plans")


@pytest.mark.search
def test_only_stale_plans_are_replaced(tmp_path, shelf):
    before = {entry.vector: entry for entry in PlanLibrary(shelf).usable()}
    heavy = under(tmp_path, "heavy", forward=[1.0, 1.0, 1.0, 3.0], backward_weight=[1.0, 1.0, 0.2, 1.0])
    drifts, entries = refresh(heavy, shelf, 0.02)
    stale = {drift.vector for drift in drifts if drift.is_stale(0.02)}
    assert 0 < len(stale) < len(drifts)
    priced = {drift.vector: drift.period for drift in drifts}
    for entry in entries:
        if entry.vector in stale:
            assert entry.period <= priced[entry.vector]
        else:
            assert (entry.period, entry.hash) == (priced[entry.vector], before[entry.vector].hash)
    assert any(entry.period < priced[entry.vector] for entry in entries)
    assert refresh(heavy, shelf, 0.02)[0] == []
    everything, _ = refresh(under(tmp_path, "unit"), shelf, 10.0)
    assert not any(drift.is_stale(10.0) for drift in everything)


@pytest.mark.search
def test_plan_that_exceeds_the_memory_is_stale(tmp_path, shelf):
    tight = under(tmp_path, "tight", limit=2, forward=1.5)
    drifts, entries = refresh(tight, shelf, 10.0)
    assert all(drift.period is None and drift.is_stale(10.0) for drift in drifts)
    assert len(entries) == 5
    assert all(plan.limits == (2.0,) * 4 for plan in PlanLibrary(shelf, tight).plans())


def test_folder_without_plans_is_refused(tmp_path):
    priced = under(tmp_path, "unit")
    with pytest.raises(PlanError, match="not a plan library"):
        refresh(priced, tmp_path / "nowhere")
    with pytest.raises(PlanError, match="has no plan for D=3 P=4 m=3"):
        refresh(priced, tmp_path)
