"""Membership: absent agents, leaving workers, and rejoining workers."""

from collections.abc import Collection

import msgspec
import pytest

from recycle import RunError, Worker
from recycle.exec.leader.actions import (
    Ask,
    DepartureAsked,
    Planned,
    Send,
)
from recycle.exec.leader.membership import END_SECONDS, Membership
from recycle.exec.leader.state import Phase
from recycle.exec.protocol import (
    AgentProcess,
    Committed,
    Kill,
    Leave,
    Leaving,
    Refused,
    Start,
)
from tests.exec.leader.driver import KILLED, LeaderDriver, cursor_of, follow, record, run_of
from tests.exec.runs import job


def on_two_nodes(**run) -> LeaderDriver:
    """Three pipelines of two stages that train; worker 1.1 is alone on node 1."""
    shaped = job(3, 2, 2)
    driver = LeaderDriver(shaped, homes=dict.fromkeys(shaped.shape.workers(), 0) | {Worker(1, 1): 1}, **run)
    driver.start_and_form()
    return driver


def test_pause_of_the_leader_does_not_count_against_agents():
    driver = on_two_nodes()
    driver.disconnect(1)
    driver.tick(100.0)
    driver.count_time(2)
    assert driver.detected == []


def test_workers_of_an_absent_agent_are_lost_and_restarted_on_its_return():
    driver = on_two_nodes(restarts=1)
    driver.disconnect(1)
    driver.count_time(4)
    assert driver.detected == [("1.1", "the agent of node 1 is gone")]
    driver.start_and_form()
    assert driver.ordered(Start)[6:] == []
    driver.connect(1)
    driver.tick()
    assert [send for send in driver.of_kind(Send) if isinstance(send.order, Kill)] == [Send(1, Kill("1.1", 0))]
    assert driver.of_kind(Send)[-1] == Send(1, Start("1.1", 1, "1.1", driver.ordered(Start)[-1].generation))
    driver.tick()
    driver.report()
    driver.start_and_form()
    assert (driver.record.generation, len(driver.record.live)) == (3, 6)


def test_agents_may_find_the_next_leader_late_if_state_would_be_lost_with_them():
    nodes = {Worker(0, 0): 0, Worker(1, 0): 1}
    driver = follow(record(), "running", homes=nodes, is_connected=False)
    driver.count_time(driver.job.membership.store_timeout - 1)
    assert driver.detected == []
    driver.connect(1)
    driver.tick()
    assert driver.detected == [("0.0", "the agent of node 0 is gone")]
    driver.start_and_form()
    assert (driver.record.live, driver.record.committed) == (["1.0"], 4)

    driver = follow(record(), "running", homes=nodes, is_connected=False)
    with pytest.raises(RunError, match="stage 0 has no live host"):
        driver.count_time(driver.job.membership.store_timeout + 1)


def test_a_stuck_worker_does_not_count_as_another_host_of_a_late_agents_state():
    nodes = {Worker(0, 0): 0, Worker(1, 0): 1}
    driver = follow(record(), "running", homes=nodes, is_connected=False)
    driver.waits, driver.is_still = False, True
    driver.connect(1)
    driver.count_time(driver.job.membership.lease / 2 + 1)
    assert driver.detected == []
    driver.waits = True
    driver.count_time(1)
    assert driver.detected == [("0.0", "the agent of node 0 is gone")]


@pytest.mark.parametrize("is_new", [False, True])
def test_worker_that_has_left_is_started_again_by_a_new_agent_only(is_new):
    before = msgspec.structs.replace(record(), live=["0.0"], roles={"0.0": "0.0"})
    cursor = cursor_of(before, "running", released={"1.0": 1}, gone={"1.0": 0})
    driver = follow(before, cursor=cursor, restarts=3, homes={Worker(0, 0): 0, Worker(1, 0): 1}, is_connected=False)
    driver.connect(0)
    driver.processes[1][Worker(1, 0)] = AgentProcess("1.0", 0, 0, "ended with exit code 0")
    driver.connect(1, is_new=is_new)
    driver.count_time(1)
    assert [action.incarnation for action in driver.ordered(Start)] == [1] * is_new


@pytest.mark.parametrize("released", [0, 1])
def test_next_leader_lets_a_released_worker_end_and_kills_one_that_was_given_up(released):
    before = msgspec.structs.replace(record(), live=["0.0"], roles={"0.0": "0.0"})
    cursor = cursor_of(before, "running", released={"1.0": released}, gone={"1.0": 0})
    driver = follow(before, cursor=cursor, is_connected=False)
    driver.processes[0][Worker(1, 0)] = AgentProcess("1.0", 0, 0)
    driver.connect(0)
    assert driver.told(Leave) == [Leave("1.0", 0)] * released
    assert driver.killed == [Worker(1, 0)] * (1 - released)
    driver.count_time(END_SECONDS + 1)
    assert driver.killed == [Worker(1, 0)]


@pytest.mark.parametrize(("startable", "place"), [("0.0 0.1 2.0 2.1", "2.1"), ("0.0 0.1 2.0", "2.0")])
def test_position_without_a_node_borrows_a_place_away_from_its_peers(startable, place):
    nodes = {"0.0": 0, "2.0": 0, "0.1": 1, "1.1": 1, "1.0": 2, "2.1": 2}
    homes = {Worker.parse(worker): node for worker, node in nodes.items()}
    run = Membership(run_of(job(3, 2, 2), homes=homes), 0.0)
    positions, other = [Worker(0, 0), Worker(0, 1), Worker(1, 0)], Worker.parse(place)
    run.exchange_places(positions, list(map(Worker.parse, startable.split())))
    assert run.places == {Worker(1, 0): other, other: Worker(1, 0)}
    assert [run.node_of(worker) for worker in positions] == [0, 1, homes[other]]
    run.exchange_places([Worker(0, 0), Worker(0, 1), other], positions)
    assert run.places == {}


# Departures.


LEAVER = Worker(1, 1)


@pytest.fixture
def driver():
    """Three pipelines of two stages, of which the first iteration is committed."""
    driver = LeaderDriver(job(3, 2, 2))
    driver.start_and_form()
    driver.report()
    return driver


def tell(driver: LeaderDriver, workers: Collection[Worker] = (LEAVER,), seconds: float | None = None):
    driver.take(DepartureAsked(list(workers), seconds))
    driver.tick()


def refused(driver: LeaderDriver) -> list[Worker]:
    return [Worker.parse(refusal.worker) for refusal in driver.of_kind(Refused)]


def test_worker_leaves_after_its_iteration_and_nothing_is_repeated(driver):
    tell(driver)
    assert refused(driver) == []
    assert driver.told(Leave) == []
    driver.report()
    assert [(reported.commit.step, reported.commit.last) for reported in driver.told(Committed)] == [(0, 8), (1, 1)]
    assert driver.told(Leave) == [Leave("1.1", 0)]
    driver.start_and_form()
    assert (driver.record.generation, len(driver.record.live)) == (2, 5)
    driver.end(LEAVER, "ended with exit code 0")
    driver.tick()
    assert [(event["worker"], event["step"]) for event in driver.events("drained")] == [("1.1", 2)]
    assert (driver.detected, driver.killed, driver.events("undone")) == ([], [], [])
    assert (driver.leader.cursor().released, driver.leader.cursor().gone) == (
        {"1.1": 1},
        {"1.1": 0},
    )


def test_worker_that_may_leave_and_does_not_end_is_killed(driver):
    tell(driver)
    driver.report()
    driver.count_time(END_SECONDS - 1)
    assert driver.killed == []
    driver.count_time(2)
    assert driver.killed == [LEAVER]
    assert (driver.detected, [event["worker"] for event in driver.events("drained")]) == ([], ["1.1"])


def test_training_continues_until_a_plan_without_the_worker_exists(driver):
    planner, driver.plan = driver.plan, lambda question: None
    tell(driver)
    driver.report()
    assert (driver.record.committed, driver.phase) == (1, Phase.RUNNING)
    question = driver.of_kind(Ask)[-1].question
    assert question.failed == {LEAVER}
    driver.take(Planned(question, planner(question)))
    driver.report()
    assert (driver.record.committed, driver.told(Leave)) == (2, [Leave("1.1", 0)])


def test_last_host_of_a_stage_stays(driver):
    tell(driver, [Worker(pipeline, 1) for pipeline in range(3)])
    assert refused(driver) == [Worker(2, 1)]
    assert driver.of_kind(Refused)[0].why in driver.events("warning")[-1]["message"]
    driver.report()
    assert driver.told(Leave) == [Leave("0.1", 0), Leave("1.1", 0)]


@pytest.mark.parametrize("iterates", [False, True])
def test_signals_to_all_workers_one_after_the_other_end_the_run(driver, iterates):
    for name in sorted(driver.record.live):
        assert not driver.leader.ends_early
        driver.say(name, Leaving(0))
        driver.tick()
        if iterates and name == "1.1":  # those that may leave have left before the others are asked
            driver.report()
            driver.start_and_form()
    assert driver.leader.ends_early


def test_process_that_was_started_since_stays():
    driver = LeaderDriver(job(3, 2, 2), restarts=1)
    driver.start_and_form()
    driver.end(LEAVER, KILLED)
    driver.start_and_form()
    driver.tick()
    assert driver.leader.processes[LEAVER].incarnation == 1
    driver.say("1.1", Leaving(0))
    driver.report()
    assert driver.told(Leave) == []
    driver.start_and_form()
    driver.say("1.1", Leaving(1))
    driver.report()
    assert driver.told(Leave) == [Leave("1.1", 1)]
