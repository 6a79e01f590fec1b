"""Shape, Worker, MicroBatch: the words for places."""

import pytest

from recycle import JobError, MicroBatch, Shape, Worker


def test_workers_run_by_pipeline_then_rank_and_index_back() -> None:
    shape = Shape(2, 3, 4)
    assert [str(worker) for worker in shape.workers()] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert [shape.worker_index(worker) for worker in shape.workers()] == list(range(6))
    assert [shape.worker_at(n) for n in range(6)] == list(shape.workers())


def test_sizes_follow_from_the_four_numbers() -> None:
    shape = Shape(3, 4, 6, chunks=2)
    assert (shape.stages, shape.worker_count, shape.global_micro_batches) == (8, 12, 18)
    assert str(shape) == "D=3 P=4 m=6 V=2"
    assert str(MicroBatch(1, 5)) == "1.5"


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 1.5), (1, 1, True), (1, 1, 1, 0), ("1", 1, 1)])
def test_a_size_that_is_no_whole_number_from_one_up_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(JobError, match="must be a whole number of at least 1"):
        Shape(*sizes)


def test_a_shape_beyond_any_job_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(JobError, match="too large"):
        Shape(10**9, 4, 8)
    with pytest.raises(JobError, match="too large"):
        Shape(1, 4, 10**9)
    assert Shape(1000, 64, 64, 4).stages == 256


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.0", "a.b", "1 .2", "9" * 5000 + ".1"])
def test_what_is_no_worker_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a worker"):
        Worker.parse(text)


def test_a_worker_reads_back_from_its_text() -> None:
    assert Worker.parse(str(Worker(12, 3))) == Worker(12, 3)


def test_membership_is_the_grid() -> None:
    shape = Shape(2, 3, 1)
    assert Worker(1, 2) in shape
    assert all(worker not in shape for worker in (Worker(2, 0), Worker(0, 3), Worker(-1, 0), "0.0"))
    with pytest.raises(JobError, match=r"plan: worker 2\.0 is outside the grid of 2 pipelines \(0 to 1\) by 3 ranks"):
        shape.require(Worker(2, 0), "plan")
