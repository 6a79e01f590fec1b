"""Reduces in buckets: lowering, checks, times and memory."""

import random
from dataclasses import replace

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.lower import buckets_of, with_barrier
from tests.ir.random_schedules import random_schedule

TWO = Shape(pipelines=2, ranks=2, micro_batches=3)


def in_buckets(schedule: Schedule, buckets: int) -> Schedule:
    return replace(schedule, buckets=buckets)


@pytest.fixture
def lowered():
    """1F1B of two pipelines, each stage reduced in three buckets; worker 0.0 ends with the parts of 0W0.2."""
    return lower(in_buckets(one_f_one_b(TWO), 3))


def test_the_last_backward_is_split_and_each_bucket_is_summed_while_the_next_is_computed(lowered):
    assert lowered.text()["0.0"].endswith(
        "0RECV_B0.2@0.1 0I0.2 0W_PART0.2/0 0REDUCE_BUCKET/0 0W_PART0.2/1 0REDUCE_BUCKET/1 0W_PART0.2/2"
        " 0REDUCE_GRAD 0STEP"
    )
    assert lowered.text()["0.1"].endswith(
        "1I0.2 1SEND_B0.2@0.0 1W_PART0.2/0 1REDUCE_BUCKET/0 1W_PART0.2/1 1REDUCE_BUCKET/1 1W_PART0.2/2"
        " 1REDUCE_GRAD 1STEP"
    )
    assert buckets_of(lowered.columns) == 3
    assert lower(lowered) == lowered


def test_all_the_last_weights_of_a_stage_run_bucket_by_bucket():
    shape = Shape(1, 1, 3)
    schedule = Schedule.from_text(shape, {"0.0": "0F0 0I0 0W0 0F1 0I1 0F2 0I2 0W1 0W2"}, buckets=2)
    assert lower(schedule).text()["0.0"] == (
        "0F0.0 0I0.0 0W0.0 0F0.1 0I0.1 0F0.2 0I0.2 0W_PART0.1/0 0W_PART0.2/0 0REDUCE_BUCKET/0"
        " 0W_PART0.1/1 0W_PART0.2/1 0REDUCE_GRAD 0STEP"
    )


def test_all_hosts_begin_their_sums_in_one_order_whichever_stage_ends_first():
    """Worker 0.0 ends with stage 0, worker 1.0 with stage 1; both begin with the buckets of stage 1."""
    shape = Shape(2, 1, 1, chunks=2)
    programs = {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0", "1.0": "0F1.0 1F1.0 1I1.0 0B1.0 1W1.0"}
    schedule = Schedule.from_text(shape, programs, buckets=2)
    for text in lower(schedule).text().values():
        sums = [word for word in text.split() if "REDUCE" in word]
        assert sums == ["1REDUCE_BUCKET/0", "0REDUCE_BUCKET/0", "1REDUCE_GRAD", "0REDUCE_GRAD"]
    assert check(schedule) == check(lower(schedule), about_to_run=True) == []


def test_hosts_that_sum_their_buckets_in_different_orders_are_found():
    text = "{0}F{k}.0 {0}I{k}.0 {0}W_PART{k}.0/0 {0}W_PART{k}.0/1 {0}W_PART{k}.0/2 {a} {b} 0REDUCE_GRAD 0STEP"
    sums = ["0REDUCE_BUCKET/0", "0REDUCE_BUCKET/1"]
    programs = {f"{k}.0": text.format(0, k=k, a=a, b=b) for k, (a, b) in enumerate((sums, sums[::-1]))}
    (finding,) = check(Schedule.from_text(Shape(2, 1, 1), programs, buckets=3))
    assert (finding.rule, finding.worker, finding.instruction) == ("reduce-order", "1.0", "0REDUCE_BUCKET/1")
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(Schedule.from_text(Shape(2, 1, 1), programs, buckets=3))


@pytest.mark.parametrize("seed", range(24))
def test_any_valid_order_is_valid_in_buckets_and_as_fast_at_least(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    assert check(schedule) == []
    profile = Profile(reduce=rng.random() * 4, step=rng.random(), weight_stash=rng.random())
    whole, cut = simulate(schedule, profile), in_buckets(schedule, rng.randint(2, 5))
    assert check(cut) == []
    assert check(lower(cut), about_to_run=True) == []
    assert [f for f in check(with_barrier(cut), about_to_run=True) if f.severity == "error"] == []
    timeline = simulate(cut, profile)
    assert timeline.makespan <= whole.makespan + 1e-9
    peaks = zip(timeline.peak_activations, whole.peak_activations, strict=True)
    assert all(peak == pytest.approx(before) for peak, before in peaks)
    # Whatever is hidden, each worker still computes, and sums its last buckets and steps, one after the other.
    for busy, before, hosted in zip(timeline.busy, whole.busy, schedule.placement, strict=True):
        hidden = len(hosted) * profile.per_stage("reduce", 1)[0] * (1 - 1 / cut.buckets)
        assert (busy is None) == (before is None)
        assert busy is None or before is None or busy == pytest.approx(before - hidden)


def makespan_of_one_stage(buckets: int, weights: int, reduce: float, latency=0.0) -> float:
    """Makespan of one stage on two hosts that end with so many W's."""
    shape = Shape(2, 1, weights)
    text = " ".join(f"0F{{k}}.{j} 0I{{k}}.{j}" for j in range(weights))
    text += " " + " ".join(f"0W{{k}}.{j}" for j in range(weights))
    programs = {f"{k}.0": text.format(k=k) for k in range(2)}
    schedule = Schedule.from_text(shape, programs, buckets=buckets)
    return simulate(schedule, Profile(reduce=reduce, reduce_latency=latency, step=0.25)).makespan


def test_each_bucket_takes_the_latency_of_a_sum_and_its_share_of_the_rest():
    profile = Profile(reduce=[2.0, 0.5], reduce_latency=[0.8, 1.0])
    assert profile.bucket_seconds(1, 2) == profile.per_stage("reduce", 2)
    assert profile.bucket_seconds(3, 2) == [0.8 + 1.2 / 3, 0.5]
    for buckets, each in ((1, 2.0), (2, 1.4), (4, 1.1), (64, 0.8 + 1.2 / 64)):
        shown = max(each, buckets * each - 3 * (buckets - 1) / buckets)
        assert makespan_of_one_stage(buckets, 3, 2.0, latency=0.8) == pytest.approx(9 + shown + 0.25)
