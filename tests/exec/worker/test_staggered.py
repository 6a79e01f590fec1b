"""Staggered steps on real processes have the bits of the barrier, also when steps are undone."""

import time
from pathlib import Path

import pytest

from recycle import Schedule, Worker, check, lower
from recycle.exec import run as run_locally
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.trackers import Observer
from recycle.ir.families import one_f_one_b
from recycle.ir.formats.run_trace import read_trace
from recycle.ir.lower import with_barrier
from recycle.job import PricedJob
from recycle.runs.logs import log_path, read_lines
from tests.exec.runs import (
    Run,
    assert_same_training,
    calm_run,
    job,
    kinds,
    live_workers,
    of_kind,
    processes_writing_below,
)
from tests.jobs import varied

STEPS = 7
FAR = {"clip": 1e9}
"""A limit that no norm comes near."""
AHEAD = ["barrier"] + ["staggered"] * (STEPS - 1)


@pytest.fixture(scope="module")
def emulated():
    return job(3, 2, 2, train=FAR)


def with_barriers(launch: Run, job: PricedJob) -> RunResult:
    """The run without failures in which every step waits for its commit."""
    calm = calm_run(varied(job, planner={"staggered": False}), launch, STEPS)
    assert modes(calm) == ["barrier"] * STEPS
    return calm


def modes(run: RunResult) -> list[str]:
    return [line["mode"] for line in run.metrics]


def undone(run: RunResult) -> list[tuple[int, int]]:
    """(step, number of workers) of undone steps."""
    return [(event["step"], event["count"]) for event in of_kind(run, "undone")]


def test_staggered_steps_have_the_bits_of_the_barrier(launch):
    gpt = job(2, 2, 2, kind="gpt", train=FAR)
    run = launch(gpt, STEPS)
    assert modes(run) == AHEAD
    assert run.modes == {"barrier": 1, "staggered": STEPS - 1}
    assert kinds(run) == ["generation"]
    assert_same_training(run, with_barriers(launch, gpt))
    local = run_locally(one_f_one_b(gpt.shape), gpt, steps=STEPS)
    assert (local.losses, local.digests) == (run.losses, run.digests)
    assert {line["period"] for line in run.metrics[1:]} == {run.metrics[1]["period"]}
    assert run.metrics[0]["period"] >= run.metrics[1]["period"]


def test_neighbouring_stages_overlap_iterations(launch):
    """Stage 1 leaves its weight gradients to the end, so stage 0 is done 30 ms before it."""
    slow = job(1, 2, 4, train=FAR, model={"seconds_per_unit": 0.01}, memory={"limit": 4})
    deferred = Schedule.from_text(
        slow.shape,
        {
            "0.0": "0F0.0 0F0.1 0F0.2 0F0.3 0B0.0 0B0.1 0B0.2 0B0.3",
            "0.1": "1F0.0 1I0.0 1F0.1 1I0.1 1F0.2 1I0.2 1F0.3 1I0.3 1W0.0 1W0.1 1W0.2 1W0.3",
        },
    )
    overlaps = {}
    for schedule in (deferred, with_barrier(deferred)):
        run = launch(slow, STEPS, schedule=schedule, planner=None)
        trace = read_trace(run.directory / "trace.json")
        overlaps[schedule.optimizer] = 0
        for step in range(1, STEPS - 1):
            this, following = trace.window(step, step), trace.window(step + 1, step + 1)
            reduced = max(this.end[row] for row in range(len(this)) if str(this.instruction(row)) == "1REDUCE_GRAD")
            overlaps[schedule.optimizer] += bool(following.start.min() < reduced)
    assert overlaps["staggered"] > 0
    assert overlaps["barrier"] == 0


class _Hold(Observer):
    """Holds the launcher, and with it every commit, when a fault strikes, until workers have stepped, or are killed.

    Workers step after the previous commit. So it is held until all have stepped and reported the previous iteration,
    and again after its commit.
    """

    def __init__(self, directory: Path, fault: str, step: int, workers: list[str]):
        self.directory, self.fault, self.step, self.workers = directory, fault, step, workers
        self._strikes, self._committed = False, -1

    def event(self, event):
        if event["kind"] == "fault" and event["fault"] == self.fault:
            self._strikes = True
            self._wait_for(["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"], self.step - 1)
            self._hold()

    def committed(self, line):
        self._committed = line["step"]
        self._hold()

    def _hold(self):
        if self._strikes and self._committed == self.step - 1:
            self._wait_for(self.workers, self.step)

    def _wait_for(self, workers: list[str], step: int):
        deadline = time.monotonic() + 30
        while not all(self._stepped(worker, step) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _stepped(self, worker: str, step: int) -> bool:
        if not processes_writing_below(f"{self.directory}/logs/{worker}."):
            return True
        lines = read_lines(log_path(self.directory, Worker.parse(worker)))
        return any(line["step"] == step and line["instructions"][-1][0].endswith("STEP") for _, line in lines)


@pytest.mark.parametrize(
    ("also", "undoing"), [((), 3), (("kill:0.1@3.stepped",), 2), (("kill:1.1@3.undo",), 2)], ids=str
)
def test_uncommitted_step_is_undone_by_all_live_workers_that_made_it(also, undoing, emulated, launch, tmp_path):
    """Worker 2.0 dies before its reduce: stage 0 cannot step, all of stage 1 has."""
    hold = _Hold(tmp_path, "kill:2.0@3.reduce", 3, ["0.1", "1.1", "2.1"])
    run = launch(emulated, STEPS, "kill:2.0@3.reduce", *also, observer=hold, directory=tmp_path)
    assert_same_training(run, with_barriers(launch, emulated))
    assert undone(run) == [(3, undoing)]
    assert len(of_kind(run, "detected")) == 1 + len(also)
    if not also:
        assert kinds(run) == ["generation", "fault", "detected", "generation", "undone", "recovered"]
    for digest in {line["plan"] for line in run.metrics}:
        plan = Schedule.load(run.directory / "plans" / f"{digest}.json")
        assert check(lower(plan), limits=emulated.activation_limits()) == []
    assert "2.0" not in run.digests
    assert modes(run) == ["barrier", "staggered", "staggered", "barrier", "staggered", "staggered", "staggered"]
    assert live_workers(run) == [6] * 3 + [5 - len(also)] * 4


def test_worker_may_die_after_its_last_step_and_rejoin_at_the_next(emulated, launch):
    """It is awaited from its death on, and its dead process is not mistaken for the new one."""
    run = launch(emulated, STEPS, "kill:1.1@3.stepped", "rejoin:1.1@4")
    reference = with_barriers(launch, emulated)
    assert_same_training(run, reference)
    assert run.digests == reference.digests
    assert [(event["worker"], event["step"]) for event in of_kind(run, "rejoined")] == [("1.1", 4)]
    assert {line["live_workers"] for line in run.metrics[4:]} == {6}


def test_staggered_step_with_a_gradient_that_is_not_finite_is_undone_and_repeated(launch):
    far = job(2, 2, 2, kind="gpt", train=FAR)
    run = launch(far, STEPS, "nan:1.1@3")
    assert_same_training(run, with_barriers(launch, far))
    assert kinds(run) == ["generation", "fault", "generation", "undone"]
    assert undone(run) == [(3, 4)]
    assert "not finite" in run.events[-1]["cause"]
    assert modes(run) == ["barrier", "staggered", "staggered", "barrier", "staggered", "staggered", "staggered"]


@pytest.mark.parametrize("kind", ["emulated", pytest.param("gpt", marks=pytest.mark.soak)])
def test_unexpectedly_large_norm_undoes_the_step_and_clips_its_repetition(kind, launch, monkeypatch):
    """The leader, which decides, runs in this process."""
    free = with_barriers(launch, job(2, 2, 2, kind=kind, train=FAR))
    limit = sorted(line["grad_norm"] for line in free.metrics)[STEPS // 2]
    near = job(2, 2, 2, kind=kind, train={"clip": limit})
    reference = with_barriers(launch, near)
    clipped = [line["step"] for line in reference.metrics if line["grad_norm"] >= limit]
    assert clipped
    assert len(clipped) < STEPS
    monkeypatch.setattr("recycle.exec.leader.commit.NEAR", 1e9)
    run = launch(near, STEPS)
    assert_same_training(run, reference)
    # Repeated steps run with the barrier, and so does the first.
    assert modes(run) == ["barrier" if step in (0, *clipped) else "staggered" for step in range(STEPS)]
    assert run.undone == [step for step in clipped if step]
    assert {count for _, count in undone(run)} == {4}
    assert all("must be clipped" in event["cause"] for event in of_kind(run, "undone"))
