"""Which plan the live workers run next, and when they change to a better one."""

from dataclasses import replace
from itertools import pairwise

import pytest

from recycle import Job, RunError, Schedule, Worker, check, lower
from recycle.exec.leader.actions import Action, Ask, Event, Outbox, Planned, PreparedPlan, Question
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.leader.plans import Plans, copy_cost, is_worth
from recycle.exec.protocol import Computed, Report
from recycle.job import PricedJob, price
from recycle.plans.hosting import Hosts
from tests.exec.runs import job
from tests.jobs import repriced

ELASTIC = {"layout": "elastic", "move_when": "always", "ahead": 0, "steps": 60}


LAYERS = {"model": {"layers": 8}, "memory": {"limit": 16, "state_limit": 1.5}}


ALWAYS = job(3, 2, 4, **LAYERS, planner=ELASTIC)


DEAD = frozenset({Worker(1, 1)})


NEEDED = Question(DEAD, is_urgent=True)


def prepared(job: PricedJob) -> PreparedPlan:
    """A plan in the given stages."""
    return PreparedPlan("0" * 16, {"barrier": 30.0, "staggered": 24.0}, hosts=Hosts.at_start(job, None))


def test_unplannable_layout_is_an_event_and_is_asked_for_once():
    outbox, plan = Outbox(), prepared(ALWAYS)
    plans, times = (
        Plans(ALWAYS, outbox),
        ComputeTimes.from_reports(
            {worker: Report({}, None) for worker in ALWAYS.shape.workers() if worker not in DEAD}
        ),
    )
    plans.adopt(DEAD, plan, {})
    plans.observe(DEAD, 4, times)
    (asked,) = outbox.take_actions()
    assert asked == Ask(Question(DEAD, moves=True))
    plans.take(Planned(asked.question, None, "no planner process answers"))
    for step in (5, 6):
        plans.observe(DEAD, step, times)
    (event,) = outbox.take_actions()
    cause = {"cause": "no planner process answers"}
    assert event == Event("layout", {"step": 6, "failed": ["1.1"], "moves": False, **cause})
    assert not plans.has_better(DEAD)
    assert plans.plan_for(DEAD) is plan


@pytest.mark.parametrize("period", [23.0, 25.0])
def test_faster_order_in_the_given_stages_is_adopted(period):
    outbox, plan = Outbox(), prepared(ALWAYS)
    live = [worker for worker in ALWAYS.shape.workers() if worker not in DEAD]
    plans, times = Plans(ALWAYS, outbox), ComputeTimes.from_reports({worker: Report({}, None) for worker in live})
    plans.adopt(DEAD, plan, {})
    plans.observe(DEAD, 4, times)
    better = replace(plan, digest="1" * 16, periods={"staggered": period, "barrier": 31.0})
    plans.take(Planned(Question(DEAD, moves=True), better))
    plans.observe(DEAD, 5, times)
    _, event = outbox.take_actions()
    assert (event.fields["moves"], event.fields["bytes"], event.fields["period"]) == (period < 24.0, 0.0, period)
    assert plans.plan_for(DEAD) == (better if period < 24.0 else plan)
    plans.observe(DEAD, 6, times)
    assert outbox.take_actions() == []


def test_needed_plan_is_asked_for_once_and_a_later_plan_replaces_an_error():
    outbox = Outbox()
    plans = Plans(ALWAYS, outbox)
    assert [plans.plan_for(DEAD), plans.plan_for(DEAD)] == [None, None]
    assert outbox.take_actions() == [Ask(NEEDED)]
    plans.take(Planned(NEEDED, None, "no room"))
    with pytest.raises(RunError, match=r"no plan for \(0, 1\) dead workers per stage: no room"):
        plans.plan_for(DEAD)
    plan = prepared(ALWAYS)
    plans.take(Planned(NEEDED, plan))
    assert plans.plan_for(DEAD) is plan
    assert outbox.take_actions() == []


# Times that drift.


SLOW, UNIT = Worker(1, 1), 0.015
NOBODY = frozenset()


def drifting(drift=0.5) -> PricedJob:
    sections = {"model": {"seconds_per_unit": UNIT}, "membership": {"drift": drift}}
    return job(3, 2, 4, memory={"limit": 4}, **sections)


DRIFTING = drifting()


def times_of(job: Job, factor: float, *dead: Worker) -> ComputeTimes:
    """The times of an iteration in which one worker takes `factor` times as long as the others."""
    reports = {}
    for worker in job.shape.workers():
        if worker not in dead:
            each = UNIT * (factor if worker == SLOW else 1.0)
            reports[worker] = [Computed(worker.rank, kind, 4, 4 * each) for kind in "FIW"]
    return ComputeTimes.from_reports({worker: Report({}, None, rows) for worker, rows in reports.items()})


def plan(job: PricedJob, digest: str, compared: float | None = None) -> PreparedPlan:
    """A plan of 1 s per iteration, which is compared with one of `compared` seconds."""
    return PreparedPlan(digest, {"barrier": 1.0}, hosts=Hosts.at_start(job, None), compared_period=compared)


class SlowRun:
    """A job whose worker `SLOW` is three times as slow as the others from the start."""

    def __init__(self, job: PricedJob, *, is_own=False):
        self.job, self.outbox, self._step = job, Outbox(), 0
        self.plans = Plans(job, self.outbox, (NOBODY, plan(job, "first")) if is_own else None)
        self.plans.adopt(NOBODY, plan(job, "first"), {})

    def iterate(self, *dead: Worker, steps=1, factor=3.0) -> list[Action]:
        """Iterations without the dead workers; the actions."""
        for _ in range(steps):
            self.plans.observe(frozenset(dead), self._step, times_of(self.job, factor, *dead))
            self._step += 1
        return self.outbox.take_actions()


def test_no_other_plan_is_asked_for_with_drift_off_or_by_the_users_own_schedule():
    for run in SlowRun(drifting(0)), SlowRun(DRIFTING, is_own=True):
        assert run.iterate(steps=20) == []
        assert run.plans.compute["compute"]["1.1"]["1F"] == pytest.approx(3 * UNIT)
    assert SlowRun(DRIFTING).iterate(steps=20) != []


def test_answer_for_other_live_workers_is_dropped_and_another_plan_is_asked_for():
    run, dead = SlowRun(DRIFTING), Worker(2, 1)
    (before,) = run.iterate(steps=10)
    assert before.profile.speed_of(SLOW) == pytest.approx(3)
    assert (before.question.failed, before.question.compared) == (NOBODY, "first")
    run.plans.adopt(frozenset({dead}), plan(run.job, "second"), {})
    (after,) = run.iterate(dead)
    assert (after.question.failed, after.question.compared) == ({dead}, "second")
    run.plans.take(Planned(before.question, plan(run.job, "late", compared=3.0)))
    assert run.iterate(dead) == []
    assert not run.plans.has_better(frozenset({dead}))
    run.plans.take(Planned(after.question, plan(run.job, "third", compared=3.0)))
    run.iterate(dead)
    assert run.plans.has_better(frozenset({dead}))
    better = run.plans.plan_for(frozenset({dead}))
    assert better.digest == "third"
    (event,) = run.outbox.take_actions()
    assert (event.kind, event.fields["step"], event.fields["plan"]) == ("replanned", 12 + 1, "third")
    assert (event.fields["period_before"], event.fields["period"]) == (3.0, 1.0)


@pytest.mark.parametrize(("compared", "is_better"), [(1.04, False), (1.06, True), (None, False)])
def test_plan_is_taken_up_if_it_saves_5_percent_of_the_period(compared, is_better):
    run = SlowRun(DRIFTING)
    (asked,) = run.iterate(steps=10)
    run.plans.take(Planned(asked.question, plan(run.job, "other", compared=compared)))
    run.iterate()
    assert run.plans.has_better(NOBODY) is is_better


def test_a_script_without_times_starts_with_1f1b_and_plans_anew_for_the_times_of_its_stages():
    config = price(Job.from_toml("[shape]\npipelines = 3\nranks = 2\nmicro_batches = 4\n"))
    outbox = Outbox()
    plans = Plans(config, outbox, is_script=True)
    assert plans.plan_for(NOBODY) is None
    (asked,) = outbox.take_actions()
    first = Schedule.loads(asked.question.text)
    assert check(lower(first)) == []
    assert " ".join(map(str, first.program(Worker(1, 0)))) == (
        "0F1.0 0F1.1 0I1.0 0W1.0 0F1.2 0I1.1 0W1.1 0F1.3 0I1.2 0W1.2 0I1.3 0W1.3"
    )
    plans.take(Planned(asked.question, plan(config, "1f1b")))
    seconds = {"F": 0.02, "I": 0.03, "W": 0.01}
    report = {
        worker: Report({}, None, [Computed(worker.rank, kind, 4, 4 * each) for kind, each in seconds.items()])
        for worker in config.shape.workers()
    }
    assert plans.plan_for(NOBODY) is not None
    for step in range(8):
        plans.observe(NOBODY, step, ComputeTimes.from_reports(report))
    (again,) = outbox.take_actions()
    measured = again.profile.per_stage("backward_input", 2), again.profile.per_stage("backward_weight", 2)
    assert measured == ([1.5, 1.5], [0.5, 0.5])
    assert (again.question.compared, again.question.text) == ("1f1b", "")


def test_moving_pays_when_its_saving_until_the_next_change_is_more_than_its_pause():
    assert is_worth(10.0, 9.0, pause=99.0, until_change=1000.0)
    assert not is_worth(10.0, 9.0, pause=100.0, until_change=1000.0)
    assert not is_worth(10.0, 10.0, pause=0.0, until_change=1000.0)
    assert not is_worth(10.0, 11.0, pause=-1e9, until_change=1000.0)


def test_copy_cost_serialises_each_source():
    """Three pipelines, eight layers, a byte of state for each tenth of a layer, and five bytes in a unit of time."""
    config = repriced(job(3, 2, 4, model={"layers": 8}), static=40.0, bandwidth=5.0)
    now = Hosts.of(config, {Worker(0, 0): (0,), Worker(0, 1): (1,), Worker(1, 0): (0,)})
    then = Hosts.of(config, {Worker(0, 0): (0,), Worker(0, 1): (1, 2), Worker(1, 0): (0, 1)}, (3, 2, 3))
    assert copy_cost(config, now, then) == (20.0, 2.0)  # layer 3 from 0.0 to 0.1, layer 4 from 0.1 to 1.0
    assert copy_cost(config, then, then) == (0.0, 0.0)
    more = Hosts.of(config, then.stages | {Worker(1, 0): (1, 2)}, (3, 2, 3))
    assert copy_cost(config, now, more) == (50.0, 8.0)  # layers 4 to 7 from 0.1


def test_alternating_times_change_plans_ever_more_rarely():
    """Ten iterations slow and ten not, again and again; each new plan saves much."""
    run, changes = SlowRun(DRIFTING), []
    for step in range(320):
        for action in run.iterate(factor=3.0 if step // 10 % 2 else 1.0):
            if isinstance(action, Ask):
                run.plans.take(Planned(action.question, plan(run.job, f"after {step}", compared=3.0)))
        if run.plans.has_better(NOBODY):
            run.plans.plan_for(NOBODY)
            changes.append(step)
    pauses = [later - earlier for earlier, later in pairwise(changes)]
    assert all(pause >= 8 * 2**place for place, pause in enumerate(pauses[:4]))
    assert 2 <= len(changes) <= 6
