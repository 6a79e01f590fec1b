"""What reports amount to, and how the next iteration steps."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from recycle.exec.leader import commit
from recycle.exec.leader.commit import WINDOW, ReportColumns, exact_parts, is_right, soonest_end, step_mode
from recycle.exec.leader.disagreement import Disagreement
from recycle.exec.protocol import Commit, Report
from recycle.job import PricedJob
from tests.exec.runs import job


def decide(of: PricedJob, step: int, reports: Mapping[str, Report], recent: Sequence[float] = ()) -> Commit:
    return commit.decide(of, step, ReportColumns.of(reports), recent)


def test_a_commit_is_the_mean_loss_the_norm_over_stages_and_the_clip_factor() -> None:
    reports = {
        "0.0": Report({0: [9.0]}, None),
        "0.1": Report({1: [16.0]}, 7.0),
        "1.0": Report({0: [9.0]}, None),
        "1.1": Report({1: [16.0]}, 5.0),
    }
    commit = decide(job(2, 2, 2), 4, reports)
    assert (commit.step, commit.loss, commit.grad_norm) == (4, 3.0, 5.0)
    assert commit.clip_factor == pytest.approx(0.2, rel=1e-6)


def test_tensor_ranks_add_what_is_theirs_and_count_once_what_is_common() -> None:
    of = job(2, 1, 2, shape={"tensor_parallel": 2})
    reports = {
        name: Report({0: [own]}, 3.0, replicated={0: [4.0]})
        for name, own in (("0.0", 9.0), ("0.0t1", 12.0), ("1.0", 9.0), ("1.0t1", 12.0))
    }
    commit = decide(of, 0, reports)
    assert (commit.loss, commit.grad_norm) == (6.0 / 4, 5.0)
    spoilt = reports | {name: Report({0: [math.nan]}, 3.0, replicated={0: [4.0]}) for name in ("0.0t1", "1.0t1")}
    assert decide(of, 0, spoilt).clip_factor is None
    common = reports | {name: Report({0: [12.0]}, 3.0, replicated={0: [math.nan]}) for name in ("0.0t1", "1.0t1")}
    assert decide(of, 0, common).clip_factor is None
    with pytest.raises(Disagreement):
        decide(of, 0, reports | {"1.0t1": Report({0: [12.5]}, 3.0, replicated={0: [4.0]})})


def test_a_norm_that_is_not_finite_has_no_clip_factor() -> None:
    commit = decide(job(1, 2, 1), 0, {"0.0": Report({0: [math.nan]}, None), "0.1": Report({1: [1.0]}, 2.0)})
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
    commit = decide(job(1, 2, 1, train={"clip": 10.5}), 7, reports, [9.0, 1.0, 2.0, 3.0])
    assert commit.recent == [1.0, 2.0, 3.0, 5.0]
    assert commit.next_mode == "staggered"
    assert decide(job(1, 2, 1, train={"clip": 10.0}), 7, reports, [1.0]).next_mode == "barrier"
    assert decide(job(1, 2, 1, train={"clip": 10.5}), 7, reports, [6.0]).next_mode == "barrier"


def test_a_step_taken_ahead_is_right_unless_the_gradient_has_to_be_clipped_or_is_not_finite() -> None:
    clipped, whole = ({"0.0": Report({0: [squared]}, 1.0)} for squared in (4.0, 0.9))
    one = job(1, 1, 1)
    assert is_right(decide(one, 0, whole))
    assert not is_right(decide(one, 0, clipped))
    assert not is_right(decide(one, 0, {"0.0": Report({0: [math.nan]}, 1.0)}))


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
        assert decide(job(1, stages, 1), 0, reports).grad_norm == math.sqrt(whole)
    assert len({sum(math.fsum(squares[s::n]) for s in range(n)) for n in range(1, 50)}) > 1  # rounded per stage
    assert math.isnan(exact_parts([1.0, math.inf])[0])


def test_norm_does_not_depend_on_which_stage_has_which_part() -> None:
    small = [2.0**-53] * 4
    norms = []
    for parts in ([1.0, *small], [*small, 1.0], [*small[:2], 1.0, *small[2:]]):
        reports = {f"0.{rank}": Report({rank: [part]}, 2.0 if rank == 4 else None) for rank, part in enumerate(parts)}
        norms.append(decide(job(1, 5, 2), 0, reports).grad_norm)
    assert norms == [math.sqrt(1.0 + 2.0**-51)] * 3
    assert norms[0] > 1.0
