"""Reduces in buckets: how they are written, lowered, checked and timed, and what they leave as it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from recycle import Profile, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.formats import chrome_trace
from recycle.ir.instruction import ReduceBucket, WeightPart, parse_instruction
from recycle.ir.lower import buckets_of, with_barrier
from recycle.job.shape import MOST_BUCKETS, MicroBatch
from tests.ir.random_schedules import random_schedule

SLOW_REDUCE = Profile(reduce=2.0, step=0.5)
TWO = Shape(pipelines=2, ranks=2, micro_batches=3)


def in_buckets(schedule: Schedule, buckets: int) -> Schedule:
    return replace(schedule, buckets=buckets)


@pytest.fixture
def lowered() -> Schedule:
    """1F1B of two pipelines, each stage reduced in three buckets; worker 0.0 ends with the parts of 0W0.2."""
    return lower(in_buckets(one_f_one_b(TWO), 3))


# Text and files


def test_parts_and_bucket_sums_are_written_with_their_bucket() -> None:
    assert parse_instruction("2W_PART1.5/3") == WeightPart(2, MicroBatch(1, 5), 3)
    assert parse_instruction("2REDUCE_BUCKET/0") == ReduceBucket(2, 0)
    assert str(WeightPart(2, MicroBatch(1, 5), 3)) == "2W_PART1.5/3"
    assert str(ReduceBucket(2, 0)) == "2REDUCE_BUCKET/0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2W_PART1.5", "the bucket is missing, write for example 2W_PART1.5/0"),
        ("2REDUCE_BUCKET", "the bucket is missing, write for example 2REDUCE_BUCKET/0"),
        ("2W1.5/0", "W takes no bucket"),
        ("2REDUCE_GRAD/0", "REDUCE_GRAD takes no bucket"),
        ("2REDUCE_BUCKET1.5/0", "takes no micro-batch and no worker, write 2REDUCE_BUCKET/0"),
        ("2W_PART1.5/0@0.1", "W_PART is local and takes no @worker"),
    ],
)
def test_a_bucket_out_of_place_is_told(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_instruction(text)


def test_files_hold_the_buckets_and_those_without_are_as_before(lowered: Schedule) -> None:
    for schedule in (lowered, in_buckets(zb_h1(TWO), 4)):
        assert Schedule.loads(schedule.dumps()) == schedule
        assert Schedule.loads(schedule.dumps()).buckets == schedule.buckets
    assert '"buckets"' not in zb_h1(TWO).dumps()
    assert Schedule.from_text(TWO, lowered.text(), buckets=3).columns == lowered.columns
    free = {worker: text.replace(" ", "  ") for worker, text in lowered.text().items()}
    assert Schedule.from_text(TWO, free, buckets=3) == lowered


@pytest.mark.parametrize("buckets", [0, MOST_BUCKETS + 1, 1.5])
def test_a_number_of_buckets_beyond_the_bounds_is_refused(buckets: int) -> None:
    with pytest.raises(ScheduleError, match=f"buckets must be a whole number from 1 to {MOST_BUCKETS}"):
        Schedule.from_text(TWO, {}, buckets=buckets)


def test_more_sums_than_a_file_may_have_instructions_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"buckets: 64 of every stage .* more than 4,194,304 sums: use fewer"):
        Schedule.from_text(Shape(2**15, 2, 1, 2), {}, buckets=64)


def test_a_chrome_trace_holds_what_runs(lowered: Schedule) -> None:
    text = "".join(chrome_trace.dumps(in_buckets(one_f_one_b(TWO), 3), SLOW_REDUCE))
    read = chrome_trace.loads(text.encode())
    assert read.columns == lowered.columns
    assert read.buckets == 3


# Lowering


def test_the_last_backward_is_cut_and_each_bucket_is_summed_while_the_next_is_computed(lowered: Schedule) -> None:
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


def test_all_the_last_weights_of_a_stage_run_bucket_by_bucket() -> None:
    shape = Shape(1, 1, 3)
    schedule = Schedule.from_text(shape, {"0.0": "0F0 0I0 0W0 0F1 0I1 0F2 0I2 0W1 0W2"}, buckets=2)
    assert lower(schedule).text()["0.0"] == (
        "0F0.0 0I0.0 0W0.0 0F0.1 0I0.1 0F0.2 0I0.2 0W_PART0.1/0 0W_PART0.2/0 0REDUCE_BUCKET/0"
        " 0W_PART0.1/1 0W_PART0.2/1 0REDUCE_GRAD 0STEP"
    )


def test_all_hosts_begin_their_sums_in_one_order_whichever_stage_ends_first() -> None:
    """Worker 0.0 ends with stage 0, worker 1.0 with stage 1; both begin with the buckets of stage 1."""
    shape = Shape(2, 1, 1, chunks=2)
    programs = {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0", "1.0": "0F1.0 1F1.0 1I1.0 0B1.0 1W1.0"}
    schedule = Schedule.from_text(shape, programs, buckets=2)
    for text in lower(schedule).text().values():
        sums = [word for word in text.split() if "REDUCE" in word]
        assert sums == ["1REDUCE_BUCKET/0", "0REDUCE_BUCKET/0", "1REDUCE_GRAD", "0REDUCE_GRAD"]
    assert check(schedule) == check(lower(schedule), about_to_run=True) == []


def test_behind_an_overlapped_pair_the_buckets_begin_together() -> None:
    shape = Shape(1, 1, 2)
    schedule = Schedule.from_text(shape, {"0.0": "0F0 0B0 0F1 0B1"}, buckets=2)
    paired = Schedule.from_text(Shape(1, 1, 2, 2), {"0.0": "0F0 1F0 0F1 (1F1;1B0) 1B1 0B0 0B1"}, buckets=2)
    assert "W_PART" in lower(schedule).text()["0.0"]
    ends_in_pair = Schedule.from_text(shape, {"0.0": "0F0 (0F1;0B0) 0B1"}, buckets=2)
    assert check(ends_in_pair) == check(paired) == []
    last = Schedule.from_text(Shape(1, 1, 2), {"0.0": "0F0 0F1 0B1 (0F1;0B0)"}, buckets=2)
    assert lower(last).text()["0.0"].endswith("(0F0.1;0B0.0) 0REDUCE_BUCKET/0 0REDUCE_GRAD 0STEP")


# Checking


def test_a_whole_weight_behind_the_sum_of_a_bucket_is_early_too() -> None:
    text = "0F0 0I0 0F1 0I1 0W_PART0/0 0REDUCE_BUCKET/0 0W_PART0/1 0W1 0REDUCE_GRAD 0STEP"
    (found,) = check(Schedule.from_text(Shape(1, 1, 2), {"0.0": text}, buckets=2))
    assert (found.rule, found.position) == ("early-bucket", 5)
    assert found.message == "0W0.1 on worker 0.0 (position 7) adds to this bucket afterwards"


def test_hosts_that_sum_their_buckets_in_two_orders_are_told() -> None:
    text = "{0}F{k}.0 {0}I{k}.0 {0}W_PART{k}.0/0 {0}W_PART{k}.0/1 {0}W_PART{k}.0/2 {a} {b} 0REDUCE_GRAD 0STEP"
    sums = ["0REDUCE_BUCKET/0", "0REDUCE_BUCKET/1"]
    programs = {f"{k}.0": text.format(0, k=k, a=a, b=b) for k, (a, b) in enumerate((sums, sums[::-1]))}
    (found,) = check(Schedule.from_text(Shape(2, 1, 1), programs, buckets=3))
    assert (found.rule, found.worker, found.instruction) == ("reduce-order", "1.0", "0REDUCE_BUCKET/1")
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(Schedule.from_text(Shape(2, 1, 1), programs, buckets=3))


@pytest.mark.parametrize("seed", range(60))
def test_any_valid_order_is_valid_in_buckets_and_as_fast_at_least(seed: int) -> None:
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
    assert all(mine == pytest.approx(before) for mine, before in peaks)
    # Whatever is hidden, each worker still computes, and sums its last buckets and steps, one after the other.
    for busy, before, hosted in zip(timeline.busy, whole.busy, schedule.placement, strict=True):
        hidden = len(hosted) * profile.per_stage("reduce", 1)[0] * (1 - 1 / cut.buckets)
        assert (busy is None) == (before is None)
        assert busy is None or before is None or busy == pytest.approx(before - hidden)


# Timing


def alone(buckets: int, weights: int, reduce: float, latency: float = 0.0) -> float:
    """Makespan of one stage on two hosts that end with so many W's."""
    shape = Shape(2, 1, weights)
    text = " ".join(f"0F{{k}}.{j} 0I{{k}}.{j}" for j in range(weights))
    text += " " + " ".join(f"0W{{k}}.{j}" for j in range(weights))
    programs = {f"{k}.0": text.format(k=k) for k in range(2)}
    schedule = Schedule.from_text(shape, programs, buckets=buckets)
    return simulate(schedule, Profile(reduce=reduce, reduce_latency=latency, step=0.25)).makespan


@pytest.mark.parametrize("buckets", [1, 2, 4, 8])
@pytest.mark.parametrize("weights", [1, 2, 3])
@pytest.mark.parametrize("reduce", [0.5, 1.0, 4.0])
def test_what_the_last_weights_hide_of_a_reduce(buckets: int, weights: int, reduce: float) -> None:
    """With a tail of W's of T in all and N buckets, max(R / N, R - T (N - 1) / N) of the reduce R shows."""
    shown = max(reduce / buckets, reduce - weights * (buckets - 1) / buckets)
    assert alone(buckets, weights, reduce) == pytest.approx(3 * weights + shown + 0.25)


def test_each_bucket_takes_the_latency_of_a_sum_and_its_share_of_the_rest() -> None:
    profile = Profile(reduce=[2.0, 0.5], reduce_latency=[0.8, 1.0])
    assert profile.bucket_seconds(1, 2) == profile.per_stage("reduce", 2)
    assert profile.bucket_seconds(3, 2) == [0.8 + 1.2 / 3, 0.5]
    for buckets, each in ((1, 2.0), (2, 1.4), (4, 1.1), (64, 0.8 + 1.2 / 64)):
        shown = max(each, buckets * each - 3 * (buckets - 1) / buckets)
        assert alone(buckets, 3, 2.0, latency=0.8) == pytest.approx(9 + shown + 0.25)
