"""Which links count as slow: what messages take and are waited for, against the profile that was planned with."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from recycle.exec.leader.drift import FACTOR, RETRY, DriftMonitor
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.protocol import Computed, LinkTime, Report
from recycle.job.profile import Link, Profile
from recycle.job.shape import Shape, Worker
from tests.exec.runs import job

SHAPE = Shape(3, 3, 4)
UNIT = 0.01
"""Seconds in a unit of the profile."""
BASE = Profile(forward=2.0, backward_input=2.0, backward_weight=2.0, latency=0.5, bandwidth=8.0, message=4.0)
PRICE = 1.0
SLOW = Worker(1, 0), Worker(1, 1)
N = 8


def iteration(
    factors: dict[tuple[Worker, Worker], float] | None = None,
    waited: float = 0.02,
    every: float = 1.0,
    without: tuple[tuple[Worker, Worker], ...] = (),
) -> ComputeTimes:
    """What all workers report: a forward, and messages to and from both neighbours of their pipeline."""
    found: dict[Worker, list[LinkTime]] = {}
    for worker in SHAPE.workers():
        found[worker] = []
        for rank in (worker.rank - 1, worker.rank + 1):
            peer = Worker(worker.pipeline, rank)
            if rank in range(SHAPE.ranks):
                seconds = every * UNIT * PRICE * (factors or {}).get((worker, peer), 1.0)
                sent = 0 if (worker, peer) in without else 4
                found[worker].append(LinkTime(peer.pipeline, rank, sent, seconds if sent else 0.0, waited))
    return ComputeTimes.of(
        {
            worker: Report({}, None, [Computed(worker.rank, "F", 1, 2.0 * UNIT)], links=links)
            for worker, links in found.items()
        }
    )


def watch(profile: Profile = BASE) -> DriftMonitor:
    of = job(SHAPE.pipelines, SHAPE.ranks, SHAPE.micro_batches, membership={"drift": 0.15, "drift_iterations": N})
    return DriftMonitor(msgspec.structs.replace(of, prices=profile))


def seen(monitor: DriftMonitor, planned: Profile = BASE) -> dict[str, Link] | None:
    found = monitor.departed(planned)
    return None if found is None else found.profile.links


def test_a_slow_link_is_seen_once_most_of_the_window_shows_it_and_priced_by_what_its_messages_take() -> None:
    monitor = watch()
    for _ in range(20):
        monitor.observe(iteration(), BASE)
    for count in range(1, N + 1):
        monitor.observe(iteration({SLOW: 4.0}), BASE)
        found = seen(monitor)
        assert found == (None if count <= N // 2 else {"1.0>1.1": Link(2.0, 2.0)})
    departure = monitor.departed(BASE)
    assert departure is not None
    assert departure.causes == ["messages from 1.0 to 1.1 take 4 times as long as the profile says"]
    assert departure.slow_links == [{"worker": "1.0", "peer": "1.1", "seconds": 4 * PRICE * UNIT, "factor": 4.0}]
    assert replace(BASE, links=found or {}).transfer_seconds(SHAPE, 3, 4, 0) == 4 * PRICE


def test_no_link_counts_that_is_a_little_slow_or_rarely_or_that_nobody_waits_for_or_that_is_as_slow_as_all() -> None:
    for reports in (
        [iteration({SLOW: 0.95 * FACTOR})],
        [iteration({SLOW: 9.0}), iteration()],
        [iteration({SLOW: 9.0}, waited=0.0)],
        [iteration(every=5.0)],
    ):
        monitor = watch()
        for place in range(4 * N):
            monitor.observe(reports[place % len(reports)], BASE)
            assert seen(monitor) is None


def test_a_link_is_held_against_the_others_where_all_take_longer_than_the_profile_says() -> None:
    base = replace(BASE, latency=0.0, bandwidth=None)
    monitor = watch(base)
    for _ in range(N):
        monitor.observe(iteration({SLOW: 5.0}), base)
    assert seen(monitor, base) == {"1.0>1.1": Link(4.0)}  # 5 less the usual 1


def test_what_was_planned_for_is_the_new_reference_and_a_link_that_recovers_is_priced_by_the_profile_again() -> None:
    monitor, planned = watch(), replace(BASE, links={"1.0>1.1": Link(2.0, 2.0)})
    for factor in (4.0, 5.0):
        for _ in range(N):
            monitor.observe(iteration({SLOW: factor}), planned)
        assert seen(monitor, planned) is None
    for count in range(1, N // 2 + 2):
        monitor.observe(iteration(waited=0.0), planned)
        assert seen(monitor, planned) == (None if count <= N // 2 else {})


def test_a_slow_link_that_nothing_goes_over_any_more_is_tried_again_ever_more_rarely() -> None:
    monitor = watch()
    planned = replace(BASE, links={"1.0>1.1": Link(2.0, 2.0)})
    for wait in (RETRY * N, 2 * RETRY * N):
        for _ in range(N):
            monitor.observe(iteration({SLOW: 4.0}), planned)
        for _ in range(wait):
            assert seen(monitor, planned) is None
            monitor.observe(iteration(without=(SLOW,)), planned)
        assert seen(monitor, planned) == {}


def test_links_of_a_new_process_start_unmeasured() -> None:
    monitor = watch()
    for _ in range(N):
        monitor.observe(iteration({SLOW: 4.0}), BASE)
    assert seen(monitor) is not None
    monitor.forget(SLOW[1])
    assert seen(monitor) is None
