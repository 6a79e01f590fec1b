"""Which transport a job gets, transports of other packages, and the order in which communicators form."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

from recycle import JobError, Schedule, Shape, Worker, lower
from recycle.exec.transport.base import sum_groups
from recycle.exec.transport.formation import AT_ONCE, COPIES, formation_order
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.nccl import Nccl
from recycle.exec.transport.plugin import transport_of
from recycle.exec.transport.staged import Staged
from recycle.ir.communicators import LANES, lanes_of
from recycle.ir.families import dualpipe_v, interleaved, one_f_one_b, zb_v
from recycle.ir.instruction import Send
from recycle.job import Job, price
from recycle.job.footprint import COMMUNICATORS
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training


def adaptive(pipelines=3, ranks=2, micro_batches=3, vector: tuple[int, ...] = (0, 1), chunks=1) -> Schedule:
    """A plan for dead workers, with lanes that cross pipelines; by default for 3 x 2 workers, 1.1 dead."""
    planned = Job.from_toml(
        f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\nchunks = {chunks}\n"
        f"[memory]\nlimit = {(ranks + 4) * chunks}\n[planner]\nsteps = 1"
    )
    plan = Plan.from_text(plan_for_training(price(planned), vector, True), "plan")
    return plan.schedule if sum(vector) > 1 else plan.for_processes(frozenset([Worker(1, 1)])).schedule


SCHEDULES = {
    "1f1b": lambda: one_f_one_b(Shape(2, 2, 3)),
    "interleaved": lambda: interleaved(Shape(1, 2, 4, 2)),
    "adaptive": adaptive,
    "in buckets": lambda: replace(adaptive(), buckets=3),
}


def job_over(transport: str, kind: str) -> Job:
    return Job.from_toml(
        f"[shape]\npipelines = 2\nranks = 2\nmicro_batches = 2\n[model]\nkind = {kind!r}\n"
        f"[membership]\ntransport = {transport!r}"
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("transport", "kind", "gpus", "expected"),
    [
        ("auto", "gpt", 0, Gloo),
        ("auto", "gpt", 4, Nccl),
        ("auto", "emulated", 4, Gloo),
        ("gloo", "gpt", 0, Gloo),
        ("nccl", "gpt", 0, '"nccl", but no stage computes on a GPU'),
        ("nccl", "emulated", 4, '"nccl", but no stage computes on a GPU'),
        ("gloo", "gpt", 4, '"gloo" moves CPU tensors'),
        ("staged", "gpt", 1, Staged),
        ("auto", "gpt", 3, "4 workers on this machine, but 3 GPUs"),
        *(
            (name, "gpt", 0, f'"{name}" is not a known transport; give one of "auto", "nccl", "gloo"')
            for name in ("local", "no.such:Module", "recycle.job:Job", "recycle.job:No", ":", "a b:c")
        ),
    ],
)
def test_transport_depends_on_where_stages_compute(transport, kind, gpus, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(JobError, match=re.escape(expected)) if isinstance(expected, str) else nullcontext():
        plugin = transport_of(job_over(transport, kind))
        plugin.require_machine(4)
        assert plugin is expected


FORMED_SCHEDULES = {
    "1f1b": lambda: lower(one_f_one_b(Shape(2, 5, 6))),
    "a ring of odd length": lambda: lower(interleaved(Shape(2, 3, 6, 2))),
    "a V": lambda: lower(zb_v(Shape(1, 4, 8, 2))),
    "two directions": lambda: lower(dualpipe_v(Shape(1, 4, 8, 2))),
    "three dead": lambda: lower(adaptive(6, 4, 12, (0, 1, 2, 0))),
    "one dead on a ring of odd length": lambda: lower(adaptive(4, 3, 9, (0, 1, 0), chunks=2)),
}


@pytest.mark.parametrize("name", FORMED_SCHEDULES)
def test_formation_has_every_lane_and_sum_in_few_rounds_and_communicators(name):
    schedule = FORMED_SCHEDULES[name]()
    joins = {(Worker(0, 0), Worker(1, 0))} if "dead" in name else set()
    hosts = sum_groups(schedule)
    communicators = formation_order(lanes_of(schedule), hosts, joins)
    pairs = {(w, op.peer) for w in schedule.live for op in schedule.program(w) if isinstance(op, Send)}
    assert sorted(lane for each in communicators for lane in each.lanes) == sorted(pairs | joins)
    assert all({*lane} <= {*each.members} for each in communicators for lane in each.lanes)
    sums = {number: list(each.members) for each in communicators for number in each.sums}
    assert sums == {stage: sorted(members) for stage, members in hosts.items() if len(members) > 1}
    assert len({each.members for each in communicators if each.sums}) == sum(bool(each.sums) for each in communicators)
    busy = Counter((worker, each.round) for each in communicators for worker in each.members)
    assert max(busy.values()) <= AT_ONCE
    own = Counter(worker for each in communicators for worker in each.members)
    assert max(own.values()) <= LANES + COPIES + len(schedule.placement[0]) <= COMMUNICATORS
    assert 1 + max(each.round for each in communicators) <= 3
