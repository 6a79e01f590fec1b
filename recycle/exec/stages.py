"""Which stages a worker process builds: the job's kind of stage, one per hosted index."""

from __future__ import annotations

from collections.abc import Iterable

from recycle.exec.stage import Stage
from recycle.job import Job


def build_stages(job: Job, indices: Iterable[int]) -> dict[int, Stage]:
    """Stage index -> a freshly initialised stage of the job's kind. Every process gets the same initial bits."""
    if job.model.kind == "emulated":
        from recycle.exec.emulated import EmulatedStage

        return {index: EmulatedStage(job, index, scale=job.model.seconds_per_unit) for index in indices}
    from recycle.exec.data import load_batches
    from recycle.exec.stage import MegatronStage, build_stage, default_device

    batches, device = load_batches(job), default_device()
    stages: dict[int, MegatronStage] = {}
    for index in indices:
        tied = next((stage.tied_sum for stage in stages.values() if stage.tied_sum is not None), None)
        stages[index] = build_stage(job, index, device, batches, tied)
    return dict(stages)
