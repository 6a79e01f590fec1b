"""Staggered steps on real processes: the bits of the barrier, whatever has to be taken back on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from recycle import Job, Schedule, Worker
from recycle.exec import run as run_here
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.trackers import Observer
from recycle.ir.families import one_f_one_b
from recycle.ir.formats.run_trace import read_trace
from recycle.ir.lower import with_barrier
from recycle.runs.logs import log_path, read_lines
from tests.exec.runs import Run, assert_same_training, calm_run, job, kinds, processes_writing_below

STEPS = 7
FAR = {"clip": 1e9}
"""A limit that no norm comes near."""
AHEAD = ["barrier"] + ["staggered"] * (STEPS - 1)


@pytest.fixture(scope="module")
def emulated() -> Job:
    return job(3, 2, 2, train=FAR)


def with_the_barrier(launch: Run, of: Job, steps: int = STEPS) -> RunResult:
    """The run without failures in which every step waits for its commit."""
    calm = calm_run(_changed(of, "planner", staggered=False), launch, steps)
    assert modes(calm) == ["barrier"] * steps
    return calm


def _changed(of: Job, section: str, **keys: Any) -> Job:
    lines = of.to_toml().splitlines()
    begin = lines.index(f"[{section}]")
    for key, value in keys.items():
        place = next(i for i in range(begin, len(lines)) if lines[i].startswith(f"{key} = "))
        lines[place] = f"{key} = {json.dumps(value)}"
    return Job.from_toml("\n".join(lines))


def modes(run: RunResult) -> list[str]:
    return [line["mode"] for line in run.metrics]


def undone(run: RunResult) -> list[tuple[int, int]]:
    """(step, workers) of what was taken back."""
    return [(event["step"], event["count"]) for event in run.events if event["kind"] == "undone"]


def test_staggered_steps_train_a_gpt_to_the_bits_of_the_barrier(launch: Run) -> None:
    of = job(3, 2, 2, kind="gpt", train=FAR)
    run = launch(of, STEPS)
    assert modes(run) == AHEAD
    assert run.modes == {"barrier": 1, "staggered": STEPS - 1}
    assert kinds(run) == ["generation"]
    assert_same_training(run, with_the_barrier(launch, of))
    here = run_here(one_f_one_b(of.shape), of, steps=STEPS)
    assert (here.losses, here.digests) == (run.losses, run.digests)
    assert {line["period"] for line in run.metrics[1:]} == {run.metrics[1]["period"]}
    assert run.metrics[0]["period"] >= run.metrics[1]["period"]


def test_neighbouring_stages_are_in_different_iterations_at_the_same_time(launch: Run) -> None:
    """Stage 1 leaves its weight gradients to the end, so stage 0 is done 30 ms before it."""
    of = job(1, 2, 4, train=FAR, model={"seconds_per_unit": 0.01}, memory={"limit": 4})
    deferred = Schedule.from_text(
        of.shape,
        {
            "0.0": "0F0.0 0F0.1 0F0.2 0F0.3 0B0.0 0B0.1 0B0.2 0B0.3",
            "0.1": "1F0.0 1I0.0 1F0.1 1I0.1 1F0.2 1I0.2 1F0.3 1I0.3 1W0.0 1W0.1 1W0.2 1W0.3",
        },
    )
    overlaps = {}
    for schedule in (deferred, with_barrier(deferred)):
        run = launch(of, STEPS, schedule=schedule, planner=None)
        assert run.directory is not None
        trace = read_trace(run.directory / "trace.json")
        found = 0
        for step in range(1, STEPS - 1):
            this, following = trace.window(step, step), trace.window(step + 1, step + 1)
            reduced = max(this.end[row] for row in range(len(this)) if str(this.instruction(row)) == "1REDUCE_GRAD")
            found += bool(following.start.min() < reduced)
        overlaps[schedule.optimizer] = found
    assert overlaps["staggered"] > 0
    assert overlaps["barrier"] == 0


class _Hold(Observer):
    """Holds the launcher, and with it every commit, when a fault strikes, until workers have stepped, or are killed.

    They do so once the step before is committed. So it is held first until everybody has stepped that one, and with it
    reported, and again behind its commit.
    """

    def __init__(self, directory: Path, fault: str, step: int, workers: list[str]) -> None:
        self.directory, self.fault, self.step, self.workers = directory, fault, step, workers
        self._strikes, self._committed = False, -1

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "fault" and event["fault"] == self.fault:
            self._strikes = True
            self._wait_for(["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"], self.step - 1)
            self._hold()

    def committed(self, line: dict[str, Any]) -> None:
        self._committed = line["step"]
        self._hold()

    def _hold(self) -> None:
        if self._strikes and self._committed == self.step - 1:
            self._wait_for(self.workers, self.step)

    def _wait_for(self, workers: list[str], step: int) -> None:
        deadline = time.monotonic() + 30
        while not all(self._stepped(worker, step) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _stepped(self, worker: str, step: int) -> bool:
        if not processes_writing_below(f"{self.directory}/logs/{worker}."):
            return True
        lines = read_lines(log_path(self.directory, Worker.parse(worker)))
        return any(line["step"] == step and line["instructions"][-1][0].endswith("STEP") for _, line in lines)


@pytest.mark.parametrize(
    ("also", "took_back"), [((), 3), (("kill:0.1@3.stepped",), 2), (("kill:1.1@3.undo",), 2)], ids=str
)
def test_a_step_that_a_death_keeps_from_being_committed_is_undone_by_all_who_took_it_and_live(
    also: tuple[str, ...], took_back: int, emulated: Job, launch: Run, tmp_path: Path
) -> None:
    """Worker 2.0 dies before its reduce: stage 0 cannot step, all of stage 1 has."""
    hold = _Hold(tmp_path, "kill:2.0@3.reduce", 3, ["0.1", "1.1", "2.1"])
    run = launch(emulated, STEPS, "kill:2.0@3.reduce", *also, observer=hold, directory=tmp_path)
    assert_same_training(run, with_the_barrier(launch, emulated))
    assert undone(run) == [(3, took_back)]
    assert kinds(run).count("detected") == 1 + len(also)
    assert modes(run) == ["barrier", "staggered", "staggered", "barrier", "staggered", "staggered", "staggered"]
    assert [line["live_workers"] for line in run.metrics] == [6] * 3 + [5 - len(also)] * 4


def test_a_worker_may_die_behind_its_last_step_and_be_back_at_the_next(emulated: Job, launch: Run) -> None:
    """It is awaited from the moment it is dead, and its dead process is not taken for the one that comes."""
    run = launch(emulated, STEPS, "kill:1.1@3.stepped", "rejoin:1.1@4")
    reference = with_the_barrier(launch, emulated)
    assert_same_training(run, reference)
    assert run.digests == reference.digests
    assert [(event["worker"], event["step"]) for event in run.events if event["kind"] == "rejoined"] == [("1.1", 4)]
    assert {line["live_workers"] for line in run.metrics[4:]} == {6}


@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_a_gradient_that_is_not_finite_in_a_staggered_iteration_is_undone_and_repeated(kind: str, launch: Run) -> None:
    of = job(3, 2, 2, kind=kind, train=FAR)
    run = launch(of, STEPS, "nan:1.1@3")
    assert_same_training(run, with_the_barrier(launch, of))
    assert kinds(run) == ["generation", "fault", "generation", "undone"]
    assert undone(run) == [(3, 6)]
    assert "not finite" in run.events[-1]["cause"]
    assert modes(run) == ["barrier", "staggered", "staggered", "barrier", "staggered", "staggered", "staggered"]


@pytest.mark.parametrize("kind", ["emulated", pytest.param("gpt", marks=pytest.mark.soak)])
def test_a_norm_that_nobody_saw_coming_undoes_the_step_and_the_repeated_one_is_clipped(
    kind: str, launch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator, which alone decides, runs in this process."""
    free = with_the_barrier(launch, job(2, 2, 2, kind=kind, train=FAR))
    limit = sorted(line["grad_norm"] for line in free.metrics)[STEPS // 2]
    of = job(2, 2, 2, kind=kind, train={"clip": limit})
    reference = with_the_barrier(launch, of)
    clipped = [line["step"] for line in reference.metrics if line["grad_norm"] >= limit]
    assert clipped
    assert len(clipped) < STEPS
    monkeypatch.setattr("recycle.exec.leader.commit.NEAR", 1e9)
    run = launch(of, STEPS)
    assert_same_training(run, reference)
    expected = ["barrier"]  # a repeated step runs with the barrier, and so does the first
    for step in range(1, STEPS):
        expected.append("barrier" if step in clipped else "staggered")
    assert modes(run) == expected
    assert run.undone == [step for step in clipped if step]
    assert {count for _, count in undone(run)} == {4}
    assert all("must be clipped" in event["cause"] for event in run.events if event["kind"] == "undone")
