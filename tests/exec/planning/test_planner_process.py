"""Planner processes that end or hang cost time and never an answer."""

import json
import os
import signal

import pytest

from recycle import Profile, Schedule, Worker, lower, simulate
from recycle.exec.launch.trackers import Observer
from recycle.exec.leader.actions import Planned, PreparedPlan, Question
from recycle.exec.planning import planner_process
from recycle.exec.planning.planner_process import MOST_FAILURES
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.processes import Waker
from recycle.ir import formats
from recycle.solve.planner import plan_for_training
from tests.exec.launch.test_replanning import forwards
from tests.exec.runs import calm_run, job, kinds, of_kind, varied
from tests.waiting import until

pytestmark = pytest.mark.process

JOB = job(
    3, 2, 2, planner={"ahead": 0, "steps": 10}, membership={"hung_after": 1.5, "hung_factor": 1.0, "warm_up": 20.0}
)
"""A process that is stopped before its first answer is overdue after the sum of `hung_after` and `warm_up`; one that is
stopped later, after the time that its longest answer took, which includes imports on a busy machine."""
SOME = Worker(0, 0), Worker(1, 1)
TEST_PROCESS = "RECYCLE_TEST_PROCESS"
"""Variable that holds the id of the process in which the tests run."""


@pytest.fixture
def started(monkeypatch):
    """Ids of the planner processes that were started so far."""
    ids = []

    class Noted(planner_process.Child):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            ids.append(self.process.pid)

    monkeypatch.setattr(planner_process, "Child", Noted)
    return ids


class Answers:
    """A plan service whose answers are kept."""

    def __init__(self, service: PlanService):
        self._service = service
        self.can_search = service.can_search
        self.planned = {}
        self.warnings = []

    def ask(self, *failed: Worker, moves=False, profile: Profile | None = None) -> Question:
        """Ask for the plan without the failed workers that is needed now, or for one for which workers may move."""
        question = Question(frozenset(failed), is_urgent=not moves, moves=moves)
        self._service.ask(question, profile)
        return question

    def given(self, text: str) -> Planned:
        question = Question(frozenset(), is_urgent=True, text=text)
        self._service.ask(question)
        return self.wait_for(question)

    def poll(self):
        """Take what is answered."""
        self.planned.update((planned.question, planned) for planned in self._service.poll(self.warnings.append))

    def wait_for(self, question: Question) -> Planned:
        """The answer, once it is there."""
        until(lambda: self.poll() or question in self.planned)
        return self.planned[question]

    def plan(self, *failed: Worker) -> PreparedPlan:
        """The plan without the failed workers, once it is made."""
        planned = self.wait_for(self.ask(*failed))
        assert planned.plan is not None, planned.error
        return planned.plan


@pytest.fixture
def serve(tmp_path, started):
    """Starts a plan service."""
    waker, services = Waker(), []
    (tmp_path / "plans").mkdir()

    def begin(planner=plan_for_training, job=JOB):
        services.append(PlanService(job, planner, tmp_path / "plans", tmp_path / "profiles", waker))
        return Answers(services[-1])

    yield begin
    for service in services:
        service.close()
    waker.close()


def test_a_schedule_given_as_text_steps_ahead_of_commits_only_if_the_job_allows_it(serve):
    text = formats.named_schedule("gpipe", JOB.shape).dumps()
    for staggered, modes in ((True, {"barrier", "staggered"}), (False, {"barrier"})):
        planned = serve(None, varied(JOB, planner={"staggered": staggered})).given(text)
        assert planned.plan is not None, planned.error
        assert planned.plan.periods.keys() == modes


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_process_that_dies_or_hangs_is_replaced_and_asked_again(sent, serve, started):
    calm = serve().plan(*SOME)
    plans = serve()
    plans.plan()
    before = started[2:]
    for pid in before:
        os.kill(pid, sent)
    assert plans.plan(*SOME).digest == calm.digest
    assert len(before) == 2
    assert set(started) > {*started[:2], *before}
    assert plans.warnings == []


def deadly_planner(*arguments, **known) -> str:
    """Plans in the process of the tests, and kills every other one."""
    if str(os.getpid()) != os.environ[TEST_PROCESS]:
        os.kill(os.getpid(), signal.SIGKILL)
    return plan_for_training(*arguments, **known)


def test_plan_whose_planner_kills_every_process_is_made_in_this_one(serve, started, monkeypatch):
    monkeypatch.setenv(TEST_PROCESS, str(os.getpid()))
    calm = serve().plan(*SOME)
    plans = serve(deadly_planner)
    assert plans.plan(*SOME).digest == calm.digest
    assert len(plans.warnings) == 1
    assert len(plans.plan().hosts.stages) == 6
    assert 2 + MOST_FAILURES <= len(started) <= 2 + 2 * MOST_FAILURES


def test_search_that_no_process_answers_is_given_up_with_an_error(serve, monkeypatch):
    monkeypatch.setenv(TEST_PROCESS, str(os.getpid()))
    plans = serve(deadly_planner)
    assert plans.can_search
    question = plans.ask(*SOME, moves=True)
    assert plans.wait_for(question) == Planned(question, None, "no planner process answers")
    assert plans.warnings == []


def test_open_question_survives_the_end_of_the_planner_process(serve, started):
    plans = serve()
    plans.plan()
    os.kill(started[1], signal.SIGSTOP)
    first = plans.ask(*SOME)
    plans.poll()
    assert first not in plans.planned
    os.kill(started[1], signal.SIGKILL)
    assert plans.plan(Worker(2, 1)).hosts.stages.keys() == {*JOB.shape.workers()} - {Worker(2, 1)}
    plan = plans.wait_for(first).plan
    assert len(plan.hosts.stages) == 4


def test_plans_made_ahead_answer_urgent_questions_and_end_with_the_possible_failures(serve, started):
    sections = {"planner": {"ahead": 2**31 - 1, "steps": 1}, "membership": {"hung_after": 600.0}}
    plans = serve(job=job(2, 2, 2, **sections))
    os.kill(started[1], signal.SIGSTOP)  # the process for urgent questions
    first, other, peer = Worker(0, 0), Worker(1, 1), Worker(0, 1)
    for failed in ((), (first,), (other,), (first, other), (first, peer)):
        assert len(plans.plan(*failed).hosts.stages) == 4 - len(failed)
    plans.wait_for(plans.ask(Worker(1, 1), moves=True))
    assert len(started) == 2  # the process that plans ahead has nothing else to do


def test_profile_with_slow_workers_is_planned_for_the_processes_after_any_death(serve, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"speed": {"1.1": 3.0}}))
    slow = job(3, 2, 4, times={"profile": str(tmp_path / "p.json")}, planner={"ahead": 0}, memory={"limit": 4})
    plans, dead = serve(job=slow), Worker(2, 1)
    for failed in ((), (dead,)):
        prepared = plans.plan(*failed)
        schedule = Schedule.load(tmp_path / "plans" / f"{prepared.digest}.json")
        assert schedule.failed == set(failed)
        assert forwards(schedule, Worker(1, 1)) < forwards(schedule, Worker(0, 1))
        assert prepared.periods["staggered"] == simulate(lower(schedule), slow.profile()).period


def test_profile_that_cannot_be_written_is_not_planned_for(serve, tmp_path):
    """As on a full disk; training continues with the present plan."""
    (tmp_path / "profiles").touch()
    plans = serve()
    question = plans.ask(*SOME, profile=JOB.prices)
    assert plans.wait_for(question).plan is None
    assert [warning.partition(":")[0] for warning in plans.warnings] == ["no plan for the measured times"]


class _Strike(Observer):
    """Kills all planner processes after a step."""

    def __init__(self, started: list[int], after: int):
        self._started, self._after = started, after

    def committed(self, line):
        if line["step"] == self._after:
            for pid in self._started:
                os.kill(pid, signal.SIGKILL)


def test_losses_stay_the_same_when_three_workers_die_after_all_planner_processes(launch, started):
    run = launch(JOB, 5, "kill:0.0@3", "kill:1.1@3", "kill:2.0@3", observer=_Strike(started, 1))
    assert run.losses == calm_run(JOB, launch, 5).losses
    assert len(started) >= 3  # the one that is asked has been replaced
    assert of_kind(run, "detected")
    assert run.metrics[-1]["live_workers"] == 3
    assert "warning" not in kinds(run)
