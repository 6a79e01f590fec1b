"""What the coordinator decides: gradients that are not finite, workers that make no progress."""

from __future__ import annotations

from tests.exec.runs import Run, job, kinds

OVER = {"gradient_exponent": -20}
"""No real gradient is below 2^-20 everywhere: every iteration counts as not finite."""


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


def test_an_operation_that_is_always_longer_than_the_least_deadline_is_no_hang(launch: Run) -> None:
    """From its profile before it was done once, from its own time behind that."""
    of = job(2, 1, 1, model={"seconds_per_unit": 0.6}, membership={"hung_after": 0.3, "warm_up": 0.3})
    run = launch(of, 3)
    assert kinds(run) == ["generation"]


def test_workers_that_hang_behind_the_last_commit_end_with_the_run_and_the_others_leave_their_digests(
    launch: Run,
) -> None:
    of = job(2, 2, 2, membership={"heartbeat": 0.1, "dead_after": 1.5, "hung_after": 1.5})
    run = launch(of, 4, "stall:1.1@3.step", "kill:0.0@3.stepped")
    reference = launch(of, 4)
    assert run.losses == reference.losses
    assert run.digests == {worker: reference.digests[worker] for worker in ("0.1", "1.0")}
    found = {event["worker"]: event["cause"] for event in run.events if event["kind"] == "detected"}
    assert found == {"0.0": "killed by SIGKILL", "1.1": "no progress for 1.5 s in 1STEP"}
