"""Which plan the live workers run next: the planner is real, and workers report no times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recycle import RunError
from recycle.exec.leader.actions import Ask, Event, Outbox, Planned, PreparedPlan, Question
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.leader.plans import Plans
from recycle.exec.protocol import Report
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts
from tests.exec.leader.real_planner import RealPlanner, real_planner
from tests.exec.runs import job


class PlannedRun:
    """The plans of a run."""

    def __init__(self, job: PricedJob, planner: RealPlanner) -> None:
        self.planner, self.plans = planner, Plans(job, planner.answers, planner.outbox)
        self._workers, self._step = frozenset(job.shape.workers()), 0

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.planner.events

    def ready(self, *dead: Worker) -> PreparedPlan:
        """The plan without the dead workers."""
        return self.planner.wait_for(lambda: self.plans.ready(frozenset(dead)))

    def commit(self, *dead: Worker) -> bool:
        """Two iterations without the dead workers, with all questions answered; whether a better plan follows."""
        times = ComputeTimes.of({worker: Report({}, None) for worker in sorted(self._workers.difference(dead))})
        for _ in range(2):
            self.plans.observe(frozenset(dead), self._step, times)
            self.planner.answer_all()
            self._step += 1
        return self.plans.has_better(frozenset(dead))


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannedRun]:
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))
    with real_planner(request.param, tmp_path) as planner:
        yield PlannedRun(request.param, planner)


ELASTIC = {"layout": "elastic", "move_when": "always", "ahead": 0, "steps": 60}


@pytest.mark.process
@pytest.mark.parametrize(
    "run",
    [job(3, 4, 6, model={"layers": 4}, memory={"limit": 4, "state_limit": 1.0}, planner=ELASTIC)],
    indirect=True,
)
def test_better_order_in_the_given_stages_is_adopted_once(run: PlannedRun) -> None:
    dead = Worker(1, 1)
    first = run.ready(dead)
    assert run.commit(dead)
    (event,) = run.events
    assert (event["kind"], event["moves"], event["bytes"]) == ("layout", True, 0)
    second = run.ready(dead)
    assert second.periods["staggered"] == event["period"] < event["period_before"] == first.periods["staggered"]
    assert second.hosts is not None
    assert not second.hosts.cut
    assert not run.commit(dead)
    assert run.ready(dead) == second
    assert len(run.events) == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("run", "limit"),
    [
        (
            job(2, 2, 4, memory={"limit": 8}, planner=ELASTIC),
            {"key": "memory.state_limit", "value": 1.25, "needed": 1.5},
        ),
        (
            job(2, 2, 4, memory={"limit": 1, "state_limit": 1.5}, planner=ELASTIC),
            {"key": "memory.limit", "value": 1, "needed": 2},
        ),
    ],
    ids=["state", "activations"],
    indirect=["run"],
)
def test_event_names_the_limit_that_keeps_layers_in_place(run: PlannedRun, limit: dict[str, Any]) -> None:
    dead = Worker(1, 1)
    run.ready(dead)
    run.commit(dead)
    (event,) = run.events
    assert event["bytes"] == 0
    assert (event["layout_limit"]["cause"], *event["layout_limit"]["limits"]) == ("limits", limit)
    assert event["layout_limit"]["period"] < min(21, event["period"], event["period_before"])


LAYERS = {"model": {"layers": 8}, "memory": {"limit": 16, "state_limit": 1.5}}
ALWAYS = job(3, 2, 4, **LAYERS, planner=ELASTIC)
SLOW_COPIES = msgspec.structs.replace(ALWAYS, prices=replace(ALWAYS.prices, static=40.0, bandwidth=1e-3))


def move_layers_without(run: PlannedRun, dead: Worker) -> Hosts:
    """The hosts after layers have moved because of a death."""
    run.ready(dead)
    assert run.commit(dead)
    layout = run.ready(dead).hosts
    assert layout is not None
    assert layout.cut
    assert not run.commit(dead)
    return layout


@pytest.mark.process
@pytest.mark.parametrize("run", [ALWAYS], indirect=True)
def test_death_after_a_move_is_rerouted_in_that_layout_and_the_last_return_restores_the_given_stages(
    run: PlannedRun,
) -> None:
    dead, other = Worker(1, 1), Worker(0, 0)
    layout = move_layers_without(run, dead)
    at_once = run.ready(dead, other)
    assert at_once.hosts is not None
    assert at_once.hosts.cut == layout.cut
    assert at_once.hosts.units == {worker: units for worker, units in layout.units.items() if worker != other}
    assert run.ready(dead).hosts == layout  # the other did not die after all
    assert [event["failed"] for event in run.events] == [["1.1"]]
    given = run.ready()
    assert given.hosts is not None
    assert not given.hosts.cut
    event = run.events[-1]
    assert (event["failed"], event["returned"], event["moves"]) == ([], ["1.1"], True)
    assert event["period"] == given.periods["staggered"] < event["period_before"]


@pytest.mark.process
@pytest.mark.parametrize("run", [SLOW_COPIES], indirect=True)
def test_returning_worker_hosts_its_stage_in_the_moved_layout_where_moving_back_does_not_pay(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Worker(1, 1)
    layout = move_layers_without(run, dead)
    reserved = msgspec.structs.replace(ALWAYS.planner, move_when="worth", iterations_between_changes=5)
    monkeypatch.setattr(run.plans, "_job", msgspec.structs.replace(SLOW_COPIES, planner=reserved))
    stays = run.ready()
    assert stays.hosts is not None
    assert stays.hosts.units == {**layout.units, dead: Hosts.at_start(ALWAYS, None).units[dead]}
    event = run.events[-1]
    assert (event["failed"], event["returned"], event["moves"]) == ([], ["1.1"], False)
    assert event["pause"] > event["until_change"]
    assert not run.commit()
    assert run.ready() == stays
    assert [event["moves"] for event in run.events] == [True, False, False]  # another layout was asked for


DEAD = frozenset({Worker(1, 1)})
NEEDED = Question(DEAD, is_urgent=True)


def prepared(job: PricedJob, *dead: Worker) -> PreparedPlan:
    """A plan in the given stages."""
    live = [worker for worker in job.shape.workers() if worker not in dead]
    hosts = Hosts.at_start(job, None)
    return PreparedPlan(
        "0" * 16, {worker: worker for worker in live}, {"barrier": 30.0, "staggered": 24.0}, hosts=hosts
    )


def test_needed_plan_is_asked_for_once_and_a_later_plan_replaces_an_error() -> None:
    outbox = Outbox()
    answers = PlanAnswers(ALWAYS, outbox)
    assert answers.needed(DEAD) is None
    assert answers.needed(DEAD) is None
    assert outbox.take() == [Ask(NEEDED)]
    answers.take(Planned(NEEDED, None, "no room"))
    with pytest.raises(RunError, match=r"no plan for \(0, 1\) dead workers per stage: no room"):
        answers.needed(DEAD)
    plan = prepared(ALWAYS, *DEAD)
    answers.take(Planned(NEEDED, plan))
    assert answers.needed(DEAD) is plan
    assert answers.hosts[plan.digest] == plan.hosts
    assert outbox.take() == []


def test_next_leader_uses_the_plan_in_use_without_asking() -> None:
    outbox, plan = Outbox(), prepared(ALWAYS, *DEAD)
    answers = PlanAnswers(ALWAYS, outbox)
    earlier = Hosts.at_start(SLOW_COPIES, None)
    answers.adopt(DEAD, plan, {"1" * 16: earlier})
    assert Plans(ALWAYS, answers, outbox).ready(DEAD) is plan
    assert answers.hosts["1" * 16] is earlier
    assert outbox.take() == []


def test_no_layout_is_asked_for_where_the_users_own_schedule_runs() -> None:
    outbox, plan = Outbox(), prepared(ALWAYS, *DEAD)
    plans = Plans(ALWAYS, PlanAnswers(ALWAYS, outbox, own=(DEAD, plan)), outbox)
    assert plans.ready(DEAD) is plan
    plans.observe(DEAD, 0, ComputeTimes.of({worker: Report({}, None) for worker in plan.roles}))
    assert outbox.take() == []


def test_layout_that_cannot_be_planned_is_an_event_and_is_not_asked_for_again() -> None:
    outbox, plan = Outbox(), prepared(ALWAYS, *DEAD)
    answers = PlanAnswers(ALWAYS, outbox)
    answers.adopt(DEAD, plan, {})
    plans, times = Plans(ALWAYS, answers, outbox), ComputeTimes.of({worker: Report({}, None) for worker in plan.roles})
    plans.observe(DEAD, 4, times)
    (asked,) = outbox.take()
    assert asked == Ask(Question(DEAD, moves=True))
    answers.take(Planned(asked.question, None, "no planner process answers"))
    for step in (5, 6):
        plans.observe(DEAD, step, times)
    (event,) = outbox.take()
    cause = {"cause": "no planner process answers"}
    assert event == Event("layout", {"step": 6, "failed": ["1.1"], "moves": False, **cause})
    assert not plans.has_better(DEAD)
    assert plans.ready(DEAD) is plan
