"""Runs of real processes: through kills, with redundant forwards and replays, by plans from files or proposals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recycle import Job, RunError, Schedule, Shape, check, lower
from recycle.exec import run
from recycle.exec.data.batches import Batch
from recycle.exec.emulation import EmulatedStage
from recycle.exec.launch.launcher import RunResult
from recycle.exec.model.loss import masked_sum
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.processes import Waker
from recycle.exec.worker.main_loop import read_plan
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.replays import with_replays
from recycle.job.sections import IntegritySection
from recycle.job.shape import Worker
from recycle.plans import schedule_hash
from recycle.plans.hosting import Hosts
from recycle.runs.logs import plan_file
from tests.exec.runs import Run, assert_same_training, calm_run, job, kinds

STEPS = 7
FAULT = ["generation", "fault", "detected", "generation", "recovered"]


@pytest.fixture(scope="module")
def emulated() -> Job:
    return job(3, 2, 2)


def assert_plans_pass_check(run: RunResult, of: Job) -> None:
    assert run.directory is not None
    plans = {line["plan"] for line in run.metrics}
    for digest in plans:
        schedule = Schedule.load(run.directory / "plans" / f"{digest}.json")
        assert check(lower(schedule), limits=of.activation_limits()) == []


@pytest.mark.parametrize("phase", ["", ".forward", ".backward", ".reduce", ".commit", ".step"])
def test_a_kill_in_each_phase_changes_no_bit_and_leaves_its_events(phase: str, emulated: Job, launch: Run) -> None:
    run = launch(emulated, STEPS, f"kill:1.1@3{phase}")
    assert_same_training(run, calm_run(emulated, launch, STEPS))
    assert_plans_pass_check(run, emulated)
    assert kinds(run) == FAULT
    assert [line["live_workers"] for line in run.metrics] in ([6] * 3 + [5] * 4, [6] * 4 + [5] * 3)
    assert "1.1" not in run.digests


def test_a_worker_that_rejoins_holds_the_same_state_as_its_peers(emulated: Job, launch: Run) -> None:
    run = launch(emulated, STEPS, "kill:1.1@2", "rejoin:1.1@5")
    reference = calm_run(emulated, launch, STEPS)
    assert_same_training(run, reference)
    assert run.digests == reference.digests
    assert [line["live_workers"] for line in run.metrics] == [6, 6, 5, 5, 5, 6, 6]
    rejoined = [event for event in run.events if event["kind"] == "rejoined"]
    assert [(event["worker"], event["step"]) for event in rejoined] == [("1.1", 5)]


def test_a_second_kill_while_recovering_from_the_first_is_survived(emulated: Job, launch: Run) -> None:
    steps = 40  # enough that the run does not end before the second signal
    run = launch(emulated, steps, "kill:1.1@3", "kill=0.05:0.0@3")
    assert_same_training(run, calm_run(emulated, launch, steps))
    assert kinds(run).count("detected") == 2
    assert run.metrics[-1]["live_workers"] == 4


def test_a_vector_that_was_not_planned_ahead_is_planned_when_it_happens(launch: Run) -> None:
    unplanned = job(3, 2, 2, planner={"ahead": 0})
    run = launch(unplanned, STEPS, "kill:1.1@3")
    assert_same_training(run, calm_run(unplanned, launch, STEPS))
    assert kinds(run) == FAULT


@pytest.mark.parametrize(
    ("pipelines", "ranks", "micro_batches"), [(3, 2, 2), pytest.param(2, 4, 4, marks=pytest.mark.soak)]
)
def test_a_real_gpt_trains_through_a_kill_and_a_rejoin_bit_for_bit(
    pipelines: int, ranks: int, micro_batches: int, launch: Run
) -> None:
    of = job(pipelines, ranks, micro_batches, kind="gpt")
    run = launch(of, 6, "kill:1.1@2", "rejoin:1.1@4")
    reference = calm_run(of, launch, 6)
    assert_same_training(run, reference)
    assert run.digests == reference.digests
    assert_plans_pass_check(run, of)
    assert run.losses[0] == pytest.approx(5.545, abs=0.15)
    assert run.losses[-1] < run.losses[0]


def test_fast_accumulation_stays_within_its_tolerance(launch: Run) -> None:
    of = job(3, 2, 2, kind="gpt", train={"accumulation": "fast"})
    run, reference = launch(of, 6, "kill:1.1@2"), calm_run(of, launch, 6)
    assert run.losses == pytest.approx(reference.losses, rel=1e-4)


COPIES = {"0.0": [0, 1], "1.0": [0, 1]}


@pytest.fixture(scope="module")
def of() -> Job:
    return job(2, 2, 3, memory={"limit": 6})


@pytest.fixture(scope="module")
def doubled(of: Job) -> Schedule:
    """1F1B with the last stage's forward again on the first stage's worker, before each backward."""
    plain = one_f_one_b(of.shape).text()
    programs = {
        worker: " ".join(
            f"1R{word[2:]} {word}" if word.startswith("0B") else word for word in text.split()
        )
        for worker, text in plain.items()
    }  # fmt: skip
    return Schedule.from_text(of.shape, programs, placement=COPIES, optimizer="barrier")


def test_processes_run_them_to_the_same_bits(of: Job, doubled: Schedule, launch: Run) -> None:
    plain = run(one_f_one_b(of.shape), of, steps=3)
    there = launch(of, 3, schedule=doubled, planner=None)
    assert there.losses == plain.losses
    assert [line["grad_norm"] for line in there.metrics] == [line["grad_norm"] for line in plain.metrics]
    assert there.digests["0.0"][1] == there.digests["0.1"][1] == plain.digests["0.1"][1]


@pytest.mark.parametrize("kind", ["emulated", "gpt"])
def test_losses_and_states_are_those_of_the_schedule_without_replays(kind: str) -> None:
    of = job(3, 2, 2, kind=kind)
    for family in (one_f_one_b, zb_h1):
        schedule = family(of.shape)
        with_them, without = (run(one, of, steps=2) for one in (with_replays(schedule).whole, schedule))
        assert with_them.losses == without.losses
        assert with_them.digests == without.digests


@pytest.mark.parametrize(("every", "is_sharded"), [(3, False), ("gaps", False), (3, True)])
def test_all_workers_of_one_process_replay_in_turn(every: int | str, is_sharded: bool) -> None:
    of = job(3, 2, 2, kind="gpt", train={"checkpoint_every": 0, "sharded_optimizer": is_sharded})
    compared = of.with_sections(integrity=IntegritySection(every=every))
    schedule = one_f_one_b(of.shape)
    with_them, without = (run(schedule, one, steps=4) for one in (compared, of))
    assert with_them.losses == without.losses
    assert with_them.digests == without.digests


@pytest.mark.parametrize(("is_sharded", "part"), [(False, "stage 0"), (True, "shard 0 of stage 0")])
@pytest.mark.parametrize("integrity", [{"digests": 2}, {"every": 4, "digests": 2}])
def test_of_one_process_states_that_differ_end_the_run(
    is_sharded: bool, part: str, integrity: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of all leaves another parameter; the state that iteration 2 begins with is compared."""
    train = {"checkpoint_every": 0, "sharded_optimizer": is_sharded}
    of = job(2, 1, 4, train=train, integrity=integrity)
    step, struck = EmulatedStage._update, list[int]()

    def update(stage: EmulatedStage, parameters: torch.Tensor, *rest: Any) -> None:
        step(stage, parameters, *rest)
        if len(parameters):  # the embedding has none
            parameters[0] += not struck
            struck.append(1)

    monkeypatch.setattr(EmulatedStage, "_update", update)
    with pytest.raises(RunError, match=rf"step 2: workers 0.0 and 1.0 hold different states of {part}"):
        run(one_f_one_b(of.shape), of, steps=4)


def test_of_one_process_what_differs_ends_the_run_when_it_has_its_turn() -> None:
    """From the 13th call on the loss is not what it was when a micro-batch is replayed."""
    of = job(2, 1, 4, kind="gpt", train={"checkpoint_every": 0}, integrity={"every": 4})
    calls = []

    def loss(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, object]:
        calls.append(1)
        total, count = masked_sum(losses, batch)
        return total + len(calls) * (len(calls) > 12), count

    with pytest.raises(
        RunError, match=r"step 1: workers .* computed different results for micro-batch .* computes wrong"
    ):
        run(one_f_one_b(of.shape), of, steps=4, loss=loss)


NOT_OVER = threading.Event()


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def small() -> Schedule:
    return lower(one_f_one_b(Shape(pipelines=2, ranks=2, micro_batches=2)))


def test_workers_take_the_plan_from_the_proposal_where_no_file_can_be_written(
    launch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recycle.exec.planning.planning.plan_file", lambda folder, digest: folder / "no" / digest)
    run = launch(job(2, 2, 2), 4, "kill:1.1@1", directory=tmp_path)
    assert len(run.losses) == 4
    assert list((tmp_path / "plans").iterdir()) == []
    assert len([event for event in run.events if event["kind"] == "warning"]) == 2


def test_late_file_is_waited_for_and_damaged_file_is_refused(tmp_path: Path) -> None:
    digest, path = schedule_hash(small()), plan_file(tmp_path, schedule_hash(small()))
    path.write_text('{"format": ')
    with pytest.raises(RunError, match=rf"plan of generation 1 .* within 0.3 s: .*{digest}.json"):
        read_plan(tmp_path, "", 1, digest, NOT_OVER, 0.3)
    one_f_one_b(Shape(pipelines=1, ranks=2, micro_batches=2)).save(path)
    with pytest.raises(RunError, match="holds another schedule"):
        read_plan(tmp_path, "", 1, digest, NOT_OVER, 0.3)
    late = threading.Timer(0.3, small().save, [path])
    late.start()
    assert read_plan(tmp_path, "", 1, digest, NOT_OVER, 30.0).text() == small().text()
    late.join()


def test_plan_of_the_proposal_needs_no_file_and_is_checked_likewise(tmp_path: Path) -> None:
    text, digest = small().dumps(), schedule_hash(small())
    assert read_plan(tmp_path, text, 1, digest, NOT_OVER, 0.0).text() == small().text()
    for damaged in (text[:-40], one_f_one_b(Shape(pipelines=1, ranks=2, micro_batches=2)).dumps()):
        with pytest.raises(RunError, match="could not be read"):
            read_plan(tmp_path, damaged, 1, digest, NOT_OVER, 0.0)


def test_next_leader_finds_the_plan_in_use_by_its_hash_and_dead_workers(tmp_path: Path, waker: Waker) -> None:
    two, schedule = job(2, 2, 2), small()
    own = PlanService(two, None, tmp_path, tmp_path, waker, schedule).own()
    assert own is not None
    assert own[0] == frozenset()
    service = PlanService(two, None, tmp_path, tmp_path, waker)
    assert service.own() is None
    assert service.adopted(frozenset(), own[1].digest) == own[1]
    assert service.adopted(frozenset({Worker(0, 0)}), own[1].digest) is None
    assert service.adopted(frozenset(), "another") is None
    assert service.hosts(own[1].digest) == own[1].hosts == Hosts.at_start(two, None)
    assert service.hosts("another") is None
