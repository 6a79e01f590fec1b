"""The end of a run: the last checkpoint, the final states of all workers, and runs that are told to end."""

from __future__ import annotations

from typing import Any

import pytest

from recycle import RunError
from recycle.exec.leader.actions import EndEarly, Finish, Rewind
from recycle.exec.leader.state import Phase
from recycle.exec.protocol import FinalState, Saved, SavedPart
from recycle.job.shape import Worker
from tests.exec.leader.driver import KILLED, LeaderDriver
from tests.exec.runs import job

LIMITS = {"heartbeat": 0.5, "dead_after": 2.0, "hung_after": 2.0, "hung_factor": 1.0, "grace": 8.0}


def running(steps: int = 1, **sections: dict[str, Any]) -> LeaderDriver:
    driver = LeaderDriver(job(2, 2, 2, membership=LIMITS, **sections), steps)
    driver.start_and_form()
    return driver


def finished(**sections: dict[str, Any]) -> LeaderDriver:
    """Four workers that have committed the only iteration."""
    driver = running(**sections)
    driver.report(states=1 if "integrity" in sections else None)
    assert driver.phase is Phase.FINISHED
    return driver


def leave_state(driver: LeaderDriver, name: str, digest: str = "same") -> None:
    driver.say(name, FinalState({Worker.parse(name).rank: digest}))


def save_parts(driver: LeaderDriver) -> None:
    for step, stage, rank in driver.missing_parts():
        driver.say("0.0", SavedPart(step, stage, rank, Saved()))
    driver.tick()


def test_run_is_over_when_all_have_left_their_final_states() -> None:
    driver = finished()
    for name in ("0.0", "0.1", "1.0"):
        leave_state(driver, name)
    driver.tick()
    assert driver.of_kind(Finish) == []
    leave_state(driver, "1.1")
    driver.tick()
    digests = {name: {Worker.parse(name).rank: "same"} for name in ("0.0", "0.1", "1.0", "1.1")}
    assert driver.of_kind(Finish) == [Finish(digests, ended_early=False, step=0)]
    assert driver.phase is Phase.OVER


def test_run_waits_for_its_last_checkpoint() -> None:
    driver = finished(train={"checkpoint_every": 1})
    for name in driver.record.live:
        leave_state(driver, name)
    driver.tick()
    assert driver.of_kind(Finish) == []
    save_parts(driver)
    driver.tick()
    assert len(driver.of_kind(Finish)) == 1


def test_worker_that_dies_or_hangs_after_the_last_commit_ends_with_the_run() -> None:
    driver = finished()
    for name in ("0.1", "1.0"):
        leave_state(driver, name)
    driver.end(Worker(0, 0), KILLED)
    driver.is_still, driver.waits = True, False
    driver.pass_time(12)
    assert driver.detected == [("0.0", KILLED), ("1.1", "no progress for 9 s in form")]
    assert [event["over"] for event in driver.events("detected")] == [True, True]
    assert [finish.digests for finish in driver.of_kind(Finish)] == [{"0.1": {1: "same"}, "1.0": {0: "same"}}]


def test_final_states_that_differ_are_an_event() -> None:
    driver = finished()
    for name in driver.record.live:
        leave_state(driver, name, "other" if name == "1.1" else "same")
    driver.tick()
    (event,) = driver.events("corrupt")
    assert (event["step"], event["held"]) == (0, {1: {"0.1": "same", "1.1": "other"}})
    assert len(driver.of_kind(Finish)) == 1


def test_final_states_that_differ_fail_a_run_that_compares_states() -> None:
    driver = finished(integrity={"digests": 1})
    leave = [name for name in driver.record.live if name != "1.1"]
    for name in leave:
        leave_state(driver, name)
    leave_state(driver, "1.1", "other")
    with pytest.raises(
        RunError, match=r"workers 0\.1 and 1\.1 end with different states of .*1; what came after step -1"
    ):
        driver.tick()
    assert driver.of_kind(Rewind) == [Rewind(-1, checkpoints=True)]
    assert driver.of_kind(Finish) == []


def test_run_that_is_told_to_end_ends_with_its_next_iteration_and_keeps_the_state() -> None:
    driver = running(steps=9)
    driver.report()
    driver.take(EndEarly())
    driver.report()
    assert driver.phase is Phase.FINISHED
    for name in driver.record.live:
        leave_state(driver, name)
    save_parts(driver)
    driver.tick()
    assert driver.events("stopped") == [{"step": 1, "checkpoint": "step-00000001"}]
    assert [(finish.ended_early, finish.step) for finish in driver.of_kind(Finish)] == [(True, 1)]


def test_run_whose_next_iteration_does_not_come_ends_with_the_committed_one() -> None:
    driver = running(steps=9)
    driver.report()
    driver.take(EndEarly())
    driver.pass_time(LIMITS["grace"] / 2 - 1)
    assert driver.phase is Phase.RUNNING
    driver.pass_time(2)
    assert (driver.phase, driver.record.generation) == (Phase.FINISHED, 2)
    assert driver.record.commit is not None
    assert (driver.record.commit.last, driver.record.commit.checkpoint) == (0, True)
    for name in driver.record.live:
        leave_state(driver, name)
    save_parts(driver)
    driver.tick()
    assert driver.events("stopped") == [{"step": 0, "checkpoint": "step-00000000"}]


def test_run_that_is_told_to_end_before_its_first_iteration_ends_at_once_without_a_checkpoint() -> None:
    driver = LeaderDriver(job(2, 2, 2, membership=LIMITS))
    driver.tick()
    driver.take(EndEarly())
    driver.tick()
    assert driver.events("stopped") == [{"step": -1, "checkpoint": None}]
    assert driver.of_kind(Finish) == [Finish({}, True, -1, merge=False)]
