"""What the coordinator decides: gradients that are not finite, workers that make no progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle import RunError
from tests.exec.runs import Run, job, kinds

OVER = {"gradient_exponent": -20}
"""No real gradient is below 2^-20 everywhere: every iteration counts as not finite."""


def test_a_gradient_that_is_not_finite_is_repeated_once_and_then_fatal(launch: Run, tmp_path: Path) -> None:
    of = job(2, 2, 2, kind="gpt", train={**OVER, "non_finite": "fatal"})
    with pytest.raises(RunError, match="step 0: a gradient is not finite, also when repeated"):
        launch(of, 2, directory=tmp_path)
    events = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["generation", "generation", "undone"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_gradient_that_is_not_finite_is_skipped_where_the_job_says_so(launch: Run) -> None:
    run = launch(job(2, 2, 2, kind="gpt", train={**OVER, "non_finite": "skip"}), 2)
    assert [line["grad_norm"] for line in run.metrics] == [None, None]
    assert kinds(run) == ["generation", "generation", "undone", "generation", "undone"]
    assert [event["count"] for event in run.events if event["kind"] == "undone"] == [0, 0]
    assert run.undone == []
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
