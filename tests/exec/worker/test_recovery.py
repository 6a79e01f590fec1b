"""Runs with redundant forwards and replays, and plans from files or proposals."""

import threading

import pytest

from recycle import RunError, Schedule, Shape, Worker, lower
from recycle.exec import run
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.loss import masked_sum
from recycle.exec.planning.planning import PlanService
from recycle.exec.processes.processes import Waker
from recycle.exec.worker.main_loop import read_plan
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.job.sections import IntegritySection
from recycle.plans import schedule_hash
from recycle.plans.hosting import Hosts
from recycle.runs.logs import plan_file
from tests.exec.runs import calm_run, job, of_kind


def test_fast_accumulation_stays_within_its_tolerance(launch):
    fast = job(2, 2, 2, kind="gpt", train={"accumulation": "fast"})
    run, reference = launch(fast, 4, "kill:1.1@1"), calm_run(fast, launch, 4)
    assert run.losses == pytest.approx(reference.losses, rel=1e-4)


def test_redundant_forwards_change_no_bit(launch):
    """1F1B with the last stage's forward again on the first stage's worker, before each backward."""
    small_job = job(2, 2, 3, memory={"limit": 6})
    plain = one_f_one_b(small_job.shape)
    programs = {
        worker: " ".join(f"1R{word[2:]} {word}" if word.startswith("0B") else word for word in text.split())
        for worker, text in plain.text().items()
    }
    placement = {"0.0": [0, 1], "1.0": [0, 1]}
    doubled = Schedule.from_text(small_job.shape, programs, placement=placement, optimizer="barrier")
    reference, redundant = run(plain, small_job, steps=3), launch(small_job, 3, schedule=doubled, planner=None)
    assert redundant.losses == reference.losses
    assert [line["grad_norm"] for line in redundant.metrics] == [line["grad_norm"] for line in reference.metrics]
    assert redundant.digests["0.0"][1] == redundant.digests["0.1"][1] == reference.digests["0.1"][1]


@pytest.mark.parametrize(("is_sharded", "rounds"), [(False, (3, "gaps")), (True, (3,))])
def test_replays_change_no_bit_in_one_process(is_sharded, rounds):
    plain = job(3, 2, 2, kind="gpt", train={"checkpoint_every": 0, "sharded_optimizer": is_sharded})
    reference = run(zb_h1(plain.shape), plain, steps=4)
    for every in rounds:
        replayed = run(zb_h1(plain.shape), plain.with_sections(integrity=IntegritySection(every=every)), steps=4)
        assert (replayed.losses, replayed.digests) == (reference.losses, reference.digests), every


@pytest.mark.parametrize(
    ("is_sharded", "integrity", "part"),
    [(False, {"digests": 2}, "stage 0"), (True, {"every": 4, "digests": 2}, "shard 0 of stage 0")],
)
def test_different_states_end_a_run_in_one_process(is_sharded, integrity, part, monkeypatch):
    """The first step of all changes another parameter; the state at the start of iteration 2 is compared."""
    train = {"checkpoint_every": 0, "sharded_optimizer": is_sharded}
    compared = job(2, 1, 4, train=train, integrity=integrity)
    step, struck = EmulatedStage._update, []

    def update(stage, parameters, *arguments):
        step(stage, parameters, *arguments)
        if len(parameters):  # the embedding has none
            parameters[0] += not struck
            struck.append(1)

    monkeypatch.setattr(EmulatedStage, "_update", update)
    with pytest.raises(RunError, match=rf"step 2: workers 0.0 and 1.0 hold different states of {part}"):
        run(one_f_one_b(compared.shape), compared, steps=4)


def test_different_replay_ends_a_run_in_one_process():
    """From the 13th call on, the loss differs from that of the replayed micro-batch."""
    replayed = job(2, 1, 4, kind="gpt", train={"checkpoint_every": 0}, integrity={"every": 4})
    calls = []

    def loss(losses, batch):
        calls.append(1)
        total, count = masked_sum(losses, batch)
        return total + len(calls) * (len(calls) > 12), count

    with pytest.raises(RunError, match=r"step 1: workers .* micro-batch "):
        run(one_f_one_b(replayed.shape), replayed, steps=4, loss=loss)


NOT_OVER = threading.Event()


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()


def small() -> Schedule:
    return lower(one_f_one_b(Shape(pipelines=2, ranks=2, micro_batches=2)))


def test_proposal_carries_the_plan_if_its_file_cannot_be_written(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("recycle.exec.planning.planning.plan_file", lambda folder, digest: folder / "no" / digest)
    run = launch(job(2, 2, 2), 4, "kill:1.1@1", directory=tmp_path)
    assert len(run.losses) == 4
    assert list((tmp_path / "plans").iterdir()) == []
    assert len(of_kind(run, "warning")) == 2


def test_plan_is_read_from_the_proposal_or_a_late_file_and_checked(tmp_path):
    schedule, other = small(), one_f_one_b(Shape(pipelines=1, ranks=2, micro_batches=2))
    text, digest = schedule.dumps(), schedule_hash(schedule)
    path = plan_file(tmp_path, digest)
    assert read_plan(tmp_path, text, 1, digest, NOT_OVER, 0.0).text() == schedule.text()
    for damaged in (text[:-40], other.dumps()):
        with pytest.raises(RunError, match="plan of generation 1 could not be read"):
            read_plan(tmp_path, damaged, 1, digest, NOT_OVER, 0.0)
        path.write_text(damaged)
        with pytest.raises(RunError, match=rf"within 0.2 s: .*{digest}"):
            read_plan(tmp_path, "", 1, digest, NOT_OVER, 0.2)
    late = threading.Timer(0.3, schedule.save, [path])
    late.start()
    assert read_plan(tmp_path, "", 1, digest, NOT_OVER, 30.0).text() == schedule.text()
    late.join()


def test_next_leader_finds_the_plan_in_use(tmp_path, waker):
    two, schedule = job(2, 2, 2), small()
    own = PlanService(two, None, tmp_path, tmp_path, waker, schedule).own()
    assert own[0] == frozenset()
    service = PlanService(two, None, tmp_path, tmp_path, waker)
    assert service.own() is None
    assert service.adopted(frozenset(), own[1].digest) == own[1]
    assert service.adopted(frozenset({Worker(0, 0)}), own[1].digest) is None
    assert service.adopted(frozenset(), "another") is None
    assert service.hosts(own[1].digest) == own[1].hosts == Hosts.at_start(two, None)
    assert service.hosts("another") is None
