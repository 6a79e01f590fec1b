"""Shapes, workers and micro-batches, and the node of each worker: no stage has all its hosts on one."""

import pytest
from hypothesis import given, strategies as st

from recycle import JobError, Shape, Worker
from recycle.job.shape import node_of, place_workers


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 1.5), (1, 1, True), (1, 1, 1, 0), ("1", 1, 1)])
def test_size_must_be_a_positive_integer(sizes):
    with pytest.raises(JobError, match="must be a whole number of at least 1"):
        Shape(*sizes)


def test_a_shape_beyond_any_job_is_refused_before_it_fills_the_memory():
    with pytest.raises(JobError, match="too large"):
        Shape(10**9, 4, 8)
    with pytest.raises(JobError, match="too large"):
        Shape(1, 4, 10**9)
    assert Shape(1000, 64, 64, 4).stages == 256


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.0", "a.b", "1 .2", "9" * 5000 + ".1"])
def test_invalid_worker_is_refused(text):
    with pytest.raises(JobError, match="is not a worker"):
        Worker.parse(text)


def test_membership_is_the_grid():
    shape = Shape(2, 3, 1)
    assert Worker(1, 2) in shape
    assert all(worker not in shape for worker in (Worker(2, 0), Worker(0, 3), Worker(-1, 0), "0.0"))
    with pytest.raises(JobError, match=r"plan: worker 2\.0 is outside the grid of 2 pipelines \(0 to 1\) by 3 ranks"):
        shape.require(Worker(2, 0), "plan")


@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 100))
def test_no_node_holds_all_peers_of_a_stage_whatever_the_shape(pipelines, ranks, per_node):
    shape = Shape(pipelines, ranks, 1)
    nodes = place_workers(shape, per_node)
    assert sorted(worker for workers in nodes for worker in workers) == sorted(shape.workers())
    assert all(1 <= len(workers) <= per_node for workers in nodes)
    assert len(nodes) == max(2, -(-shape.worker_count // per_node))
    for rank in range(ranks):
        assert len({node for w, node in node_of(shape, per_node).items() if w.rank == rank}) >= 2


def test_a_pipeline_lies_on_one_node_where_it_fits():
    nodes = place_workers(Shape(3, 4, 2), 4)
    assert [{worker.pipeline for worker in workers} for workers in nodes] == [{0}, {1}, {2}]


def test_a_single_pipeline_is_refused():
    with pytest.raises(JobError, match="with a single pipeline a stage has no peer"):
        place_workers(Shape(1, 4, 4), 2)
