"""Which stages a worker hosts, the same for the whole run: a state is never copied to where it was not."""

from __future__ import annotations

from collections.abc import Sequence

from recycle.errors import ScheduleError
from recycle.ir.schedule import Schedule
from recycle.shape import Shape


def rank_of_stages(stages: Sequence[Sequence[int]]) -> list[int]:
    """Rank that hosts each stage, of what `stages_by_rank` gives."""
    ranks = {stage: rank for rank, hosted in enumerate(stages) for stage in hosted}
    return [ranks[stage] for stage in sorted(ranks)]


def stages_by_rank(shape: Shape, schedule: Schedule | None) -> list[tuple[int, ...]]:
    """Stages of each rank: those of `schedule`, or chunk c of rank r on stage c * P + r, as the planner places them.

    Raises:
        ScheduleError: live workers of one rank host different stages, so that none could take another's place.
    """
    if schedule is None:
        return [tuple(range(rank, shape.stages, shape.ranks)) for rank in range(shape.ranks)]
    found: list[tuple[int, ...]] = []
    for rank in range(shape.ranks):
        peers = [worker for worker in schedule.live if worker.rank == rank]
        hosted = {worker: tuple(sorted(schedule.stages_of(worker))) for worker in peers}
        other = next((worker for worker in peers if hosted[worker] != hosted[peers[0]]), None)
        if other is not None:
            raise ScheduleError(
                f"the schedule places stages {' '.join(map(str, hosted[other]))} on worker {other} and"
                f" {' '.join(map(str, hosted[peers[0]]))} on {peers[0]}: with a process per worker, the workers of a"
                f" rank host the same stages"
            )
        found.append(hosted[peers[0]] if peers else ())
    return found
