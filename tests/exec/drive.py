"""Drives stages in one process, without transport or interpreter: what the tests of the numerics compare with.

A program is a list of (kind, micro-batch) per stage object; `execute` runs whatever is ready, round robin, and hands
messages over directly. The reduction sums the hosts' buffers in rank order.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from recycle import Job, MicroBatch
from recycle.exec.model.build import build_stages
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.exec.model.stage import Stage
from recycle.exec.model.tensor_group import TensorGroup
from recycle.job.sections import DataSection, ModelSection, ShapeSection, TrainSection

CPU = torch.device("cpu")
Program = list[tuple[str, MicroBatch]]


def small_job(pipelines=1, ranks=2, micro_batches=4, tensor_parallel=1, **sections: dict) -> Job:
    """L = 4, H = 64, S = 32; `model=`, `data=` and `train=` give further keys of these sections."""
    model = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32} | sections.get("model", {})
    return Job(
        grid=ShapeSection(pipelines, ranks, micro_batches, tensor_parallel=tensor_parallel),
        model=ModelSection(**model),
        data=DataSection(**sections.get("data", {})),
        train=TrainSection(**sections.get("train", {})),
    )


def build_stage(job: Job, index: int, group: TensorGroup | None = None) -> MegatronStage:
    """A stage; a tied stage has its own sum."""
    (stage,) = build_stages(job, [index], CPU, group).values()
    return stage


def build_pipeline(job: Job) -> list[MegatronStage]:
    """One pipeline's stages, first to last."""
    return [build_stage(job, index) for index in range(job.shape.stages)]


def micro_batches(pipeline: int, count: int) -> list[MicroBatch]:
    return [MicroBatch(pipeline, index) for index in range(count)]


def one_f_one_b(stage: int, stages: int, batches: Sequence[MicroBatch]) -> Program:
    """1F1B of one stage: as many forwards ahead as stages follow."""
    warmup = min(stages - stage - 1, len(batches))
    program = [("F", batch) for batch in batches[:warmup]]
    for place, batch in enumerate(batches[warmup:]):
        program += [("F", batch), ("B", batches[place])]
    return program + [("B", batch) for batch in batches[len(batches) - warmup :]]


def split(program: Program, weight_order: Sequence[MicroBatch]) -> Program:
    """The same with every B as I, and all W at the end in `weight_order`."""
    return [("I" if kind == "B" else kind, batch) for kind, batch in program] + [("W", batch) for batch in weight_order]


def execute(work: Iterable[tuple[Stage, Program]]):
    """Run all programs; each stage object's own order is kept. Fails when none can go on."""
    queues = [(stage, list(program)) for stage, program in work]
    activations = {}
    gradients = {}
    while any(program for _, program in queues):
        progress = False
        for stage, program in queues:
            if not program:
                continue
            kind, batch = program[0]
            if kind == "F":
                key = (stage.index - 1, batch)
                if stage.index > 0 and key not in activations:
                    continue
                activations[stage.index, batch] = stage.forward(batch, activations.get(key))
            elif kind == "W":
                stage.backward_weight(batch)
            else:
                key = (stage.index + 1, batch)
                last = activations[stage.index, batch] is None
                if not last and key not in gradients:
                    continue
                run = stage.backward if kind == "B" else stage.backward_input
                gradients[stage.index, batch] = run(batch, gradients.get(key))
            program.pop(0)
            progress = True
        assert progress, f"stuck: {[(stage.index, program[:1]) for stage, program in queues]}"


def reduce_gradients(hosts: Sequence[Stage]):
    """Sum the buffers of one stage's hosts in the order given, and give every host the sum."""
    for buffers in zip(*(host.gradient_buffers() for host in hosts), strict=True):
        total = buffers[0].clone()
        for buffer in buffers[1:]:
            total += buffer
        for buffer in buffers:
            buffer.copy_(total)


def reduce_tied(stages: Sequence[Stage]):
    """Sum the shared gradients of tied stages; each stage has its own sum here."""
    buffers = [buffer for stage in stages for buffer in stage.tied_buffers()]
    if buffers:
        total = sum(buffers[1:], buffers[0].clone())
        for buffer in buffers:
            buffer.copy_(total)


def run_pipelines(pipelines: Sequence[Sequence[Stage]], step: int, count: int) -> float:
    """One healthy 1F1B iteration of all pipelines with their own micro-batches; returns the sum of the losses."""
    for stages in pipelines:
        for stage in stages:
            stage.begin_iteration(step)
    for home, stages in enumerate(pipelines):
        batches = micro_batches(home, count)
        execute((stage, one_f_one_b(stage.index, len(stages), batches)) for stage in stages)
    for hosts in zip(*pipelines, strict=True):
        reduce_gradients(hosts)
    reduce_tied([stage for stages in pipelines for stage in stages])
    return sum(stages[-1].loss_sum() for stages in pipelines)


def run_deferred(stages: Sequence[Stage], step: int, order: Sequence[int] = (3, 1, 0, 2)):
    """The same of one pipeline, with every B as I, and all W at the end in this order of the micro-batches."""
    batches = micro_batches(0, len(order))
    for stage in stages:
        stage.begin_iteration(step)
    late = [batches[place] for place in order]
    execute((stage, split(one_f_one_b(stage.index, len(stages), batches), late)) for stage in stages)
    reduce_tied(stages)


def norm_squared_of(stages: Iterable[Stage]) -> float:
    """Squared norm of the mean gradient of the stages."""
    return math.fsum(part for stage in stages for part in stage.gradient_norms_squared())


def mean_gradients(stage: MegatronStage) -> dict[str, torch.Tensor]:
    """Mean gradient of each parameter of a stage by its name in the whole model, fp32; after the reduction."""
    mean = torch.empty(stage._sums.layout.size)
    stage._sums.mean(0, mean)
    return dict(zip(stage.parameters, stage._sums.layout.views(mean), strict=True))


def gradients_by_name(stages: Iterable[MegatronStage]) -> dict[str, torch.Tensor]:
    """Mean gradients of a whole pipeline by global parameter name."""
    return {name: gradient for stage in stages for name, gradient in mean_gradients(stage).items()}


def iterated(job: Job, step=0) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the losses and mean gradients of one iteration of a fresh pipeline."""
    stages = build_pipeline(job)
    return run_pipelines([stages], step, job.shape.micro_batches), gradients_by_name(stages)


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not equal bit for bit; the names themselves must agree."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]
