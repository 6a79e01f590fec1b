"""Plans of elastic layouts: close to the even share of all work, valid, within memory, and readable from files."""

import random
from dataclasses import replace

import pytest

from recycle import Job, Worker, check, simulate
from recycle.job import PricedJob, price
from recycle.job.cut import profile_of_cut
from recycle.job.shape import node_of
from recycle.plans import Plan
from recycle.solve.planner import plan
from tests.jobs import repriced, varied

pytestmark = pytest.mark.search

JOB = """
[shape]
pipelines = {D}
ranks = {P}
micro_batches = {m}
[memory]
limit = {limit}
[model]
layers = {layers}
[planner]
seconds = {seconds}
layout = "elastic"
"""


ANALYTIC = """
[shape]
pipelines = 2
ranks = 4
micro_batches = 16
[times]
profile = "analytic"
[model]
layers = 8
hidden = 1024
heads = 16
sequence = 1024
vocabulary = 50000
[memory]
state_limit = 2.0
[planner]
layout = "elastic"
"""


def job(D: int, P: int, m: int, layers: int, seconds: float = 6.0, more: str = "") -> PricedJob:
    return price(Job.from_toml(JOB.format(D=D, P=P, m=m, layers=layers, limit=2 * P, seconds=seconds) + more))


@pytest.mark.parametrize("more", ["", "staggered = false\n"], ids=["staggered", "barrier"])
def test_tied_first_and_last_stages_are_reduced_together(more):
    priced = job(3, 4, 12, 12, seconds=2.0, more=f"{more}[train]\n")
    tied = varied(priced, model={"tied": True})
    planned = plan(tied, [Worker(1, 2)])
    require_sound(planned, tied)
    assert planned.schedule.shape.cut
    assert planned.schedule.ties == ((0, planned.schedule.shape.stages - 1),)
    assert planned.period < 0.9 * planned.fixed_bound


def require_sound(planned: Plan, priced: PricedJob) -> None:
    """Valid, with the simulator's figures, within all limits, and equal after reading it back."""
    schedule = planned.schedule
    whole = priced.layers_per_stage()
    prices = profile_of_cut(priced.prices, schedule.shape, whole)
    assert check(schedule, profile=prices, limits=priced.limits) == []
    timeline = simulate(schedule, prices)
    assert (timeline.period, timeline.makespan) == (planned.period, planned.makespan)
    assert planned.lower_bound <= planned.period * (1 + 1e-9)
    assert Plan.from_text(planned.text()) == planned
    ranks = priced.shape.ranks
    most = priced.memory.state_limit * max(sum(whole[rank::ranks]) for rank in range(ranks))
    for name, ends in schedule.metadata.get("layout", {}).items():
        runs = schedule.unit_runs(Worker.parse(name))
        assert ends == [end for run in runs for end in run]
        assert sum(end - begin for begin, end in runs) <= most


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_random_jobs_are_sound(seed):
    chance = random.Random(seed)
    D, P = chance.choice([(2, 3), (3, 3), (3, 4), (2, 5)])
    per_rank = chance.choice([1, 2, 3])
    times = f"[times]\nforward = {chance.choice(['1.0', str([1.0 + r for r in range(P)])])}\n"
    priced = job(D, P, chance.choice([4, 9, 16]), per_rank * P, seconds=2.0, more=times + "step = 0.25\nlink = 0.1\n")
    mortal = [worker for worker in priced.shape.workers() if worker.pipeline < D - 1]
    dead = chance.sample(mortal, chance.randint(1, D - 1))
    planned = plan(priced, dead)
    require_sound(planned, priced)
    for move in planned.moves:
        assert Worker.parse(move.worker) not in dead
        assert Worker.parse(move.source) not in dead


@pytest.mark.parametrize(
    ("shape", "dead", "times", "speed", "bound", "most"),
    [
        pytest.param((2, 4, 8, 16), ["0.2"], "", {}, 37 * 0.75, 1.06, id="few micro-batches"),
        pytest.param((3, 4, 24, 16), [], "", {"1.2": 2.0}, 72 * 12 / 11.5, 1.06, id="a slow worker"),
        pytest.param((2, 4, 16, 16), [], "1, 1, 1, 2", {}, 16 * (3 * 3 + 5) / 4, 1.12, id="a stage of twice the work"),
    ],
)
def test_period_is_close_to_the_bound_of_uneven_loads(shape, dead, times, speed, bound, most):
    more = f"[times]\nforward = [{times}]\nbackward_input = [{times}]\n" if times else ""
    priced = job(*shape, more=more)
    planned = plan(repriced(priced, speed=speed), [Worker.parse(name) for name in dead], steps=50)
    require_sound(planned, priced)
    assert planned.lower_bound == pytest.approx(bound)
    assert planned.period <= most * planned.lower_bound < most * planned.fixed_bound
    assert len(planned.schedule.metadata["layout"]) == priced.shape.worker_count - len(dead)


def test_no_node_has_all_hosts_of_a_unit():
    priced = job(3, 4, 24, 16, more="[cluster]\nworkers_per_node = 4\n")
    planned = plan(priced, [Worker(0, 1), Worker(0, 2)], steps=50)
    require_sound(planned, priced)
    nodes = node_of(priced.shape, 4)
    for stage in range(planned.shape.stages):
        assert len({nodes[worker] for worker in planned.schedule.hosts(stage)}) > 1


@pytest.mark.parametrize(
    ("D", "P", "V", "m", "layers", "dead", "most"),
    [
        (4, 8, 1, 64, 64, ["1.2"], 1.03),
        (4, 8, 1, 64, 16, ["1.0"], 1.08),
        (2, 8, 1, 32, 32, ["0.5"], 1.06),
        (3, 2, 2, 4, 8, ["1.1"], 1.08),
        (2, 4, 3, 12, 24, ["0.2"], 1.10),
    ],
)
def test_period_is_close_to_the_even_share(D, P, V, m, layers, dead, most):
    text = JOB.format(D=D, P=P, m=m, limit=2 * P * V, layers=layers, seconds=4.0)
    priced = price(Job.from_toml(text.replace("ranks", f"chunks = {V}\nranks")))
    planned = plan(priced, [Worker.parse(name) for name in dead], steps=100)
    require_sound(planned, priced)
    assert replace(planned.shape, cut=()) == priced.shape
    even = 3 * D * P * V * m / (D * P - len(dead))
    assert even <= planned.lower_bound <= 1.05 * even
    assert planned.period <= most * even
    assert planned.fixed_bound > 1.1 * planned.period, "re-routing in the given stages cannot reach it"


def test_layout_is_planned_even_with_almost_no_time():
    priced = job(2, 4, 16, 16, seconds=0.01)
    planned = plan(priced, [Worker(0, 2)], seconds=0.01)
    require_sound(planned, priced)
    assert planned.period < 0.8 * planned.fixed_bound
