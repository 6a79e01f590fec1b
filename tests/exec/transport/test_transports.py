"""Transports between processes: what is sent arrives, sums are right, and nobody waits for the dead.

Each test runs on gloo's transport and on the one that NCCL uses, a communicator per lane, over those of the simulated
accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from recycle.errors import JobError, RunError
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.nccl import Nccl
from recycle.exec.transport.plugin import TransportPlugin, TransportSettings, transport_of
from recycle.ir.families import interleaved, one_f_one_b, zb_h1
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.shape import Shape, Worker
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training
from tests.exec.transport_workers import TransportWorkers

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def workers() -> Iterator[TransportWorkers]:
    with TransportWorkers(5) as started:
        yield started


def adaptive() -> Schedule:
    """3 x 2 workers, 1.1 dead: lanes that cross pipelines."""
    job = Job.from_toml(
        "[shape]\npipelines = 3\nranks = 2\nmicro_batches = 3\n[memory]\nlimit = 4\n[planner]\nsteps = 1"
    )
    vector = (0, 1)
    plan = Plan.from_text(plan_for_training(price(job), vector, True), "plan")
    return plan.for_processes(frozenset([Worker(1, 1)])).schedule


KINDS = ["gloo", "accelerator"]
SCHEDULES = {
    "1f1b": lambda: one_f_one_b(Shape(2, 2, 3)),
    "zb-h1": lambda: zb_h1(Shape(1, 4, 6)),
    "interleaved": lambda: interleaved(Shape(1, 2, 4, 2)),
    "adaptive": adaptive,
    "in buckets": lambda: replace(adaptive(), buckets=3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_and_sum_is_the_right_one_in_every_iteration(
    kind: str, name: str, workers: TransportWorkers
) -> None:
    schedule = SCHEDULES[name]()
    assert workers.run(kind, schedule, "") == ["done"] * len(schedule.live)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before a send", "before a sum"])
@pytest.mark.parametrize("victim", [0, 4])
def test_nobody_waits_for_a_dead_peer_once_the_generation_is_over(
    kind: str, when: str, victim: int, workers: TransportWorkers
) -> None:
    assert_all_end(workers.run(kind, adaptive(), when, victim=victim), victim)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_waits_for_a_peer_that_died_while_buckets_are_summed(kind: str, workers: TransportWorkers) -> None:
    assert_all_end(workers.run(kind, replace(adaptive(), buckets=3), "before a sum", victim=4), 4)


def assert_all_end(answers: list[str], victim: int) -> None:
    assert answers.pop(victim) == ""
    assert all(answer.startswith("TransportError: ") for answer in answers), answers


def job(transport: str, kind: str = "gpt", tensor_parallel: int = 1) -> Job:
    return Job.from_toml(
        f"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\ntensor_parallel = {tensor_parallel}\n"
        f'[model]\nkind = "{kind}"\n[membership]\ntransport = "{transport}"'
    )


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
    assert transport_of(job(transport, kind)) is expected
    expected.require_machine(4)


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
        transport_of(job(transport, kind)).require_machine(4)


@pytest.mark.parametrize("name", ["gluu", "local", "no.such:Module", "recycle.job:Job", "recycle.job:No", ":", "a b:c"])
def test_a_transport_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(JobError, match=re.escape(f'transport: "{name}" is none of "auto", "nccl", "gloo", nor the')):
        transport_of(job(name))


def test_nccl_names_what_is_missing() -> None:
    with pytest.raises(RunError, match="NCCL: no GPU is visible here"):
        Nccl(TransportSettings(None))
