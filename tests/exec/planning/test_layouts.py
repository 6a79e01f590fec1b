"""Which plan runs next, asked as the coordinator asks: planners are real, what workers report says nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.planner import plan_for_training
from recycle.exec.membership.compute_times import ComputeTimes
from recycle.exec.membership.interfaces import Ready
from recycle.exec.planning.layouts import Layouts
from recycle.exec.planning.planning import PlanService
from recycle.exec.planning.replanning import Replanner
from recycle.exec.processes.waker import Waker
from recycle.job import PricedJob
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
    "asked",
    [job(3, 2, 4, model={"layers": 8}, memory={"limit": 16, "state_limit": 1.5}, planner=ELASTIC)],
    indirect=True,
)
def test_a_death_in_a_layout_is_re_routed_in_it_and_a_return_brings_the_given_stages(asked: Asked) -> None:
    one, two = Worker(1, 1), Worker(0, 0)
    asked.ready(one)
    assert asked.commit(one)
    layout = asked.ready(one)
    assert layout.hosts is not None
    assert layout.hosts.cut
    assert not asked.commit(one)
    at_once = asked.ready(one, two)
    assert at_once.hosts is not None
    assert at_once.hosts.cut == layout.hosts.cut
    assert at_once.hosts.units == {w: units for w, units in layout.hosts.units.items() if w != two}
    asked.commit(one, two)
    assert [event["failed"] for event in asked.events] == [["1.1"], ["0.0", "1.1"]]
    given = asked.ready(two)
    assert given.hosts is not None
    assert not given.hosts.cut
