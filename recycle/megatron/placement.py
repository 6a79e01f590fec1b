"""Builds Megatron's model chunks for stages that Megatron would place on another rank.

Megatron's chunk c on rank r is stage c P + r. On a V (ZB-V, V-half, V-min, DualPipeV) the second chunk of rank r is
stage 2 P - 1 - r. Megatron would build it on rank P - 1 - r. `as_stage` presents that rank to megatron-core while a
chunk is built. Layer offsets, first and last stage, and the names in checkpoints then match the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state

from recycle.megatron.order import MegatronGrid, ScheduleSource, schedule_in, stages_of_rank
from recycle.megatron_versions import parallel_rank, pipeline_group


class _OtherRank:
    """A process group as seen from another of its ranks; supports only size and rank."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def current_grid() -> MegatronGrid:
    chunks: int | None = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return MegatronGrid(
        parallel_state.get_pipeline_model_parallel_group().rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        chunks or 1,
    )


@contextmanager
def as_stage(schedule: ScheduleSource, vp_stage: int | None = None) -> Iterator[None]:
    """Build a model chunk inside this block as the stage that the schedule places on this rank.

    `parallel_state` then describes the first or last stage, and megatron-core's modules build the stage's layers. Has
    no effect if the schedule places chunks as Megatron does.

    Args:
        vp_stage: megatron-core's number of the chunk; None or 0 if each rank has one chunk.

    Raises:
        ScheduleError, JobError: the schedule is for another number of ranks or chunks.
    """
    grid = current_grid()
    stages = stages_of_rank(schedule_in(schedule, grid, 4 * grid.ranks), grid.rank)
    seen = stages[vp_stage or 0] % grid.ranks
    if seen == grid.rank:
        yield
        return
    with pipeline_group(lambda group: _OtherRank(group, seen)), parallel_rank("PIPELINE_MODEL", seen):
        yield
