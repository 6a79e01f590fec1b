"""Routes: every micro-batch goes once through the whole model, on the workers and as often as was asked for."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from recycle.job.shape import Shape, Worker
from recycle.solve.layout.routes import routes_of
from tests.solve.layout.spans import spans


def random_quotas(seed: int) -> tuple[list[Worker], np.ndarray]:
    """Shares of 24 micro-batches that change by a few from unit to unit."""
    chance = random.Random(seed)
    workers = [Worker(k, r) for k in range(3) for r in range(2)]
    quotas = np.zeros((6, 7), dtype=np.int64)
    here = np.array([8, 0, 8, 0, 8, 0])
    for u in range(7):
        quotas[:, u] = here
        for _ in range(chance.randint(0, 2)):
            giver, taker = chance.choice(np.flatnonzero(here).tolist()), chance.randrange(6)
            amount = chance.randint(0, int(here[giver]))
            here[giver] -= amount
            here[taker] += amount
    return workers, quotas


@pytest.mark.parametrize("seed", range(20))
def test_quotas_are_kept_with_as_few_hand_overs_as_can_be(seed: int) -> None:
    workers, quotas = random_quotas(seed)
    routes = routes_of(workers, quotas, [worker.pipeline for worker in workers], spans(quotas))
    counted = np.zeros_like(quotas)
    for host, begin, end in zip(routes.host, routes.begin, routes.end, strict=True):
        counted[workers.index(routes.workers[host]), begin:end] += 1
    assert np.array_equal(counted, quotas)
    assert routes.micro_batches == 24
    for g in range(24):
        mine = np.flatnonzero(routes.micro_batch == g)
        assert routes.begin[mine[0]] == 0
        assert routes.end[mine[-1]] == 7
        assert all(routes.end[a] == routes.begin[b] for a, b in pairwise(mine))
        assert all(routes.host[a] != routes.host[b] for a, b in pairwise(mine))
    hand_overs = sum(int(np.clip(b - a, 0, None).sum()) for a, b in pairwise(quotas.T))
    assert len(routes) == 24 + hand_overs


def test_a_worker_that_helps_two_pipelines_gets_an_even_stream_of_both() -> None:
    """Worker 2.0 runs unit 1 of every third micro-batch of pipelines 0 and 1."""
    workers = [Worker(0, 0), Worker(1, 0), Worker(2, 0)]
    quotas = np.array([[6, 4, 6], [6, 4, 6], [0, 4, 0]])
    routes = routes_of(workers, quotas, [0, 1, 2], spans(quotas))
    helped = routes.micro_batch[routes.host == 2]
    first = {int(g): int(routes.host[np.flatnonzero(routes.micro_batch == g)[0]]) for g in helped}
    assert sorted(first.values()) == [0, 0, 1, 1]
    assert max(b - a for a, b in pairwise([-1, *helped.tolist(), 12])) <= 6
    assert routes.common_cut() == (1, 1, 1)
    assert routes.parts == (((0, 3),), ((0, 3),), ((1, 2),))


def test_micro_batches_start_in_their_home_where_they_can() -> None:
    workers = [Worker(0, 0), Worker(2, 1)]
    quotas = np.array([[5, 5], [4, 4]])
    routes = routes_of(workers, quotas, [0, 1], spans(quotas))
    names = routes.names(Shape(3, 2, 3))
    assert len(set(names)) == 9
    starts = [routes.workers[host].pipeline for host in routes.host]
    at_home = sum(name.pipeline == start for name, start in zip(names, starts, strict=True))
    assert at_home == 6, "three of each live home; the dead pipeline's three go to both"
