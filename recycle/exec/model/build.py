"""Which stages a worker process builds: the job's kind of stage, one per hosted index."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from recycle.exec.model.stage import Stage
from recycle.exec.model.tensor_group import TensorGroup
from recycle.exec.transport.plugin import gpu_or_cpu
from recycle.job import Job, price


def build_stages(
    job: Job, indices: Iterable[int], device: torch.device | None = None, tensor_group: TensorGroup | None = None
) -> dict[int, Stage]:
    """Stage index -> a freshly initialised stage of the job's kind. Every process gets the same initial bits.

    Args:
        device: that they compute on; when left out, the machine's first GPU, or the CPU.
        tensor_group: that the stages compute in, each process a part; None without tensor parallelism.
    """
    if job.model.kind == "emulated":
        from recycle.exec.model.emulated import EmulatedStage

        profile, scale = price(job).prices, job.model.seconds_per_unit
        return {index: EmulatedStage(job, index, profile, scale) for index in indices}
    from recycle.exec.data.batches import load_batches
    from recycle.exec.model.stage import MegatronStage, build_stage

    batches, device = load_batches(job), device or gpu_or_cpu()
    stages: dict[int, MegatronStage] = {}
    for index in indices:
        tied = next((stage.tied_sum for stage in stages.values() if stage.tied_sum is not None), None)
        stages[index] = build_stage(job, index, device, batches, tied, tensor_group)
    return dict(stages)
