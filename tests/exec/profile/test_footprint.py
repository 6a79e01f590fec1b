"""Memory is what is counted: what torch allocates for a worker's iterations by profile, analytic model and limit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from recycle import Job, Link, Profile, simulate
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.state.layouts import Shards
from recycle.exec.profile.measure import StageFigures, Subject, message_bytes
from recycle.exec.profile.memory import Allocated, allocated_by
from recycle.exec.profile.profiler import assemble
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.worker.interpreter import Interpreter
from recycle.exec.worker.updates import Updates
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.job import analytic
from recycle.job.footprint import ON_CPU, parameter_bytes
from recycle.job.shape import Worker
from recycle.plans.shards import shards_of_schedule
from tests.exec.runs import job

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
"""In which every choice is once. The benchmark has all settings, and the soaks."""
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"kind": "llama", "heads": 6, "ffn": 512}, {}),
    "llama, grouped": ({"kind": "llama", "heads": 6, "ffn": 512}, {"num_query_groups": 2}),
    "qwen": ({"kind": "qwen", "heads": 6, "ffn": 512}, {"num_query_groups": 2}),
    "qwen, one group": ({"kind": "qwen", "heads": 6, "ffn": 512}, {"num_query_groups": 1}),
    "mixtral": ({"kind": "mixtral", "heads": 6, "ffn": 256}, {"num_moe_experts": 4, "num_query_groups": 2}),
}
"""Name -> keys of `[model]` and of `[model.config]`."""
OF_FAMILIES = [("fp32", "exact", "staggered", "kept"), *QUICK]
QUICK_FAMILIES = [("qwen", OF_FAMILIES[0]), ("mixtral", OF_FAMILIES[0])]


class Echo(GroupTransport):
    """A transport on which every message has come as soon as its receive is posted, and every sent one has arrived."""

    def form(self) -> None:
        return

    def reduce_scatter(self, stage: int, buffers: Sequence[Sequence[torch.Tensor]], bucket: int | None = None) -> None:
        return

    def gather(self, stage: int, parts: Sequence[torch.Tensor]) -> None:
        return

    def _start_receive(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        tensor.fill_(1e-3)
        return self

    def _start_send(self, peer: Worker, tensor: torch.Tensor, tag: int) -> Any:
        return self

    def wait(self) -> None:
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


def measured(of: Job, schedule: Schedule, worker: Worker) -> Allocated:
    """What a worker allocates, its stage included, over two iterations."""
    program = schedule.program(worker)

    def live() -> None:
        stages: dict[int, Stage] = build_stages(of, [worker.rank])
        shape = stages[worker.rank].message_spec()
        if isinstance(shards := stages[worker.rank].layout, Shards):
            owned = shards_of_schedule(of, schedule).owned(schedule.live).stages[worker]
            shards.own(owned)
            shards.settled()
        updates = Updates(stages)
        groups = GroupsOfGeneration("g", worker, schedule.live, {}, shape, program)
        transport = Echo(groups, CPU)
        iteration = 0

        def step(index: int) -> None:
            for _ in stages[index].layout.reduced(stages[index]):
                pass
            if of.planner.staggered:
                updates.step_ahead(index, iteration)
            else:
                stages[index].step(iteration, 1.0)

        interpreter = Interpreter(stages, of.shape.stages, transport, step)
        for iteration in range(2):
            interpreter.begin(program, iteration)
            for instruction in program:
                interpreter.execute(instruction)
        transport.close()

    return allocated_by(live, CPU)


def counted(of: Job, schedule: Schedule) -> dict[str, Profile]:
    """The profiles by which the worker is counted."""
    figures = []
    for stage in range(2):
        subject = Subject(of, stage)
        message = message_bytes(subject.stage)
        none = {key: [1.0] for key in ("forward", "backward_input", "backward_weight", "backward", "step")}
        figures.append(StageFigures(stage, none, message, *subject.footprint(), ((8, 8),), 1e12))
    return {
        "profile": assemble(of, figures, Link(), 1),
        "analytic": analytic.profile(of, of.layers_per_stage(), ON_CPU),
    }


@pytest.mark.parametrize(
    ("precision", "accumulation", "steps", "recompute"),
    [each if each in QUICK else pytest.param(*each, marks=pytest.mark.soak) for each in SETTINGS],
)
def test_what_is_counted_is_what_a_worker_allocates(
    precision: str, accumulation: str, steps: str, recompute: str
) -> None:
    of = job_of(precision, accumulation, steps, recompute)
    family = one_f_one_b if recompute == "recomputed" else zb_h1
    # The planner counts what I makes again from the start of F on.
    assert_counted(of, lower(family(of.shape, optimizer=steps)), by_limit=recompute != "recomputed split")


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        pytest.param(family, setting, marks=() if (family, setting) in QUICK_FAMILIES else pytest.mark.soak)
        for family in FAMILIES
        for setting in OF_FAMILIES
    ],
)
def test_of_other_families_too(family: str, setting: tuple[str, str, str, str]) -> None:
    keys, config = FAMILIES[family]
    of = job_of(*setting)
    of = msgspec.structs.replace(of, model=msgspec.structs.replace(of.model, config=config, **keys))
    build = one_f_one_b if setting[3] == "recomputed" else zb_h1
    assert_counted(of, lower(build(of.shape, optimizer=setting[2])), by_limit=setting[3] != "recomputed split")


def assert_counted(of: Job, schedule: Schedule, by_limit: bool) -> None:
    """What every worker allocates is what the profiles count, and, if `by_limit`, what the planner's limit allows."""
    profiles = counted(of, schedule)
    for worker in (one for one in schedule.live if one.pipeline == 0):  # peers hold as much
        peak = measured(of, schedule, worker).peak
        for name, profile in profiles.items():
            found = simulate(schedule, profile)
            expected = found.peak_bytes[worker.rank]
            assert expected is not None
            assert expected == pytest.approx(peak, rel=TOLERANCE), f"{name}, stage {worker.rank}"
            if not by_limit:
                continue
            held = found.peak_activations[worker.rank]
            assert held is not None
            limit = profile.fixed_bytes([worker.rank], 2) + held * profile.per_stage("activation", 2)[worker.rank]
            assert limit == pytest.approx(peak, rel=TOLERANCE), f"limit by {name}, stage {worker.rank}"


@pytest.mark.parametrize(
    ("precision", "accumulation", "pipelines"),
    [
        ("bf16", "exact", 4),
        pytest.param("bf16", "fast", 4, marks=pytest.mark.soak),
        pytest.param("fp32", "exact", 3, marks=pytest.mark.soak),
        pytest.param("bf16", "fast", 8, marks=pytest.mark.soak),
    ],
)
def test_with_a_sharded_optimizer_too(precision: str, accumulation: str, pipelines: int) -> None:
    of = job_of(precision, accumulation, "staggered", "kept")
    grid = msgspec.structs.replace(of.grid, pipelines=pipelines)
    train = msgspec.structs.replace(of.train, sharded_optimizer=True)
    # Large enough that the pieces which a host awaits while it reduces, and `Echo` does not, are within the tolerance.
    model = msgspec.structs.replace(of.model, hidden=64 * pipelines if pipelines > 6 else 384, sequence=32)
    of = msgspec.structs.replace(of, grid=grid, train=train, model=model)
    schedule = replace(zb_h1(of.shape), gathers=True)
    assert_counted(of, lower(schedule), by_limit=False)


@pytest.mark.parametrize(
    ("precision", "accumulation", "expected"),
    [("bf16", "fast", 12), ("bf16", "exact", 16), ("fp32", "exact", 17), ("fp32", "fast", 13)],
)
def test_bytes_of_a_parameter_of_a_sharded_optimizer(precision: str, accumulation: str, expected: int) -> None:
    train = {"precision": precision, "accumulation": accumulation, "sharded_optimizer": True}
    assert parameter_bytes(job(8, 2, 2, kind="gpt", train=train)).total == expected


@pytest.mark.parametrize(
    ("precision", "accumulation", "staggered", "undo", "expected"),
    [
        ("fp32", "exact", True, "device", 32),
        ("fp32", "fast", True, "device", 28),
        ("bf16", "exact", True, "device", 36),
        ("bf16", "fast", True, "device", 32),
        ("bf16", "fast", True, "host", 18),
        ("bf16", "exact", False, "device", 22),
        ("bf16", "fast", False, "device", 18),
    ],
)
def test_bytes_of_a_parameter(precision: str, accumulation: str, staggered: bool, undo: str, expected: int) -> None:
    of = job(
        1,
        2,
        4,
        kind="gpt",
        train={"precision": precision, "accumulation": accumulation, "undo": undo},
        planner={"staggered": staggered},
    )
    assert parameter_bytes(of).total == expected
