"""Routes: every micro-batch passes the model once, within its quotas; the order of the legs, and their schedule."""

import random
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from recycle import Profile, Schedule, Shape, Worker, check, lower, simulate
from recycle.solve.effort import Deadline
from recycle.solve.layout.route_search import best_order
from recycle.solve.layout.routes import Routes, joint_schedule, routes_of
from recycle.solve.layout.units import Units
from recycle.solve.problem_arrays import Operations

SHAPE = Shape(2, 3, 6)
UNITS = Units(
    (2, 2, 2),
    {name: np.ones(6) for name in ("forward", "backward_input", "backward_weight", "static", "activation")},
    False,
    4.0,
)
WORKERS = [Worker(0, 0), Worker(0, 1), Worker(0, 2), Worker(1, 0), Worker(1, 2)]
CHAINS = np.array([[7, 7, 0, 0, 0, 0], [0, 0, 7, 7, 0, 0], [0, 0, 0, 0, 7, 7], [5, 5, 5, 0, 0, 0], [0, 0, 0, 5, 5, 5]])
HELPED = np.array([[8, 6, 0, 0, 0, 0], [0, 3, 9, 3, 0, 0], [0, 0, 0, 2, 6, 7], [4, 3, 3, 0, 0, 0], [0, 0, 0, 7, 6, 5]])


def routed(workers: list[Worker], quotas: Operations) -> Routes:
    """The routes where each worker hosts the units from the first up to and with the last that it runs."""
    at = [np.flatnonzero(row) for row in quotas]
    parts = [((int(row[0]), int(row[-1]) + 1),) if len(row) else () for row in at]
    return routes_of(workers, quotas, [worker.pipeline for worker in workers], parts)


def schedule_of_routes(
    quotas: Operations, split: bool = True, cap: float = 6.0, optimizer: Literal["staggered", "barrier"] = "staggered"
) -> Schedule:
    routes = routed(WORKERS, quotas)
    order = best_order(routes, UNITS, Profile(), SHAPE, [cap] * len(routes.workers), Deadline(None), split=split)
    names = routes.names(SHAPE)
    return joint_schedule(SHAPE, routes, order.programs, names, [Worker(1, 1)], optimizer, split=split)


def random_quotas(seed: int) -> tuple[list[Worker], Operations]:
    """Shares of 24 micro-batches that change by a few from unit to unit."""
    chance = random.Random(seed)
    workers = [Worker(k, r) for k in range(3) for r in range(2)]
    quotas = np.zeros((6, 7), dtype=np.int64)
    current = np.array([8, 0, 8, 0, 8, 0])
    for u in range(7):
        quotas[:, u] = current
        for _ in range(chance.randint(0, 2)):
            giver, taker = chance.choice(np.flatnonzero(current).tolist()), chance.randrange(6)
            amount = chance.randint(0, int(current[giver]))
            current[giver] -= amount
            current[taker] += amount
    return workers, quotas


@pytest.mark.parametrize("seed", range(8))
def test_quotas_are_kept_with_the_fewest_hand_overs(seed):
    workers, quotas = random_quotas(seed)
    routes = routed(workers, quotas)
    counted = np.zeros_like(quotas)
    for host, begin, end in zip(routes.host, routes.begin, routes.end, strict=True):
        counted[workers.index(routes.workers[host]), begin:end] += 1
    assert np.array_equal(counted, quotas)
    assert routes.micro_batch[-1] == 23
    for g in range(24):
        legs = np.flatnonzero(routes.micro_batch == g)
        assert (routes.begin[legs[0]], routes.end[legs[-1]]) == (0, 7)
        assert all(routes.end[a] == routes.begin[b] for a, b in pairwise(legs))
        assert all(routes.host[a] != routes.host[b] for a, b in pairwise(legs))
    hand_overs = sum(int(np.clip(b - a, 0, None).sum()) for a, b in pairwise(quotas.T))
    assert len(routes) == 24 + hand_overs


def test_helper_of_two_pipelines_gets_an_even_stream_of_both():
    """Worker 2.0 runs unit 1 of every third micro-batch of pipelines 0 and 1."""
    quotas = np.array([[6, 4, 6], [6, 4, 6], [0, 4, 0]])
    routes = routed([Worker(0, 0), Worker(1, 0), Worker(2, 0)], quotas)
    helped = routes.micro_batch[routes.host == 2]
    first = {int(g): int(routes.host[np.flatnonzero(routes.micro_batch == g)[0]]) for g in helped}
    assert sorted(first.values()) == [0, 0, 1, 1]
    assert max(b - a for a, b in pairwise([-1, *helped.tolist(), 12])) <= 6


def test_micro_batches_start_in_their_home_pipeline_if_possible():
    routes = routed([Worker(0, 0), Worker(2, 1)], np.array([[5, 5], [4, 4]]))
    names = routes.names(Shape(3, 2, 3))
    assert len(set(names)) == 9
    starts = [routes.workers[host].pipeline for host in routes.host]
    home_hosts = sum(name.pipeline == start for name, start in zip(names, starts, strict=True))
    assert home_hosts == 6, "three of each live home; the dead pipeline's three go to both"


@pytest.mark.parametrize("optimizer", ["staggered", "barrier"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("quotas", [CHAINS, HELPED], ids=["chains", "helped"])
def test_joint_schedule_is_valid_and_reads_back(quotas, split, optimizer):
    schedule = schedule_of_routes(quotas, split, optimizer=optimizer)
    assert check(lower(schedule), limits=[6.0] * 3) == []
    assert Schedule.loads(schedule.dumps()) == schedule
    assert (schedule.shape.units, schedule.failed) == (6, {Worker(1, 1)})


def test_activations_count_by_the_units_of_their_stage():
    """A fault-free stage has two units, and three micro-batches of three units count 4.5."""
    schedule = schedule_of_routes(CHAINS, cap=4.5)
    assert max(peak for peak in simulate(schedule).peak_activations if peak) <= 4.5
