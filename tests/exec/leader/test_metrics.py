"""Lines of metrics: throughput, and the times of everybody in a small job, of whoever stands out in a large one."""

from __future__ import annotations

import json

import pytest

from recycle.exec.leader.metrics import MOST_LISTED, ComputeTimes, Throughput
from recycle.exec.protocol import Computed, Report
from recycle.job.shape import Shape, Worker


def test_tokens_per_second_are_a_mean_over_bursts_of_commits_and_follow_a_change() -> None:
    """Of steps of 0.1 s that are committed five at a time, and of 0.2 s from then on."""
    throughput = Throughput()
    bursts = [throughput.mean_after(0.5 if step % 5 == 0 else 1e-5) for step in range(400)]
    assert all(mean == pytest.approx(0.1, rel=0.06) for mean in bursts[100:])
    assert max(bursts[4:]) / min(bursts[4:]) < 2.5
    slower = [throughput.mean_after(0.2) for _ in range(60)]
    assert slower[-1] == pytest.approx(0.2)
    throughput.start_over()
    assert [throughput.mean_after(seconds) for seconds in (30.0, 60.0, 30.0, 60.0, 60.0)] == [30, 45, 40, 45, 52.5]


def times(shape: Shape, slow: dict[Worker, float]) -> ComputeTimes:
    """Four F of 0.01 s and four W of 0.02 s on each worker, times a factor."""
    each = {worker: slow.get(worker, 1.0) for worker in shape.workers()}
    return ComputeTimes.of(
        {
            worker: Report(
                {},
                None,
                [Computed(worker.rank, "W", 4, 0.08 * factor), Computed(worker.rank, "F", 4, 0.04 * factor)],
            )
            for worker, factor in each.items()
        }
    )


def test_of_a_small_job_every_workers_means_are_listed() -> None:
    line = times(Shape(2, 2, 4), {Worker(1, 0): 3.0}).line()
    assert line == {
        "compute": {
            "0.0": {"0F": 0.01, "0W": 0.02},
            "0.1": {"1F": 0.01, "1W": 0.02},
            "1.0": {"0F": 0.03, "0W": 0.06},
            "1.1": {"1F": 0.01, "1W": 0.02},
        }
    }


def test_of_a_large_job_those_stand_in_the_line_that_are_furthest_from_their_peers() -> None:
    """16,384 workers took 1 MiB."""
    slow = {Worker(3, 7): 3.0, Worker(200, 63): 0.25, Worker(255, 0): 1.5}
    line = times(Shape(256, 64, 64), slow).line()
    assert len(line["compute"]) == MOST_LISTED
    assert {str(worker) for worker in slow} <= line["compute"].keys()
    assert line["compute"]["3.7"] == {"7F": 0.03, "7W": 0.06}
    assert line["compute_spread"]["7F"] == [0.01, 0.01, 0.03]
    assert line["compute_spread"]["63W"] == [0.005, 0.02, 0.02]
    assert len(line["compute_spread"]) == 128
    assert len(json.dumps(line)) < 2**14
