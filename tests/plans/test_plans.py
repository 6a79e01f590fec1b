import collections
import itertools
import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from recycle import PlanError, Schedule, Shape, Worker, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.plans import (
    Plan,
    PlanLibrary,
    assign_roles,
    cache_path,
    cached_plan,
    count_vectors,
    dead_roles,
    failure_vector,
    likely_vectors,
    rename,
)
from recycle.solve.planner import plan_vector
from tests.solve.jobs import job, small_jobs

TINY = job(3, 2, 2, 3)


def test_a_plan_file_is_a_schedule_file_with_the_hash_of_its_schedule(tmp_path):
    plan = plan_vector(TINY, (1, 0), quick=True)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").text() == plan.text()
    assert Schedule.load(tmp_path / "plan.json") == plan.schedule
    replanned, other = plan_vector(TINY, (1, 0), quick=True), plan_vector(TINY, (0, 1), quick=True)
    assert plan.hash == replanned.hash == Plan.from_text(plan.text()).hash != other.hash
    with pytest.raises(PlanError, match="is a schedule but not a plan"):
        Plan.from_schedule(plan.schedule, "some file")


def test_survivors_keep_their_positions():
    shape = Shape(4, 2, 2)
    roles = assign_roles(shape, dead_roles(shape, (1, 2)), [Worker(1, 0), Worker(3, 1), Worker(0, 1)])
    moved = {str(process): str(role) for process, role in roles.items() if process != role}
    assert moved == {"3.0": "1.0", "2.1": "0.1"}
    with pytest.raises(PlanError, match=r"vector \(1, 2\) cannot serve"):
        assign_roles(shape, dead_roles(shape, (1, 2)), [Worker(1, 0)])
    with pytest.raises(PlanError, match="roles of stage 0 are not a permutation"):
        rename(one_f_one_b(shape), {Worker(0, 0): Worker(1, 0), Worker(1, 0): Worker(1, 0)})
    for vector in ((1,), (5, 0), (4, 0), (-1, 0)):
        with pytest.raises(PlanError):
            dead_roles(shape, vector)


@pytest.mark.search
@settings(max_examples=12)
@given(small_jobs(), st.randoms(use_true_random=False))
def test_renamed_roles_keep_validity_and_period(case, chance):
    planned_job, dead = case
    vector = failure_vector(planned_job.shape, dead)
    plan = plan_vector(planned_job, vector, quick=True)
    named = rename(lower(plan.schedule) if chance.random() < 0.5 else plan.schedule, plan.roles(dead))
    natural = plan.for_processes(dead).schedule
    for schedule in (named, natural):
        assert schedule.failed == set(dead)
        assert check(schedule, profile=planned_job.profile(), limits=planned_job.activation_limits()) == []
        timeline = simulate(schedule, planned_job.profile())
        assert timeline.period == pytest.approx(plan.period)
        assert timeline.makespan == pytest.approx(plan.makespan)


def test_a_renamed_plan_re_routes_the_micro_batches_of_the_dead_worker():
    plan = plan_vector(job(3, 4, 6, 8), (0, 0, 1, 0), quick=True)
    for dead in (Worker(0, 2), Worker(1, 2), Worker(2, 2)):
        schedule = plan.for_processes([dead]).schedule
        for worker, stage in itertools.product(schedule.live, range(4)):
            homes = {i.micro_batch.pipeline for i in schedule.program(worker) if i.stage == stage}
            assert homes <= {worker.pipeline, dead.pipeline if stage == 2 else worker.pipeline}


def test_a_library_looks_up_any_set_of_dead_workers(tmp_path):
    library = PlanLibrary(tmp_path / "deep" / "library", TINY)
    library.add(plan_vector(TINY, (1, 1), quick=True))
    for a, b in itertools.product(range(3), range(3)):
        failed = {Worker(a, 0), Worker(b, 1)}
        plan, roles, moves = library.lookup(failed)
        assert plan.vector == (1, 1)
        assert moves == []
        assert set(roles) == set(TINY.shape.workers()) - failed
        assert set(roles.values()) == set(plan.schedule.live)
        assert all(process.rank == role.rank for process, role in roles.items())
    with pytest.raises(PlanError, match=r"no plan for failure vector \(2, 0\)"):
        library.lookup([Worker(0, 0), Worker(1, 0)])
    with pytest.raises(PlanError, match="outside the grid"):
        library.lookup([Worker(7, 0)])
    assert library.vectors() == [(1, 1)]


def test_a_set_without_a_plan_gets_the_best_for_more_dead_workers_and_the_others_stand_idle(tmp_path):
    library = PlanLibrary(tmp_path, TINY)
    for vector in ((2, 2), (1, 2), (0, 2)):
        library.add(plan_vector(TINY, vector, quick=True))
    failed = {Worker(1, 0), Worker(0, 1)}
    plan, roles, moves = library.lookup(failed)
    assert (plan.vector, moves) == ((1, 2), [])  # as good as (2, 2) and leaves more at work
    assert set(roles.values()) == set(plan.schedule.live)
    idle = set(TINY.shape.workers()) - failed - set(roles)
    assert {worker.rank for worker in idle} == {1}
    assert len(idle) == 1
    named = plan.for_processes(failed | idle).schedule
    assert check(named, profile=TINY.profile(), limits=TINY.activation_limits()) == []


def test_a_lookup_moves_workers_where_the_job_lets_them_and_it_pays(tmp_path):
    still, moving = job(4, 4, 8, 7), job(4, 4, 8, 7, move=True)
    for vector in ((0, 2, 0, 0), (0, 1, 1, 0), (2, 2, 2, 2)):
        PlanLibrary(tmp_path, still).add(plan_vector(still, vector, quick=True))
    failed = {Worker(0, 1), Worker(3, 1)}
    plan, _, moves = PlanLibrary(tmp_path, still).lookup(failed)
    assert (plan.vector, moves) == ((0, 2, 0, 0), [])
    plan, roles, moves = PlanLibrary(tmp_path, moving).lookup(failed)
    assert plan.vector == (0, 1, 1, 0)
    (move,) = moves
    assert Worker.parse(move.worker).rank == 2
    assert roles[Worker.parse(move.worker)].rank == 1
    assert Worker.parse(move.source) in {Worker(1, 1), Worker(2, 1)}
    assert set(roles) == set(moving.shape.workers()) - failed
    assert set(roles.values()) == set(plan.schedule.live)


def test_files_that_are_not_valid_plans_of_the_job_are_ignored(tmp_path):
    library = PlanLibrary(tmp_path, TINY)
    path = tmp_path / library.add(plan_vector(TINY, (1, 0), quick=True)).file
    text = path.read_text()
    other = plan_vector(job(3, 2, 2, 3, forward=2.0), (1, 0), quick=True).text()
    boast = text.replace('"period": 9.0', '"period": 8.0')
    assert boast != text
    assert PlanLibrary(tmp_path, TINY).get((1, 0)) is not None
    for broken in ("", boast, text[:200], text.replace("0F0.0 ", "", 1), text.replace('"1.0"', '"0.0"', 1), other):
        path.write_text(broken)
        library_again = PlanLibrary(tmp_path, TINY)
        assert library_again.get((1, 0)) is None
        assert list(library_again.plans()) == []
        (tmp_path / "manifest.json").rename(tmp_path / "manifest")  # without it the file is adopted, or not
        lost = PlanLibrary(tmp_path, TINY)
        lost.prepare()
        assert lost.vectors() == []
        (tmp_path / "manifest").rename(tmp_path / "manifest.json")
    path.unlink()
    assert PlanLibrary(tmp_path, TINY).get((1, 0)) is None
    assert PlanLibrary(tmp_path, job(3, 2, 2, 4)).vectors() == []
    assert PlanLibrary(tmp_path, job(3, 2, 2, 3, seconds=1.0)).vectors() == [(1, 0)]  # effort makes no other job


@pytest.mark.parametrize("manifest", [None, "", '{"format": "recycle-plan-library", "version": 1, "plans": [{}]}'])
def test_a_lost_manifest_is_rebuilt_from_the_plan_files(tmp_path, manifest):
    for vector in ((1, 0), (0, 1)):
        plan_vector(TINY, vector, quick=True).save(tmp_path / f"{'-'.join(map(str, vector))}.json")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    assert PlanLibrary(tmp_path, TINY).vectors() == [(0, 1), (1, 0)]
    library = PlanLibrary(tmp_path, TINY)
    library.prepare()
    assert json.loads((tmp_path / "manifest.json").read_text())["plans"][0]["file"] == "0-1.json"
    assert library.lookup([Worker(2, 0)])[0].period == 9


def test_a_better_plan_replaces_the_file_of_the_previous_one(tmp_path):
    planned_job = job(3, 4, 6, 4, chunks=2, steps=300)
    library = PlanLibrary(tmp_path, planned_job)
    hurried = library.add(plan_vector(planned_job, (0, 0, 1, 0), quick=True))
    searched = library.add(plan_vector(planned_job, (0, 0, 1, 0)))
    assert (hurried.quick, searched.quick) == (True, False)
    assert searched.period < hurried.period
    assert sorted(path.name for path in tmp_path.iterdir()) == [searched.file, "manifest.json"]
    assert PlanLibrary(tmp_path, planned_job).entry((0, 0, 1, 0)) == searched


def test_a_manifest_that_names_a_file_elsewhere_removes_nothing(tmp_path):
    library, important = tmp_path / "library", tmp_path / "important.json"
    entry = PlanLibrary(library, TINY).add(plan_vector(TINY, (0, 0), quick=True))
    important.write_text("important")
    manifest = (library / "manifest.json").read_text()
    (library / "manifest.json").write_text(manifest.replace(entry.file, "../important.json"))
    PlanLibrary(library, TINY).add(plan_vector(TINY, (0, 0), quick=True))
    assert important.read_text() == "important"


def test_an_invalid_plan_is_not_stored(tmp_path):
    plan = plan_vector(TINY, (0, 0), quick=True)
    program = plan.schedule.text()
    program["0.0"] = " ".join(random.Random(1).sample(program["0.0"].split(), 6))
    broken = Schedule.from_text(TINY.shape, program)
    with pytest.raises(PlanError, match="not valid and was not stored"):
        PlanLibrary(tmp_path, TINY).add(Plan(broken, 1, 1, 1, 0, "x"))
    assert list(tmp_path.iterdir()) == []


def test_the_cache_key_follows_everything_a_plan_depends_on(tmp_path):
    jobs = [TINY, job(3, 2, 2, 4), job(3, 2, 3, 3), job(3, 2, 2, 3, forward=2.0), job(3, 2, 2, 3, seed=1)]
    paths = {cache_path(tmp_path, planned_job, (1, 0)) for planned_job in jobs} | {cache_path(tmp_path, TINY, (0, 1))}
    assert len(paths) == 6
    assert cache_path(tmp_path, TINY, (1, 0)) == cache_path(tmp_path, job(3, 2, 2, 3), [1, 0])
    assert cached_plan(tmp_path / "absent.json", TINY, (1, 0)) is None


@pytest.mark.parametrize("shape", [Shape(2, 2, 2), Shape(3, 4, 1), Shape(5, 2, 1), Shape(1, 3, 1)])
def test_counts_of_vectors_equal_their_enumeration(shape):
    counts = collections.Counter(sum(vector) for vector in likely_vectors(shape, 6))
    assert count_vectors(shape, 6) == [counts[dead] for dead in range(7)]


def test_vectors_come_likeliest_first_and_leave_each_stage_a_host():
    vectors = list(likely_vectors(Shape(2, 2, 2), 3))
    assert vectors == [(0, 0), (1, 0), (0, 1), (1, 1)]
    spread = list(likely_vectors(Shape(4, 3, 1), 2))[4:]
    assert spread == [(1, 1, 0), (1, 0, 1), (0, 1, 1), (2, 0, 0), (0, 2, 0), (0, 0, 2)]  # 16 sets each, then 6
