"""Workers that are told to leave: all stop after the same iteration, and a worker that has to stay does."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from recycle.exec.leader.actions import Ask, DepartureAsked, Finish, Planned
from recycle.exec.leader.membership import END_SECONDS
from recycle.exec.leader.state import Phase
from recycle.exec.protocol import Committed, FinalState, Leave, Leaving, Refused, Saved, SavedPart, Start
from recycle.job.shape import Worker
from tests.exec.leader.driver import KILLED, LeaderDriver
from tests.exec.runs import job

LEAVER = Worker(1, 1)


@pytest.fixture
def driver() -> LeaderDriver:
    """Three pipelines of two stages, of which the first iteration is committed."""
    driver = LeaderDriver(job(3, 2, 2))
    driver.start_and_form()
    driver.report()
    return driver


def tell(driver: LeaderDriver, workers: Collection[Worker] = (LEAVER,), seconds: float | None = None) -> None:
    driver.take(DepartureAsked(list(workers), seconds))
    driver.tick()


def refused(driver: LeaderDriver) -> list[Worker]:
    return [Worker.parse(refusal.worker) for refusal in driver.of_kind(Refused)]


def test_worker_leaves_after_its_iteration_and_nothing_is_repeated(driver: LeaderDriver) -> None:
    tell(driver)
    assert refused(driver) == []
    assert driver.told(Leave) == []
    driver.report()
    assert [(told.commit.step, told.commit.last) for told in driver.told(Committed)] == [(0, 8), (1, 1)]
    assert driver.told(Leave) == [Leave("1.1", 0)]
    driver.start_and_form()
    assert (driver.record.generation, len(driver.record.live)) == (2, 5)
    driver.end(LEAVER, "ended with exit code 0")
    driver.tick()
    assert [(event["worker"], event["step"]) for event in driver.events("drained")] == [("1.1", 2)]
    assert (driver.detected, driver.killed, driver.events("undone")) == ([], [], [])
    assert (driver.leader.generations.cursor().released, driver.leader.generations.cursor().gone) == (
        {"1.1": 1},
        {"1.1": 0},
    )


def test_worker_that_may_leave_and_does_not_end_is_killed(driver: LeaderDriver) -> None:
    tell(driver)
    driver.report()
    driver.pass_time(END_SECONDS - 1)
    assert driver.killed == []
    driver.pass_time(2)
    assert driver.killed == [LEAVER]
    assert (driver.detected, [event["worker"] for event in driver.events("drained")]) == ([], ["1.1"])


def test_worker_that_cannot_leave_before_its_deadline_dies(driver: LeaderDriver) -> None:
    tell(driver, seconds=2.0)
    driver.pass_time(1.5)
    assert driver.detected == []
    driver.pass_time(1)
    assert driver.detected == [("1.1", "told to leave within 2 s, in which no iteration came to its end")]
    assert (driver.killed, driver.events("drained")) == ([LEAVER], [])


def test_training_goes_on_until_there_is_a_plan_without_the_worker(driver: LeaderDriver) -> None:
    planner, driver.plan = driver.plan, lambda question: None
    tell(driver)
    driver.report()
    assert (driver.record.committed, driver.phase) == (1, Phase.RUNNING)
    question = driver.of_kind(Ask)[-1].question
    assert question.failed == {LEAVER}
    driver.take(Planned(question, planner(question)))
    driver.report()
    assert (driver.record.committed, driver.told(Leave)) == (2, [Leave("1.1", 0)])


def test_last_host_of_a_stage_stays(driver: LeaderDriver) -> None:
    tell(driver, [Worker(pipeline, 1) for pipeline in range(3)])
    assert refused(driver) == [Worker(2, 1)]
    assert driver.of_kind(Refused)[0].why in driver.events("warning")[-1]["message"]
    driver.report()
    assert driver.told(Leave) == [Leave("0.1", 0), Leave("1.1", 0)]


def test_worker_that_is_dead_is_not_told_to_leave(driver: LeaderDriver) -> None:
    driver.end(LEAVER, KILLED)
    driver.start_and_form()
    tell(driver)
    assert driver.of_kind(Refused) == [Refused(str(LEAVER), "it is dead already")]
    assert driver.told(Leave) == []


def test_notice_to_an_earlier_process_does_not_count(driver: LeaderDriver) -> None:
    driver.say("1.1", Leaving(-1))
    driver.report()
    assert (driver.told(Leave), refused(driver)) == ([], [])


def test_process_that_was_started_since_stays() -> None:
    driver = LeaderDriver(job(3, 2, 2), restarts=1)
    driver.start_and_form()
    driver.end(LEAVER, KILLED)
    driver.start_and_form()
    driver.tick()
    assert driver.leader.generations.processes[LEAVER].incarnation == 1
    driver.say("1.1", Leaving(0))
    driver.report()
    assert driver.told(Leave) == []
    driver.start_and_form()
    driver.say("1.1", Leaving(1))
    driver.report()
    assert driver.told(Leave) == [Leave("1.1", 1)]


def test_first_deadline_of_a_worker_counts(driver: LeaderDriver) -> None:
    tell(driver, seconds=2.0)
    tell(driver, seconds=60.0)
    driver.pass_time(2)
    assert driver.killed == [LEAVER]


def test_run_ends_with_a_checkpoint_when_all_workers_are_told_by_a_signal(driver: LeaderDriver) -> None:
    for name in driver.record.live:
        driver.say(name, Leaving(0))
    driver.tick()
    driver.report()
    assert driver.phase is Phase.FINISHED
    assert driver.told(Leave) == []
    for step, stage, rank in driver.missing_parts():
        driver.say("0.0", SavedPart(step, stage, rank, Saved()))
    for name in driver.record.live:
        driver.say(name, FinalState({Worker.parse(name).rank: "digest"}))
    driver.tick()
    driver.tick()
    assert driver.events("stopped") == [{"step": 1, "checkpoint": "step-00000001"}]
    assert [(finish.ended_early, finish.step) for finish in driver.of_kind(Finish)] == [(True, 1)]


def test_worker_that_was_killed_at_its_deadline_is_not_started_again() -> None:
    driver = LeaderDriver(job(3, 2, 2), restarts=3)
    driver.start_and_form()
    tell(driver, seconds=2.0)
    driver.pass_time(2)
    driver.start_and_form()
    driver.pass_time(1)
    assert [start.incarnation for start in driver.ordered(Start)] == [0] * 6
