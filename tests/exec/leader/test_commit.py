"""What reports amount to, how the next iteration steps, and which state is gone back to."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from recycle.exec.leader.commit import (
    MOST_LINKS,
    WINDOW,
    ReportColumns,
    comparison,
    decide,
    exact_parts,
    is_right,
    soonest_end,
    step_mode,
    verified_after,
)
from recycle.exec.leader.disagreement import Disagreement, compare
from recycle.exec.members import members_of, split_member
from recycle.exec.protocol import Commit, Computed, GenerationRecord, LinkTime, Report, Verified
from recycle.exec.worker.iterations import report_of
from recycle.job import PricedJob
from recycle.job.shape import Shape, Worker
from tests.exec.runs import job


def decided(of: PricedJob, step: int, reports: Mapping[str, Report], recent: Sequence[float] = ()) -> Commit:
    return decide(of, step, ReportColumns.of(reports), recent)


def test_a_commit_is_the_mean_loss_the_norm_over_stages_and_the_clip_factor() -> None:
    reports = {
        "0.0": Report({0: [9.0]}, None),
        "0.1": Report({1: [16.0]}, 7.0),
        "1.0": Report({0: [9.0]}, None),
        "1.1": Report({1: [16.0]}, 5.0),
    }
    commit = decided(job(2, 2, 2), 4, reports)
    assert (commit.step, commit.loss, commit.grad_norm) == (4, 3.0, 5.0)
    assert commit.clip_factor == pytest.approx(0.2, rel=1e-6)


def test_tensor_ranks_add_what_is_theirs_and_count_once_what_is_common() -> None:
    of = job(2, 1, 2, shape={"tensor_parallel": 2})
    reports = {
        name: Report({0: [own]}, 3.0, replicated={0: [4.0]})
        for name, own in (("0.0", 9.0), ("0.0t1", 12.0), ("1.0", 9.0), ("1.0t1", 12.0))
    }
    commit = decided(of, 0, reports)
    assert (commit.loss, commit.grad_norm) == (6.0 / 4, 5.0)
    spoilt = reports | {name: Report({0: [math.nan]}, 3.0, replicated={0: [4.0]}) for name in ("0.0t1", "1.0t1")}
    assert decided(of, 0, spoilt).clip_factor is None
    common = reports | {name: Report({0: [12.0]}, 3.0, replicated={0: [math.nan]}) for name in ("0.0t1", "1.0t1")}
    assert decided(of, 0, common).clip_factor is None
    with pytest.raises(Disagreement):
        decided(of, 0, reports | {"1.0t1": Report({0: [12.5]}, 3.0, replicated={0: [4.0]})})


def test_a_norm_that_is_not_finite_has_no_clip_factor() -> None:
    commit = decided(job(1, 2, 1), 0, {"0.0": Report({0: [math.nan]}, None), "0.1": Report({1: [1.0]}, 2.0)})
    assert commit.clip_factor is None
    assert math.isnan(commit.grad_norm)


def test_steps_are_staggered_while_all_recent_norms_are_below_half_the_limit() -> None:
    assert step_mode([0.9, 0.4], 2.0) == "staggered"
    assert step_mode([0.9, 1.0, 0.4], 2.0) == "barrier"
    assert step_mode([3.0] + [0.9] * WINDOW, 2.0) == "staggered"
    assert step_mode([3.0] + [0.9] * (WINDOW - 1), 2.0) == "barrier"


@pytest.mark.parametrize("recent", [[], [math.nan], [0.1, math.nan, 0.1], [math.inf]])
def test_norms_that_are_not_known_to_be_small_keep_the_barrier(recent: list[float]) -> None:
    assert step_mode(recent, 1e9) == "barrier"


def test_the_next_mode_follows_from_the_last_norms_that_the_facts_carry_on() -> None:
    reports = {"0.0": Report({0: [9.0]}, None), "0.1": Report({1: [16.0]}, 1.0)}
    commit = decided(job(1, 2, 1, train={"clip": 10.5}), 7, reports, [9.0, 1.0, 2.0, 3.0])
    assert commit.recent == [1.0, 2.0, 3.0, 5.0]
    assert commit.next_mode == "staggered"
    assert decided(job(1, 2, 1, train={"clip": 10.0}), 7, reports, [1.0]).next_mode == "barrier"
    assert decided(job(1, 2, 1, train={"clip": 10.5}), 7, reports, [6.0]).next_mode == "barrier"


def test_a_step_taken_ahead_is_right_unless_the_gradient_has_to_be_clipped_or_is_not_finite() -> None:
    clipped, whole = ({"0.0": Report({0: [squared]}, 1.0)} for squared in (4.0, 0.9))
    one = job(1, 1, 1)
    assert is_right(decided(one, 0, whole))
    assert not is_right(decided(one, 0, clipped))
    assert not is_right(decided(one, 0, {"0.0": Report({0: [math.nan]}, 1.0)}))


def test_a_generation_ends_at_a_boundary_that_nobody_has_passed_yet() -> None:
    before = Commit(4, 1.0, 1.0, 1.0, last=9)
    assert soonest_end(5, "barrier", before) == 5
    assert soonest_end(5, "staggered", before) == 6
    assert soonest_end(5, "staggered", Commit(4, 1.0, 1.0, 1.0, last=5)) == 5
    assert soonest_end(0, "barrier", None) == 0


def test_the_norm_does_not_depend_on_how_parameters_are_split_into_stages() -> None:
    drawn = random.Random(5)
    squares = [drawn.random() * 2.0 ** drawn.randint(-40, 10) for _ in range(200)]
    whole = math.fsum(squares)
    for stages in (1, 2, 3, 7):
        split = [exact_parts(squares[stage::stages]) for stage in range(stages)]
        assert max(map(len, split)) <= 3
        reports = {f"0.{stage}": Report({stage: parts}, 1.0) for stage, parts in enumerate(split)}
        assert decided(job(1, stages, 1), 0, reports).grad_norm == math.sqrt(whole)
    assert len({sum(math.fsum(squares[s::n]) for s in range(n)) for n in range(1, 50)}) > 1  # rounded per stage
    assert math.isnan(exact_parts([1.0, math.inf])[0])


def test_norm_does_not_depend_on_which_stage_has_which_part() -> None:
    small = [2.0**-53] * 4
    norms = []
    for parts in ([1.0, *small], [*small, 1.0], [*small[:2], 1.0, *small[2:]]):
        reports = {f"0.{rank}": Report({rank: [part]}, 2.0 if rank == 4 else None) for rank, part in enumerate(parts)}
        norms.append(decided(job(1, 5, 2), 0, reports).grad_norm)
    assert norms == [math.sqrt(1.0 + 2.0**-51)] * 3
    assert norms[0] > 1.0


NUMBERS = st.sampled_from([1.0, 2.0, 0.1 + 0.2, 1e-300, math.nan, math.inf])
SHAPE = Shape(3, 2, 2)


def one_by_one(reports: Mapping[str, Report]) -> tuple[float, float]:
    """Loss sum and squared norm, as `decide` had them before there were columns."""
    norms: dict[tuple[int, int | None], list[float]] = {}
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
        return found.step, found.odd, found.held, found.what
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
    odd = draw(st.sampled_from(["nobody", "0.0", "1.1", "2.0t1"]))
    what = draw(st.sampled_from(["norm", "replicated", "checksum", "loss", "state", "no state", "no checksum"]))
    compares = draw(st.booleans())
    found: dict[str, Report] = {}
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
        found[name] = Report(norms, loss, compute if worker != "2.1" else [], replicated, checksums, states)
    return found


@pytest.mark.slow
@given(reported())
@settings(max_examples=300, deadline=None)
def test_columns_agree_only_where_no_report_disagrees_and_amount_to_the_same_bits(reports: dict[str, Report]) -> None:
    columns = ReportColumns.of(reports)
    found = disagreement(lambda: compare(4, reports))
    assert disagreement(lambda: decide(job(3, 2, 2), 4, columns)) == found
    if found is not None:
        assert not columns.agree
        return
    loss, squared = one_by_one(reports)
    assert columns.loss_sum == loss
    found_squared = math.fsum(columns.squared_norms)
    assert found_squared == squared or not (math.isfinite(found_squared) or math.isfinite(squared))


def test_reports_that_agree_are_found_to_without_a_look_at_each() -> None:
    """A comparison one by one of 16,384 takes a quarter of a second."""
    usual = {
        f"{k}.{r}": Report({r: [0.5 + r]}, 1.0 if r else None, checksums={r: 7}) for k in range(3) for r in range(2)
    }
    assert ReportColumns.of(usual).agree
    assert not ReportColumns.of(usual | {"1.1": Report({1: [1.5]}, 1.0, checksums={1: 8})}).agree
    spoilt = {name: Report({0: [math.nan]}, None, checksums={0: place}) for place, name in enumerate(("0.0", "1.0"))}
    assert ReportColumns.of(usual | spoilt | {"2.0": spoilt["0.0"]}).agree


def test_states_are_compared_where_all_say_theirs_also_of_gradients_that_are_not_finite() -> None:
    usual = {f"{k}.0": Report({0: [math.nan]}, None, checksums={0: k}, states={0: (5, 6)}) for k in range(3)}
    columns = ReportColumns.of(usual)
    assert (columns.agree, columns.has_states) == (True, True)
    odd = ReportColumns.of(usual | {"1.0": replace(usual["1.0"], states={0: (5, 7)})})
    assert (odd.agree, odd.has_states) == (False, True)
    silent = ReportColumns.of(usual | {"1.0": replace(usual["1.0"], states={})})
    assert (silent.agree, silent.has_states) == (False, False)
    assert not ReportColumns.of({name: replace(one, states={}) for name, one in usual.items()}).has_states


def test_the_times_are_those_of_each_workers_first_process() -> None:
    compute = {name: [Computed(1, token, 4, seconds) for token, seconds in (("F", 1.0), ("I", 2.0))] for name in "ab"}
    reports = {
        "0.1": Report(
            {1: [1.0]}, None, compute["a"], links=[LinkTime(0, 0, 3, 0.25, 0.5), LinkTime(2, 0, 0, 0.0, 2.0)]
        ),
        "0.1t1": Report({1: [1.0]}, None, [Computed(1, "F", 4, 9.0)]),
        "2.1": Report({1: [1.0]}, None),
        "2.1t1": Report({1: [1.0]}, None, links=[LinkTime(2, 0, 4, 1.0, 0.0)]),
        "3.1": Report({1: [1.0]}, 2.0, [Computed(1, "W", 1, 5.0)]),
    }
    times = ReportColumns.of(reports).times()
    assert times.workers == [Worker(0, 1), Worker(2, 1), Worker(3, 1)]
    rows = zip(times.owner, times.stage, times.kind, times.count, times.seconds, strict=True)
    assert [(int(o), int(s), times.tokens[k], float(c), float(sec)) for o, s, k, c, sec in rows] == [
        (0, 1, "F", 4.0, 1.0),
        (0, 1, "I", 4.0, 2.0),
        (2, 1, "W", 1.0, 5.0),
    ]
    assert np.asarray(times.owner).dtype == np.int64
    assert list(times.reports.values()) == [reports[name] for name in ("0.1", "2.1", "3.1")]


def test_a_report_of_many_links_has_the_longest_and_stays_below_two_kilobytes() -> None:
    links = [LinkTime(k, 1, 2, k / 7, k / 700) for k in range(100)]
    compute = [Computed(stage, token, 8, 1 / 7) for stage in (0, 1) for token in "FIWB"]
    report = report_of({}, compute, links=links)
    assert [link.pipeline for link in report.links] == list(range(99, 99 - MOST_LINKS, -1))
    whole = replace(report, norms={0: [1 / 7] * 3, 1: [1 / 7] * 3}, checksums={0: 2**63, 1: 2**63 + 1})
    assert len(msgspec.msgpack.encode(whole)) <= 2048


def steps_of(record: GenerationRecord) -> tuple[int | None, int | None]:
    return tuple(None if one is None else one.step for one in (record.verified, record.candidate))  # type: ignore[return-value]


def committed(record: GenerationRecord, has_states: bool) -> GenerationRecord:
    verified, candidate = verified_after(record, has_states)
    step = record.committed + 1
    commit = Commit(step, 1.0, 1.0, 1.0, last=step + 1, checkpoint=True)
    return msgspec.structs.replace(record, committed=step, commit=commit, verified=verified, candidate=candidate)


def commits(rounds: int, compared: Callable[[int], bool], steps: int) -> list[tuple[int | None, int | None]]:
    """(verified, candidate) after each iteration of one generation."""
    record, found = GenerationRecord(1, [], {}, "", rounds=rounds), []
    for step in range(steps):
        record = committed(record, compared(step))
        found.append(steps_of(record))
    return found


def test_without_replays_it_is_the_last_state_that_was_compared() -> None:
    assert commits(0, lambda step: step % 2 == 0, 5) == [(-1, -1), (-1, -1), (1, 1), (1, 1), (3, 3)]
    after = committed(committed(GenerationRecord(1, [], {}, ""), True), True).verified
    assert after is not None
    assert after.commit is not None
    assert (after.commit.last, after.commit.checkpoint) == (None, False)


def test_with_them_a_state_counts_once_all_was_replayed_since() -> None:
    found = commits(3, lambda step: step % 3 == 0, 10)
    assert found[:5] == [(-1, -1), (-1, -1), (-1, -1), (-1, 2), (-1, 2)]
    assert found[5:] == [(2, 2), (2, 5), (2, 5), (5, 5), (5, 8)]


def test_states_that_are_compared_more_often_than_all_is_replayed_are_not_all_kept() -> None:
    """Everything takes five iterations. The states before 2 and 4 are compared only; that before 6 is kept."""
    found = commits(5, lambda step: step % 2 == 0, 12)
    assert found == [(-1, -1)] * 6 + [(-1, 5)] * 4 + [(5, 5)] * 2


def test_where_they_are_compared_less_often_a_state_counts_when_the_replays_since_are_complete() -> None:
    found = commits(2, lambda step: step % 4 == 0, 8)
    assert found == [(-1, -1)] * 4 + [(-1, 3)] + [(3, 3)] * 3


def test_a_generation_begins_anew_and_iterations_before_it_do_not_count() -> None:
    """It begins with iteration 7, whose state counts once 7, 8 and 9 have replayed everything."""
    record = GenerationRecord(1, [], {}, "", rounds=3)
    for step in range(7):
        record = committed(record, step % 3 == 0)
    assert steps_of(record) == (2, 5)
    record, found = msgspec.structs.replace(record, generation=2, candidate=None), []
    for step in range(7, 16):
        record = committed(record, step == 7 or step % 3 == 0)
        found.append(steps_of(record))
    assert found == [(2, 6), (2, 6), (6, 6), (6, 6), (6, 6), (6, 11), (6, 11), (11, 11), (11, 14)]


def test_a_state_that_was_gone_back_to_is_the_one_that_hosts_keep_in_the_layout_at_hand() -> None:
    before = Verified(4, None, ["1.0"], holds="layout before")
    record = GenerationRecord(3, [], {}, "", committed=4, verified=before, rounds=5, holds="layout at hand")
    assert record.has_gone_back
    assert committed(record, False).verified == before
    after = committed(record, True)
    assert not after.has_gone_back
    assert after.verified is not None
    assert (after.verified.step, after.verified.without, after.verified.holds) == (4, [], "layout at hand")


def test_a_state_is_named_by_what_its_holders_have_reported() -> None:
    record = GenerationRecord(3, [], {}, "", committed=4, holds="by now")
    for has_states, name in ((True, "in the state"), (False, None)):
        verified, _ = verified_after(record, has_states, lambda: "in the state")
        assert (None if verified is None else verified.holds) == name


@pytest.mark.parametrize("first", [0, 1, 5, 6])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_workers_keep_the_state_that_the_coordinator_goes_back_to(first: int, rounds: int, every: int) -> None:
    record = GenerationRecord(1, [], {}, "", rounds=rounds, committed=first - 1)
    kept, begun_with = set[int](), None
    if first == 5:  # another generation before has kept an older state
        record = msgspec.structs.replace(record, verified=Verified(2, None))
        kept, begun_with = {2, 4}, 2
    for step in range(first, first + 25):
        compared = comparison(step, first, every, rounds, begun_with)
        assert (compared is not None) == (step == first or step % every == 0)
        if compared is not None and compared.is_kept:
            if len(kept) == 2 and step - 1 not in kept:
                kept.remove(next(one for one in sorted(kept) if one != compared.besides))
            kept |= {step - 1}
            assert record.verified is None or record.verified.step in kept
        record = committed(record, compared is not None)
        assert record.verified is not None
        assert record.verified.step in kept
        assert record.candidate is not None
        assert record.candidate.step in kept
