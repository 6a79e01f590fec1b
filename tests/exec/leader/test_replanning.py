"""Times that drift: micro-batches leave a slow worker and return to it, and no loss changes by a bit."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recycle import Job, Profile, Schedule, Worker, simulate
from recycle.exec.launch.dials import Observer
from recycle.exec.launch.launcher import RunResult
from recycle.exec.leader.actions import Action, Ask, Event, Outbox, Planned, PreparedPlan
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.leader.plans import Plans
from recycle.exec.protocol import Computed, Report
from recycle.ir.instruction import Forward, Send
from recycle.ir.lower import lower
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts
from recycle.solve.planner import plan_for_training
from tests.exec.leader.real_planner import real_planner
from tests.exec.runs import Run, job

STEPS = 36
SLOW = Worker(1, 1)
UNIT = 0.015
DRIFT = {"drift": 0.5}
"""On a busy machine a sleep of 15 ms takes longer, which does not count as drift here."""
NOBODY: frozenset[Worker] = frozenset()


def noting_planner(job: Job, vector: tuple[int, ...], quick: bool, failed: list[Worker] | None = None) -> str:
    """The real planner; writes the dead workers of each plan into a file next to the profile."""
    if failed is None:
        return plan_for_training(job, vector, quick)
    assert job.times.profile is not None
    if not failed:
        time.sleep(job.train.warmup)
    text = plan_for_training(job, vector, quick, failed)
    with (Path(job.times.profile).parent / "answered").open("a") as notes:
        notes.write(f"without {' '.join(map(str, failed))}\n")
    return text


class _Patient(Observer):
    """From step `since` on, holds the run until a plan that is asked for is made, for a minute at most.

    The profile to plan with is written whenever a plan is asked for.
    """

    def __init__(self, directory: Path, since: int = 0) -> None:
        self.profiles, self.since = directory / "profiles", since

    def committed(self, line: dict[str, Any]) -> None:
        deadline = time.monotonic() + 60
        while line["step"] >= self.since and self.is_open() and time.monotonic() < deadline:
            time.sleep(0.02)

    def is_open(self) -> bool:
        asked = max((file.stat().st_mtime for file in self.profiles.glob("*.json")), default=0.0)
        answered = self.profiles / "answered"
        return asked > (answered.stat().st_mtime if answered.exists() else 0.0)


def emulated_job(membership: dict[str, Any], seconds: int = 0, unit: float = UNIT, link: float = 0.0) -> PricedJob:
    """A plan for all workers takes `seconds` longer; emulated stages have no other warm-up."""
    return job(
        3,
        2,
        4,
        times={"link": link},
        memory={"limit": 4},
        model={"seconds_per_unit": unit},
        train={"clip": 1e9, "warmup": seconds},
        membership=membership,
    )


@pytest.fixture(scope="module")
def emulated() -> PricedJob:
    return emulated_job(DRIFT)


_FREE: dict[tuple[int, float], RunResult] = {}


def free(launch: Run, steps: int, unit: float = 0.0) -> RunResult:
    """The run in which nothing drifts; its losses do not depend on how long its stages take."""
    if (steps, unit) not in _FREE:
        _FREE[steps, unit] = launch(emulated_job(DRIFT, unit=unit), steps)
    return _FREE[steps, unit]


@pytest.fixture
def timed(launch: Run) -> RunResult:
    return free(launch, 10, UNIT)


def plan_of(run: RunResult, digest: str) -> Schedule:
    assert run.directory is not None
    return Schedule.load(run.directory / "plans" / f"{digest}.json")


def forwards(schedule: Schedule, worker: Worker) -> int:
    return sum(isinstance(instruction, Forward) for instruction in schedule.program(worker))


def replanned(run: RunResult) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == "replanned"]


def test_micro_batches_leave_a_slow_worker_and_return_and_no_bit_changes(
    emulated: PricedJob, launch: Run, tmp_path: Path
) -> None:
    run = launch(
        emulated, STEPS, "slow=3:1.1@4-18", planner=noting_planner, observer=_Patient(tmp_path), directory=tmp_path
    )
    reference = free(launch, STEPS)
    assert (run.losses, run.digests) == (reference.losses, reference.digests)
    assert run.undone == []
    away, back = (e for e in replanned(run) if "worker 1.1" in e["cause"])
    first, slow, last = (plan_of(run, line["plan"]) for line in (run.metrics[0], _at(run, away), _at(run, back)))
    assert 4 + 8 // 2 < away["step"] <= 18 < back["step"]
    assert [forwards(plan, SLOW) for plan in (first, last)] == [4, 4]
    assert forwards(slow, SLOW) in (1, 2)  # as many as it computes while each peer computes 5
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


def test_messages_leave_a_slow_link_and_no_bit_changes(launch: Run, tmp_path: Path) -> None:
    """A message over the link takes as long as 4 instructions, and a micro-batch at a stage as long as 3."""
    described = emulated_job(DRIFT, link=0.8)
    run = launch(
        described,
        18,
        "slow-link=5:1.0,1.1@1-17",
        planner=noting_planner,
        observer=_Patient(tmp_path),
        directory=tmp_path,
    )
    reference = free(launch, 18)
    assert (run.losses, run.digests, run.undone) == (reference.losses, reference.digests, [])
    slow = {(e["worker"], e["peer"]): e["factor"] for e in run.events if e["kind"] == "slow-link"}
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


def _at(run: RunResult, event: dict[str, Any]) -> dict[str, Any]:
    return run.metrics[event["step"]]


def test_metrics_state_the_computing_times_of_each_worker_and_the_error_of_the_period(
    timed: RunResult,
) -> None:
    first, *rest = timed.metrics
    assert first["period_error"] is None
    errors = [line["period_error"] for line in rest if line["generation"] == first["generation"]]
    assert all(error > -0.9 for error in errors)
    assert timed.period_error is not None
    for line in timed.metrics:
        assert set(line["compute"]) == {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1"}
        for worker, times in line["compute"].items():
            assert {key[0] for key in times} == {worker[-1]}
            for key, seconds in times.items():
                assert seconds >= UNIT * (2 if key.endswith("B") else 1) * 0.99


def test_profile_with_slow_workers_is_planned_for_the_processes_after_any_death(launch: Run, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"speed": {"1.1": 3.0}}))
    sections = {"memory": {"limit": 4}, "train": {"clip": 1e9}}
    slow = job(3, 2, 4, times={"profile": str(tmp_path / "p.json")}, planner={"ahead": 1}, **sections)
    run, free = launch(slow, 5, "kill:2.1@2", directory=tmp_path / "run"), launch(job(3, 2, 4, **sections), 5)
    assert run.losses == free.losses
    before, after = (plan_of(run, line["plan"]) for line in (run.metrics[0], run.metrics[-1]))
    assert (forwards(before, SLOW), after.failed) == (2, {Worker(2, 1)})
    assert forwards(after, SLOW) < forwards(after, Worker(0, 1))
    assert run.metrics[-1]["period"] == simulate(after, slow.profile()).period


@pytest.mark.soak
def test_death_while_a_plan_is_made_drops_that_plan_and_the_slow_worker_is_relieved_by_another(
    launch: Run, tmp_path: Path
) -> None:
    steps = 26
    run = launch(
        emulated_job(DRIFT, seconds=6),
        steps,
        "slow=3:1.1@2-25",
        "kill:2.1@9",
        planner=noting_planner,
        observer=_Patient(tmp_path, since=10),
        directory=tmp_path,
    )
    reference = free(launch, steps)
    assert run.losses == reference.losses
    assert run.digests == {worker: reference.digests[worker] for worker in run.digests}
    live = [line["live_workers"] for line in run.metrics]
    # Step 8 may not be committed yet when a worker in step 9 is killed; then it is repeated without that worker.
    assert live in ([6] * 9 + [5] * (steps - 9), [6] * 8 + [5] * (steps - 8))
    *_, event = (e for e in replanned(run) if "worker 1.1" in e["cause"])
    after = plan_of(run, _at(run, event)["plan"])
    assert event["step"] > 9
    assert {"without ", "without 2.1"} <= set((tmp_path / "profiles" / "answered").read_text().split("\n"))
    assert after.failed == {Worker(2, 1)}
    before = plan_of(run, run.metrics[event["step"] - 1]["plan"])
    assert forwards(after, SLOW) < forwards(before, SLOW)


def times_of(job: Job, factor: float, *dead: Worker) -> ComputeTimes:
    """The times of an iteration in which one worker takes `factor` times as long as the others."""
    reports: dict[Worker, list[Computed]] = {}
    for worker in job.shape.workers():
        if worker not in dead:
            each = UNIT * (factor if worker == SLOW else 1.0)
            reports[worker] = [Computed(worker.rank, kind, 4, 4 * each) for kind in "FIW"]
    return ComputeTimes.of({worker: Report({}, None, rows) for worker, rows in reports.items()})


@pytest.mark.process
def test_times_that_jump_to_and_fro_cost_ever_fewer_changes(emulated: PricedJob, tmp_path: Path) -> None:
    """Ten iterations slow and ten not, again and again."""
    with real_planner(emulated, tmp_path) as planner:
        plans = Plans(emulated, planner.answers, planner.outbox)
        planner.wait_for(lambda: plans.ready(NOBODY))
        for step in range(320):
            plans.observe(NOBODY, step, times_of(emulated, 3.0 if step // 10 % 2 else 1.0))
            planner.answer_all()
            if plans.has_better(NOBODY):
                planner.wait_for(lambda: plans.ready(NOBODY))
    changes = [event["step"] for event in planner.events]
    pauses = [later - earlier for earlier, later in pairwise(changes)]
    assert changes[0] == 10 + 8 // 2 + 2
    assert all(pause >= 8 * 2**place for place, pause in enumerate(pauses[:4]))
    assert len(changes) <= 6


def plan(job: PricedJob, digest: str, *dead: Worker, compared: float | None = None) -> PreparedPlan:
    """A plan of 1 s per iteration, which is compared with one of `compared` seconds."""
    roles = {worker: worker for worker in job.shape.workers() if worker not in dead}
    return PreparedPlan(digest, roles, {"barrier": 1.0}, hosts=Hosts.at_start(job, None), compared_period=compared)


class SlowRun:
    """A job whose worker `SLOW` is three times as slow as the others from the start."""

    def __init__(self, job: PricedJob, *, is_own: bool = False) -> None:
        self.job, self.outbox, self._step = job, Outbox(), 0
        own = (NOBODY, plan(job, "first")) if is_own else None
        self.answers = PlanAnswers(job, self.outbox, own, can_search=True)
        self.answers.adopt(NOBODY, plan(job, "first"), {})
        self.plans = Plans(job, self.answers, self.outbox)

    def iterate(self, *dead: Worker, steps: int = 1) -> list[Action]:
        """Iterations without the dead workers; the actions."""
        for _ in range(steps):
            self.plans.observe(frozenset(dead), self._step, times_of(self.job, 3.0, *dead))
            self._step += 1
        return self.outbox.take()


def test_no_other_plan_is_asked_for_with_drift_off_or_by_the_users_own_schedule(emulated: PricedJob) -> None:
    for run in SlowRun(emulated_job({"drift": 0})), SlowRun(emulated, is_own=True):
        assert run.iterate(steps=20) == []
        assert run.plans.compute["compute"]["1.1"]["1F"] == pytest.approx(3 * UNIT)
    assert SlowRun(emulated).iterate(steps=20) != []


def test_answer_for_other_live_workers_is_dropped_and_another_plan_is_asked_for(emulated: PricedJob) -> None:
    run, dead = SlowRun(emulated), Worker(2, 1)
    (before,) = run.iterate(steps=10)
    assert isinstance(before, Ask)
    assert before.profile is not None
    assert before.profile.speed_of(SLOW) == pytest.approx(3)
    assert (before.question.failed, before.question.compared) == (NOBODY, "first")
    run.answers.adopt(frozenset({dead}), plan(run.job, "second", dead), {})
    (after,) = run.iterate(dead)
    assert isinstance(after, Ask)
    assert (after.question.failed, after.question.compared) == ({dead}, "second")
    run.answers.take(Planned(before.question, plan(run.job, "late", compared=3.0)))
    assert run.iterate(dead) == []
    assert not run.plans.has_better(frozenset({dead}))
    run.answers.take(Planned(after.question, plan(run.job, "third", dead, compared=3.0)))
    run.iterate(dead)
    assert run.plans.has_better(frozenset({dead}))
    better = run.plans.ready(frozenset({dead}))
    assert better is not None
    assert better.digest == "third"
    (event,) = run.outbox.take()
    assert isinstance(event, Event)
    assert (event.kind, event.fields["step"], event.fields["plan"]) == ("replanned", 12 + 1, "third")
    assert (event.fields["period_before"], event.fields["period"]) == (3.0, 1.0)


@pytest.mark.parametrize(("compared", "is_better"), [(1.04, False), (1.06, True), (None, False)])
def test_plan_is_taken_up_if_it_saves_5_percent_of_the_period(
    emulated: PricedJob, compared: float | None, is_better: bool
) -> None:
    run = SlowRun(emulated)
    (asked,) = run.iterate(steps=10)
    assert isinstance(asked, Ask)
    run.answers.take(Planned(asked.question, plan(run.job, "other", compared=compared)))
    run.iterate()
    assert run.plans.has_better(NOBODY) is is_better
