"""A run directory as the launcher writes it, made by simulating: 1.1 dies in step 3 and is back in step 6."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle import Profile, Schedule, Shape, Timeline, Worker, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.plans import Plan
from recycle.runs import logs as runs

SHAPE = Shape(pipelines=3, ranks=2, micro_batches=2)
WITHOUT_1_1 = {
    "0.0": "0F0.0 0F0.1 0B0.0 0B0.1",
    "0.1": "1F0.0 1F1.0 1B0.0 1F0.1 1I1.0 1B0.1 1W1.0",
    "1.0": "0F1.0 0F1.1 0I1.0 0W1.0 0B1.1",
    "2.0": "0F2.0 0F2.1 0B2.0 0B2.1",
    "2.1": "1F2.0 1F1.1 1B2.0 1F2.1 1I1.1 1B2.1 1W1.1",
}
JOB = """
[shape]
pipelines = 3
ranks = 2
micro_batches = 2
[times]
link = 0.1
step = 0.5
"""
PROFILE = Profile.uniform(link=0.1, step=0.5)
SECONDS = 0.0173
"""Seconds of one unit of the profile in the synthetic run."""


@pytest.fixture(scope="session")
def healthy() -> Schedule:
    return one_f_one_b(SHAPE)


@pytest.fixture(scope="session")
def broken() -> Schedule:
    """Without 1.1: 0.1 takes micro-batch 1.0 and 2.1 takes 1.1, both with decoupled backwards."""
    return planned(Schedule.from_text(SHAPE, WITHOUT_1_1, failed=["1.1"]), 11.0, 10.0)


def planned(schedule: Schedule, period: float, lower_bound: float, limits: tuple[float, ...] | None = None) -> Schedule:
    """Return the schedule with the metadata of a plan for uniform times."""
    plan = Plan(schedule, period, period, lower_bound, 0.0, Profile.uniform().digest(), limits)
    return Schedule.loads(plan.text())


@pytest.fixture(scope="session")
def broken_timeline(broken: Schedule) -> Timeline:
    return simulate(broken)


GENERATIONS = ((range(4), "aaaa0000"), (range(3, 6), "bbbb1111"), (range(6, 9), "aaaa0000"))
"""Steps and plan of each generation of the run."""


@pytest.fixture(scope="session")
def make_run(healthy: Schedule, broken: Schedule) -> Callable[..., Path]:
    """Writes a run directory: (path, live=False) -> path. Step 3 is tried twice, in generations 0 and 1."""

    def write(path: Path, live: bool = False) -> Path:
        for folder in ("plans", "logs"):
            (path / folder).mkdir(parents=True)
        (path / "job.toml").write_text(JOB)
        plans = {"aaaa0000": lower(healthy), "bbbb1111": lower(broken)}
        for digest, plan in plans.items():
            plan.save(path / "plans" / f"{digest}.json")
        now, metrics, events = 2.0, [], []
        for generation, (steps, digest) in enumerate(GENERATIONS):
            attempt, timeline = {"generation": generation, "plan": digest}, simulate(plans[digest], PROFILE)
            workers = [str(worker) for worker in plans[digest].live]
            roles = {worker: worker for worker in workers}
            events.append(
                {"time": now, "kind": "generation", "step": steps[0], **attempt, "live": workers, "roles": roles}
            )
            for step in steps:
                is_aborted = (step, generation) == (3, 0)
                _execute(path, timeline, step, generation, now, until=4.0 if is_aborted else math.inf)
                now += SECONDS * timeline.makespan + 0.01
                if is_aborted:
                    events.append({"time": now, "kind": "fault", "worker": "1.1", "step": step})
                    events.append({"time": now + 0.3, "kind": "detected", "worker": "1.1", "step": step})
                    now += 0.5
                    continue
                figures = {
                    "loss": 5.5 * math.exp(-step / 20),
                    "tokens_per_second": 1000.0,
                    "live_workers": len(workers),
                }
                period = SECONDS * timeline.period
                metrics.append({"step": step, "time": now, "mode": "staggered", **figures, **attempt, "period": period})
        events.append({"time": now, "kind": "rejoined", "worker": "1.1", "step": 6})
        for name, lines in (("metrics", metrics), ("events", events)):
            (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not live:
            runs.merge_logs(path, SHAPE)
        return path

    return write


def _execute(path: Path, timeline: Timeline, step: int, generation: int, begin: float, until: float) -> None:
    """Append what each live process ran of one iteration, up to the time `until` of the timeline."""
    schedule = timeline.schedule
    for w, worker in enumerate(SHAPE.workers()):
        if worker in schedule.failed or (until < math.inf and worker == Worker(1, 1)):
            continue
        rows = range(int(schedule.columns.offsets[w]), int(schedule.columns.offsets[w + 1]))
        instructions = [
            (schedule.instruction(row), begin + SECONDS * timeline.start[row], begin + SECONDS * timeline.end[row])
            for row in rows
            if timeline.end[row] <= until
        ]
        runs.append_iteration(runs.log_path(path, worker), step, generation, worker, instructions)


@pytest.fixture
def run_dir(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def empty_run_dir(run_dir: Path) -> Path:
    """A run that has committed no step and run no iteration."""
    for name in ("metrics.jsonl", "events.jsonl", "trace.json"):
        (run_dir / name).unlink()
    for log in (run_dir / "logs").iterdir():
        log.unlink()
    return run_dir


@pytest.fixture(scope="session")
def moved() -> Schedule:
    """Of five layers 0.0 hosts both stages since 0.1 is dead, 1.0 the first and 1.1 the second."""
    programs = {"0.0": "0F0.0 1F0.0 1B0.0 0B0.0", "1.0": "0F1.0 0B1.0", "1.1": "1F1.0 1B1.0"}
    placement = {"0.0": (0, 1), "1.0": (0,), "1.1": (1,)}
    return Schedule.from_text(Shape(2, 2, 1, cut=(2, 3)), programs, placement=placement, failed=["0.1"])


@pytest.fixture
def schedule_file(tmp_path: Path, broken: Schedule) -> Path:
    broken.save(tmp_path / "broken.json")
    return tmp_path / "broken.json"
