"""Which stages a worker process builds: the job's kind of stage, one per hosted index."""

from __future__ import annotations

from collections.abc import Iterable

from recycle.exec.model.stage import Stage
from recycle.exec.model.tensor_group import TensorGroup
from recycle.job import Job, price


def build_stages(
    job: Job, indices: Iterable[int], local_index: int = 0, tensor_group: TensorGroup | None = None
) -> dict[int, Stage]:
    """Stage index -> a freshly initialised stage of the job's kind. Every process gets the same initial bits.

    Args:
        local_index: of this process on its machine: which GPU it computes on.
        tensor_group: that the stages compute in, each process a part; None without tensor parallelism.
    """
    if job.model.kind == "emulated":
        from recycle.exec.model.emulated import EmulatedStage

        profile, scale = price(job).prices, job.model.seconds_per_unit
        return {index: EmulatedStage(job, index, profile, scale) for index in indices}
    from recycle.exec.data.batches import load_batches
    from recycle.exec.model.stage import MegatronStage, build_stage, default_device

    batches, device = load_batches(job), default_device(local_index)
    stages: dict[int, MegatronStage] = {}
    for index in indices:
        tied = next((stage.tied_sum for stage in stages.values() if stage.tied_sum is not None), None)
        stages[index] = build_stage(job, index, device, batches, tied, tensor_group)
    return dict(stages)
