"""States to go back to, copied in a thread while the worker waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from recycle.exec.model.stage import Stage
from recycle.exec.model.state import optimizer
from recycle.exec.protocol import Commit
from recycle.exec.worker.updates import Updates
from recycle.job.footprint import ON_CPU
from tests.exec.drive import build_pipeline, run_pipelines, small_job

JOB = small_job(1, 2, 2, model={"layers": 2, "hidden": 32})
FACTS = Commit(0, 1.0, 0.5, 1.0, "staggered", "staggered")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Counting:
    """Stages of one worker that count the pieces copied early, and those that a step still copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, commit: Callable[[int], Commit | None]) -> None:
        monkeypatch.setattr(optimizer, "ON_CPU", replace(ON_CPU, stepped=1024))
        self.stages: dict[int, Stage] = dict(enumerate(build_pipeline(JOB)))
        self.early: dict[int, int] = dict.fromkeys(self.stages, 0)
        for index, stage in self.stages.items():
            monkeypatch.setattr(stage, "keep", self._counting(index, stage.keep))
        self.updates = Updates(self.stages, decided=commit)

    def _counting(self, index: int, keep: Callable[..., int]) -> Callable[..., int]:
        def counted(before: object, start: int) -> int:
            stop = keep(before, start)
            self.early[index] += stop - start
            return stop

        return counted

    def train(self, step: int) -> None:
        run_pipelines([list(self.stages.values())], step, 2)

    def digests(self) -> list[str]:
        return [stage.state_digest() for stage in self.stages.values()]

    def step(self, iteration: int) -> None:
        for index in self.stages:
            self.updates.step_ahead(index, iteration)

    def take_back(self, step: int) -> None:
        assert self.updates.ahead(step - 1) == list(self.stages)
        self.updates.settle(step - 1, FACTS)


@pytest.fixture
def asked() -> list[int]:
    return []


def test_in_a_wait_all_is_copied_once_the_last_step_is_committed(
    monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    def decided(step: int) -> Commit | None:
        asked.append(step)
        return FACTS if len(asked) > 2 else None

    of = Counting(monkeypatch, decided)
    of.train(0)
    of.step(0)
    assert not any(of.early.values())
    after = of.digests()
    of.updates.begin(1)
    of.updates.waits(True)
    sizes = {
        i: sum(unit.state_tensors()[0].numel() for unit in s.layout.units().values()) for i, s in of.stages.items()
    }
    until(lambda: of.early == sizes)
    of.updates.waits(False)
    assert asked == [0, 0, 0]
    of.train(1)
    of.step(1)
    assert of.digests() != after
    of.take_back(1)
    assert of.digests() == after


def test_what_is_left_when_the_wait_ends_is_copied_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Counting(monkeypatch, lambda step: FACTS)
    of.train(0)
    of.step(0)
    after = of.digests()
    of.updates.begin(1)
    copy, pieces = of.stages[0].keep, []

    def keep(before: object, start: int) -> int:
        pieces.append(start)
        if len(pieces) == 3:
            of.updates.waits(False)
        return copy(before, start)

    monkeypatch.setattr(of.stages[0], "keep", keep)
    of.updates.waits(True)
    until(lambda: len(pieces) == 3)
    of.train(1)
    of.step(1)
    assert 0 < sum(of.early.values()) < sum(stage.state_tensors()[0].numel() for stage in of.stages.values())
    of.take_back(1)
    assert of.digests() == after


@pytest.mark.parametrize("commit", [None, Commit(0, 1.0, 0.5, 1.0, "staggered", "barrier")])
def test_nothing_is_copied_before_the_commit_nor_for_a_step_that_waits_for_its_own(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], commit: Commit | None
) -> None:
    def decided(step: int) -> Commit | None:
        asked.append(step)
        return commit

    of = Counting(monkeypatch, decided)
    before = of.digests()
    of.train(0)
    of.step(0)
    of.updates.begin(1)
    of.updates.waits(True)
    until(lambda: len(asked) > (3 if commit is None else 0))
    of.updates.waits(False)
    assert not any(of.early.values())
    of.take_back(0)
    assert of.digests() == before
