"""What follows from reports, broken connections, heartbeats and deaths while a generation runs."""

from __future__ import annotations

from typing import Any

import pytest

from recycle import RunError
from recycle.exec.leader.actions import Event, Line, Persist, PreparedPlan, Send, Tell
from recycle.exec.leader.forming import GRACE_SECONDS
from recycle.exec.leader.state import Phase, PlannedFault
from recycle.exec.protocol import (
    CutOff,
    FaultReached,
    FromWorker,
    Kill,
    Ready,
    Report,
    Start,
    StepReport,
    Strike,
    Trouble,
    Warned,
)
from recycle.job.shape import Worker
from tests.exec.leader.driver import KILLED, TICK, LeaderDriver
from tests.exec.runs import job

NOT_FINITE = float("inf")


def test_gradient_that_is_not_finite_is_repeated_once_and_then_fatal() -> None:
    driver = LeaderDriver(job(2, 2, 2, train={"non_finite": "fatal"}))
    driver.start_and_form()
    driver.report(norm=NOT_FINITE)
    driver.start_and_form()
    assert driver.record.generation == 2
    assert [event["count"] for event in driver.events("undone")] == [0]
    with pytest.raises(RunError, match="step 0: a gradient is not finite, also when repeated"):
        driver.report(norm=NOT_FINITE)
    assert driver.of_kind(Line) == []


def test_gradient_that_is_not_finite_is_skipped_after_a_repetition_where_the_job_says_so() -> None:
    driver = LeaderDriver(job(2, 2, 2, train={"non_finite": "skip"}))
    driver.start_and_form()
    for generation, step in ((2, 0), (3, 1)):
        driver.report(norm=NOT_FINITE)
        driver.start_and_form()
        driver.report(norm=NOT_FINITE)
        assert (driver.record.generation, driver.record.committed) == (generation, step)
        assert driver.record.commit is not None
        assert driver.record.commit.clip_factor is None
    assert [action.line["grad_norm"] for action in driver.of_kind(Line)] == [None, None]


def test_staggered_step_whose_gradient_has_to_be_clipped_is_repeated_with_the_barrier() -> None:
    driver = LeaderDriver(job(2, 2, 2, train={"clip": 1.0}))
    workers = driver.job.shape.workers()
    driver.plan = lambda question: PreparedPlan("plan", {w: w for w in workers}, {"barrier": 9.0, "staggered": 8.0})
    driver.start_and_form()
    while driver.record.mode == "barrier":
        driver.report()
    step = driver.record.committed
    driver.report(norm=100.0)
    assert (driver.record.committed, driver.phase) == (step, Phase.PROPOSED)
    driver.start_and_form()
    driver.report(norm=100.0)
    assert driver.record.committed == step + 1
    assert driver.record.commit is not None
    assert driver.record.commit.clip_factor == pytest.approx(0.0707, rel=0.01)


def test_iteration_that_all_have_reported_is_committed_although_a_worker_has_died_since() -> None:
    driver = LeaderDriver(job(2, 2, 2))
    driver.start_and_form()
    for step in (1, 0):  # no worker is further ahead
        for name in driver.record.live:
            rank = Worker.parse(name).rank
            report = Report({rank: [1e-6]}, 1.0 if rank else None, checksums={rank: 1})
            driver.say(name, StepReport(step, report))
    driver.end(Worker(1, 1), KILLED)
    driver.tick()
    assert driver.record.committed == 1
    assert driver.events("detected") == [{"worker": "1.1", "step": 2, "cause": KILLED}]


def test_worker_without_progress_is_dead_and_its_stage_lost_with_the_last_host() -> None:
    driver = LeaderDriver(job(1, 2, 2, membership={"heartbeat": 0.5, "hung_after": 2.0, "hung_factor": 1.0}))
    driver.start_and_form()
    driver.report()
    driver.is_still, driver.waits = True, False
    with pytest.raises(RunError, match=r"no live host left after step 0: .* worker 0\.1, no progress for 9 s in form"):
        driver.pass_time(12)
    assert driver.detected == [("0.0", "no progress for 9 s in form"), ("0.1", "no progress for 9 s in form")]


def test_stage_whose_only_state_dies_while_it_is_copied_is_lost() -> None:
    driver = LeaderDriver(job(2, 2, 2), faults=[PlannedFault("rejoin:1.1@1", Worker(1, 1), 1, strikes=False)])
    driver.start_and_form()
    driver.end(Worker(1, 1), KILLED)
    driver.start_and_form()
    driver.report()
    driver.start()
    assert driver.record.joins == ["1.1"]
    driver.end(Worker(0, 1), KILLED)
    with pytest.raises(RunError, match=r"stage 1 has no live host left after step 0"):
        driver.pass_time(1)


def test_broken_connection_brings_another_generation_unless_a_death_explains_it() -> None:
    driver = LeaderDriver(job(2, 2, 2))
    driver.start_and_form()
    driver.say("0.0", Trouble("a connection broke"))
    driver.pass_time(GRACE_SECONDS)
    assert driver.phase is Phase.RUNNING
    driver.pass_time(3 * TICK)
    assert (driver.record.generation, driver.detected) == (2, [])
    driver.start_and_form()
    driver.say("0.0", Trouble("a connection broke"))
    driver.tick()
    driver.end(Worker(1, 0), KILLED)
    driver.start_and_form()
    driver.pass_time(2 * GRACE_SECONDS)
    assert (driver.record.generation, driver.detected) == (3, [("1.0", KILLED)])


def test_worker_with_more_peers_is_fenced_of_two_that_cannot_reach_each_other() -> None:
    driver = LeaderDriver(job(2, 2, 2))
    driver.start_and_form()
    driver.end(Worker(1, 1), KILLED)
    driver.start_and_form()
    driver.say("0.0", CutOff("0.1"))
    driver.tick()
    assert driver.detected[1:] == [("0.0", "cut off from worker 0.1")]


def test_of_two_last_hosts_that_cannot_reach_each_other_none_is_fenced() -> None:
    driver = LeaderDriver(job(1, 2, 2))
    driver.start_and_form()
    driver.say("0.0", CutOff("0.1"))
    driver.tick()
    driver.tick()
    assert (driver.record.generation, driver.detected) == (2, [])


def test_event_of_a_fault_is_written_and_persisted_before_it_strikes_the_first_that_has_reached_it() -> None:
    faults = [PlannedFault("cut:0.0-1.1@0", Worker(0, 0), 0)]
    driver = LeaderDriver(job(2, 2, 2), faults=faults)
    driver.start_and_form()
    count = len(driver.actions)
    for name in ("0.0", "0.0", "1.1"):
        driver.say(name, FaultReached(0))
    driver.tick()
    done = driver.actions[count:]
    event = done.index(Event("fault", {"worker": "0.0", "step": 0, "fault": "cut:0.0-1.1@0"}))
    strike = done.index(Tell(Strike(0, "0.0")))
    persisted = [place for place, action in enumerate(done) if isinstance(action, Persist) and action.cursor.struck]
    assert event < persisted[0] < strike
    assert driver.told(Strike) == [Strike(0, "0.0")]


def test_only_the_first_warning_of_a_worker_is_written() -> None:
    driver = LeaderDriver(job(2, 2, 2))
    driver.start_and_form()
    driver.say("0.0", Warned("no trace"))
    driver.say("0.1", Warned("no trace either"))
    driver.tick()
    driver.tick()
    assert driver.events("warning") == [{"message": "no trace"}]


# Agents that go away.


def on_two_nodes(**run: Any) -> LeaderDriver:
    """Three pipelines of two stages that train; worker 1.1 has a node of its own, with number 1."""
    shaped = job(3, 2, 2)
    driver = LeaderDriver(shaped, homes=dict.fromkeys(shaped.shape.workers(), 0) | {Worker(1, 1): 1}, **run)
    driver.start_and_form()
    return driver


def test_what_a_process_says_while_its_agent_is_away_counts_when_the_agent_is_back() -> None:
    driver = on_two_nodes()
    driver.disconnect(1)
    for name in driver.record.live:
        rank = Worker.parse(name).rank
        report = StepReport(0, Report({rank: [1e-6]}, 1.0 if rank else None, checksums={rank: 1}))
        if name == "1.1":
            said = FromWorker(name, report, 1)
        else:
            driver.say(name, report)
    driver.pass_time(2)
    assert driver.record.committed == -1
    for _ in range(2):
        driver.connect(1, said=[said])
        driver.tick()
        assert (driver.record.committed, driver.detected) == (0, [])
    assert [action.line["step"] for action in driver.of_kind(Line)] == [0]


def test_pause_of_the_leader_does_not_count_against_agents() -> None:
    driver = on_two_nodes()
    driver.disconnect(1)
    driver.tick(100.0)
    driver.pass_time(2)
    assert driver.detected == []


def test_workers_of_an_agent_that_is_away_too_long_die_and_are_started_again_when_it_is_back() -> None:
    driver = on_two_nodes(restarts=1)
    driver.disconnect(1)
    driver.pass_time(4)
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


def test_worker_that_was_fenced_while_its_agent_was_away_does_not_join_with_the_same_process() -> None:
    driver = on_two_nodes(restarts=1)
    driver.disconnect(1)
    driver.say("1.0", CutOff("1.1"))
    driver.tick()
    assert driver.detected == [("1.1", "cut off from worker 1.0")]
    driver.kills = False
    driver.connect(1, said=[FromWorker("1.1", Ready(0))])
    driver.start_and_form()
    for _ in range(3):
        driver.report()
    assert (driver.record.generation, len(driver.record.live)) == (2, 5)
    assert driver.ordered(Kill)[1:] == [Kill("1.1", 0)]
    driver.end(Worker(1, 1), KILLED)
    driver.tick()
    assert driver.ordered(Start)[-1].incarnation == 1
