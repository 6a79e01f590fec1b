"""Several stages per worker, on a loop and on the V: the bits of one process that holds the whole model."""

from __future__ import annotations

import pytest

from recycle import Job, Schedule, check
from recycle.exec import run
from recycle.exec.launch.launcher import RunResult
from recycle.ir.families import FAMILIES, one_f_one_b
from recycle.ir.instruction import OptimizerStep, ReduceGradients, SendGradient
from recycle.ir.lower import lower
from tests.exec.runs import Run, figures, job

pytestmark = pytest.mark.slow

STEPS = 5


def two_chunks(ahead: int = 2, **train: float) -> Job:
    return job(2, 2, 4, kind="gpt", shape={"chunks": 2}, memory={"limit": 8}, train=train, planner={"ahead": ahead})


@pytest.fixture(scope="module")
def gpt() -> Job:
    return two_chunks()


def alone(**train: float) -> RunResult:
    """The same model and micro-batches in one stage, 1F1B."""
    whole = job(1, 1, 8, kind="gpt", memory={"limit": 8}, model={"layers": 4}, train=train)
    return run(one_f_one_b(whole.shape), whole, steps=STEPS)


@pytest.fixture(scope="module")
def whole() -> RunResult:
    return alone()


def by_stage(result: RunResult) -> dict[int, str]:
    """Final state of each stage, which all of its hosts must agree on."""
    found: dict[int, set[str]] = {}
    for stages in result.digests.values():
        for stage, digest in stages.items():
            found.setdefault(stage, set()).add(digest)
    assert all(len(digests) == 1 for digests in found.values())
    return {stage: digests.pop() for stage, digests in sorted(found.items())}


@pytest.mark.parametrize("family", ["interleaved", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_every_family_trains_to_the_bits_of_one_process(family: str, gpt: Job, whole: RunResult) -> None:
    result = run(FAMILIES[family](gpt.shape), gpt, steps=STEPS)
    assert figures(result) == figures(whole)
    assert sorted(by_stage(result)) == [0, 1, 2, 3]


def test_all_stages_on_one_worker(whole: RunResult) -> None:
    one = job(1, 1, 8, kind="gpt", shape={"chunks": 4}, memory={"limit": 32}, model={"layers": 4})
    programs = {"0.0": " ".join(f"{s}{k}0.{j}" for j in range(8) for k, s in _down_and_up(4))}
    assert figures(run(Schedule.from_text(one.shape, programs), one, steps=STEPS)) == figures(whole)


def _down_and_up(stages: int) -> list[tuple[str, int]]:
    return [("F", s) for s in range(stages)] + [("B", s) for s in reversed(range(stages))]


@pytest.mark.parametrize(
    "family", ["zb-v", *(pytest.param(each, marks=pytest.mark.soak) for each in ("interleaved", "dualpipe-v"))]
)
def test_processes_train_through_a_kill_and_a_rejoin_to_the_same_bits(
    family: str, gpt: Job, whole: RunResult, launch: Run
) -> None:
    schedule = FAMILIES[family](gpt.shape)
    of = two_chunks(ahead=1)
    result = launch(of, STEPS, "kill:1.1@1", "rejoin:1.1@3", schedule=schedule)
    assert figures(result) == figures(whole)
    assert [line["live_workers"] for line in result.metrics] == [4, 3, 3, 4, 4]
    assert result.digests == run(schedule, gpt, steps=STEPS).digests
    assert result.directory is not None
    for digest in {line["plan"] for line in result.metrics}:
        ran = Schedule.load(result.directory / "plans" / f"{digest}.json")
        assert check(ran, limits=of.activation_limits()) == []
        assert all(ran.stages_of(worker) == schedule.stages_of(worker) for worker in ran.live)


def test_planned_adaptive_schedules_train_to_the_same_bits(gpt: Job, whole: RunResult, launch: Run) -> None:
    result = launch(gpt, STEPS, "kill:0.0@1", "kill:1.1@2", "rejoin:0.0@3")
    assert figures(result) == figures(whole)
    assert [line["live_workers"] for line in result.metrics] == [4, 3, 2, 3, 3]
    assert len({line["plan"] for line in result.metrics}) == 4


def eager(schedule: Schedule) -> Schedule:
    """Reduce and step of each stage right behind its last gradient, before other stages of the worker are done."""
    programs = {}
    for worker in schedule.live:
        compute = [i for i in lower(schedule).program(worker) if not isinstance(i, ReduceGradients | OptimizerStep)]
        for stage in schedule.stages_of(worker):
            last = max(p for p, i in enumerate(compute) if getattr(i, "stage", None) == stage and str(i)[1] in "BIW")
            end = next(
                (p for p in range(last + 1, len(compute)) if not isinstance(compute[p], SendGradient)), len(compute)
            )
            compute[end:end] = [ReduceGradients(stage), OptimizerStep(stage)]
        programs[worker] = compute
    return Schedule.build(schedule.shape, programs, placement=schedule.placement)
