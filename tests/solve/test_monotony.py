"""More memory never makes a plan worse, and more dead workers never make one better."""

from random import Random

import pytest

from recycle.job.shape import Worker
from recycle.solve.planner import plan
from tests.solve.jobs import job

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
@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 3, 4, 5))])
def test_more_memory_never_makes_a_plan_worse(seed):
    shape, other, dead = drawn(seed)
    chunks, ranks = other["chunks"], shape[1]
    limits = [chunks, chunks + 1, chunks * ranks, 2 * chunks * ranks, None]
    periods = [plan(job(*shape, limit, **other), dead).period for limit in limits]
    assert periods == sorted(periods, reverse=True)


@pytest.mark.search
@pytest.mark.parametrize("seed", [6, 8, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (7, 9, 10, 11))])
def test_more_dead_workers_never_make_a_plan_better(seed):
    shape, other, dead = drawn(seed)
    made = job(*shape, other["chunks"] * shape[1], **other)
    periods = [plan(made, dead[:count]).period for count in range(len(dead) + 1)]
    assert periods == sorted(periods)
