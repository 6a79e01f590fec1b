"""What a line of metrics says of times: of everybody in a small job, of whoever stands out in a large one."""

from __future__ import annotations

import json

from recycle.exec.leader.metrics import MOST_LISTED, ComputeTimes
from recycle.exec.protocol import Computed, Report
from recycle.job.shape import Shape, Worker


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
