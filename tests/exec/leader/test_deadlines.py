"""Workers that send heartbeats and miss a deadline are fenced, unless a stage's state would be lost with them."""

from __future__ import annotations

from typing import Any

import pytest

from recycle import RunError
from recycle.exec.leader import generations
from recycle.exec.leader.actions import Ask, EndEarly, Tick
from recycle.exec.leader.forming import ATTEMPTS, GRACE_SECONDS
from recycle.exec.leader.generations import END_SECONDS
from recycle.exec.leader.state import Phase, PlannedFault
from recycle.exec.protocol import Formed, Start
from recycle.job.shape import Worker
from tests.exec.leader.driver import KILLED, TICK, LeaderDriver
from tests.exec.runs import job

FORM_TIMEOUT, HUNG_AFTER, TRANSPORT_TIMEOUT, REJOIN_DEADLINE = 4.0, 2.0, 10.0, 5.0
LIMITS = {
    "heartbeat": 0.5,
    "form_timeout": FORM_TIMEOUT,
    "hung_after": HUNG_AFTER,
    "transport_timeout": TRANSPORT_TIMEOUT,
    "warm_up": 3.0,
    "rejoin_deadline": REJOIN_DEADLINE,
}
LATE = Worker(1, 1)


def proposed(steps: int = 9, *, sections: dict[str, dict[str, Any]] | None = None, **run: Any) -> LeaderDriver:
    """Six workers of two stages, whose first generation is proposed."""
    driver = LeaderDriver(job(3, 2, 2, membership=LIMITS, **(sections or {})), steps, **run)
    driver.start()
    return driver


def test_worker_that_does_not_acknowledge_is_fenced_and_the_others_go_on() -> None:
    driver = proposed()
    driver.acknowledge(without=["1.1"])
    driver.pass_time(FORM_TIMEOUT + HUNG_AFTER - 1)
    assert driver.phase is Phase.PROPOSED
    driver.pass_time(2)
    assert driver.detected == [("1.1", "generation 1 was not acknowledged within 6 s")]
    assert driver.killed == [LATE]
    assert driver.record.generation == 2
    driver.start_and_form()
    assert driver.record.live == ["0.0", "0.1", "1.0", "2.0", "2.1"]


def test_pause_of_the_leader_does_not_count_against_workers() -> None:
    driver = proposed()
    driver.acknowledge(without=["1.1"])
    driver.tick(seconds=100.0, beats=0)
    driver.pass_time(4)
    assert driver.detected == []


def test_worker_that_neither_forms_nor_fails_is_fenced_after_the_others_have_given_up() -> None:
    driver = proposed()
    driver.acknowledge()
    driver.form(["0.1"], dict.fromkeys(driver.record.live, Formed("waited in vain", expired=True)))
    driver.pass_time(2 * FORM_TIMEOUT - 1)
    assert driver.detected == []
    driver.pass_time(2)
    assert driver.detected == [("0.1", "groups of generation 1 did not form within 8 s")]


def test_worker_that_fails_first_to_form_twice_is_fenced_and_not_one_that_fails_in_consequence() -> None:
    driver, broken = proposed(), Formed("the device is broken")
    for generation in (1, 2):
        assert driver.record.generation == generation
        driver.acknowledge()
        driver.form(["0.0", "1.0"], {"2.1": broken})
        driver.form([], {"2.1": broken, "0.0": Formed("closed by its peer")})
        driver.pass_time(GRACE_SECONDS + TICK)
    assert driver.detected == [("2.1", "could not form generation 2: the device is broken")]
    driver.start_and_form()


def test_run_is_given_up_after_some_attempts_with_workers_of_which_none_can_be_fenced() -> None:
    driver = proposed()

    def attempt() -> None:
        driver.acknowledge()
        driver.form(without=["0.0", "1.0", "2.0"])
        driver.pass_time(2 * FORM_TIMEOUT + 1)

    for _ in range(ATTEMPTS - 1):
        attempt()
    with pytest.raises(RunError, match=rf"gave up after {ATTEMPTS} attempts .* not form within 8 s by workers 0\.0 1"):
        attempt()
    assert driver.detected == []


def test_worker_that_does_not_rejoin_is_waited_for_until_a_deadline() -> None:
    driver = proposed(faults=[PlannedFault("rejoin:1.1@3", LATE, 3, strikes=False)])
    driver.start_and_form()
    driver.starts_up = False
    driver.end(LATE, KILLED)
    driver.start_and_form()
    driver.tick()
    assert driver.ordered(Start)[-1] == Start(str(LATE), 1, str(LATE), 2)
    for _ in range(3):
        driver.report()
    assert (driver.record.committed, driver.phase) == (2, Phase.BETWEEN)
    driver.pass_time(REJOIN_DEADLINE - TICK)
    assert driver.phase is Phase.BETWEEN
    driver.pass_time(2 * TICK)
    assert driver.events("fault") == [{"worker": "1.1", "step": 3, "cause": "did not re-join in time"}]
    assert driver.killed == [LATE]
    driver.start_and_form()
    assert (driver.record.generation, len(driver.record.live)) == (3, 5)


def test_generation_in_which_all_workers_wait_without_progress_is_repeated() -> None:
    driver = proposed()
    driver.start_and_form()
    driver.pass_time(2 * TRANSPORT_TIMEOUT)
    assert (driver.record.generation, driver.phase) == (1, Phase.RUNNING)
    driver.is_still = True
    driver.pass_time(TRANSPORT_TIMEOUT - 1)
    assert driver.record.generation == 1
    driver.pass_time(2)
    assert (driver.record.generation, driver.detected) == (2, [])


def test_last_evaluation_may_wait_for_the_last_checkpoint() -> None:
    """The last checkpoint waits for the one before, with a deadline of its own."""
    deadline = 60.0
    driver = proposed(
        1, sections={"train": {"checkpoint_every": 1, "checkpoint_deadline": deadline}, "eval": {"every": 1}}
    )
    driver.start_and_form()
    driver.report()
    assert driver.record.is_evaluation_due
    driver.is_still = True
    driver.pass_time(deadline - 1)
    assert (driver.record.generation, driver.phase) == (1, Phase.RUNNING)
    driver.pass_time(2)
    assert driver.record.generation == 2


def test_run_that_is_to_end_does_not_wait_for_a_worker_that_is_expected_back() -> None:
    """The node of the worker that died is gone, and the worker was expected from step 0 on."""
    driver = proposed(
        faults=[PlannedFault("rejoin:1.1@0", LATE, 0, strikes=False)],
        homes=dict.fromkeys(job(3, 2, 2).shape.workers(), 0) | {LATE: 1},
    )
    driver.disconnect(1)
    driver.pass_time(4)
    assert (driver.record.generation, driver.phase) == (1, Phase.BETWEEN)
    driver.take(EndEarly())
    driver.tick()
    assert (driver.record.generation, driver.phase) == (2, Phase.PROPOSED)


def test_run_that_is_to_end_kills_no_worker_without_progress_where_its_state_would_be_lost() -> None:
    """All of them may be compiling."""
    driver = proposed()
    driver.start_and_form()
    driver.report()
    assert driver.record.committed == 0
    driver.take(EndEarly())
    driver.is_still, driver.waits = True, False
    driver.pass_time(END_SECONDS)
    driver.leader.generations.end_at_committed()
    assert (driver.killed, driver.phase) == ([], Phase.FINISHED)
    assert len(driver.record.live) == 6


def test_plan_that_never_comes_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "PLAN_SECONDS", 30.0)
    driver = proposed()
    driver.plan = lambda question: None
    driver.end(LATE, KILLED)
    driver.pass_time(29)
    assert driver.phase is Phase.BETWEEN
    assert [ask.question.failed for ask in driver.of_kind(Ask)] == [frozenset(), {LATE}]
    with pytest.raises(RunError, match=r"no plan without workers 1\.1"):
        driver.pass_time(4)


def test_nothing_follows_after_the_run_has_failed() -> None:
    driver = proposed()
    for pipeline in range(3):
        driver.end(Worker(pipeline, 1), KILLED)
    with pytest.raises(RunError, match="no complete checkpoint to go back to"):
        driver.pass_time(1)
    assert driver.phase is Phase.OVER
    assert driver.leader.take(driver.now, Tick()) == []
