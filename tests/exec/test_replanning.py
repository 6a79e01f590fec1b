"""Runs whose times drift: micro-batches leave a slow worker and come back, and no loss changes by a bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from recycle import Job, Profile, Schedule, Worker, simulate
from recycle.exec.launcher import RunResult
from recycle.exec.observer import Observer
from recycle.ir.instruction import Forward
from recycle.solve.planner import plan_for_training
from tests.exec.runs import Run, job, kinds

STEPS = 36
SLOW = Worker(1, 1)
UNIT = 0.015
DRIFT = {"drift": 0.5}
"""On a machine with too much to do a sleep of 15 ms lasts some longer: that is no drift here."""


class _Patient(Observer):
    """Holds the run while a plan is asked for, so that the planner has its time whatever the load; a minute at most.

    The asked profile's file is there as soon as it is asked for; `replanned` follows.
    """

    def __init__(self, directory: Path, per_step: float = 0.5) -> None:
        self.profiles, self.per_step, self.replanned = directory / "profiles", per_step, 0

    def event(self, event: dict[str, Any]) -> None:
        self.replanned += event["kind"] == "replanned"

    def committed(self, line: dict[str, Any]) -> None:
        asked = len(list(self.profiles.glob("*.json"))) if self.profiles.is_dir() else 0
        if asked > self.replanned:
            time.sleep(self.per_step)


def emulated_job(membership: dict[str, Any]) -> Job:
    return job(
        3, 2, 4, memory={"limit": 4}, model={"seconds_per_unit": UNIT}, train={"clip": 1e9}, membership=membership
    )


@pytest.fixture(scope="module")
def emulated() -> Job:
    return emulated_job(DRIFT)


_FREE: list[RunResult] = []


@pytest.fixture
def reference(emulated: Job, launch: Run) -> RunResult:
    if not _FREE:
        _FREE.append(launch(emulated, STEPS))
    return _FREE[0]


def plan_of(run: RunResult, digest: str) -> Schedule:
    assert run.directory is not None
    return Schedule.load(run.directory / "plans" / f"{digest}.json")


def forwards(schedule: Schedule, worker: Worker) -> int:
    return sum(isinstance(instruction, Forward) for instruction in schedule.program(worker))


def replanned(run: RunResult) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == "replanned"]


def test_micro_batches_leave_a_slow_worker_and_come_back_and_no_bit_changes(
    emulated: Job, reference: RunResult, launch: Run, tmp_path: Path
) -> None:
    run = launch(emulated, STEPS, "slow=3:1.1@4-18", observer=_Patient(tmp_path), directory=tmp_path)
    assert (run.losses, run.digests) == (reference.losses, reference.digests)
    assert run.undone == []
    away, back = (e for e in replanned(run) if "worker 1.1" in e["cause"])
    first, slow, last = (plan_of(run, line["plan"]) for line in (run.metrics[0], _at(run, away), _at(run, back)))
    assert 4 + 8 // 2 < away["step"] <= 18 < back["step"]
    assert [forwards(plan, SLOW) for plan in (first, slow, last)] == [4, 2, 4]
    profile = Profile.load(tmp_path / "profiles" / f"{away['profile']}.json")
    assert profile.speed_of(SLOW) == pytest.approx(3, rel=0.1)
    assert simulate(first, profile).period == pytest.approx(away["period_before"])
    assert simulate(slow, profile).period == pytest.approx(away["period"])
    assert away["period"] < 0.6 * away["period_before"]
    assert back["period"] == pytest.approx(
        simulate(last, Profile.load(tmp_path / "profiles" / f"{back['profile']}.json")).period
    )
    generations = {line["generation"] for line in run.metrics}
    assert len(generations) == 1 + len(replanned(run))
    assert [line["step"] for line in run.metrics] == list(range(STEPS))


def _at(run: RunResult, event: dict[str, Any]) -> dict[str, Any]:
    return run.metrics[event["step"]]


def test_every_commit_says_how_long_each_worker_computed_and_how_far_the_period_is_from_the_plan(
    emulated: Job, reference: RunResult
) -> None:
    first, *rest = reference.metrics
    assert first["period_error"] is None
    errors = [line["period_error"] for line in rest if line["generation"] == first["generation"]]
    assert all(error > -0.9 for error in errors)
    assert reference.period_error is not None
    for line in reference.metrics:
        assert set(line["compute"]) == {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1"}
        for worker, times in line["compute"].items():
            assert {key[0] for key in times} == {worker[-1]}
            for key, seconds in times.items():
                assert seconds >= UNIT * (2 if key.endswith("B") else 1) * 0.99


def test_drift_can_be_switched_off(emulated: Job, reference: RunResult, launch: Run, tmp_path: Path) -> None:
    run = launch(emulated_job({"drift": 0}), 16, "slow=3:1.1@1-15", directory=tmp_path)
    assert run.losses == reference.losses[:16]
    assert kinds(run) == ["generation", "fault"]
    assert not (tmp_path / "profiles").exists()


def test_a_schedule_of_ones_own_is_kept_however_slow_a_worker_is(
    emulated: Job, reference: RunResult, launch: Run
) -> None:
    own = plan_of(reference, reference.metrics[0]["plan"])
    run = launch(emulated, 16, "slow=3:1.1@1-15", schedule=own)
    assert run.losses == reference.losses[:16]
    assert kinds(run) == ["generation", "fault"]


def waiting_planner(job: Job, vector: tuple[int, ...], quick: bool, failed: list[Worker] | None) -> str:
    """As the real one, but a plan for a drifted profile of all workers takes its time."""
    if failed == [] and job.times.profile is not None:
        time.sleep(4.0)
    return plan_for_training(job, vector, quick, failed)


def test_a_worker_killed_while_a_plan_is_made_is_worked_around_and_that_plan_is_dropped(
    emulated: Job, reference: RunResult, launch: Run, tmp_path: Path
) -> None:
    """The slow worker itself lives on: the set without the dead one gets a plan of its own."""
    run = launch(
        emulated,
        STEPS,
        "slow=3:1.1@2-35",
        "kill:2.1@9",
        planner=waiting_planner,
        observer=_Patient(tmp_path, 0.3),
        directory=tmp_path,
    )
    assert run.losses == reference.losses
    assert {w: run.digests[w] for w in run.digests} == {w: reference.digests[w] for w in run.digests}
    assert [line["live_workers"] for line in run.metrics] == [6] * 9 + [5] * (STEPS - 9)
    (event,) = (e for e in replanned(run) if "worker 1.1" in e["cause"])
    after = plan_of(run, _at(run, event)["plan"])
    assert event["step"] > 9
    assert after.failed == {Worker(2, 1)}
    before = plan_of(run, run.metrics[event["step"] - 1]["plan"])
    assert forwards(after, SLOW) < forwards(before, SLOW)
