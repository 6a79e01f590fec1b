"""Workers killed by real signals in the middle of training: the losses and the final state stay those of no failure."""

from __future__ import annotations

import pytest

from recycle import Job, Schedule, check, lower
from recycle.exec.launch.launcher import RunResult
from tests.exec.runs import Run, assert_same_training, calm_run, job, kinds

STEPS = 7
FAULT = ["generation", "fault", "detected", "generation", "recovered"]


@pytest.fixture(scope="module")
def emulated() -> Job:
    return job(3, 2, 2)


def assert_plans_pass_check(run: RunResult, of: Job) -> None:
    assert run.directory is not None
    plans = {line["plan"] for line in run.metrics}
    for digest in plans:
        schedule = Schedule.load(run.directory / "plans" / f"{digest}.json")
        assert check(lower(schedule), limits=of.activation_limits()) == []


@pytest.mark.parametrize("phase", ["", ".forward", ".backward", ".reduce", ".commit", ".step"])
def test_a_kill_in_each_phase_changes_no_bit_and_leaves_its_events(phase: str, emulated: Job, launch: Run) -> None:
    run = launch(emulated, STEPS, f"kill:1.1@3{phase}")
    assert_same_training(run, calm_run(emulated, launch, STEPS))
    assert_plans_pass_check(run, emulated)
    assert kinds(run) == FAULT
    assert [line["live_workers"] for line in run.metrics] in ([6] * 3 + [5] * 4, [6] * 4 + [5] * 3)
    assert "1.1" not in run.digests


def test_a_worker_that_rejoins_holds_the_same_state_as_its_peers(emulated: Job, launch: Run) -> None:
    run = launch(emulated, STEPS, "kill:1.1@2", "rejoin:1.1@5")
    reference = calm_run(emulated, launch, STEPS)
    assert_same_training(run, reference)
    assert run.digests == reference.digests
    assert [line["live_workers"] for line in run.metrics] == [6, 6, 5, 5, 5, 6, 6]
    rejoined = [event for event in run.events if event["kind"] == "rejoined"]
    assert [(event["worker"], event["step"]) for event in rejoined] == [("1.1", 5)]


def test_a_second_kill_while_recovering_from_the_first_is_survived(emulated: Job, launch: Run) -> None:
    steps = 40  # enough that the run does not end before the second signal
    run = launch(emulated, steps, "kill:1.1@3", "kill=0.05:0.0@3")
    assert_same_training(run, calm_run(emulated, launch, steps))
    assert kinds(run).count("detected") == 2
    assert run.metrics[-1]["live_workers"] == 4


def test_a_vector_that_was_not_planned_ahead_is_planned_when_it_happens(launch: Run) -> None:
    unplanned = job(3, 2, 2, planner={"ahead": 0})
    run = launch(unplanned, STEPS, "kill:1.1@3")
    assert_same_training(run, calm_run(unplanned, launch, STEPS))
    assert kinds(run) == FAULT


@pytest.mark.parametrize(
    ("pipelines", "ranks", "micro_batches"), [(3, 2, 2), pytest.param(2, 4, 4, marks=pytest.mark.soak)]
)
def test_a_real_gpt_trains_through_a_kill_and_a_rejoin_bit_for_bit(
    pipelines: int, ranks: int, micro_batches: int, launch: Run
) -> None:
    of = job(pipelines, ranks, micro_batches, kind="gpt")
    run = launch(of, 6, "kill:1.1@2", "rejoin:1.1@4")
    reference = calm_run(of, launch, 6)
    assert_same_training(run, reference)
    assert run.digests == reference.digests
    assert_plans_pass_check(run, of)
    assert run.losses[0] == pytest.approx(5.545, abs=0.15)
    assert run.losses[-1] < run.losses[0]


def test_fast_accumulation_stays_within_its_tolerance(launch: Run) -> None:
    of = job(3, 2, 2, kind="gpt", train={"accumulation": "fast"})
    run, reference = launch(of, 6, "kill:1.1@2"), calm_run(of, launch, 6)
    assert run.losses == pytest.approx(reference.losses, rel=1e-4)
