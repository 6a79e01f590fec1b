"""Profile, analytic model and limits count the memory that torch allocates for a worker's iterations."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from recycle import Job, Link, Profile, Schedule, Worker, lower, simulate
from recycle.exec.model.build import build_stages
from recycle.exec.model.state.layouts import Shards
from recycle.exec.profile.measure import MeasuredStage, StageFigures, message_bytes
from recycle.exec.profile.memory import Allocated, allocated_by
from recycle.exec.profile.profiler import assemble
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.worker.interpreter import Interpreter
from recycle.exec.worker.step_state import StepState
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.job import analytic
from recycle.job.footprint import ON_CPU, parameter_bytes
from recycle.plans.shards import shards_of_schedule
from tests.exec.runs import job
from tests.jobs import varied

pytestmark = pytest.mark.process  # each runs both stages of a model several times

CPU = torch.device("cpu")
TOLERANCE = 0.03
SETTINGS = [
    *itertools.product(("fp32", "bf16"), ("exact", "fast"), ("staggered", "barrier"), ("kept",)),
    *itertools.product(("fp32",), ("exact",), ("staggered",), ("recomputed", "recomputed split")),
    *itertools.product(("bf16",), ("fast",), ("barrier",), ("recomputed", "recomputed split")),
]
"""The benchmark has them all."""
QUICK = [
    ("bf16", "exact", "staggered", "kept"),
    ("fp32", "exact", "staggered", "recomputed split"),
    ("bf16", "fast", "barrier", "recomputed"),
]
"""Each choice once. The benchmark and the soaks have all settings."""


class Echo(GroupTransport):
    """A transport on which all messages arrive at once."""

    def form(self):
        return

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[torch.Tensor]], bucket: int | None = None):
        return

    def gather(self, stage: int, parts: Sequence[torch.Tensor]):
        return

    def _start_receive(self, peer: Worker, tensor: torch.Tensor, tag: int):
        tensor.fill_(1e-3)
        return self

    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: int):
        return self

    def wait(self):
        return

    def is_completed(self) -> bool:
        return True


def job_of(precision: str, accumulation: str, steps: str, recompute: str) -> Job:
    return job(
        1,
        2,
        3,
        kind="gpt",
        model={
            "layers": 4,
            "hidden": 192,
            "sequence": 64,
            "vocabulary": 512,
            "recompute": "none" if recompute == "kept" else "full",
        },
        train={"precision": precision, "accumulation": accumulation},
        planner={"staggered": steps == "staggered", "decoupled": recompute != "recomputed"},
    )


def measured(job: Job, schedule: Schedule, worker: Worker) -> Allocated:
    """Allocations of a worker and its stage over two iterations."""
    program = schedule.program(worker)

    def live():
        stages = build_stages(job, [worker.rank])
        shape = stages[worker.rank].message_spec()
        if isinstance(shards := stages[worker.rank].layout, Shards):
            owned = shards_of_schedule(job, schedule).owned(schedule.live).stages[worker]
            shards.own(owned)
            shards.settled()
        updates = StepState(stages)
        groups = GroupsOfGeneration("g", worker, schedule.live, {}, shape, program)
        transport = Echo(groups, CPU)
        iteration = 0

        def step(index):
            for _ in stages[index].layout.reduced(stages[index]):
                pass
            if job.planner.staggered:
                updates.step_ahead(index, iteration)
            else:
                stages[index].step(iteration, 1.0)

        interpreter = Interpreter(stages, job.shape.stages, transport, step)
        for iteration in range(2):
            interpreter.begin(program, iteration)
            for instruction in program:
                interpreter.execute(instruction)
        transport.close()

    return allocated_by(live, CPU)


def counted(job: Job, schedule: Schedule) -> dict[str, Profile]:
    """The profiles that count the worker's memory."""
    figures = []
    for stage in range(2):
        subject = MeasuredStage(job, stage)
        message = message_bytes(subject.stage)
        none = {key: [1.0] for key in ("forward", "backward_input", "backward_weight", "backward", "step")}
        figures.append(StageFigures(stage, none, message, *subject.footprint(), ((8, 8),), 1e12))
    return {
        "profile": assemble(job, figures, Link(), 1),
        "analytic": analytic.profile(job, job.layers_per_stage(), ON_CPU),
    }


@pytest.mark.parametrize(
    ("precision", "accumulation", "steps", "recompute"),
    [each if each in QUICK else pytest.param(*each, marks=pytest.mark.soak) for each in SETTINGS],
)
def test_counted_memory_is_what_a_worker_allocates(precision, accumulation, steps, recompute):
    job = job_of(precision, accumulation, steps, recompute)
    family = one_f_one_b if recompute == "recomputed" else zb_h1
    # The planner counts recomputed activations from the start of F on.
    assert_counted(job, lower(family(job.shape, optimizer=steps)), by_limit=recompute != "recomputed split")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"kind": "qwen", "ffn": 512, "config": {"num_query_groups": 2}}, marks=pytest.mark.soak),
        {"kind": "mixtral", "ffn": 256, "config": {"num_moe_experts": 4, "num_query_groups": 2}},
        pytest.param({"kind": "llama", "ffn": 512}, marks=pytest.mark.soak),
    ],
)
def test_counted_memory_of_model_families(model):
    plain = job_of("fp32", "exact", "staggered", "kept")
    family = varied(plain, model={"heads": 6} | model)
    assert_counted(family, lower(zb_h1(family.shape)), by_limit=True)


def assert_counted(job: Job, schedule: Schedule, by_limit: bool):
    """Allocations of every worker equal the profiles' count and, if `by_limit`, the planner's limit."""
    profiles = counted(job, schedule)
    for worker in (each for each in schedule.live if each.pipeline == 0):  # peers hold as much
        peak = measured(job, schedule, worker).peak
        for name, profile in profiles.items():
            timeline = simulate(schedule, profile)
            expected = timeline.peak_bytes[worker.rank]
            assert expected == pytest.approx(peak, rel=TOLERANCE), f"{name}, stage {worker.rank}"
            if not by_limit:
                continue
            held = timeline.peak_activations[worker.rank]
            limit = profile.fixed_bytes([worker.rank], 2) + held * profile.per_stage("activation", 2)[worker.rank]
            assert limit == pytest.approx(peak, rel=TOLERANCE), f"limit by {name}, stage {worker.rank}"


@pytest.mark.parametrize(
    ("precision", "accumulation", "pipelines"),
    [("bf16", "exact", 4), pytest.param("fp32", "exact", 3, marks=pytest.mark.soak)],
)
def test_counted_memory_with_a_sharded_optimizer(precision, accumulation, pipelines):
    job = job_of(precision, accumulation, "staggered", "kept")
    # So large that the pieces that a host awaits in a reduce, which `Echo` lacks, are within the tolerance.
    model = {"hidden": 384, "sequence": 32}
    job = varied(job, grid={"pipelines": pipelines}, train={"sharded_optimizer": True}, model=model)
    schedule = replace(zb_h1(job.shape), gathers=True)
    assert_counted(job, lower(schedule), by_limit=False)


@pytest.mark.parametrize(
    ("precision", "accumulation", "staggered", "undo", "expected"),
    [
        ("fp32", "exact", True, "device", 32),
        ("bf16", "exact", True, "device", 36),
        ("bf16", "fast", True, "host", 18),
        ("bf16", "exact", False, "device", 22),
    ],
)
def test_bytes_of_a_parameter(precision, accumulation, staggered, undo, expected):
    gpt = job(
        1,
        2,
        4,
        kind="gpt",
        train={"precision": precision, "accumulation": accumulation, "undo": undo},
        planner={"staggered": staggered},
    )
    assert parameter_bytes(gpt).total == expected
