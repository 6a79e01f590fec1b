"""What the coordinator decides: commits, gradients that are not finite, workers that make no progress."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from recycle import RunError
from recycle.exec.coordinator import decide
from recycle.exec.membership import Report
from tests.exec.runs import Run, job, kinds

OVER = {"gradient_exponent": -20}
"""No real gradient is below 2^-20 everywhere: every iteration counts as not finite."""


def test_a_commit_is_the_mean_loss_the_norm_over_stages_and_the_clip_factor() -> None:
    reports = {
        "0.0": Report({0: 9.0}, None),
        "0.1": Report({1: 16.0}, 7.0),
        "1.0": Report({0: 9.0}, None),
        "1.1": Report({1: 16.0}, 5.0),
    }
    facts = decide(job(2, 2, 2), 4, reports)
    assert (facts.step, facts.loss, facts.grad_norm) == (4, 3.0, 5.0)
    assert facts.clip_factor == pytest.approx(0.2, rel=1e-6)


def test_hosts_of_a_stage_that_hold_different_gradients_end_the_run() -> None:
    reports = {"0.0": Report({0: 1.0}, 1.0), "1.0": Report({0: math.nextafter(1.0, 2.0)}, 1.0)}
    with pytest.raises(RunError, match=r"worker 1\.0 holds another gradient of stage 0 than its peers"):
        decide(job(2, 1, 2), 0, reports)


def test_a_norm_that_is_not_finite_has_no_clip_factor() -> None:
    facts = decide(job(1, 2, 1), 0, {"0.0": Report({0: math.nan}, None), "0.1": Report({1: 1.0}, 2.0)})
    assert facts.clip_factor is None
    assert math.isnan(facts.grad_norm)


def test_a_gradient_that_is_not_finite_is_repeated_once_and_then_fatal(launch: Run, tmp_path: Path) -> None:
    of = job(2, 2, 2, kind="gpt", train={**OVER, "non_finite": "fatal"})
    with pytest.raises(RunError, match="step 0: a gradient is not finite, also when repeated"):
        launch(of, 2, directory=tmp_path)
    events = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["generation", "undone", "generation"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_gradient_that_is_not_finite_is_skipped_where_the_job_says_so(launch: Run) -> None:
    run = launch(job(2, 2, 2, kind="gpt", train={**OVER, "non_finite": "skip"}), 2)
    assert [line["grad_norm"] for line in run.metrics] == [None, None]
    assert kinds(run) == ["generation", "undone", "generation", "undone", "generation"]
    trained = launch(job(2, 2, 2, kind="gpt"), 2)
    assert run.losses[0] == trained.losses[0]
    assert run.losses[1] != trained.losses[1]
    assert run.digests["0.0"] == run.digests["1.0"] != trained.digests["0.0"]


def test_a_worker_without_progress_is_declared_dead(launch: Run, tmp_path: Path) -> None:
    """Every worker computes for longer than the limit here, so the stage is lost; the events say why."""
    slow = job(2, 1, 1, model={"seconds_per_unit": 30.0}, membership={"hung_after": 0.5})
    with pytest.raises(RunError, match="stage 0 has no live host left"):
        launch(slow, 1, directory=tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {event["cause"] for event in events if event["kind"] == "detected"} == {"no progress for 0.5 s"}
