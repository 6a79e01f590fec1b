"""Plans of elastic layouts: how near to what the live workers can do at all, valid, within memory, and as files."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job, PricedJob, price
from recycle.job.cut import profile_of_cut
from recycle.job.shape import Worker, node_of
from recycle.plans import Plan
from recycle.solve.planner import plan

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


@pytest.mark.search
@pytest.mark.parametrize("more", ["", "staggered = false\n"], ids=["staggered", "barrier"])
def test_tied_first_and_last_stages_are_reduced_together_by_whoever_hosts_them(more: str) -> None:
    its_job = job(3, 4, 12, 12, seconds=2.0, more=f"{more}[train]\n")
    tied = its_job.with_sections(model=msgspec.structs.replace(its_job.model, tied=True))
    made = plan(tied, [Worker(1, 2)])
    require_sound(made, tied)
    assert made.schedule.shape.cut
    assert made.schedule.ties == ((0, made.schedule.shape.stages - 1),)
    assert made.period < 0.9 * plan(tied.with_sections(planner=msgspec.structs.replace(tied.planner, layout="fixed")),
                                    [Worker(1, 2)]).period  # fmt: skip


def require_sound(made: Plan, its_job: PricedJob) -> None:
    """The plan is valid, its figures are the simulator's, nobody is over a limit, and it reads back."""
    schedule = made.schedule
    whole = its_job.layers_per_stage()
    prices = profile_of_cut(its_job.prices, schedule.shape, whole)
    assert check(schedule, profile=prices, limits=its_job.limits) == []
    timeline = simulate(schedule, prices)
    assert (timeline.period, timeline.makespan) == (made.period, made.makespan)
    assert made.lower_bound <= made.period * (1 + 1e-9)
    assert Plan.from_text(made.text()) == made
    ranks = its_job.shape.ranks
    most = its_job.memory.state_limit * max(sum(whole[rank::ranks]) for rank in range(ranks))
    for name, ends in schedule.metadata.get("layout", {}).items():
        runs = schedule.unit_runs(Worker.parse(name))
        assert ends == [end for run in runs for end in run]
        assert sum(end - begin for begin, end in runs) <= most


@pytest.mark.search
@pytest.mark.parametrize(
    ("D", "P", "m", "layers", "dead", "most"),
    [
        (4, 8, 64, 64, ["1.2"], 1.03),
        pytest.param(4, 8, 64, 64, ["2.1", "2.4", "2.6"], 1.05, marks=pytest.mark.soak),
        (4, 8, 64, 16, ["1.0"], 1.08),
        (2, 8, 32, 32, ["0.5"], 1.06),
    ],
)
def test_live_workers_come_near_to_all_that_they_can_do(
    D: int, P: int, m: int, layers: int, dead: list[str], most: float
) -> None:
    mine = job(D, P, m, layers)
    made = plan(mine, [Worker.parse(name) for name in dead])
    require_sound(made, mine)
    even = 3 * D * m * P / (D * P - len(dead))
    assert even <= made.lower_bound <= 1.01 * even
    assert made.period <= most * even
    assert made.fixed_bound is not None
    assert made.fixed_bound > made.period, "re-routing alone cannot reach it"


@pytest.mark.search
@pytest.mark.parametrize("seed", range(3))
def test_random_jobs_are_planned_no_worse_than_by_re_routing(seed: int) -> None:
    chance = random.Random(seed)
    D, P = chance.choice([(2, 3), (3, 3), (3, 4), (2, 5)])
    per_rank = chance.choice([1, 2, 3])
    times = f"[times]\nforward = {chance.choice(['1.0', str([1.0 + r for r in range(P)])])}\n"
    mine = job(D, P, chance.choice([4, 9, 16]), per_rank * P, seconds=2.0, more=times + "step = 0.25\nlink = 0.1\n")
    mortal = [worker for worker in mine.shape.workers() if worker.pipeline < D - 1]
    dead = chance.sample(mortal, chance.randint(1, D - 1))
    made = plan(mine, dead)
    require_sound(made, mine)
    fixed = plan(price(Job.from_toml(mine_fixed(mine))), dead, seconds=0.5)
    assert made.period <= 1.02 * fixed.period, "both against the clock"
    for move in made.moves:
        assert Worker.parse(move.worker) not in dead
        assert Worker.parse(move.source) not in dead


def mine_fixed(mine: PricedJob) -> str:
    """The job with its given stages."""
    forward = mine.times.forward
    D, P, m = mine.shape.pipelines, mine.shape.ranks, mine.shape.micro_batches
    text = JOB.format(D=D, P=P, m=m, limit=2 * P, layers=mine.model.layers, seconds=2)
    times = f"[times]\nforward = {forward}\nstep = {mine.times.step}\nlink = {mine.times.link}\n"
    return text.replace('"elastic"', '"fixed"') + times


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "dead", "times", "speed", "bound", "most"),
    [
        pytest.param((2, 4, 8, 16), ["0.2"], "", {}, 37 * 0.75, 1.06, id="few micro-batches"),
        pytest.param((3, 4, 24, 16), [], "", {"1.2": 2.0}, 72 * 12 / 11.5, 1.06, id="a slow worker"),
        pytest.param((2, 4, 16, 16), [], "1, 1, 1, 2", {}, 16 * (3 * 3 + 5) / 4, 1.12, id="a stage of twice the work"),
    ],
)
def test_loads_come_near_to_even_whatever_makes_them_uneven(
    shape: tuple[int, int, int, int], dead: list[str], times: str, speed: dict[str, float], bound: float, most: float
) -> None:
    more = f"[times]\nforward = [{times}]\nbackward_input = [{times}]\n" if times else ""
    mine = job(*shape, more=more)
    mine = msgspec.structs.replace(mine, prices=replace(mine.prices, speed=speed))
    made = plan(mine, [Worker.parse(name) for name in dead], steps=50)
    require_sound(made, mine)
    assert made.lower_bound == pytest.approx(bound)
    assert made.fixed_bound is not None
    assert made.period <= most * made.lower_bound < most * made.fixed_bound
    assert len(made.schedule.metadata["layout"]) == mine.shape.worker_count - len(dead)


@pytest.mark.search
def test_no_node_has_all_hosts_of_a_unit() -> None:
    mine = job(3, 4, 24, 16, more="[cluster]\nworkers_per_node = 4\n")
    made = plan(mine, [Worker(0, 1), Worker(0, 2)], steps=50)
    require_sound(made, mine)
    nodes = node_of(mine.shape, 4)
    for stage in range(made.shape.stages):
        assert len({nodes[worker] for worker in made.schedule.hosts(stage)}) > 1


@pytest.mark.search
def test_steps_make_it_repeatable() -> None:
    mine = job(3, 4, 12, 12)
    first, second = (plan(mine, [Worker(1, 2)], steps=200) for _ in range(2))
    assert first.hash == second.hash
    assert first.moves == second.moves


@pytest.mark.search
@pytest.mark.parametrize(
    ("D", "P", "V", "m", "layers", "dead", "most"),
    [(3, 2, 2, 4, 8, ["1.1"], 1.08), (4, 4, 2, 16, 32, ["1.2"], 1.05), (2, 4, 3, 12, 24, ["0.2"], 1.10)],
)
def test_with_several_chunks_layouts_come_as_near_to_all_that_live_workers_can_do(
    D: int, P: int, V: int, m: int, layers: int, dead: list[str], most: float
) -> None:
    text = JOB.format(D=D, P=P, m=m, limit=2 * P * V, layers=layers, seconds=4.0)
    mine = price(Job.from_toml(text.replace("ranks", f"chunks = {V}\nranks")))
    made = plan(mine, [Worker.parse(name) for name in dead], steps=100)
    require_sound(made, mine)
    assert replace(made.shape, cut=()) == mine.shape
    even = 3 * D * P * V * m / (D * P - len(dead))
    assert even <= made.lower_bound <= 1.05 * even
    assert made.period <= most * even
    assert made.fixed_bound is not None
    assert made.fixed_bound > 1.1 * made.period, "re-routing in the given stages cannot reach it"


@pytest.mark.search
def test_a_first_layout_is_planned_however_little_time_there_is() -> None:
    mine = job(2, 4, 16, 16, seconds=0.01)
    made = plan(mine, [Worker(0, 2)], seconds=0.01)
    require_sound(made, mine)
    assert made.fixed_bound is not None
    assert made.period < 0.8 * made.fixed_bound
