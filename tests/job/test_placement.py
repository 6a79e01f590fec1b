"""Where workers lie: everyone on one node, none overfull, and no stage with all its hosts on one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle import JobError, Shape
from recycle.job.shape import node_of, place_workers


@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 100))
def test_no_node_holds_all_peers_of_a_stage_whatever_the_shape(pipelines: int, ranks: int, per_node: int) -> None:
    shape = Shape(pipelines, ranks, 1)
    nodes = place_workers(shape, per_node)
    assert sorted(worker for workers in nodes for worker in workers) == sorted(shape.workers())
    assert all(1 <= len(workers) <= per_node for workers in nodes)
    assert len(nodes) == max(2, -(-shape.worker_count // per_node))
    for rank in range(ranks):
        assert len({node for w, node in node_of(shape, per_node).items() if w.rank == rank}) >= 2


def test_a_pipeline_lies_on_one_node_where_it_fits() -> None:
    nodes = place_workers(Shape(3, 4, 2), 4)
    assert [{worker.pipeline for worker in workers} for workers in nodes] == [{0}, {1}, {2}]


def test_nodes_that_could_hold_everyone_are_still_two() -> None:
    assert [len(workers) for workers in place_workers(Shape(2, 2, 2), 8)] == [2, 2]


def test_a_single_pipeline_is_refused() -> None:
    with pytest.raises(JobError, match="with a single pipeline a stage has no peer"):
        place_workers(Shape(1, 4, 4), 2)
