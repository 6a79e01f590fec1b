"""The start of a run, the way back to a checkpoint after a stage was lost, and the end."""

import pytest

from recycle import JobError, RunError, Worker
from recycle.exec.leader.actions import (
    Begin,
    EndEarly,
    FindCheckpoint,
    Finish,
    Line,
    Rewind,
    StoredCheckpoint,
)
from recycle.exec.leader.state import Phase
from recycle.exec.protocol import (
    LINE_SEPARATOR,
    REFUSED_THE_JOB,
    STAGE_LOST,
    Commit,
    EvaluationReport,
    FinalState,
    Start,
    StepReport,
)
from tests.exec.leader.driver import KILLED, LeaderDriver
from tests.exec.runs import job

START_DEADLINE, REJOIN_DEADLINE = 8.0, 5.0


LIMITS = {
    "heartbeat": 0.5,
    "dead_after": 2.0,
    "warm_up": 3.0,
    "start_deadline": START_DEADLINE,
    "rejoin_deadline": REJOIN_DEADLINE,
}


STORED = StoredCheckpoint(3, Commit(3, 1.5, 0.25, 1.0), has_metrics=True)


STAGE_1 = [Worker(0, 1), Worker(1, 1)]


AGAIN = "; continue from the script's checkpoint with: "


def begun(begin: Begin | None = None, **run) -> LeaderDriver:
    """Two pipelines of two stages, whose workers are about to be started."""
    return LeaderDriver(job(2, 2, 2, membership=LIMITS), begin=begin, **run)


def started(driver: LeaderDriver, since=0) -> dict[str, tuple[int, int, int | None]]:
    """Worker -> incarnation, generation before and step restored, of the processes that were started."""
    asked = driver.ordered(Start)[since:]
    return {str(start.worker): (start.incarnation, start.generation, start.restored) for start in asked}


def test_run_fails_when_nodes_or_workers_are_late():
    driver = begun(is_connected=False)
    with pytest.raises(RunError, match=r"agents of nodes 0 were not ready within 8 s .*; see the logs"):
        driver.count_time(START_DEADLINE + 1)
    driver = begun()
    driver.starts_up = False
    with pytest.raises(RunError, match=r"workers 0\.0 0\.1 1\.0 1\.1 were not ready within 8 s .*; see the logs"):
        driver.count_time(START_DEADLINE + 1)


@pytest.mark.parametrize("before", ["12:00 worker 0.1 ends: ", f"usage: script{LINE_SEPARATOR}"])
def test_job_that_a_worker_refuses_is_an_error_of_the_job(before):
    driver = begun()
    driver.starts_up = False
    driver.tick()
    driver.end(Worker(0, 1), f"ended with {REFUSED_THE_JOB}", f"{before}[model] layers: too few")
    with pytest.raises(JobError, match=r"^\[model\] layers: too few$"):
        driver.tick()


def test_a_script_without_a_session_is_told_so():
    driver = begun(script_restarts=0)
    driver.starts_up = False
    driver.tick()
    driver.end(Worker(0, 1), "ended with exit code 0", "")
    with pytest.raises(RunError, match=r"has called no session\.attach"):
        driver.tick()


def test_resumed_run_starts_its_workers_from_the_checkpoint():
    driver = begun(Begin(checkpoint=STORED, generation=5, kept=frozenset({3})))
    assert driver.events("restored") == [
        {"step": 4, "checkpoint": "step-00000003", "live": ["0.0", "0.1", "1.0", "1.1"]}
    ]
    driver.start()
    assert set(started(driver).values()) == {(0, 5, 3)}
    assert (driver.record.generation, driver.record.committed) == (6, 3)
    driver.start_and_form()
    driver.report()
    assert [action.line["step"] for action in driver.of_kind(Line)] == [4]


def test_evaluation_that_a_checkpoint_leaves_is_made_up_for():
    evaluate = Commit(3, 1.5, 0.25, 1.0, evaluate=True)
    small = job(2, 2, 2, eval={"every": 4})
    due = LeaderDriver(small, begin=Begin(checkpoint=StoredCheckpoint(3, evaluate, has_metrics=False)))
    due.start_and_form()
    assert due.record.is_evaluation_due
    done = LeaderDriver(small, begin=Begin(checkpoint=StoredCheckpoint(3, evaluate, has_metrics=True)))
    done.start_and_form()
    assert not done.record.is_evaluation_due


def lost(driver: LeaderDriver):
    """Both hosts of stage 1 die after step 4."""
    driver.start_and_form()
    for _ in range(5):
        driver.report()
    for worker in STAGE_1:
        driver.end(worker, KILLED)
    driver.tick()


def test_lost_stage_restores_the_newest_checkpoint():
    driver = begun()
    driver.checkpoint = STORED
    lost(driver)
    assert driver.killed == [Worker(0, 0), Worker(1, 0)]
    count = len(driver.ordered(Start))
    driver.start()
    assert driver.of_kind(FindCheckpoint) == [FindCheckpoint(None)]
    assert started(driver, count) == {"0.0": (1, 2, 3), "0.1": (1, 2, 3)}
    places = {start.worker: start.place for start in driver.ordered(Start)[count:]}
    assert places == {"0.0": "0.0", "0.1": "1.0"}
    assert driver.of_kind(Rewind) == [Rewind(3)]
    assert driver.events("restored") == [{"step": 4, "checkpoint": "step-00000003", "live": ["0.0", "0.1"]}]
    driver.start_and_form()
    driver.report()
    assert [action.line["step"] for action in driver.of_kind(Line)] == [0, 1, 2, 3, 4, 4]


def test_run_fails_when_too_few_workers_are_left():
    driver = LeaderDriver(job(1, 2, 2, membership=LIMITS))
    driver.checkpoint = STORED
    driver.start_and_form()
    driver.end(Worker(0, 1), KILLED)
    says = (
        "stage 1 has no live host left .* and 1 live workers are too few for 2 ranks; resume from step-00000003 with: "
    )
    with pytest.raises(RunError, match=says) as raised:
        driver.count_time(2)
    assert raised.value.code == "stage-lost"


def test_the_loss_of_a_stage_is_told_with_a_worker_that_held_it():
    driver = begun()
    driver.start_and_form()
    for worker in (Worker(0, 0), Worker(1, 0), Worker(1, 1)):
        driver.end(worker, KILLED)
    with pytest.raises(RunError, match=r"stage 0 has no live host left .* lost with worker 1\.0"):
        driver.count_time(2)


def test_nodes_that_may_return_are_waited_for_until_a_deadline():
    driver = begun(restarts=1)
    driver.checkpoint = STORED
    driver.start_and_form()
    driver.disconnect(0)
    while driver.phase is Phase.RUNNING:
        driver.tick()
    driver.count_time(REJOIN_DEADLINE - 1)
    assert driver.phase is Phase.RESTORING
    with pytest.raises(RunError, match="0 live workers are too few for 2 ranks"):
        driver.count_time(2)


@pytest.mark.parametrize(
    ("ends", "commits", "exit_code", "remedy"),
    [
        (["ValueError: 5", "ValueError: 5"], 0, 1, "; the script would fail again: mend it, see "),
        (["ValueError: 5", "ValueError: 5"], 1, STAGE_LOST, AGAIN),
        (["ValueError: 5", "ValueError: 6"], 0, STAGE_LOST, AGAIN),
        (["ValueError: 5", ""], 0, STAGE_LOST, AGAIN),
    ],
)
def test_script_that_fails_alike_at_once_is_not_to_be_started_again(ends, commits, exit_code, remedy):
    driver = begun(script_restarts=0)
    driver.start_and_form()
    for _ in range(commits):
        driver.report()
    for worker, line in zip(STAGE_1, ends, strict=True):
        driver.end(worker, "ended with exit code 1" if line else KILLED, line)
    driver.tick()
    for worker in (Worker(0, 0), Worker(1, 0)):
        driver.end(worker, f"ended with exit code {STAGE_LOST}")
    with pytest.raises(RunError, match=f"stage 1 has no live host .*{remedy}") as raised:
        driver.tick()
    assert raised.value.exit_code == exit_code


def test_workers_that_cannot_be_ended_fail_the_run():
    driver = begun()
    driver.kills = False
    lost(driver)
    with pytest.raises(RunError, match=r"and workers 0\.0 1\.0 could not be ended for the restore"):
        driver.count_time(REJOIN_DEADLINE + 1)


def test_restore_waits_for_a_checkpoint_in_completion():
    driver = LeaderDriver(job(2, 2, 2, membership=LIMITS, train={"checkpoint_every": 5}))
    driver.checkpoint = STORED
    driver.start_and_form()
    for _ in range(5):
        driver.report()
    driver.save_parts()
    for worker in STAGE_1:
        driver.end(worker, KILLED)
    driver.tick()
    assert driver.leader.checkpoints.kept == {4}
    assert driver.events("checkpoint") != []


# The end.


ENDING = {"heartbeat": 0.5, "dead_after": 2.0, "hung_after": 2.0, "hung_factor": 1.0, "grace": 8.0}


def running(steps=1, run=None, **sections) -> LeaderDriver:
    driver = LeaderDriver(job(2, 2, 2, membership=ENDING, **sections), steps, **run or {})
    driver.start_and_form()
    return driver


def finished(**sections) -> LeaderDriver:
    """Four workers that have committed the only iteration."""
    driver = running(**sections)
    driver.report(states=1 if "integrity" in sections else None)
    assert driver.phase is Phase.FINISHED
    return driver


def leave_state(driver: LeaderDriver, name: str, digest="same"):
    driver.say(name, FinalState({Worker.parse(name).rank: digest}))


def test_worker_that_dies_or_hangs_after_the_last_commit_ends_with_the_run():
    driver = finished()
    for name in ("0.1", "1.0"):
        leave_state(driver, name)
    driver.end(Worker(0, 0), KILLED)
    driver.is_still, driver.waits = True, False
    driver.count_time(12)
    assert driver.detected == [("0.0", KILLED), ("1.1", "no progress for 9 s in form")]
    assert [event["over"] for event in driver.events("detected")] == [True, True]
    assert [finish.digests for finish in driver.of_kind(Finish)] == [{"0.1": {1: "same"}, "1.0": {0: "same"}}]


def test_a_script_that_fails_in_all_workers_after_the_last_step_fails_the_run():
    driver = running(run={"script_restarts": 0})
    driver.report()
    for name in driver.record.live:
        driver.say(name, StepReport(0, EvaluationReport([], [])))
    driver.tick()
    assert driver.phase is Phase.FINISHED
    for name in driver.record.live:
        driver.end(Worker.parse(name), "ended with exit code 1", "ValueError: 5")
    with pytest.raises(RunError, match=r"worker 1\.1 ended with exit code 1 \(ValueError: 5\)"):
        driver.tick()


def test_final_states_that_differ_are_an_event():
    driver = finished()
    for name in driver.record.live:
        leave_state(driver, name, "other" if name == "1.1" else "same")
    driver.tick()
    (event,) = driver.events("corrupt")
    assert (event["step"], event["held"]) == (0, {1: {"0.1": "same", "1.1": "other"}})
    assert len(driver.of_kind(Finish)) == 1


def test_final_states_that_differ_fail_a_run_that_compares_states():
    driver = finished(integrity={"digests": 1})
    leave = [name for name in driver.record.live if name != "1.1"]
    for name in leave:
        leave_state(driver, name)
    leave_state(driver, "1.1", "other")
    with pytest.raises(
        RunError, match=r"workers 0\.1 and 1\.1 end with different states of .*1; the steps after step -1"
    ) as raised:
        driver.tick()
    assert raised.value.code == "states-differ"
    assert driver.of_kind(Rewind) == [Rewind(-1, checkpoints=True)]
    assert driver.of_kind(Finish) == []


def test_early_end_falls_back_to_the_committed_step():
    driver = running(steps=9)
    driver.report()
    driver.take(EndEarly())
    driver.count_time(ENDING["grace"] / 2 - 1)
    assert driver.phase is Phase.RUNNING
    driver.count_time(2)
    assert (driver.phase, driver.record.generation) == (Phase.FINISHED, 2)
    assert (driver.record.commit.last, driver.record.commit.checkpoint) == (0, True)
    for name in driver.record.live:
        leave_state(driver, name)
    driver.save_parts()
    driver.tick()
    driver.tick()
    assert driver.events("stopped") == [{"step": 0, "checkpoint": "step-00000000"}]


def test_early_end_before_the_first_iteration_needs_no_checkpoint():
    driver = LeaderDriver(job(2, 2, 2, membership=ENDING))
    driver.tick()
    driver.take(EndEarly())
    driver.tick()
    assert driver.events("stopped") == [{"step": -1, "checkpoint": None}]
    assert driver.of_kind(Finish) == [Finish({}, True, -1, merge=False)]
