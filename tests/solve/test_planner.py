import json
import pickle
import time
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.errors import PlanError
from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job.profile import Link
from recycle.job.shape import Worker
from recycle.plans import Plan, likely_vectors
from recycle.solve.planner import plan, plan_for_training
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


@pytest.mark.parametrize(
    ("limit", "decoupled", "staggered", "period", "bound"),
    [
        ([4, 3, 2, 1], False, False, 36, 36),
        (8, False, False, 33, 33),
        (4, True, False, 29, 29),
        ([4, 3, 2, 1], True, False, 32, 32),
        (4, True, True, 29, 29),
        (5, True, True, 28, 28),
        (6, True, True, 27, 27),
    ],
)
def test_the_worked_example_reaches_the_best_known_period(limit, decoupled, staggered, period, bound):
    made = worked_example(limit, decoupled=decoupled, staggered=staggered, steps=400_000)
    planned = plan(made, [DEAD])
    assert (planned.period, planned.lower_bound) == (period, bound)
    assert planned.schedule.failed == {DEAD}
    assert simulate(planned.schedule, made.profile()).period == period
    assert check(planned.schedule, profile=made.profile(), limits=made.activation_limits()) == []


@pytest.mark.search
@settings(max_examples=15, deadline=None)
@given(small_jobs())
def test_every_plan_is_valid_and_not_below_its_bound(case):
    made, dead = case
    planned = plan(made, dead, steps=200)
    assert check(planned.schedule, profile=made.profile(), limits=made.activation_limits()) == []
    assert planned.schedule.failed == set(dead)
    assert planned.period >= planned.lower_bound - 1e-9
    assert planned.period == pytest.approx(simulate(planned.schedule, made.profile()).period)
    assert planned.gap >= 0


@st.composite
def measured_profiles(draw):
    """(shape, profile as a file holds it): times, links, reduce and bytes as they are measured, and slow workers."""
    pipelines, ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    times = st.lists(st.floats(0.5, 3.0), min_size=ranks * chunks, max_size=ranks * chunks)
    profile = {key: draw(times) for key in ("forward", "backward_input", "backward_weight", "reduce", "step")}
    profile |= {"latency": draw(st.floats(0, 0.5)), "bandwidth": 10.0, "message": draw(times)}
    profile["weight_stash"] = draw(st.sampled_from([0.0, 0.3, 1.0]))
    if draw(st.booleans()):
        profile["links"] = {"*.*>0.*": {"latency": draw(st.floats(0, 2))}}
    if draw(st.booleans()):
        slow = f"{draw(st.integers(0, pipelines - 1))}.{draw(st.integers(0, ranks - 1))}"
        profile["speed"] = {slow: draw(st.sampled_from([0.5, 1.7]))}
    return (pipelines, ranks, draw(st.integers(1, 4)), chunks), profile


@pytest.mark.search
@settings(max_examples=12, deadline=None)
@given(measured_profiles(), st.booleans(), st.booleans(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_plan_of_a_measured_profile_is_valid_and_not_below_its_bound(
    tmp_path_factory, case, decoupled, staggered, spare, chance
):
    (pipelines, ranks, micro_batches, chunks), profile = case
    path = tmp_path_factory.mktemp("profile") / "p.json"
    path.write_text(json.dumps(profile))
    other = {"decoupled": decoupled, "staggered": staggered, "seed": chance.randrange(9)}
    made = job(pipelines, ranks, micro_batches, chunks + spare, chunks=chunks, profile=str(path), **other)
    dead = [Worker(k, r) for r in range(ranks) for k in chance.sample(range(pipelines), chance.randrange(pipelines))]
    planned = plan(made, dead, steps=100)
    assert check(planned.schedule, profile=made.profile(), limits=made.activation_limits()) == []
    assert planned.schedule.failed == set(dead)
    assert planned.period >= planned.lower_bound * (1 - 1e-9)
    timeline = simulate(planned.schedule, made.profile())
    assert (planned.period, planned.makespan) == pytest.approx((timeline.period, timeline.makespan))


@pytest.mark.search
@settings(max_examples=10, deadline=None)
@given(small_jobs())
def test_steps_make_the_plan_depend_on_nothing_but_the_seed(case):
    made, dead = case
    first, second = (plan(made, dead, steps=300) for _ in range(2))
    assert (first.hash, first.period, first.lower_bound) == (second.hash, second.period, second.lower_bound)


@pytest.mark.search
def test_a_longer_search_depends_on_seed_and_steps_only_either():
    made = job(3, 4, 6, 5, steps=5_000, seed=11)
    assert len({plan(made, [DEAD], processes=processes).hash for processes in (1, 2)}) == 1
    chunked = job(3, 4, 6, 4, chunks=2, steps=3_000)
    assert plan(chunked, [DEAD]).hash == plan(chunked, [DEAD]).hash


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "chunks", "limit", "link"),
    [
        ((8, 8, 32), 2, 8, 0.0),
        pytest.param((16, 16, 64), 1, 16, 1.0, marks=pytest.mark.soak),
    ],
)
def test_the_wall_limit_is_kept_whatever_the_size(shape, chunks, limit, link):
    made = job(*shape, limit, chunks=chunks, link=link)
    plan(made, [Worker(3, 7)], seconds=1.0)  # compiles what is not compiled yet
    begun = time.process_time()
    plan(made, [Worker(3, 7)], seconds=2.0)
    assert time.process_time() - begun < 1.2 * 2.0 + 0.5


def test_a_first_plan_that_takes_longer_than_the_job_allows_is_refused_unless_the_caller_sets_the_limit():
    made = job(16, 16, 64, 16, seconds=0.01, steps=None)
    with pytest.raises(PlanError, match=r"seconds: 0.01 are too few for the 98,304 operations"):
        plan(job(16, 16, 128, 16, seconds=0.01))
    assert plan(made, [Worker(3, 7)], seconds=0.01).period <= 240


def test_the_tiny_job_is_planned_for_training_within_five_seconds(tmp_path):
    tiny = job(3, 2, 2, 3)
    begun = time.monotonic()
    texts = {vector: plan_for_training(tiny, vector, cache=tmp_path) for vector in likely_vectors(tiny.shape, 1)}
    assert time.monotonic() - begun < 5.0
    assert {v: Plan.from_text(text).period for v, text in texts.items()} == {(0, 0): 7, (1, 0): 9, (0, 1): 9}
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert plan_for_training(tiny, (1, 0), cache=tmp_path) == texts[1, 0]  # from the cache, seconds included
    assert pickle.loads(pickle.dumps(plan_for_training)) is plan_for_training


def test_a_broken_cache_file_is_planned_again(tmp_path):
    tiny = job(3, 2, 2, 3)
    text = plan_for_training(tiny, (1, 0), cache=tmp_path)
    (path,) = tmp_path.glob("*.json")
    forged = text.replace("0F0.0 ", "", 1)
    for broken in (text[: len(text) // 2], "", "[]", forged, plan_for_training(tiny, (0, 1), cache=tmp_path)):
        path.write_text(broken)
        assert Plan.from_text(plan_for_training(tiny, (1, 0), cache=tmp_path)).vector == (1, 0)


def test_workers_change_stage_where_the_job_lets_them():
    made = job(4, 4, 8, 7, steps=200, move=True)
    planned = plan(made, [Worker(0, 1), Worker(1, 1)])
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


def test_a_plan_for_training_moves_nobody():
    planned = Plan.from_text(plan_for_training(job(4, 4, 8, 7, steps=50, move=True), (0, 2, 0, 0)))
    assert (planned.vector, planned.moves) == ((0, 2, 0, 0), ())


@pytest.mark.search
@pytest.mark.parametrize("link", [0.5, 2.0])
@pytest.mark.parametrize("dead", [(), (Worker(3, 2),)])
def test_a_plan_goes_around_a_link_that_is_four_times_slower_and_takes_hardly_longer(link, dead):
    made = job(4, 4, 6, 8, link=link, steps=20)
    slow = replace(made.prices, links={"1.0>1.1": Link(4 * link), "1.1>1.0": Link(4 * link)})
    calm, around = plan(made, dead), plan(msgspec.structs.replace(made, prices=slow), dead)
    unaware = simulate(calm.schedule, slow).period
    assert around.lower_bound <= around.period == simulate(around.schedule, slow).period
    assert around.period <= 1.05 * calm.period < unaware


@pytest.mark.parametrize(
    ("made", "dead", "message"),
    [
        (job(2, 2, 2), [(0, 1), (1, 1)], "no live worker is left for stage 1"),
        (job(2, 2, 2, reroute=False), [(0, 1)], r"\[planner\] reroute: is false"),
        (job(2, 2, 2, forward=[1.0, 0.0]), [], r"\[times\] forward: stage 1 takes 0; a plan needs a time above 0"),
        (job(2, 2, 2, backward_input=[1.0, 0.0]), [], r"\[times\] backward_input: stage 1 takes 0"),
    ],
)
def test_jobs_without_a_plan_are_refused(made, dead, message):
    with pytest.raises(PlanError, match=message):
        plan(made, [Worker(*one) for one in dead])


def slowed(made, speed):
    """The job with workers of these speed factors."""
    return msgspec.structs.replace(made, prices=replace(made.prices, speed=speed))


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "limit", "dead", "slow", "factor"),
    [
        ((5, 4, 6), 1, [(3, 0), (3, 1), (3, 2)], (1, 3), 2.0),
        ((3, 4, 6), 2, [], (0, 0), 3.0),
        ((4, 2, 8), None, [(1, 0)], (2, 1), 1.5),
    ],
)
def test_a_plan_is_no_worse_than_that_of_the_job_without_its_slow_worker(shape, limit, dead, slow, factor):
    made = slowed(job(*shape, limit, steps=400), {f"{slow[0]}.{slow[1]}": factor})
    dead = [Worker(*one) for one in dead]
    assert plan(made, dead).period <= plan(made, [*dead, Worker(*slow)]).period


def test_a_worker_that_is_a_little_slow_is_not_left_out():
    made = slowed(job(3, 2, 6, steps=400), {"1.1": 1.1})
    planned = plan(made)
    assert planned.period < plan(made, [Worker(1, 1)]).period
    assert len(planned.schedule.text()["1.1"]) > 0


def test_without_re_routing_a_slow_worker_keeps_its_micro_batches():
    made = slowed(job(3, 2, 4, reroute=False, steps=400), {"1.1": 3.0})
    schedule = plan(made).schedule
    assert all(one.micro_batch.pipeline == 1 for one in schedule.program(Worker(1, 1)) if str(one).startswith("1F"))


STEPS = 200


def drawn(seed):
    """(what makes a job but for its limit, dead workers in any order)."""
    random = Random(seed)
    pipelines, ranks, chunks = random.randint(2, 4), random.randint(2, 4), random.choice((1, 1, 2))
    shape = (pipelines, ranks, random.randint(2, 4))
    times = {}
    if random.random() < 0.6:
        for key in ("forward", "backward_input", "backward_weight"):
            times[key] = [random.choice((0.5, 1.0, 1.5, 2.0)) for _ in range(ranks * chunks)]
    dead = [Worker(k, rank) for rank in random.sample(range(ranks), 2) for k in range(random.randrange(pipelines))]
    return shape, {"chunks": chunks, "steps": STEPS, **times}, dead


@pytest.mark.search
@pytest.mark.parametrize("seed", range(3))
def test_more_memory_never_makes_a_plan_worse(seed):
    shape, other, dead = drawn(seed)
    chunks, ranks = other["chunks"], shape[1]
    limits = [chunks, chunks + 1, chunks * ranks, 2 * chunks * ranks, None]
    periods = [plan(job(*shape, limit, **other), dead).period for limit in limits]
    assert periods == sorted(periods, reverse=True)


@pytest.mark.search
@pytest.mark.parametrize("seed", [6, 7, 8])
def test_more_dead_workers_never_make_a_plan_better(seed):
    shape, other, dead = drawn(seed)
    made = job(*shape, other["chunks"] * shape[1], **other)
    periods = [plan(made, dead[:count]).period for count in range(len(dead) + 1)]
    assert periods == sorted(periods)
