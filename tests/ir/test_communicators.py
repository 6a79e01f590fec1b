"""The communicators that lanes share. What sharing does to order and time is in conformance/cases/failures.json."""

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from random import Random

import pytest

from recycle import Worker
from recycle.ir.communicators import LANES, Lane, share_communicators


def lanes_after(pipelines: int, ranks: int, dead: Collection[Worker]) -> set[Lane]:
    """Both directions between neighbours, and between the neighbours of the dead and all of their peers."""
    peers = [[Worker(k, rank) for k in range(pipelines) if Worker(k, rank) not in dead] for rank in range(ranks)]
    lanes = set()
    for rank, following in pairwise(range(ranks)):
        for k in range(pipelines):
            ends = [[Worker(k, each)] if Worker(k, each) not in dead else peers[each] for each in (rank, following)]
            lanes |= {(a, b) for a in ends[0] for b in ends[1]} | {(b, a) for a in ends[0] for b in ends[1]}
    return lanes


@pytest.mark.parametrize(
    ("pipelines", "ranks", "deaths"), [(8, 8, 0), (8, 8, 1), (16, 16, 1), (24, 64, 1), (24, 64, 12), (8, 4, 9)]
)
def test_no_worker_has_more_communicators_than_allowed(pipelines, ranks, deaths):
    every = [Worker(k, rank) for k in range(pipelines - 1) for rank in range(ranks)]
    lanes = lanes_after(pipelines, ranks, Random(deaths).sample(every, deaths))
    shared = share_communicators(lanes)
    assert sorted(lane for of_lanes in shared for lane in of_lanes) == sorted(lanes)
    own = Counter(worker for of_lanes in shared for worker in {end for lane in of_lanes for end in lane})
    assert max(own.values()) <= LANES
    assert share_communicators(sorted(lanes, reverse=True)) == shared
    most = max(Counter(worker for lane in lanes for worker in lane).values())
    assert (max(map(len, shared)) > 1) == (most > LANES)
    if deaths <= 1:  # lanes within a pipeline keep theirs
        assert all(a.pipeline != b.pipeline for of_lanes in shared if len(of_lanes) > 1 for a, b in of_lanes)
