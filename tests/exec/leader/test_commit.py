"""What reports amount to, how the next iteration steps, which state is gone back to, and the line of metrics."""

import json
import math
import random
from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from recycle import Shape, Worker
from recycle.exec.leader.commit import (
    WINDOW,
    ReportColumns,
    comparison,
    decide,
    exact_parts,
    soonest_end,
    step_mode,
    verified_after,
)
from recycle.exec.leader.disagreement import Disagreement, compare
from recycle.exec.leader.metrics import MOST_LISTED, ComputeTimes, Throughput
from recycle.exec.members import members_of, split_member
from recycle.exec.protocol import Commit, Computed, GenerationRecord, Report, Verified
from recycle.job import PricedJob
from tests.exec.runs import job


def decided(config: PricedJob, step: int, reports: Mapping[str, Report]) -> Commit:
    return decide(config, step, ReportColumns.from_reports(reports))


def test_a_commit_is_the_mean_loss_the_norm_over_stages_and_the_clip_factor():
    reports = {
        "0.0": Report({0: [9.0]}, None),
        "0.1": Report({1: [16.0]}, 7.0),
        "1.0": Report({0: [9.0]}, None),
        "1.1": Report({1: [16.0]}, 5.0),
    }
    commit = decided(job(2, 2, 2), 4, reports)
    assert (commit.step, commit.loss, commit.grad_norm) == (4, 3.0, 5.0)
    assert commit.clip_factor == pytest.approx(0.2, rel=1e-6)


def test_tensor_ranks_add_own_norms_and_count_replicated_norms_once():
    config = job(2, 1, 2, shape={"tensor_parallel": 2})
    reports = {
        name: Report({0: [own]}, 3.0, replicated={0: [4.0]})
        for name, own in (("0.0", 9.0), ("0.0t1", 12.0), ("1.0", 9.0), ("1.0t1", 12.0))
    }
    commit = decided(config, 0, reports)
    assert (commit.loss, commit.grad_norm) == (6.0 / 4, 5.0)
    spoilt = reports | {name: Report({0: [math.nan]}, 3.0, replicated={0: [4.0]}) for name in ("0.0t1", "1.0t1")}
    assert decided(config, 0, spoilt).clip_factor is None
    common = reports | {name: Report({0: [12.0]}, 3.0, replicated={0: [math.nan]}) for name in ("0.0t1", "1.0t1")}
    assert decided(config, 0, common).clip_factor is None
    with pytest.raises(Disagreement):
        decided(config, 0, reports | {"1.0t1": Report({0: [12.5]}, 3.0, replicated={0: [4.0]})})


@pytest.mark.parametrize(
    ("recent", "clip", "mode"),
    [
        ([0.9, 0.4], 2.0, "staggered"),
        ([0.9, 1.0, 0.4], 2.0, "barrier"),
        ([3.0] + [0.9] * WINDOW, 2.0, "staggered"),
        ([3.0] + [0.9] * (WINDOW - 1), 2.0, "barrier"),
        ([], 1e9, "barrier"),
        ([0.1, math.nan, 0.1], 1e9, "barrier"),
        ([math.inf], 1e9, "barrier"),
    ],
)
def test_steps_are_staggered_while_all_recent_norms_are_below_half_the_limit(recent, clip, mode):
    assert step_mode(recent, clip) == mode


def test_generation_ends_at_a_boundary_that_no_worker_has_passed():
    before = Commit(4, 1.0, 1.0, 1.0, last=9)
    assert soonest_end(5, "barrier", before) == 5
    assert soonest_end(5, "staggered", before) == 6
    assert soonest_end(5, "staggered", Commit(4, 1.0, 1.0, 1.0, last=5)) == 5
    assert soonest_end(0, "barrier", None) == 0


def test_the_norm_does_not_depend_on_how_parameters_are_split_into_stages_or_in_which_order_they_come():
    drawn = random.Random(5)
    squares = [drawn.random() * 2.0 ** drawn.randint(-40, 10) for _ in range(200)]
    for stages in (1, 2, 3, 7):
        split = [exact_parts(squares[stage::stages]) for stage in range(stages)]
        for parts in (split, split[::-1]):
            reports = {f"0.{stage}": Report({stage: part}, 1.0) for stage, part in enumerate(parts)}
            assert decided(job(1, stages, 1), 0, reports).grad_norm == math.sqrt(math.fsum(squares))
    small = [2.0**-53] * 4  # each is lost in a sum with 1
    reports = {f"0.{rank}": Report({rank: [part]}, 1.0) for rank, part in enumerate([1.0, *small])}
    assert decided(job(1, 5, 2), 0, reports).grad_norm == math.sqrt(1.0 + 2.0**-51) > 1.0
    assert math.isnan(exact_parts([1.0, math.inf])[0])


NUMBERS = st.sampled_from([1.0, 2.0, 0.1 + 0.2, 1e-300, math.nan, math.inf])


SHAPE = Shape(3, 2, 2)


def one_by_one(reports: Mapping[str, Report]) -> tuple[float, float]:
    """Loss sum and squared norm, as `decide` had them before there were columns."""
    norms = {}
    for member, report in reports.items():
        for held_by, of_stages in ((split_member(member)[1], report.norms), (None, report.replicated)):
            for stage, parts in of_stages.items():
                norms.setdefault((stage, held_by), parts)
                if not all(map(math.isfinite, parts)):
                    norms[stage, held_by] = [math.nan]
    losses = [r.loss for member, r in sorted(reports.items()) if r.loss is not None and split_member(member)[1] == 0]
    return sum(losses), math.fsum(part for parts in norms.values() for part in parts)


def disagreement(action: Callable[[], object]) -> tuple[object, ...] | None:
    """What the Disagreement says that it raises, if it does."""
    try:
        action()
    except Disagreement as found:
        return found.step, found.odd, found.held, found.description
    return None


@st.composite
def reported(draw: st.DrawFn) -> dict[str, Report]:
    """Of 3 x 2 workers of one or two processes: mostly alike, some with other numbers."""
    tensor_parallel, both = draw(st.sampled_from([1, 2])), draw(st.booleans())
    usual = {
        (stage, rank): (draw(st.lists(NUMBERS, max_size=3)), draw(st.integers(0, 2**64 - 1)))
        for stage in range(2)
        for rank in range(2)
    }
    common = {stage: draw(st.lists(NUMBERS, max_size=2)) for stage in range(2)}
    odd = draw(st.sampled_from(["none", "0.0", "1.1", "2.0t1"]))
    what = draw(st.sampled_from(["norm", "replicated", "checksum", "loss", "state", "no state", "no checksum"]))
    compares = draw(st.booleans())
    result = {}
    for name in members_of(SHAPE.workers(), tensor_parallel):
        worker, rank = split_member(name)
        stages = [0, 1] if both else [Worker.parse(worker).rank]
        norms = {stage: list(usual[stage, rank][0]) for stage in stages}
        replicated = {stage: list(common[stage]) for stage in stages} if tensor_parallel > 1 else {}
        checksums = {stage: usual[stage, rank][1] for stage in stages}
        states = {stage: (usual[stage, rank][1], 2**64 - 1 - stage) for stage in stages} if compares else {}
        loss = draw(st.sampled_from([0.1, 0.7, 1e16])) if worker.endswith("1") and rank == 0 else None
        if name == odd:
            last = stages[-1]
            if what == "norm":
                norms[last] = [3.0]
            elif what == "replicated" and replicated:
                replicated[last] = [3.0]
            elif what == "checksum":
                checksums[last] ^= 1 << 63
            elif what == "loss":
                loss = 5.0
            elif what == "state" and compares:
                states[last] = states[last][0], 5
            elif what == "no state":
                states.pop(last, None)
            else:
                checksums.pop(last)
        compute = [Computed(stage, token, 3, 0.1 * stage) for stage in stages for token in ("F", "B")]
        result[name] = Report(norms, loss, compute if worker != "2.1" else [], replicated, checksums, states)
    return result


@pytest.mark.slow
@given(reported())
@settings(max_examples=300)
def test_columns_agree_only_where_no_report_disagrees_and_amount_to_the_same_bits(reports):
    columns = ReportColumns.from_reports(reports)
    result = disagreement(lambda: compare(4, reports))
    assert disagreement(lambda: decide(job(3, 2, 2), 4, columns)) == result
    if result is not None:
        assert not columns.agree
        return
    loss, squared = one_by_one(reports)
    assert columns.loss_sum == loss
    found_squared = math.fsum(columns.squared_norms)
    assert found_squared == squared or not (math.isfinite(found_squared) or math.isfinite(squared))


def test_states_are_compared_if_all_hosts_report_them():
    usual = {f"{k}.0": Report({0: [math.nan]}, None, checksums={0: k}, states={0: (5, 6)}) for k in range(3)}
    columns = ReportColumns.from_reports(usual)
    assert (columns.agree, columns.has_states) == (True, True)
    odd = ReportColumns.from_reports(usual | {"1.0": replace(usual["1.0"], states={0: (5, 7)})})
    assert (odd.agree, odd.has_states) == (False, True)
    silent = ReportColumns.from_reports(usual | {"1.0": replace(usual["1.0"], states={})})
    assert (silent.agree, silent.has_states) == (False, False)
    assert not ReportColumns.from_reports({name: replace(item, states={}) for name, item in usual.items()}).has_states


def steps_of(record: GenerationRecord) -> tuple[int | None, int | None]:
    return tuple(None if item is None else item.step for item in (record.verified, record.candidate))


def committed(record: GenerationRecord, has_states: bool) -> GenerationRecord:
    verified, candidate = verified_after(record, has_states)
    step = record.committed + 1
    commit = Commit(step, 1.0, 1.0, 1.0, last=step + 1, checkpoint=True)
    return msgspec.structs.replace(record, committed=step, commit=commit, verified=verified, candidate=candidate)


@pytest.mark.parametrize(
    ("rounds", "every", "found"),
    [
        (0, 2, [(-1, -1)] * 2 + [(1, 1)] * 2 + [(3, 3)]),  # nothing is replayed: the last one that was compared
        (3, 3, [(-1, -1)] * 3 + [(-1, 2)] * 2 + [(2, 2)] + [(2, 5)] * 2 + [(5, 5), (5, 8)]),
        (5, 2, [(-1, -1)] * 6 + [(-1, 5)] * 4 + [(5, 5)] * 2),  # those before 2 and 4 are compared and not kept
        (2, 4, [(-1, -1)] * 4 + [(-1, 3)] + [(3, 3)] * 3),
    ],
)
def test_candidate_state_is_verified_after_a_full_round(rounds, every, found):
    record, steps = GenerationRecord(1, [], {}, "", rounds=rounds), []
    for step in range(len(found)):
        record = committed(record, step % every == 0)
        steps.append(steps_of(record))
    assert steps == found
    kept = record.verified.commit if record.verified is not None else None
    assert kept is None or (kept.last, kept.checkpoint) == (None, False)


def test_restored_state_is_kept_in_the_present_layout():
    before = Verified(4, None, ["1.0"], holds="layout before")
    record = GenerationRecord(3, [], {}, "", committed=4, verified=before, rounds=5, holds="present layout")
    assert record.has_gone_back
    assert committed(record, False).verified == before
    after = committed(record, True)
    assert not after.has_gone_back
    assert (after.verified.step, after.verified.without, after.verified.holds) == (4, [], "present layout")


@pytest.mark.parametrize("first", [0, 1, 5, 6])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_workers_keep_the_state_that_the_coordinator_goes_back_to(first, rounds, every):
    record = GenerationRecord(1, [], {}, "", rounds=rounds, committed=first - 1)
    kept, begun_with = set(), None
    if first == 5:  # another generation before has kept an older state
        record = msgspec.structs.replace(record, verified=Verified(2, None))
        kept, begun_with = {2, 4}, 2
    for step in range(first, first + 25):
        compared = comparison(step, first, every, rounds, begun_with)
        assert (compared is not None) == (step == first or step % every == 0)
        if compared is not None and compared.is_kept:
            if len(kept) == 2 and step - 1 not in kept:
                kept.remove(next(item for item in sorted(kept) if item != compared.besides))
            kept |= {step - 1}
            assert record.verified is None or record.verified.step in kept
        record = committed(record, compared is not None)
        assert record.verified.step in kept
        assert record.candidate.step in kept


def test_tokens_per_second_are_a_mean_over_bursts_of_commits_and_follow_a_change():
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
    return ComputeTimes.from_reports(
        {
            worker: Report(
                {},
                None,
                [Computed(worker.rank, "W", 4, 0.08 * factor), Computed(worker.rank, "F", 4, 0.04 * factor)],
            )
            for worker, factor in each.items()
        }
    )


def test_metrics_line_of_a_large_job_lists_only_outliers():
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
