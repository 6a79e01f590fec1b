"""Workers that are told to leave: nothing is done again, every bit stays, and who has to stay does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recycle import Job, JobError, RunError
from recycle.exec.launch.drain import drain
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.observer import Observer
from recycle.run_report import read_attempts
from tests.exec.runs import Run, job, kinds, processes_writing_below

STEPS = 12
PACE = {"seconds_per_unit": 0.002}
_CALM: list[RunResult] = []


@pytest.fixture(scope="module")
def of() -> Job:
    """Steps are staggered from the second on, and the plans for two that are dead are made while a run starts."""
    return job(3, 2, 2, model=PACE, train={"clip": 1e9}, cluster={"workers_per_node": 2}, planner={"ahead": 2})


def assert_nothing_lost(run: RunResult, of: Job, launch: Run) -> None:
    """Losses, norms and final states are the calm run's, and no iteration was begun twice."""
    if not _CALM:
        _CALM.append(launch(of, STEPS))
    (calm,) = _CALM
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in run.metrics] == [
        (m["step"], m["loss"], m["grad_norm"]) for m in calm.metrics
    ]
    assert run.digests
    assert run.digests == {worker: calm.digests[worker] for worker in run.digests}
    assert not {"detected", "undone", "recovered"} & set(kinds(run))


def of_kind(run: RunResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == kind]


class Slowly(Observer):
    """Lets the run go slowly from a step on until the event of this kind, so that it lasts until plans are made."""

    def __init__(self, step: int, until: str) -> None:
        self._step, self._until, self._is_over = step, until, False

    def committed(self, line: dict[str, Any]) -> None:
        if line["step"] >= self._step and not self._is_over:
            time.sleep(0.25)

    def event(self, event: dict[str, Any]) -> None:
        self._is_over |= event["kind"] == self._until


class At(Slowly):
    """Does something in a thread once a step is committed, and gives its outcome."""

    def __init__(self, step: int, action: Callable[[], None], until: str = "drained") -> None:
        super().__init__(step, until)
        self._action = action
        self._thread = threading.Thread(target=self._run)
        self.error: Exception | None = None

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self.error = error

    def committed(self, line: dict[str, Any]) -> None:
        if line["step"] == self._step:
            self._thread.start()
        super().committed(line)

    def join(self) -> Exception | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


def test_a_worker_that_gets_sigterm_leaves_after_its_iteration_and_may_come_back(of: Job, launch: Run) -> None:
    run = launch(of, STEPS, "drain:1.1@2", "rejoin:1.1@10", observer=Slowly(2, "drained"))
    assert_nothing_lost(run, of, launch)
    (left,) = of_kind(run, "drained")
    assert left["worker"] == "1.1"
    assert 3 <= left["step"] < 10
    assert [line["live_workers"] for line in run.metrics] == [6] * left["step"] + [5] * (10 - left["step"]) + [6] * 2
    assert len(run.digests) == 6


def test_a_worker_that_is_told_twice_dies_at_once(of: Job, launch: Run, tmp_path: Path) -> None:
    def twice() -> None:
        (pid,) = processes_writing_below(str(tmp_path / "logs" / "1.1.log"))
        for _ in range(2):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.01)  # two that are pending at once are one

    slowly = job(3, 2, 2, model={"seconds_per_unit": 0.03}, train={"clip": 1e9}, planner={"ahead": 2})
    at = At(2, twice, "detected")
    run = launch(slowly, 6, observer=at, directory=tmp_path)
    assert at.join() is None
    assert [(event["worker"], event["cause"]) for event in of_kind(run, "detected")] == [
        ("1.1", "ended with exit code 143")
    ]
    assert not of_kind(run, "drained")


def test_a_node_is_drained_from_outside_and_its_workers_leave_together(of: Job, launch: Run, tmp_path: Path) -> None:
    told: list[str] = []
    at = At(1, lambda: drain(tmp_path, "2", None, told.append))
    run = launch(of, STEPS, observer=at, directory=tmp_path)
    assert at.join() is None
    assert_nothing_lost(run, of, launch)
    steps = {event["worker"]: event["step"] for event in of_kind(run, "drained")}
    assert set(steps) == {"2.0", "2.1"}
    (step,) = set(steps.values())
    assert [line["live_workers"] for line in run.metrics] == [6] * step + [4] * (STEPS - step)
    assert told[0] == "told 2.0 2.1 to leave; waiting for the end of an iteration"
    assert [line.split(" after ")[0] for line in sorted(told[1:])] == ["worker 2.0 has left", "worker 2.1 has left"]
    assert not (tmp_path / "store").exists()


def test_a_deadline_that_no_iteration_meets_makes_it_a_death(launch: Run, tmp_path: Path) -> None:
    slowly = job(2, 2, 2, model={"seconds_per_unit": 0.1}, planner={"ahead": 1})
    at = At(0, lambda: drain(tmp_path, "1.1", 0.2, lambda line: None), "detected")
    run = launch(slowly, 4, observer=at, directory=tmp_path)
    why = "told to leave within 0.2 s, in which no iteration came to its end"
    assert [event["cause"] for event in of_kind(run, "detected")] == [why]
    assert isinstance(at.join(), RunError)
    assert str(at.error) == f"worker 1.1 has not left but died: {why}"
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]


def test_the_last_host_of_a_stage_stays_and_so_does_one_that_is_dead(launch: Run, tmp_path: Path) -> None:
    refused: list[str] = []

    def ask() -> None:
        for worker in ("0.1", "1.1", "1.9"):
            with pytest.raises(JobError) as refusal:
                drain(tmp_path, worker, None, lambda line: None)
            refused.append(str(refusal.value))

    slowly = job(2, 2, 2, model={"seconds_per_unit": 0.02}, planner={"ahead": 1})
    at = At(3, ask, "never")
    run = launch(slowly, 14, "kill:1.1@1", observer=at, directory=tmp_path)
    assert at.join() is None
    assert refused[0] == (
        "worker 0.1 stays: it is the last live host of its stage; let a peer re-join first, or end the run with a"
        " checkpoint by SIGTERM to recycle train"
    )
    assert refused[1] == f"worker 1.1 of {tmp_path} is dead already"
    assert refused[2].startswith("worker 1.9: ")
    assert [line["live_workers"] for line in run.metrics][-1] == 3
    with pytest.raises(JobError, match="this run has ended"):
        drain(tmp_path, "0.1", None, lambda line: None)
    with pytest.raises(JobError, match="there is no run here"):
        drain(tmp_path / "nowhere", "0.1", None, lambda line: None)


def test_all_workers_told_by_their_machine_end_the_run_with_a_checkpoint(launch: Run, tmp_path: Path) -> None:
    """Two of two hosts, at once; nobody is left to go on, so nobody leaves before the end."""
    run = launch(job(2, 1, 2, model={"seconds_per_unit": 0.02}), 9, "drain:0.0@2", "drain:1.0@2", directory=tmp_path)
    assert run.ended_early
    last = run.metrics[-1]["step"]
    assert 2 <= last < 8
    (stopped,) = of_kind(run, "stopped")
    assert (stopped["step"], stopped["checkpoint"]) == (last, f"step-{last:08d}")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "count"), [("emulated", 50), ("gpt", 8)])
def test_at_random_instants_nothing_is_done_again_and_every_bit_stays(kind: str, count: int, launch: Run) -> None:
    """A worker leaves and comes back, over and over; each time it is told at another moment of an iteration."""
    draw = random.Random(7)
    of = job(3, 2, 2, kind, model=PACE if kind == "emulated" else {}, train={"clip": 1e9}, planner={"ahead": 1})
    apart = 10
    faults = []
    for place in range(count):
        worker, step = f"{draw.randrange(3)}.{draw.randrange(2)}", apart * (place + 1)
        faults += [f"drain={draw.random() * 0.1:.4f}:{worker}@{step}", f"rejoin:{worker}@{step + 6}"]
    steps = apart * (count + 1)
    run, calm = launch(of, steps, *faults), launch(of, steps)
    assert [event["worker"] for event in of_kind(run, "drained")] == [fault.split(":")[1][:3] for fault in faults[::2]]
    assert not {"detected", "undone", "recovered"} & set(kinds(run))
    assert run.losses == calm.losses
    assert run.digests == calm.digests
    assert run.directory is not None
    tried = [step for _, step in read_attempts(run.directory, of.shape)]
    assert sorted(tried) == list(range(steps))
