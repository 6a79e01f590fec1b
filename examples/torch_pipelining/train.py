"""A schedule made here in torch's own pipeline runtime: built, checked, exported, loaded, run, gradients compared.

    torchrun --nproc-per-node 2 examples/torch_pipelining/train.py --schedule zb-h1
    torchrun --nproc-per-node 2 examples/torch_pipelining/train.py --chunks 2 --schedule zb-v

`recycle convert` writes the same file: `recycle schedule zb-h1 -P 2 -m 4 -o zb-h1.json`, then
`recycle convert zb-h1.json zb-h1.csv`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from recycle import Schedule, Shape, check
from recycle.ir.formats import named_schedule, write

HIDDEN, ROWS = 32, 8
TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="zb-h1", help="a family or a schedule file")
    parser.add_argument("--chunks", type=int, default=1, help="stages of a rank")
    parser.add_argument("--micro-batches", type=int, default=4)
    given = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    schedule = named_schedule(given.schedule, Shape(1, ranks, given.micro_batches, given.chunks))
    assert check(schedule) == []
    layers = [layer(stage) for stage in range(schedule.shape.stages)]
    hosted = {stage: layers[stage] for stage in schedule.placement[rank]}
    inputs, labels = data(given.micro_batches)

    run(schedule, hosted, inputs, labels)

    expected = gradients_of_the_unsplit_model([layer(stage) for stage in range(len(layers))], inputs, labels)
    largest = max(
        float((parameter.grad - other).abs().max())
        for stage, module in hosted.items()
        for parameter, other in zip(module.parameters(), expected[stage], strict=True)
    )
    assert largest <= TOLERANCE, largest
    print(f"rank {rank}: gradients of stages {sorted(hosted)} equal the unsplit model's within {largest:.0e}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(schedule: Schedule, hosted: dict[int, torch.nn.Module], inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Export the schedule, and have torch's runtime run an iteration of it: the gradients are in the modules."""
    count = schedule.shape.micro_batches
    stages = [
        PipelineStage(module, stage, schedule.shape.stages, torch.device("cpu")) for stage, module in hosted.items()
    ]
    runtime = _PipelineScheduleRuntime(
        stages,
        count,
        loss_fn=lambda output, label: torch.nn.functional.mse_loss(output, label) / count,
        scale_grads=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write(schedule, path)
        runtime._load_csv(str(path), format="compute_only")
    first, last = 0 in hosted, schedule.shape.stages - 1 in hosted
    runtime.step(*([inputs] if first else []), target=labels if last else None, return_outputs=False)


def layer(stage: int) -> torch.nn.Module:
    """A stage of the model, the same on every rank that makes it."""
    torch.manual_seed(stage)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, HIDDEN))


def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = torch.randn(2, count * ROWS, HIDDEN, generator=generator)
    return made[0], made[1]


def gradients_of_the_unsplit_model(
    layers: list[torch.nn.Module], inputs: torch.Tensor, labels: torch.Tensor
) -> list[list[torch.Tensor]]:
    torch.nn.functional.mse_loss(torch.nn.Sequential(*layers)(inputs), labels).backward()
    return [[parameter.grad for parameter in one.parameters()] for one in layers]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
