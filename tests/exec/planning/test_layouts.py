"""Which plan runs next, asked as the coordinator asks: planners are real, what workers report says nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recycle.cli.planner import plan_for_training
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.membership.interfaces import Ready
from recycle.exec.planning.layouts import Layouts
from recycle.exec.planning.planning import PlanService
from recycle.exec.planning.replanning import Replanner
from recycle.exec.processes.waker import Waker
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts
from recycle.shape import Worker
from tests.exec.runs import job

pytestmark = pytest.mark.process


class Asked:
    """The plans of a job, as a coordinator has them."""

    def __init__(self, of: PricedJob, directory: Path) -> None:
        (directory / "plans").mkdir()
        self._waker = Waker()
        self._service = PlanService(of, plan_for_training, directory / "plans", self._waker)
        self.events: list[dict[str, Any]] = []
        given = Replanner(of, self._service, directory / "profiles", self._log)
        self.layouts = Layouts(of, self._service, given, self._log)
        self._workers, self._step = set(of.shape.workers()), 0

    def _log(self, kind: str, **details: Any) -> None:
        self.events.append({"kind": kind, **details})

    def ready(self, *dead: Worker) -> Ready:
        deadline = time.monotonic() + 120
        while (found := self.layouts.ready(frozenset(dead))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found

    def commit(self, *dead: Worker) -> bool:
        """One iteration without these, once all planners have answered; whether a better plan is there then."""
        times = ComputeTimes.of({worker: [] for worker in sorted(self._workers - set(dead))})
        for _ in range(2):
            self.layouts.observe(frozenset(dead), self._step, times)
            deadline = time.monotonic() + 120
            while self._service.is_busy:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            self._step += 1
        return self.layouts.has_better(frozenset(dead))

    def close(self) -> None:
        self._service.close()
        self._waker.close()


@pytest.fixture
def asked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))
    made = Asked(request.param, tmp_path)
    yield made
    made.close()


ELASTIC = {"layout": "elastic", "move_when": "always", "ahead": 0, "steps": 60}


@pytest.mark.parametrize(
    "asked",
    [job(3, 4, 6, model={"layers": 4}, memory={"limit": 4, "state_limit": 1.0}, planner=ELASTIC)],
    indirect=True,
)
def test_a_better_order_in_the_given_stages_is_taken_up_once_and_kept(asked: Asked) -> None:
    dead = Worker(1, 1)
    first = asked.ready(dead)
    assert asked.commit(dead)
    (event,) = asked.events
    assert (event["kind"], event["moves"], event["bytes"]) == ("layout", True, 0)
    second = asked.ready(dead)
    assert second.periods["staggered"] == event["period"] < event["period_before"] == first.periods["staggered"]
    assert second.hosts is not None
    assert not second.hosts.cut
    assert not asked.commit(dead)
    assert asked.ready(dead) == second
    assert len(asked.events) == 1


@pytest.mark.parametrize(
    ("asked", "limit"),
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
    indirect=["asked"],
)
def test_event_names_the_limit_that_keeps_layers_in_place(asked: Asked, limit: dict[str, Any]) -> None:
    dead = Worker(1, 1)
    asked.ready(dead)
    asked.commit(dead)
    (event,) = asked.events
    assert event["bytes"] == 0
    assert (event["layout_limit"]["cause"], *event["layout_limit"]["limits"]) == ("limits", limit)
    assert event["layout_limit"]["period"] < min(21, event["period"], event["period_before"])


LAYERS = {"model": {"layers": 8}, "memory": {"limit": 16, "state_limit": 1.5}}
ALWAYS = job(3, 2, 4, **LAYERS, planner=ELASTIC)
SLOW_COPIES = msgspec.structs.replace(ALWAYS, prices=replace(ALWAYS.prices, static=40.0, bandwidth=1e-3))


def moved_without(asked: Asked, one: Worker) -> Hosts:
    """Who hosts what once layers have moved after a death."""
    asked.ready(one)
    assert asked.commit(one)
    layout = asked.ready(one).hosts
    assert layout is not None
    assert layout.cut
    assert not asked.commit(one)
    return layout


@pytest.mark.parametrize("asked", [ALWAYS], indirect=True)
def test_a_death_in_a_layout_is_re_routed_in_it_and_the_last_return_brings_the_given_stages(asked: Asked) -> None:
    one, two = Worker(1, 1), Worker(0, 0)
    layout = moved_without(asked, one)
    at_once = asked.ready(one, two)
    assert at_once.hosts is not None
    assert at_once.hosts.cut == layout.cut
    assert at_once.hosts.units == {w: units for w, units in layout.units.items() if w != two}
    assert asked.ready(one).hosts == layout  # the second did not die after all
    assert [event["failed"] for event in asked.events] == [["1.1"]]
    given = asked.ready()
    assert given.hosts is not None
    assert not given.hosts.cut
    event = asked.events[-1]
    assert (event["failed"], event["returned"], event["moves"]) == ([], ["1.1"], True)
    assert event["period"] == given.periods["staggered"] < event["period_before"]


@pytest.mark.parametrize("asked", [SLOW_COPIES], indirect=True)
def test_who_comes_back_hosts_its_stage_in_the_layout_where_moving_back_does_not_pay(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Worker(1, 1)
    layout = moved_without(asked, one)
    reserved = msgspec.structs.replace(ALWAYS.planner, move_when="worth", iterations_between_changes=5)
    monkeypatch.setattr(asked.layouts, "_job", msgspec.structs.replace(SLOW_COPIES, planner=reserved))
    stays = asked.ready()
    assert stays.hosts is not None
    assert stays.hosts.units == {**layout.units, one: Hosts.at_start(ALWAYS, None).units[one]}
    event = asked.events[-1]
    assert (event["failed"], event["returned"], event["moves"]) == ([], ["1.1"], False)
    assert event["pause"] > event["until_change"]
    assert not asked.commit()
    assert asked.ready() == stays
    assert [event["moves"] for event in asked.events] == [True, False, False]  # it was thought over once more
