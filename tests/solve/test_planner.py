import pickle
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.automatic_schedules import AUTOMATIC
from benchmarks.gaps import ONE_CHUNK, zero_bubble_task
from recycle import Link, PlanError, Worker, check, simulate
from recycle.ir.operations import operations_of
from recycle.plans import Plan, likely_vectors
from recycle.solve import effort
from recycle.solve.planner import plan, plan_for_training
from recycle.solve.problem import Problem
from tests.jobs import repriced
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


@pytest.mark.parametrize(
    ("limit", "decoupled", "staggered", "period"),
    [
        ([4, 3, 2, 1], False, False, 36),
        (8, False, False, 33),
        (4, True, False, 29),
        ([4, 3, 2, 1], True, False, 32),
        (4, True, True, 29),
        (5, True, True, 28),
        (6, True, True, 27),
    ],
)
def test_worked_example_is_planned_optimally(limit, decoupled, staggered, period):
    priced = worked_example(limit, decoupled=decoupled, staggered=staggered, steps=400_000)
    planned = plan(priced, [DEAD])
    assert (planned.period, planned.lower_bound) == (period, period)
    require_valid(planned, priced, [DEAD])


def require_valid(planned, priced, dead):
    assert check(planned.schedule, profile=priced.prices, limits=priced.limits) == []
    assert planned.schedule.failed == set(dead)
    assert planned.period >= planned.lower_bound * (1 - 1e-9)
    timeline = simulate(planned.schedule, priced.prices)
    assert (planned.period, planned.makespan) == pytest.approx((timeline.period, timeline.makespan))


@pytest.mark.search
@settings(max_examples=8)
@given(small_jobs())
def test_plan_is_valid_and_depends_only_on_seed_and_steps(case):
    priced, dead = case
    first, second = (plan(priced, dead, steps=200) for _ in range(2))
    assert (first.hash, first.period, first.lower_bound) == (second.hash, second.period, second.lower_bound)
    require_valid(first, priced, dead)


@pytest.mark.search
@settings(max_examples=8)
@given(small_jobs(), st.floats(0.5, 2.0), st.floats(0.0, 2.0), st.floats(0.1, 3.0))
def test_plan_for_unlike_workers_and_links_is_valid(case, speed, latency, reduce):
    priced, dead = case
    priced = repriced(priced, speed={"0.0": speed}, links={"*.*>0.*": Link(latency)}, reduce=reduce)
    require_valid(plan(priced, dead, steps=100), priced, dead)


def test_worker_that_is_alone_at_the_turn_of_a_v_sends_nothing_there():
    priced = job(1, 2, 2, chunks=2, placement="v")
    priced = repriced(priced, links={"0.0>0.1": Link(2.0)})
    planned = plan(priced, steps=10)
    require_valid(planned, priced, [])
    assert planned.certified_bound == planned.lower_bound <= planned.period


@pytest.mark.search
def test_plan_does_not_depend_on_the_number_of_processes():
    priced = job(3, 4, 6, 5, steps=5_000, seed=11)
    assert len({plan(priced, [DEAD], processes=processes).hash for processes in (1, 2)}) == 1


@pytest.mark.search
def test_wall_clock_limit_is_kept():
    priced = job(8, 8, 32, 8, chunks=2)
    plan(priced, [Worker(3, 7)], seconds=1.0)  # compiles what is not compiled yet
    begun = time.process_time()
    plan(priced, [Worker(3, 7)], seconds=2.0)
    assert time.process_time() - begun < 1.2 * 2.0 + 0.5


def test_job_with_too_few_seconds_for_a_first_plan_is_refused():
    priced = job(16, 16, 64, 16, seconds=0.01, steps=None)
    with pytest.raises(PlanError, match=r"seconds: 0.01 are too few for the 98,304 operations"):
        plan(job(16, 16, 128, 16, seconds=0.01))
    assert plan(priced, [Worker(3, 7)], seconds=0.01).period <= 240


def test_tiny_job_is_planned_for_training_within_five_seconds(tmp_path):
    tiny = job(3, 2, 2, 3)
    begun = time.process_time()
    texts = {vector: plan_for_training(tiny, vector, cache=tmp_path) for vector in likely_vectors(tiny.shape, 1)}
    assert time.process_time() - begun < 5.0
    assert {v: Plan.from_text(text).period for v, text in texts.items()} == {(0, 0): 7, (1, 0): 9, (0, 1): 9}
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert plan_for_training(tiny, (1, 0), cache=tmp_path) == texts[1, 0]  # from the cache, seconds included
    assert pickle.loads(pickle.dumps(plan_for_training)) is plan_for_training


def test_broken_cache_file_is_planned_again(tmp_path):
    tiny = job(3, 2, 2, 3)
    text = plan_for_training(tiny, (1, 0), cache=tmp_path)
    (path,) = tmp_path.glob("*.json")
    forged = text.replace("0F0.0 ", "", 1)
    for broken in (text[: len(text) // 2], "", "[]", forged, plan_for_training(tiny, (0, 1), cache=tmp_path)):
        path.write_text(broken)
        assert Plan.from_text(plan_for_training(tiny, (1, 0), cache=tmp_path)).vector == (1, 0)
    path.unlink()
    path.mkdir()  # cannot be written, as on a full disk
    assert Plan.from_text(plan_for_training(tiny, (1, 0), cache=tmp_path)).vector == (1, 0)


def test_workers_change_stage_if_the_job_allows_it():
    priced = job(4, 4, 8, 7, steps=200, move=True)
    planned = plan(priced, [Worker(0, 1), Worker(1, 1)])
    assert sum(planned.vector) == 2
    assert max(planned.vector) == 1
    assert (planned.period, planned.lower_bound) == (33, 33)
    (moved,) = planned.moves
    leaver, role, source = (Worker.parse(name) for name in (moved.worker, moved.role, moved.source))
    assert role in {Worker(0, 1), Worker(1, 1)}
    assert source.rank == 1
    assert planned.schedule.failed == {Worker(0, 1), Worker(1, 1), leaver} - {role}
    assert Plan.from_text(planned.text()).moves == planned.moves
    assert plan(job(4, 4, 8, 7, steps=200), [Worker(0, 1), Worker(1, 1)]).moves == ()


def test_plan_for_training_moves_no_worker():
    planned = Plan.from_text(plan_for_training(job(4, 4, 8, 7, steps=50, move=True), (0, 2, 0, 0)))
    assert (planned.vector, planned.moves) == ((0, 2, 0, 0), ())


@pytest.mark.search
@pytest.mark.parametrize("link", [0.5, 2.0])
@pytest.mark.parametrize("dead", [(), (Worker(3, 2),)])
def test_plan_avoids_a_link_that_is_four_times_slower(link, dead):
    priced = job(4, 4, 6, 8, link=link, steps=20)
    slow = repriced(priced, links={"1.0>1.1": Link(4 * link), "1.1>1.0": Link(4 * link)})
    calm, around = plan(priced, dead), plan(slow, dead)
    unaware = simulate(calm.schedule, slow.prices).period
    assert around.lower_bound <= around.period == simulate(around.schedule, slow.prices).period
    assert around.period <= 1.05 * calm.period < unaware


def test_dead_worker_is_refused_if_the_job_forbids_re_routing():
    with pytest.raises(PlanError, match=r"\[planner\] reroute: is false"):
        plan(job(2, 2, 2, reroute=False), [Worker(0, 1)])


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "limit", "dead", "slow", "factor"),
    [
        ((5, 4, 6), 1, [(3, 0), (3, 1), (3, 2)], (1, 3), 2.0),
        ((3, 4, 6), 2, [], (0, 0), 3.0),
        ((4, 2, 8), None, [(1, 0)], (2, 1), 1.5),
        ((6, 3, 6), 3, [], (0, 1), 3.0),
    ],
)
def test_plan_is_not_worse_than_without_the_slow_worker(shape, limit, dead, slow, factor):
    priced = repriced(job(*shape, limit, steps=400), speed={f"{slow[0]}.{slow[1]}": factor})
    dead = [Worker(*position) for position in dead]
    assert plan(priced, dead).period <= plan(priced, [*dead, Worker(*slow)]).period


@pytest.mark.parametrize("row", range(6))
def test_first_plans_are_as_short_as_zero_bubbles_automatic_schedules(row, monkeypatch):
    monkeypatch.setattr(effort, "time", SimpleNamespace(monotonic=time.process_time))  # the machine may be busy
    task = zero_bubble_task(ONE_CHUNK[row], 1)
    assert plan(task.job, quick=True).period <= task.ideal * (AUTOMATIC[1][row] + 5e-5)


def test_placement_is_chosen_by_the_period():
    shape = {"chunks": 2, "limit": 8, "steps": 200}
    settled = job(3, 4, 8, placement="auto", **shape)
    planned = plan(settled.placed("auto"), [DEAD])
    loop, v = (plan(job(3, 4, 8, placement=placement, **shape), [DEAD]) for placement in ("loop", "v"))
    assert planned.period == min(loop.period, v.period)
    other = planned.other_placement
    assert {planned.schedule.placing, other.placement} == {"loop", "v"}
    assert other.lower_bound == (v if other.placement == "v" else loop).lower_bound <= other.period
    require_valid(planned, settled, [DEAD])
    assert Plan.from_text(planned.text()).other_placement == other
    assert settled.grid.placement == "v"
    assert plan(settled, steps=200).period == 48 < plan(job(3, 4, 8, **shape)).period


def test_pipelines_exchange_second_chunks_where_an_odd_limit_leaves_a_place_empty():
    priced = job(2, 4, 8, 3, chunks=2, placement="v", steps=100)
    planned = plan(priced)
    require_valid(planned, priced, [])
    work = operations_of(planned.schedule)
    assert (work.worker // 4 != work.micro_batch // 8).any()
    assert planned.period <= 78  # 86 without exchanges


def test_a_worker_that_hosts_neighboring_stages_of_the_v_transfers_nothing_between_them():
    priced = job(1, 2, 3, 4, chunks=2, placement="v", steps=20)
    priced = repriced(priced, links={"0.0>0.1": Link(2.0), "0.1>0.0": Link(1.0)})
    planned = plan(priced)
    require_valid(planned, priced, [])
    assert Problem.from_job(priced).hop_after == [1, 0, 1, 0]


def test_slow_worker_keeps_its_micro_batches_without_re_routing():
    priced = repriced(job(3, 2, 4, reroute=False, steps=400), speed={"1.1": 3.0})
    schedule = plan(priced).schedule
    assert all(i.micro_batch.pipeline == 1 for i in schedule.program(Worker(1, 1)) if str(i).startswith("1F"))
