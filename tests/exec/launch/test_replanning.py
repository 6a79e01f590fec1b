"""Times that drift: micro-batches leave a slow worker and return to it, and no loss changes by a bit."""

import time
from pathlib import Path

import pytest

from recycle import Job, Profile, Schedule, Worker, lower, simulate
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.trackers import Observer
from recycle.ir.instruction import Forward, Send
from recycle.job import PricedJob
from recycle.solve.planner import plan_for_training
from tests.exec.runs import calm_run, job, of_kind

STEPS, SLOW, UNIT = 36, Worker(1, 1), 0.015


def noting_planner(job: Job, vector: tuple[int, ...], quick: bool, failed: list[Worker] | None = None) -> str:
    """The real planner; touches a file next to the profile."""
    text = plan_for_training(job, vector, quick, failed)
    if failed is not None:
        (Path(job.times.profile).parent / "answered").touch()
    return text


class _Patient(Observer):
    """Holds the run until a plan that is asked for is made, for a minute at most.

    The profile to plan with is written whenever a plan is asked for.
    """

    def __init__(self, directory: Path):
        self._profiles = directory / "profiles"

    def committed(self, line):
        deadline = time.monotonic() + 60
        while self.is_open() and time.monotonic() < deadline:
            time.sleep(0.02)

    def is_open(self) -> bool:
        asked = max((file.stat().st_mtime for file in self._profiles.glob("*.json")), default=0.0)
        answered = self._profiles / "answered"
        return asked > (answered.stat().st_mtime if answered.exists() else 0.0)


def emulated_job(link=0.0, **membership: float) -> PricedJob:
    return job(
        3,
        2,
        4,
        times={"link": link},
        memory={"limit": 4},
        model={"seconds_per_unit": UNIT},
        train={"clip": 1e9, "warmup": 0},
        membership={"drift": 0.5} | membership,  # a sleep of 15 ms takes longer on a busy machine
    )


def plan_of(run: RunResult, digest: str) -> Schedule:
    return Schedule.load(run.directory / "plans" / f"{digest}.json")


def forwards(schedule: Schedule, worker: Worker) -> int:
    return sum(isinstance(instruction, Forward) for instruction in schedule.program(worker))


def replanned(run: RunResult):
    return of_kind(run, "replanned")


def test_micro_batches_leave_a_slow_worker_and_return_and_no_bit_changes(launch, tmp_path):
    run = launch(
        emulated_job(drift_iterations=4),  # an unused worker is tried again after 16
        STEPS,
        "slow=3:1.1@4-18",
        planner=noting_planner,
        observer=_Patient(tmp_path),
        directory=tmp_path,
    )
    reference = calm_run(emulated_job(), launch, STEPS)
    assert (run.losses, run.digests) == (reference.losses, reference.digests)
    assert run.undone == []
    away, back = (e for e in replanned(run) if "worker 1.1" in e["cause"])
    first, slow, last = (plan_of(run, line["plan"]) for line in (run.metrics[0], _at(run, away), _at(run, back)))
    assert 4 + 4 // 2 < away["step"] <= 18 < back["step"]
    assert [forwards(plan, SLOW) for plan in (first, last)] == [4, 4]
    assert forwards(slow, SLOW) <= 2  # as many as it computes while each peer computes 6; none is as good
    profile = Profile.load(tmp_path / "profiles" / f"{away['profile']}.json")
    assert profile.speed_of(SLOW) == pytest.approx(3, rel=0.3)
    assert simulate(first, profile).period == pytest.approx(away["period_before"])
    assert simulate(slow, profile).period == pytest.approx(away["period"])
    assert away["period"] < 0.6 * away["period_before"]
    assert back["period"] == pytest.approx(
        simulate(last, Profile.load(tmp_path / "profiles" / f"{back['profile']}.json")).period
    )
    generations = {line["generation"] for line in run.metrics}
    assert len(generations) == 1 + len(replanned(run))
    assert [line["step"] for line in run.metrics] == list(range(STEPS))


def test_messages_leave_a_slow_link_and_no_bit_changes(launch, tmp_path):
    """A message over the link takes as long as 4 instructions, and a micro-batch at a stage as long as 3."""
    run = launch(
        emulated_job(link=0.8),
        18,
        "slow-link=5:1.0,1.1@1-17",
        planner=noting_planner,
        observer=_Patient(tmp_path),
        directory=tmp_path,
    )
    reference = calm_run(emulated_job(), launch, 18)
    assert (run.losses, run.digests, run.undone) == (reference.losses, reference.digests, [])
    slow = {(e["worker"], e["peer"]): e["factor"] for e in of_kind(run, "slow-link")}
    assert slow == {("1.0", "1.1"): pytest.approx(5, rel=0.3), ("1.1", "1.0"): pytest.approx(5, rel=0.3)}
    away = next(e for e in replanned(run) if "messages from 1.0 to 1.1" in e["cause"])
    assert away["step"] > 1 + 8 // 2
    assert away["period"] < 0.85 * away["period_before"]
    first, around = (lower(plan_of(run, line["plan"])) for line in (run.metrics[0], _at(run, away)))
    ends = [
        {(send.peer, str(worker)) for worker in plan.live for send in plan.program(worker) if isinstance(send, Send)}
        for plan in (first, around)
    ]
    assert [(Worker(1, 1), "1.0") in pairs for pairs in ends] == [True, False]
    profile = Profile.load(tmp_path / "profiles" / f"{away['profile']}.json")
    assert profile.links.keys() == {"1.0>1.1", "1.1>1.0"}
    assert simulate(around, profile).period == pytest.approx(away["period"])


def _at(run: RunResult, event):
    return run.metrics[event["step"]]
