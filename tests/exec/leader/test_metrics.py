"""Lines of metrics."""

from __future__ import annotations

import pytest

from recycle.exec.leader.metrics import Throughput


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
