"""Transports between processes: what is sent arrives, sums are right, and nobody waits for the dead.

They run on gloo's transport and on the one that NCCL uses, a communicator per lane, over those of the simulated
accelerator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.errors import JobError, RunError
from recycle.exec.transport.base import sum_groups
from recycle.exec.transport.formation import Wanted, formation, lanes_of
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.nccl import Nccl
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings, transport_of
from recycle.ir.families import dualpipe_v, interleaved, one_f_one_b, zb_h1, zb_v
from recycle.ir.instruction import Send
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.shape import Shape, Worker
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training
from tests.exec.runs import Run, job, kinds
from tests.exec.transport_workers import TransportWorkers


@pytest.fixture(scope="module")
def workers() -> Iterator[TransportWorkers]:
    with TransportWorkers(5) as started:
        yield started


def adaptive() -> Schedule:
    """3 x 2 workers, 1.1 dead: lanes that cross pipelines."""
    job_over = Job.from_toml(
        "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 3\n[memory]\nlimit = 4\n[planner]\nsteps = 1"
    )
    vector = (0, 1)
    plan = Plan.from_text(plan_for_training(price(job_over), vector, True), "plan")
    return plan.for_processes(frozenset([Worker(1, 1)])).schedule


KINDS = ["gloo", "accelerator"]
SCHEDULES = {
    "1f1b": lambda: one_f_one_b(Shape(2, 2, 3)),
    "zb-h1": lambda: zb_h1(Shape(1, 4, 6)),
    "interleaved": lambda: interleaved(Shape(1, 2, 4, 2)),
    "adaptive": adaptive,
    "in buckets": lambda: replace(adaptive(), buckets=3),
}


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_and_sum_is_the_right_one_in_every_iteration(
    kind: str, name: str, workers: TransportWorkers
) -> None:
    schedule = SCHEDULES[name]()
    assert workers.run(kind, schedule, "") == ["done"] * len(schedule.live)


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before a send", "before a sum"])
@pytest.mark.parametrize("victim", [0, 4])
def test_nobody_waits_for_a_dead_peer_once_the_generation_is_over(
    kind: str, when: str, victim: int, workers: TransportWorkers
) -> None:
    assert_all_end(workers.run(kind, adaptive(), when, victim=victim), victim)


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_waits_for_a_peer_that_died_while_buckets_are_summed(kind: str, workers: TransportWorkers) -> None:
    assert_all_end(workers.run(kind, replace(adaptive(), buckets=3), "before a sum", victim=4), 4)


def assert_all_end(answers: list[str], victim: int) -> None:
    assert answers.pop(victim) == ""
    assert all(answer.startswith("TransportError: ") for answer in answers), answers


def job_over(transport: str, kind: str = "gpt", tensor_parallel: int = 1) -> Job:
    return Job.from_toml(
        f"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\ntensor_parallel = {tensor_parallel}\n"
        f'[model]\nkind = "{kind}"\n[membership]\ntransport = "{transport}"'
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("transport", "kind", "gpus", "expected"),
    [
        ("auto", "gpt", 0, Gloo),
        ("auto", "gpt", 4, Nccl),
        ("nccl", "gpt", 4, Nccl),
        ("auto", "emulated", 4, Gloo),
        ("gloo", "emulated", 4, Gloo),
        ("gloo", "gpt", 0, Gloo),
    ],
)
def test_the_transport_follows_from_where_stages_compute(
    transport: str, kind: str, gpus: int, expected: type[TransportPlugin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert transport_of(job_over(transport, kind)) is expected
    expected.require_machine(4)


@pytest.mark.process
@pytest.mark.parametrize(
    ("transport", "kind", "gpus", "message"),
    [
        ("nccl", "gpt", 0, '[membership] transport: "nccl", but no stage computes on a GPU here'),
        ("nccl", "emulated", 4, '[membership] transport: "nccl", but no stage computes on a GPU here'),
        ("gloo", "gpt", 4, '[membership] transport: "gloo" moves CPU tensors'),
        ("auto", "gpt", 3, "4 workers on this machine, but 3 GPUs: NCCL wants one for each"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(
    transport: str, kind: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(JobError, match=re.escape(message)):
        transport_of(job_over(transport, kind)).require_machine(4)


@pytest.mark.process
@pytest.mark.parametrize("name", ["gluu", "local", "no.such:Module", "recycle.job:Job", "recycle.job:No", ":", "a b:c"])
def test_a_transport_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(JobError, match=re.escape(f'transport: "{name}" is none of "auto", "nccl", "gloo", nor the')):
        transport_of(job_over(name))


@pytest.mark.process
def test_nccl_names_what_is_missing() -> None:
    with pytest.raises(RunError, match="NCCL: no GPU is visible here"):
        Nccl(TransportSettings(None))


class Counting(Gloo):
    """Gloo that says in the worker's log what was asked of it."""

    def open(self, groups: GroupsOfGeneration) -> GroupTransport:
        print(f"opened {groups.name} with {len(groups.members)}", flush=True)
        return super().open(groups)

    def end(self) -> None:
        super().end()
        print("ended", flush=True)


@pytest.mark.process
def test_a_job_trains_through_a_kill_on_a_transport_of_ones_own(launch: Run, tmp_path: Path) -> None:
    of = job(2, 2, 2, membership={"transport": f"{__name__}:Counting"})
    run = launch(of, 5, "kill:1.1@2", directory=tmp_path)
    assert run.losses == launch(job(2, 2, 2), 5).losses
    assert "detected" in kinds(run)
    said = (tmp_path / "logs" / "0.0.log").read_text().splitlines()
    opened = [line.split()[-1] for line in said if line.startswith("opened")]
    assert opened == ["4", "3"]
    assert said.count("ended") == 2


def planned(pipelines: int, ranks: int, micro_batches: int, *dead: int, chunks: int = 1) -> Schedule:
    """The plan that training begins with, with a dead worker of each of these ranks."""
    text = f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\nchunks = {chunks}\n"
    job = price(Job.from_toml(f"{text}[memory]\nlimit = {(ranks + 4) * chunks}\n[planner]\nsteps = 1\n"))
    vector = [dead.count(rank) for rank in range(ranks)]
    return lower(Plan.from_text(plan_for_training(job, vector, True), "plan").schedule)


FORMED_SCHEDULES = {
    "1f1b": lambda: lower(one_f_one_b(Shape(2, 5, 6))),
    "a ring of odd length": lambda: lower(interleaved(Shape(2, 3, 6, 2))),
    "a V": lambda: lower(zb_v(Shape(1, 4, 8, 2))),
    "two directions": lambda: lower(dualpipe_v(Shape(1, 4, 8, 2))),
    "one dead": lambda: planned(6, 4, 12, 2),
    "three dead": lambda: planned(6, 4, 12, 1, 2, 2),
    "one dead on a ring of odd length": lambda: planned(4, 3, 9, 1, chunks=2),
}


def formed(schedule: Schedule, joins: Sequence[tuple[Worker, Worker]] = ()) -> list[Wanted]:
    return formation({*lanes_of(schedule), *joins}, sum_groups(schedule))


@pytest.mark.parametrize("name", FORMED_SCHEDULES)
def test_the_rounds_are_hardly_more_than_the_communicators_of_the_busiest_worker(name: str) -> None:
    wanted = formed(FORMED_SCHEDULES[name](), [(Worker(0, 0), Worker(1, 0))] if "dead" in name else [])
    busy = Counter((worker, one.round) for one in wanted for worker in one.members)
    assert set(busy.values()) == {1}
    degree = max(Counter(worker for one in wanted for worker in one.members).values())
    assert 1 + max(one.round for one in wanted) <= 1.3 * degree


@pytest.mark.parametrize("name", FORMED_SCHEDULES)
def test_every_pair_with_a_transfer_has_a_lane_and_every_stage_with_several_hosts_a_sum(name: str) -> None:
    schedule = FORMED_SCHEDULES[name]()
    pairs = {(w, one.peer) for w in schedule.live for one in schedule.program(w) if isinstance(one, Send)}
    wanted = formed(schedule)
    assert sorted(one.members for one in wanted if one.stage is None) == sorted(pairs)
    sums = {one.stage: list(one.members) for one in wanted if one.stage is not None}
    assert sums == {stage: sorted(hosts) for stage, hosts in sum_groups(schedule).items() if len(hosts) > 1}
