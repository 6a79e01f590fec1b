"""What counts as drift: clocks of the workers and times of messages against the profile that was planned with."""

from dataclasses import replace

import msgspec
import pytest

from recycle import Link, Profile, Shape, Worker
from recycle.exec.leader.drift import FACTOR, LEAST_SECONDS, RETRY, DriftMonitor
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.protocol import Computed, LinkTime, Report
from tests.exec.runs import job

SHAPE = Shape(3, 2, 4)
BASE = Profile(forward=0.01, backward_input=0.012, backward_weight=0.008)
SLOW = Worker(1, 1)
N = 8


def drift(shape: Shape = SHAPE, prices: Profile = BASE, seconds_per_unit=1.0) -> DriftMonitor:
    sizes = shape.pipelines, shape.ranks, shape.micro_batches
    membership, model = {"drift": 0.15, "drift_iterations": N}, {"seconds_per_unit": seconds_per_unit}
    return DriftMonitor(msgspec.structs.replace(job(*sizes, membership=membership, model=model), prices=prices))


def iteration(
    factors: dict[Worker, float] | None = None,
    stages: dict[int, float] | None = None,
    without: tuple[Worker, ...] = (),
    unit=1.0,
) -> ComputeTimes:
    """What all workers report: four F, three I and W and one B each; half of 2.1's as B."""
    report = {}
    for worker in SHAPE.workers():
        s, whole = worker.rank, 2 if worker == Worker(2, 1) else 1
        factor = unit * (factors or {}).get(worker, 1.0) * (stages or {}).get(s, 1.0)
        counts = {"F": (4, 0.01), "I": (4 - whole, 0.012), "W": (4 - whole, 0.008), "B": (whole, 0.02)}
        report[worker] = [Computed(s, kind, n, n * each * factor) for kind, (n, each) in counts.items()]
        if worker in without:
            report[worker] = []
    return times_of(report)


def times_of(report: dict[Worker, list[Computed]]) -> ComputeTimes:
    return ComputeTimes.from_reports({worker: Report({}, None, rows) for worker, rows in report.items()})


def seen(watch: DriftMonitor, planned: Profile = BASE) -> Profile | None:
    result = watch.departed(planned)
    return None if result is None else result.profile


def test_planned_times_do_not_depart_in_any_unit():
    watch = drift()
    for unit in (1.0, 1.3, 2.0, 0.7) * 4:
        watch.observe(iteration(unit=unit), BASE)
    assert seen(watch) is None


def test_a_slow_worker_is_seen_once_most_of_the_window_shows_it_and_by_its_factor():
    watch = drift()
    for _ in range(20):
        watch.observe(iteration(), BASE)
    for count in range(1, N + 1):
        watch.observe(iteration({SLOW: 3.0}), BASE)
        assert seen(watch) == (None if count <= N // 2 else replace(BASE, speed={"1.1": 3.0}))
    result = watch.departed(BASE)
    assert result.causes == ["worker 1.1 takes 3 times as long as its peers"]


def test_noise_at_the_threshold_changes_the_plan_once():
    watch, planned, plans = drift(), BASE, 0
    for place in range(200):
        watch.observe(iteration({SLOW: 1.10 + 0.12 * (place // N % 2)}), planned)  # 1.10 and 1.22 in turns
        result = seen(watch, planned)
        if result is not None:
            planned, plans = result, plans + 1
    assert plans == 1
    assert planned.speed == {"1.1": 1.22}


def test_a_worker_that_recovers_departs_back_to_no_factor_at_all():
    watch = drift()
    planned = replace(BASE, speed={"1.1": 3.0})
    for _ in range(N):
        watch.observe(iteration({SLOW: 3.0}), BASE)
    assert seen(watch, planned) is None
    for _ in range(N // 2 + 1):
        assert seen(watch, planned) is None
        watch.observe(iteration({SLOW: 1.05}), BASE)
    assert seen(watch, planned) == BASE


def test_a_slow_worker_without_work_is_tried_again_ever_more_rarely():
    watch, planned = drift(), replace(BASE, speed={"1.1": 30.0})
    for wait in (RETRY * N, 2 * RETRY * N, 4 * RETRY * N):
        for _ in range(N):
            watch.observe(iteration({SLOW: 30.0}), BASE)
        for _ in range(wait):
            assert seen(watch, planned) is None
            watch.observe(iteration(without=(SLOW,)), BASE)
        assert seen(watch, planned) == BASE


def test_slow_stage_is_planned_with_its_measured_times():
    watch = drift()
    for _ in range(N):
        watch.observe(iteration(stages={1: 1.5}), BASE)
    result = seen(watch)
    assert result.speed == {}
    ratio = [result.per_stage(name, 2)[1] / result.per_stage(name, 2)[0] for name in ("forward", "backward_input")]
    assert ratio == pytest.approx([1.5, 1.5], rel=0.01)
    assert result.per_stage("backward_weight", 2)[1] / result.per_stage("backward_weight", 2)[0] == pytest.approx(
        1.5, 0.01
    )
    assert seen(watch, result) is None


def test_times_below_the_floor_are_noise():
    watch = drift()
    for _ in range(2 * N):
        watch.observe(iteration({SLOW: 3.0}, unit=LEAST_SECONDS / 0.06), BASE)
    assert seen(watch) is None


def test_workers_with_unlike_stages_are_compared_per_stage():
    """0.0 and 1.0 share stage 0, 1.0 and 2.0 stage 1; stage 2 has one host, so its times do not count."""
    hosts = {Worker(0, 0): (0,), Worker(1, 0): (0, 1), Worker(2, 0): (1, 2)}

    def reports(slow, last):
        report = {}
        for worker, stages in hosts.items():
            factor = 2.0 if worker == slow else 1.0
            each = {stage: factor * (last if stage == 2 else 0.01 * (stage + 1)) for stage in stages}
            report[worker] = [Computed(stage, kind, 3, 3 * each[stage]) for stage in stages for kind in "FIW"]
        return times_of(report)

    for slow in hosts:
        watch = drift()
        for _ in range(N):
            watch.observe(reports(None, last=0.5), BASE, by_stage=True)
        assert watch.departed(BASE) is None
        for _ in range(N):
            watch.observe(reports(slow, last=0.1), BASE, by_stage=True)
        result = watch.departed(BASE)
        assert result.profile.speed == {str(slow): 2.0}


# Links.


LINKED = Shape(3, 3, 4)
LINK_UNIT = 0.01
"""Seconds in a unit of the profile."""
LINK_BASE = Profile(forward=2.0, backward_input=2.0, backward_weight=2.0, latency=0.5, bandwidth=8.0, message=4.0)
PRICE = 1.0
SLOW_LINK = Worker(1, 0), Worker(1, 1)


def sent_messages(
    factors: dict[tuple[Worker, Worker], float] | None = None,
    waited=0.02,
    every=1.0,
) -> ComputeTimes:
    """What all workers report: a forward, and messages to and from both neighbours of their pipeline."""
    result = {}
    for worker in LINKED.workers():
        result[worker] = []
        for rank in (worker.rank - 1, worker.rank + 1):
            peer = Worker(worker.pipeline, rank)
            if rank in range(LINKED.ranks):
                seconds = every * LINK_UNIT * PRICE * (factors or {}).get((worker, peer), 1.0)
                result[worker].append(LinkTime(peer.pipeline, rank, 4, seconds, waited))
    return ComputeTimes.from_reports(
        {
            worker: Report({}, None, [Computed(worker.rank, "F", 1, 2.0 * LINK_UNIT)], links=links)
            for worker, links in result.items()
        }
    )


def link_monitor() -> DriftMonitor:
    return drift(LINKED, LINK_BASE, seconds_per_unit=0.0)


def links_seen(monitor: DriftMonitor, planned: Profile = LINK_BASE) -> dict[str, Link] | None:
    result = monitor.departed(planned)
    return None if result is None else result.profile.links


def test_slow_link_is_found_after_half_a_window_and_gets_its_measured_price():
    monitor = link_monitor()
    for _ in range(20):
        monitor.observe(sent_messages(), LINK_BASE)
    for count in range(1, N + 1):
        monitor.observe(sent_messages({SLOW_LINK: 4.0}), LINK_BASE)
        result = links_seen(monitor)
        assert result == (None if count <= N // 2 else {"1.0>1.1": Link(2.0, 2.0)})
    departure = monitor.departed(LINK_BASE)
    assert departure.causes == ["messages from 1.0 to 1.1 take 4 times as long as the profile says"]
    assert departure.slow_links == [{"worker": "1.0", "peer": "1.1", "seconds": 4 * PRICE * LINK_UNIT, "factor": 4.0}]
    assert replace(LINK_BASE, links=result or {}).transfer_seconds(LINKED, 3, 4, 0) == 4 * PRICE


def test_slightly_or_rarely_or_commonly_slow_links_are_ignored():
    for reports in (
        [sent_messages({SLOW_LINK: 0.95 * FACTOR})],
        [sent_messages({SLOW_LINK: 9.0}), sent_messages()],
        [sent_messages({SLOW_LINK: 9.0}, waited=0.0)],
        [sent_messages(every=5.0)],
    ):
        monitor = link_monitor()
        for place in range(4 * N):
            monitor.observe(reports[place % len(reports)], LINK_BASE)
            assert links_seen(monitor) is None


def test_recovered_link_gets_its_profiled_price_again():
    monitor, planned = link_monitor(), replace(LINK_BASE, links={"1.0>1.1": Link(2.0, 2.0)})
    for factor in (4.0, 5.0):
        for _ in range(N):
            monitor.observe(sent_messages({SLOW_LINK: factor}), planned)
        assert links_seen(monitor, planned) is None
    for count in range(1, N // 2 + 2):
        monitor.observe(sent_messages(waited=0.0), planned)
        assert links_seen(monitor, planned) == (None if count <= N // 2 else {})
