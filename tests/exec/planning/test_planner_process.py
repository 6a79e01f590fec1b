"""Planner processes that end or stand still cost time and never an answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle import Worker
from recycle.exec.launch.observer import Observer
from recycle.exec.membership.interfaces import Ready
from recycle.exec.planning import planner_process
from recycle.exec.planning.planner_process import MOST_FAILURES, Planner
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.waker import Waker
from recycle.solve.planner import plan_for_training
from tests.exec.runs import Run, job, kinds

pytestmark = pytest.mark.process

OF = job(3, 2, 2, planner={"ahead": 0, "steps": 10}, membership={"hung_after": 1.5, "warm_up": 20.0})
"""A process that is stopped before its first answer is overdue after both together, which a test must outlast."""
NOBODY: frozenset[Worker] = frozenset()
SOME = frozenset({Worker(0, 0), Worker(1, 1)})
HERE = "RECYCLE_TEST_PROCESS"
"""Variable that holds the id of the process which the tests run in."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the planner processes that were started so far."""
    found: list[int] = []

    class Noted(planner_process.Child):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self.process.pid)

    monkeypatch.setattr(planner_process, "Child", Noted)
    return found


Serve = Callable[..., PlanService]


@pytest.fixture
def serve(tmp_path: Path, started: list[int]) -> Iterator[Serve]:
    """Plans by a planner."""
    waker, services, warnings = Waker(), list[PlanService](), list[str]()
    (tmp_path / "plans").mkdir()

    def begin(planner: Planner = plan_for_training) -> PlanService:
        services.append(PlanService(OF, planner, tmp_path / "plans", waker, warn=warnings.append))
        services[-1].warnings = warnings  # type: ignore[attr-defined]
        return services[-1]

    yield begin
    for service in services:
        service.close()
    waker.close()


def wanted(plans: PlanService, failed: frozenset[Worker]) -> Ready:
    """The plan without the failed workers, once it is made."""
    deadline = time.monotonic() + 60
    while (ready := plans.ready(failed)) is None:
        plans.look()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ready


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.soak), signal.SIGSTOP])
def test_a_process_that_dies_or_stands_still_is_replaced_and_asked_again(
    sent: signal.Signals, serve: Serve, started: list[int]
) -> None:
    calm = wanted(serve(), SOME)
    plans = serve()
    wanted(plans, NOBODY)
    before = started[2:]
    for pid in before:
        os.kill(pid, sent)
    assert wanted(plans, SOME).digest == calm.digest
    assert len(before) == 2
    assert set(started) > {*started[:2], *before}
    assert not plans.warnings  # type: ignore[attr-defined]


def deadly_planner(*arguments: Any, **known: Any) -> str:
    """Plans where the tests run, and takes every other process with it."""
    if str(os.getpid()) != os.environ[HERE]:
        os.kill(os.getpid(), signal.SIGKILL)
    return plan_for_training(*arguments, **known)


def test_what_kills_every_process_is_planned_in_this_one(
    serve: Serve, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HERE, str(os.getpid()))
    calm = wanted(serve(), SOME)
    plans = serve(deadly_planner)
    assert wanted(plans, SOME).digest == calm.digest
    assert len(plans.warnings) == 1  # type: ignore[attr-defined]
    assert wanted(plans, NOBODY).text
    assert 2 + MOST_FAILURES <= len(started) <= 2 + 2 * MOST_FAILURES


def test_a_process_ends_while_a_question_is_under_way_and_all_later_ones_are_answered(
    serve: Serve, started: list[int]
) -> None:
    plans = serve()
    wanted(plans, NOBODY)
    os.kill(started[1], signal.SIGSTOP)
    assert plans.ready(SOME) is None
    os.kill(started[1], signal.SIGKILL)
    assert plans.ready(frozenset({Worker(2, 1)})) is None
    assert wanted(plans, frozenset({Worker(2, 1)})).roles.keys() == {
        worker for worker in OF.shape.workers() if worker != Worker(2, 1)
    }
    assert len(wanted(plans, SOME).roles) == 4


def test_planning_ahead_of_more_failures_than_there_can_be_ends(tmp_path: Path, started: list[int]) -> None:
    waker = Waker()
    plans = PlanService(job(2, 2, 2, planner={"ahead": 2**31 - 1, "steps": 1}), plan_for_training, tmp_path, waker)
    try:
        deadline = time.monotonic() + 60
        while plans.is_busy:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for other in range(2):
            assert plans.ready(frozenset({Worker(0, 0), Worker(1 - other, 1)})) is not None
        assert not plans.is_busy
    finally:
        plans.close()
        waker.close()


class _Strike(Observer):
    """Kills all planner processes after a step."""

    def __init__(self, started: list[int], after: int) -> None:
        self._started, self._after = started, after

    def committed(self, line: dict[str, Any]) -> None:
        if line["step"] == self._after:
            for pid in self._started:
                os.kill(pid, signal.SIGKILL)


def test_three_workers_die_without_any_planner_and_the_losses_stay_the_same(launch: Run, started: list[int]) -> None:
    reference = launch(OF, 5)
    started.clear()
    run = launch(OF, 5, "kill:0.0@3", "kill:1.1@3", "kill:2.0@3", observer=_Strike(started, 1))
    assert run.losses == reference.losses
    assert len(started) >= 4
    assert [event["worker"] for event in run.events if event["kind"] == "detected"] != []
    assert run.metrics[-1]["live_workers"] == 3
    assert "warning" not in kinds(run)
