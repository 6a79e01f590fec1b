"""Runs torch's own pipeline schedules on two gloo processes under torch's profiler, for tests that read its files.

`run_profiled` leaves in a directory a folder per schedule, with the trace of each rank, and beside it the CSV that
torch writes of the same schedule.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile

from tests.warm import warm_context

RANKS, STAGES, WIDTH = 2, 4, 4
ITERATIONS = 2
LOOP = {0: (0, 2), 1: (1, 3)}
VEE = {0: (0, 3), 1: (1, 2)}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def stages(rank: int, placement: dict[int, tuple[int, ...]], count: int) -> list[PipelineStage]:
    return [
        PipelineStage(torch.nn.Linear(WIDTH, WIDTH), stage, count, torch.device("cpu")) for stage in placement[rank]
    ]


def run_profiled(directory: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [warm_context().Process(target=_rank, args=(rank, store.port, directory)) for rank in range(RANKS)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * RANKS


def _rank(rank: int, port: int, directory: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    schedules = {
        "interleaved": ScheduleInterleaved1F1B(stages(rank, LOOP, STAGES), 4, loss_fn=loss),
        "dualpipe": ScheduleDualPipeV(stages(rank, VEE, STAGES), 4, loss_fn=loss),
        "unlabelled": Schedule1F1B(stages(rank, {0: (0,), 1: (1,)}, RANKS)[0], 4, loss_fn=loss),
    }
    batch = torch.randn(8, WIDTH)
    for name, schedule in schedules.items():
        first = rank == 0
        last = rank == 0 if name == "dualpipe" else rank == 1
        given = ((batch,) if first else (), {"target": batch} if last else {})
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(ITERATIONS):
                schedule.step(*given[0], **given[1])
        (directory / name).mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(directory / name / f"of-rank-{rank}.json"))
        if name != "unlabelled" and rank == 0:
            schedule._dump_csv(str(directory / f"{name}.csv"), format="compute_comms")  # type: ignore[union-attr]
    dist.destroy_process_group()
