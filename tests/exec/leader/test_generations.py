"""The leader's decisions after reports, broken connections, silence and deadlines, and the next leader's start."""

from typing import Any

import msgspec
import pytest

from recycle import RunError, Worker
from recycle.exec.leader import forming
from recycle.exec.leader.actions import (
    Ask,
    Begin,
    EndEarly,
    Event,
    Line,
    Persist,
    PreparedPlan,
    Tick,
)
from recycle.exec.leader.forming import ATTEMPTS
from recycle.exec.leader.generations import END_SECONDS
from recycle.exec.leader.state import Phase, PlannedFault
from recycle.exec.protocol import (
    Commit,
    Committed,
    Cursor,
    CutOff,
    FaultReached,
    Formed,
    FromWorker,
    Permit,
    Progress,
    Propose,
    Report,
    Start,
    StepReport,
    Stop,
    Strike,
    Verified,
)
from tests.exec.leader.driver import FACTS, KILLED, LIVE, LeaderDriver, cursor_of, follow, record
from tests.exec.runs import job

NOT_FINITE = float("inf")


def test_gradient_that_is_not_finite_is_repeated_once_and_then_fatal():
    driver = LeaderDriver(job(2, 2, 2, train={"non_finite": "fatal"}))
    driver.start_and_form()
    driver.report(norm=NOT_FINITE)
    driver.start_and_form()
    assert driver.record.generation == 2
    assert [event["count"] for event in driver.events("undone")] == [0]
    with pytest.raises(RunError, match="step 0: a gradient is not finite, also when repeated"):
        driver.report(norm=NOT_FINITE)
    assert driver.of_kind(Line) == []


def test_staggered_step_that_needs_clipping_is_repeated_with_the_barrier():
    driver = LeaderDriver(job(2, 2, 2, train={"clip": 1.0}))
    driver.plan = lambda question: PreparedPlan("plan", {"barrier": 9.0, "staggered": 8.0})
    driver.start_and_form()
    while driver.record.mode == "barrier":
        driver.report()
    step = driver.record.committed
    driver.report(norm=100.0)
    assert (driver.record.committed, driver.phase) == (step, Phase.PROPOSED)
    driver.start_and_form()
    driver.report(norm=100.0)
    assert driver.record.committed == step + 1
    assert driver.record.commit.clip_factor == pytest.approx(0.0707, rel=0.01)


def test_fully_reported_iteration_commits_despite_a_later_death():
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


def test_death_is_reported_after_the_end_of_the_generation_is_written():
    """A leader that is cut off cannot write the register, so it does not report other workers dead."""
    driver = LeaderDriver(job(2, 2, 2))
    driver.start_and_form()
    driver.end(Worker(1, 1), KILLED)
    driver.tick()
    ended = [n for n, done in enumerate(driver.actions) if isinstance(done, Persist) and done.cursor.phase == "ended"]
    deaths = [n for n, done in enumerate(driver.actions) if isinstance(done, Event) and done.kind == "detected"]
    assert (len(ended), len(deaths)) == (1, 1)
    assert ended < deaths


def test_cut_fences_the_worker_with_more_peers():
    driver = LeaderDriver(job(2, 2, 2))
    driver.start_and_form()
    driver.end(Worker(1, 1), KILLED)
    driver.start_and_form()
    driver.say("0.0", CutOff("0.1"))
    driver.tick()
    assert driver.detected[1:] == [("0.0", "cut off from worker 0.1")]


# Deadlines.


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


def proposed(steps=9, *, sections: dict[str, dict[str, Any]] | None = None, **run) -> LeaderDriver:
    """Six workers of two stages, whose first generation is proposed."""
    driver = LeaderDriver(job(3, 2, 2, membership=LIMITS, **(sections or {})), steps, **run)
    driver.start()
    return driver


def test_worker_that_does_not_acknowledge_is_fenced():
    driver = proposed()
    driver.acknowledge(without=["1.1"])
    driver.count_time(FORM_TIMEOUT + HUNG_AFTER - 1)
    assert driver.phase is Phase.PROPOSED
    driver.count_time(2)
    assert driver.detected == [("1.1", "generation 1 was not acknowledged within 6 s")]
    assert driver.killed == [LATE]
    assert driver.record.generation == 2
    driver.start_and_form()
    assert driver.record.live == ["0.0", "0.1", "1.0", "2.0", "2.1"]


def test_worker_silent_during_forming_is_fenced_last():
    driver = proposed()
    driver.acknowledge()
    driver.form(["0.1"], dict.fromkeys(driver.record.live, Formed("waited in vain", expired=True)))
    driver.count_time(2 * FORM_TIMEOUT - 1)
    assert driver.detected == []
    driver.count_time(2)
    assert driver.detected == [("0.1", "groups of generation 1 did not form within 8 s")]


def test_run_is_given_up_after_some_attempts_with_workers_of_which_none_can_be_fenced():
    driver = proposed()

    def attempt():
        driver.acknowledge()
        driver.form(without=["0.0", "1.0", "2.0"])
        driver.count_time(2 * FORM_TIMEOUT + 1)

    for _ in range(ATTEMPTS - 1):
        attempt()
    with pytest.raises(RunError, match=rf"gave up after {ATTEMPTS} attempts .* not form within 8 s by workers 0\.0 1"):
        attempt()
    assert driver.detected == []


def test_generation_in_which_all_workers_wait_without_progress_is_repeated():
    driver = proposed()
    driver.start_and_form()
    driver.count_time(2 * TRANSPORT_TIMEOUT)
    assert (driver.record.generation, driver.phase) == (1, Phase.RUNNING)
    driver.is_still = True
    driver.count_time(TRANSPORT_TIMEOUT - 1)
    assert driver.record.generation == 1
    driver.count_time(2)
    assert (driver.record.generation, driver.detected) == (2, [])


def test_last_evaluation_may_wait_for_the_last_checkpoint():
    """The last checkpoint waits for the previous one, with its own deadline."""
    deadline = 60.0
    driver = proposed(
        1, sections={"train": {"checkpoint_every": 1, "checkpoint_deadline": deadline}, "eval": {"every": 1}}
    )
    driver.start_and_form()
    driver.report()
    assert driver.record.is_evaluation_due
    driver.is_still = True
    driver.count_time(deadline - 1)
    assert (driver.record.generation, driver.phase) == (1, Phase.RUNNING)
    driver.count_time(2)
    assert driver.record.generation == 2


def test_plan_that_never_comes_ends_the_run(monkeypatch):
    monkeypatch.setattr(forming, "PLAN_SECONDS", 30.0)
    driver = proposed()
    driver.plan = lambda question: None
    driver.end(LATE, KILLED)
    driver.count_time(29)
    assert driver.phase is Phase.BETWEEN
    assert [ask.question.failed for ask in driver.of_kind(Ask)] == [frozenset(), {LATE}]
    with pytest.raises(RunError, match=r"no plan without workers 1\.1"):
        driver.count_time(4)


def test_ending_run_kills_no_stuck_worker_that_is_a_last_host():
    """All of them may be compiling."""
    driver = proposed()
    driver.start_and_form()
    driver.report()
    assert driver.record.committed == 0
    driver.take(EndEarly())
    driver.is_still, driver.waits = True, False
    driver.count_time(END_SECONDS)
    driver.leader.end_at_committed()
    assert (driver.killed, driver.phase) == ([], Phase.FINISHED)
    assert len(driver.record.live) == 6


# Another leader.


WORKERS = [Worker(0, 0), Worker(1, 0)]


FORM, RUN = Permit(3, "form"), Permit(3, "run")


@pytest.mark.parametrize("phase", [None, "proposed"])
def test_proposed_generation_is_abandoned_by_the_next_leader(phase):
    driver = follow(record(), phase)
    assert driver.told(Propose) == [Propose(record())]
    assert driver.told(Stop) == [Stop(3)]
    assert driver.told(Permit) == []
    assert driver.of_kind(Persist) == [Persist(cursor_of(record(), "abandoned"))]
    driver.tick()
    after = driver.record
    assert (after.generation, after.committed, after.commit, after.live) == (4, 4, FACTS, LIVE)
    assert driver.told(Propose)[-1].record == after
    assert driver.of_kind(Persist)[-1] == Persist(cursor_of(after, "proposed"), after)


@pytest.mark.parametrize("phase", ["ended", "abandoned"])
def test_next_leader_repeats_that_a_generation_is_over(phase):
    driver = follow(record(), phase)
    assert (driver.told(Stop), driver.told(Propose)) == ([Stop(3)], [])


def test_record_of_a_return_says_which_process_joins_and_lacks_the_verified_state():
    driver = follow(record(verified=Verified(4, FACTS)), "running", restarts=1)
    driver.end(Worker(1, 0), KILLED)
    driver.tick()
    driver.start_and_form()
    for _ in range(20):
        driver.tick()
        if driver.phase is Phase.RUNNING:
            driver.report()
    after = driver.record
    assert (after.joins, after.incarnations) == (["1.0"], {"1.0": 1})
    assert after.verified == Verified(4, FACTS, without=["1.0"])


def test_running_generation_continues_and_its_permits_are_repeated():
    """The last leader may have died between its register and its messages."""
    driver = follow(record(joins=["1.0"]), "running")
    assert driver.told(Permit) == [FORM, RUN]
    driver.tick()
    assert (driver.phase, driver.record) == (Phase.RUNNING, record(joins=["1.0"]))
    assert driver.told(Stop) == []
    driver.report()
    assert driver.record.committed == 5


def test_cursor_says_how_far_the_generation_has_come():
    later, verified = Commit(6, 2.5, 0.5, 1.0, next_mode="staggered"), Verified(6, None)
    progress = Progress(committed=6, commit=later, mode="staggered", verified=verified).progress()
    cursor = Cursor(3, "running", released={"1.0": 2}, gone={"1.0": 3}, **progress)
    driver = follow(record(), cursor=cursor)
    assert driver.told(Committed) == [Committed(3, later)]
    after = driver.record
    assert (after.committed, after.commit, after.mode, after.verified) == (6, later, "staggered", verified)
    assert driver.leader.cursor() == cursor


def test_fault_that_has_struck_does_not_strike_again():
    faults = [PlannedFault("kill:0.0@1", fault_worker, 1) for fault_worker in WORKERS]
    driver = follow(record(), cursor=cursor_of(record(), "running", struck={0: "1.0"}), faults=faults)
    for number in (0, 1):
        driver.say("0.0", FaultReached(number))
    driver.tick()
    assert driver.told(Strike) == [Strike(0, "1.0"), Strike(1, "0.0")]
    assert [event["worker"] for event in driver.events("fault")] == ["1.0"]
    assert driver.of_kind(Persist)[-1].cursor.struck == {0: "1.0", 1: "0.0"}


def test_cut_is_judged_only_after_heartbeats_had_time_to_arrive():
    """The agent of the silent worker does not come."""
    homes = {Worker(0, 0): 0, Worker(1, 0): 1}
    driver = follow(record(), "running", homes=homes, is_connected=False)
    driver.connect(1, messages=[FromWorker("1.0", CutOff("0.0"), 3)])
    driver.count_time(2)
    assert driver.detected == []
    driver.count_time(1)
    assert driver.detected == [("0.0", "cut off from worker 1.0")]


def test_next_leader_forms_again_before_it_judges_a_cut_between_workers_that_are_heard():
    driver = follow(record(), "running", is_connected=False)
    driver.connect(0, messages=[FromWorker("1.0", CutOff("0.0"), 3), FromWorker("0.0", CutOff("1.0"), 3)])
    driver.count_time(3)
    driver.start_and_form()
    assert (driver.record.generation, driver.record.live, driver.detected) == (4, ["0.0", "1.0"], [])
    driver.say("1.0", CutOff("0.0"))
    driver.tick()
    assert driver.detected == [("1.0", "cut off from worker 0.0")]


@pytest.mark.parametrize("is_reached", [False, True])
def test_leader_that_was_cut_off_itself_forms_again_before_it_judges_a_cut(is_reached):
    """It hears nothing of etcd, or waits for the answer to a write."""
    driver = LeaderDriver(job(3, 1, 3))
    driver.start_and_form()
    driver.now += driver.job.membership.dead_after * is_reached
    driver.take(Tick(is_reached=is_reached))
    driver.tick()
    for detected in ([], [("1.0", "cut off from worker 0.0")]):
        driver.say("1.0", CutOff("0.0"))
        driver.tick()
        assert driver.detected == detected
        driver.start_and_form()


def test_worker_that_several_cannot_reach_is_cut_off():
    driver = LeaderDriver(job(3, 1, 3))
    driver.start_and_form()
    for member, peer in (("1.0", "0.0"), ("2.0", "0.0"), ("0.0", "1.0")):
        driver.say(member, CutOff(peer))
    driver.tick()
    assert driver.detected == [("0.0", "cut off from worker 1.0")]


def test_record_of_a_restart_starts_its_workers_from_the_checkpoint():
    restarted = msgspec.structs.replace(record(), plan="", roles={}, periods={}, places={"1.0": "0.0", "0.0": "1.0"})
    begin = Begin(record=restarted, cursor=cursor_of(restarted, "abandoned"))
    driver = LeaderDriver(job(2, 1, 1), begin=begin)
    assert driver.told(Committed) == []
    driver.start()
    started = {action.worker: (action.place, action.restored) for action in driver.ordered(Start)}
    assert started == {"0.0": ("1.0", 4), "1.0": ("0.0", 4)}
    assert (driver.record.generation, driver.record.committed) == (4, 4)


def test_record_that_names_a_plan_without_file_fails():
    with pytest.raises(
        RunError, match="plan gone, which defines what the workers hold, is missing in the run directory"
    ):
        follow(record(held="gone"))
