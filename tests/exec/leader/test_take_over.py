"""A leader that follows another: what the register says is told again, what it does not say is void."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from recycle import RunError
from recycle.exec.leader.actions import Begin, Finish, Line, Persist, PreparedPlan, Question, Rewind
from recycle.exec.leader.generations import END_SECONDS
from recycle.exec.leader.state import Phase, PlannedFault
from recycle.exec.protocol import (
    AgentProcess,
    Commit,
    Committed,
    Copy,
    Cursor,
    CutOff,
    Evaluated,
    EvaluationReport,
    EvaluationResult,
    FaultReached,
    FinalState,
    FromWorker,
    GenerationRecord,
    Permit,
    Progress,
    Propose,
    Ready,
    Start,
    StepReport,
    Stop,
    Strike,
    Verified,
)
from recycle.exec.protocol import GenerationPhase as PersistedPhase
from recycle.job.shape import Worker
from tests.exec.leader.driver import LeaderDriver
from tests.exec.runs import job

LIVE = ["0.0", "1.0"]
WORKERS = [Worker(0, 0), Worker(1, 0)]
FACTS = Commit(4, 1.5, 0.25, 1.0)
LAST = Commit(8, 1.5, 0.25, 1.0, finished=True)
FORM, RUN = Permit(3, "form"), Permit(3, "run")


def record(commit: Commit = FACTS, joins: Sequence[str] = (), **more: Any) -> GenerationRecord:
    roles = {worker: worker for worker in LIVE}
    return GenerationRecord(
        3, LIVE, roles, "plan", list(joins), {"barrier": 7.0}, committed=commit.step, commit=commit, **more
    )


def cursor_of(of: GenerationRecord, phase: PersistedPhase, **more: Any) -> Cursor:
    return Cursor(of.generation, phase, **of.progress(), **more)


def follow(
    before: GenerationRecord, phase: PersistedPhase | None = "proposed", cursor: Cursor | None = None, **run: Any
) -> LeaderDriver:
    """A leader that finds this record, and a cursor in this phase; None for a cursor of an earlier generation."""
    if cursor is None:
        earlier = Cursor(before.generation - 1, "ended", committed=0)
        cursor = earlier if phase is None else cursor_of(before, phase)
    begin = Begin(record=before, cursor=cursor)
    return LeaderDriver(job(2, 1, 1), begin=begin, running=before.live, **run)


def test_commit_in_the_register_is_told_to_all_and_its_line_is_written() -> None:
    driver = follow(record(), "running")
    assert driver.told(Committed) == [Committed(3, FACTS)]
    assert [(action.line["step"], action.line["period"]) for action in driver.of_kind(Line)] == [(4, 7.0)]
    assert driver.events("coordinator") == [{"node": 0, "generation": 3, "step": 5}]
    assert driver.of_kind(Rewind) == [Rewind(4)]


@pytest.mark.parametrize("phase", [None, "proposed"])
def test_generation_that_has_only_been_proposed_is_told_and_over(phase: PersistedPhase | None) -> None:
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


def test_generation_that_runs_goes_on_and_its_permissions_are_told_again() -> None:
    """The last leader may have died between its register and its messages."""
    driver = follow(record(joins=["1.0"]), "running")
    assert driver.told(Permit) == [FORM, RUN]
    driver.tick()
    assert (driver.phase, driver.record) == (Phase.RUNNING, record(joins=["1.0"]))
    assert driver.told(Stop) == []
    driver.report()
    assert driver.record.committed == 5


@pytest.mark.parametrize("phase", ["ended", "abandoned"])
def test_generation_that_is_over_is_stopped_again(phase: PersistedPhase) -> None:
    driver = follow(record(joins=["1.0"]), phase)
    assert driver.told(Stop) == [Stop(3)]
    assert (driver.told(Permit), driver.told(Propose)) == ([], [])
    driver.tick()
    assert (driver.phase, driver.record.generation) == (Phase.PROPOSED, 4)
    assert driver.record.joins == ([] if phase == "ended" else ["1.0"])


def test_generation_whose_last_iteration_is_committed_does_not_go_on() -> None:
    last = record(msgspec.structs.replace(FACTS, last=4))
    driver = follow(record(Commit(3, 2.5, 0.25, 1.0)), cursor=cursor_of(last, "running"))
    assert driver.told(Stop) == [Stop(3)]
    driver.tick()
    assert (driver.phase, driver.record.generation) == (Phase.PROPOSED, 4)


def test_generation_goes_on_that_began_after_the_last_iteration_of_the_one_before() -> None:
    driver = follow(record(msgspec.structs.replace(FACTS, last=4)), "running")
    driver.report()
    assert (driver.record.committed, driver.told(Stop)) == (5, [])


def test_cursor_says_how_far_the_generation_has_come() -> None:
    later, verified = Commit(6, 2.5, 0.5, 1.0, next_mode="staggered"), Verified(6, None)
    progress = Progress(committed=6, commit=later, mode="staggered", verified=verified).progress()
    cursor = Cursor(3, "running", released={"1.0": 2}, gone={"1.0": 3}, **progress)
    driver = follow(record(), cursor=cursor)
    assert driver.told(Committed) == [Committed(3, later)]
    after = driver.record
    assert (after.committed, after.commit, after.mode, after.verified) == (6, later, "staggered", verified)
    assert driver.leader.generations.cursor() == cursor


def test_last_two_commits_of_the_generation_are_told_again() -> None:
    """A process that has not heard of the first waits for it, although it has reported the step of the second."""
    driver = follow(record(), "running")
    driver.report()
    driver.report()
    cursor = driver.leader.generations.cursor()
    commits = [message.commit for message in driver.told(Committed)[-2:]]
    assert [commit.step for commit in commits] == [5, 6]
    assert follow(record(), cursor=cursor).told(Committed) == [Committed(3, commit) for commit in commits]


def test_first_iteration_after_a_take_over_counts_from_then_on() -> None:
    """The leader's clock has run for longer than any iteration takes."""
    driver = follow(record(), "running")
    driver.report()
    assert driver.record.committed == 5
    assert driver.leader.generations.end_patience == END_SECONDS


def test_worker_whose_copy_may_not_be_complete_copies_again() -> None:
    driver = follow(record(joins=["1.0"]))
    driver.tick()
    assert driver.record.joins == ["1.0"]
    assert driver.record.copies == [Copy("1.0", "0.0", 0, 4)]


def test_workers_that_were_told_to_go_back_do_so_and_one_that_has_not_kept_the_state_copies_it() -> None:
    """The generation of such a record is over from the start."""
    back = record(joins=["1.0"], verified=Verified(4, FACTS, ["1.0"]))
    driver = follow(back, "abandoned")
    driver.tick()
    after = driver.record
    assert (after.generation, after.committed, after.commit, after.joins) == (4, 4, FACTS, ["1.0"])
    assert after.verified == Verified(4, FACTS, ["1.0"])
    assert after.copies == [Copy("1.0", "0.0", 0, 4)]


def test_worker_that_joins_has_not_kept_the_state_to_go_back_to() -> None:
    driver = follow(record(joins=["1.0"], verified=Verified(2, None)))
    driver.tick()
    assert driver.record.verified == Verified(2, None, ["1.0"])


def test_run_whose_last_step_is_committed_is_finished() -> None:
    driver = follow(record(LAST), "running")
    assert driver.phase is Phase.FINISHED
    assert driver.told(Committed) == [Committed(3, LAST)]
    assert [action.line["step"] for action in driver.of_kind(Line)] == [8]
    assert driver.told(Stop) == []


@pytest.mark.parametrize("phase", ["proposed", "running"])
def test_run_that_was_ended_early_is_finished(phase: PersistedPhase) -> None:
    driver = follow(record(msgspec.structs.replace(FACTS, last=4, finished=True)), phase)
    assert driver.phase is Phase.FINISHED
    for member in LIVE:
        driver.say(member, FinalState({0: "digest"}))
    driver.tick()
    assert driver.of_kind(Finish) == [Finish({member: {0: "digest"} for member in LIVE}, True, 4)]
    assert driver.told(Stop) == []


def to_evaluate(commit: Commit, result: Evaluated | None) -> GenerationRecord:
    return record(msgspec.structs.replace(commit, evaluate=True), evaluated=result)


def test_evaluation_in_the_register_is_told_and_no_other_follows() -> None:
    result = Evaluated(8, 2.5, 96.0)
    driver = follow(to_evaluate(LAST, result), "running")
    assert driver.phase is Phase.FINISHED
    assert driver.told(EvaluationResult) == [EvaluationResult(3, result)]
    assert [action.line["eval_loss"] for action in driver.of_kind(Line)] == [2.5]


def test_evaluation_that_runs_goes_on() -> None:
    driver = follow(to_evaluate(LAST, None), "running")
    for member in LIVE:
        driver.say(member, StepReport(8, EvaluationReport([3.0], [2.0])))
    driver.tick()
    assert driver.told(EvaluationResult) == [EvaluationResult(3, Evaluated(8, 1.5, 4.0))]
    assert driver.phase is Phase.FINISHED
    assert [action.line["eval_loss"] for action in driver.of_kind(Line)] == [1.5]


@pytest.mark.parametrize("earlier", [None, Evaluated(2, 2.5, 96.0)])
def test_evaluation_that_was_not_done_is_due_in_the_next_generation(earlier: Evaluated | None) -> None:
    driver = follow(to_evaluate(msgspec.structs.replace(LAST, last=8), earlier))
    assert driver.told(Stop) == [Stop(3)]
    driver.tick()
    after = driver.record
    assert (after.generation, after.committed, after.evaluated) == (4, 8, earlier)
    assert after.is_evaluation_due
    assert after.commit is not None
    assert after.commit.last is None


def test_fault_that_has_struck_does_not_strike_again() -> None:
    faults = [PlannedFault("kill:0.0@1", fault_worker, 1) for fault_worker in WORKERS]
    driver = follow(record(), cursor=cursor_of(record(), "running", struck={0: "1.0"}), faults=faults)
    for number in (0, 1):
        driver.say("0.0", FaultReached(number))
    driver.tick()
    assert driver.told(Strike) == [Strike(0, "1.0"), Strike(1, "0.0")]
    assert [event["worker"] for event in driver.events("fault")] == ["1.0"]
    assert driver.of_kind(Persist)[-1].cursor.struck == {0: "1.0", 1: "0.0"}


def test_workers_that_cannot_reach_each_other_are_judged_after_it_is_known_who_is_silent() -> None:
    """The agent of the silent worker does not come."""
    homes = {Worker(0, 0): 0, Worker(1, 0): 1}
    driver = follow(record(), "running", homes=homes, is_connected=False)
    driver.connect(1, said=[FromWorker("1.0", CutOff("0.0"), 3)])
    driver.pass_time(2)
    assert driver.detected == []
    driver.pass_time(1)
    assert driver.detected == [("0.0", "cut off from worker 1.0")]


def test_worker_that_the_last_leader_has_started_for_its_return_joins() -> None:
    before = msgspec.structs.replace(record(), live=["0.0"], roles={"0.0": "0.0"})
    back = [PlannedFault("rejoin:1.0@6", Worker(1, 0), 6, strikes=False)]
    driver = follow(before, "running", faults=back, is_connected=False)
    driver.processes[0][Worker(1, 0)] = AgentProcess("1.0", 1, 3)
    driver.connect(0, said=[FromWorker("1.0", Ready(1))])
    driver.report()
    driver.start()
    assert (driver.record.committed, driver.record.joins) == (5, ["1.0"])
    assert (driver.killed, driver.ordered(Start)) == ([], [])


@pytest.mark.parametrize("is_new", [False, True])
def test_worker_that_has_left_is_started_again_by_a_new_agent_only(is_new: bool) -> None:
    before = msgspec.structs.replace(record(), live=["0.0"], roles={"0.0": "0.0"})
    cursor = cursor_of(before, "running", released={"1.0": 1}, gone={"1.0": 0})
    driver = follow(before, cursor=cursor, restarts=3, homes={Worker(0, 0): 0, Worker(1, 0): 1}, is_connected=False)
    driver.connect(0)
    driver.processes[1][Worker(1, 0)] = AgentProcess("1.0", 0, 0, "ended with exit code 0")
    driver.connect(1, is_new=is_new)
    driver.pass_time(1)
    assert [action.incarnation for action in driver.ordered(Start)] == [1] * is_new


def test_record_of_a_restart_starts_its_workers_from_the_checkpoint() -> None:
    restarted = msgspec.structs.replace(record(), plan="", roles={}, periods={}, places={"1.0": "0.0", "0.0": "1.0"})
    begin = Begin(record=restarted, cursor=cursor_of(restarted, "abandoned"))
    driver = LeaderDriver(job(2, 1, 1), begin=begin)
    assert driver.told(Committed) == []
    driver.start()
    started = {action.worker: (action.place, action.restored) for action in driver.ordered(Start)}
    assert started == {"0.0": ("1.0", 4), "1.0": ("0.0", 4)}
    assert (driver.record.generation, driver.record.committed) == (4, 4)


def test_record_that_names_a_plan_without_file_fails() -> None:
    with pytest.raises(RunError, match="plan gone, which says what the workers hold, is not in the run directory"):
        follow(record(held="gone"))


def test_plan_of_the_last_leader_is_not_asked_for_again() -> None:
    plan = PreparedPlan("plan", {worker: worker for worker in WORKERS}, {"barrier": 7.0})
    begin = Begin(record=record(), cursor=cursor_of(record(), "ended"), plan=plan)
    driver = LeaderDriver(job(2, 1, 1), begin=begin, running=LIVE)
    asked: list[Question] = []
    driver.plan = asked.append
    driver.tick()
    assert (driver.record.generation, driver.record.plan, asked) == (4, "plan", [])
