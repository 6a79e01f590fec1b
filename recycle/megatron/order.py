"""The program of one rank of a Megatron job for an iteration: computes and transfers of a schedule.

Reduces and steps are omitted: Megatron's DDP, `finalize_model_grads` and the script's optimizer do them. Megatron's
data iterators yield micro-batches in order, so every stage must run its forwards in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recycle.errors import ScheduleError
from recycle.ir.check import check, require_no_errors
from recycle.ir.formats import named_schedule
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    ReduceGradients,
    Transfer,
    computes,
)
from recycle.ir.lower import forward_only, lower
from recycle.ir.schedule import Schedule
from recycle.job.shape import MicroBatch, Shape, Worker

ScheduleSource = Schedule | str | Path
"""A schedule, the name of a family, or the path of a schedule file."""
_KNOWN = (Forward, Backward, BackwardInput, BackwardWeight, OverlappedPair, Transfer, ReduceGradients, OptimizerStep)


@dataclass(frozen=True)
class MegatronGrid:
    """Position of this process in a Megatron job, and the job's size, from `parallel_state`.

    Attributes:
        rank, ranks: rank in the pipeline-parallel group, and its size P.
        replica, replicas: rank in the data-parallel group, and its size D.
        chunks: V, model chunks of every rank.
    """

    rank: int
    ranks: int
    replica: int
    replicas: int
    chunks: int


@dataclass(frozen=True)
class RankOrder:
    """Program of a rank.

    Attributes:
        program: computes and transfers, in order.
        all_stages: S.
        ends_share_rank: whether first and last stage are chunks of one rank.
        completing: the computes that complete gradients of a chunk: its last I, and its last W. Chunks without such
            computes are left out.
    """

    program: tuple[Instruction, ...]
    stages: tuple[int, ...]
    all_stages: int
    ends_share_rank: bool
    completing: frozenset[Compute]


def training_order(source: ScheduleSource, grid: MegatronGrid, micro_batches: int) -> RankOrder:
    """Return the rank's order of one training iteration.

    Raises:
        ScheduleError: the schedule does not fit the job, or does not pass `check`.
        JobError: the family cannot be built in this shape, or the file cannot be found.
    """
    schedule = schedule_in(source, grid, micro_batches)
    _require_shape(schedule, grid)
    if schedule.shape.micro_batches != micro_batches:
        raise ScheduleError(
            f"the schedule has {schedule.shape.micro_batches} micro-batches, the call num_microbatches ="
            f" {micro_batches}; a family by its name fits any number"
        )
    require_no_errors(check(lower(schedule), about_to_run=True))
    _require_own_kinds(schedule)
    pipeline = grid.replica if schedule.shape.pipelines > 1 else 0
    own = lower(schedule).program(Worker(pipeline, grid.rank))
    program = tuple(instruction for instruction in own if not isinstance(instruction, ReduceGradients | OptimizerStep))
    stages = stages_of_rank(schedule, grid.rank)
    return RankOrder(
        program, stages, schedule.shape.stages, _ends_share_rank(schedule), completing_computes(list(computes(program)))
    )


def evaluation_order(source: ScheduleSource, grid: MegatronGrid, micro_batches: int) -> RankOrder:
    """Return the rank's order of forwards alone, from `recycle.ir.lower` on the schedule's placement.

    Raises ScheduleError, JobError as in `training_order`, but the number of micro-batches may differ.
    """
    schedule = schedule_in(source, grid, micro_batches)
    _require_shape(schedule, grid)
    shape = Shape(1, grid.ranks, micro_batches, grid.chunks)
    batches = [MicroBatch(0, index) for index in range(micro_batches)]
    hosted = {Worker(0, rank): stages_of_rank(schedule, rank) for rank in range(grid.ranks)}
    forwards = Schedule.build(
        shape,
        {worker: [Forward(stage, batch) for stage in stages for batch in batches] for worker, stages in hosted.items()},
        placement={str(worker): stages for worker, stages in hosted.items()},
    )
    own = lower(forward_only(forwards)).program(Worker(0, grid.rank))
    return RankOrder(tuple(own), hosted[Worker(0, grid.rank)], shape.stages, _ends_share_rank(schedule), frozenset())


def schedule_in(source: ScheduleSource, grid: MegatronGrid, micro_batches: int) -> Schedule:
    """Return the given schedule, or build or read the named one. Raises ScheduleError, JobError."""
    if isinstance(source, Schedule):
        return source
    return named_schedule(str(source), Shape(1, grid.ranks, micro_batches, grid.chunks))


def stages_of_rank(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the stage of each model chunk of a rank, ascending.

    Raises ScheduleError if the stage of a chunk c is not in c P to (c + 1) P - 1, the range of Megatron's chunks c.
    """
    stages = tuple(sorted(schedule.stages_of(Worker(0, rank))))
    ranks = schedule.shape.ranks
    if [stage // ranks for stage in stages] != list(range(schedule.shape.chunks)):
        raise ScheduleError(
            f"the schedule places stages {' '.join(map(str, stages))} on rank {rank}; Megatron's chunk c of a rank is"
            f" one of the stages {ranks} c to {ranks} c + {ranks - 1}"
        )
    return stages


def _ends_share_rank(schedule: Schedule) -> bool:
    ends = {0, schedule.shape.stages - 1}
    return len(ends) > 1 and any(ends <= {*schedule.stages_of(worker)} for worker in schedule.live)


def _require_shape(schedule: Schedule, grid: MegatronGrid) -> None:
    shape = schedule.shape
    for what, has, wanted in (
        ("ranks (P)", shape.ranks, grid.ranks),
        ("chunks per rank (V)", shape.chunks, grid.chunks),
    ):
        if has != wanted:
            raise ScheduleError(f"the schedule has {has} {what}, Megatron's parallel_state {wanted}")
    if shape.pipelines not in (1, grid.replicas):
        raise ScheduleError(
            f"the schedule has {shape.pipelines} pipelines, the job {grid.replicas} data-parallel replicas; a schedule"
            " of one pipeline fits any number"
        )
    if schedule.failed:
        dead = " ".join(map(str, sorted(schedule.failed)))
        raise ScheduleError(f"the schedule has failed workers ({dead}); in Megatron's loop every worker must live")
    if schedule.buckets > 1:
        raise ScheduleError(
            f"the schedule reduces gradients in {schedule.buckets} buckets; Megatron's DDP has its own, so use"
            " buckets = 1"
        )
    if schedule.gathers:
        raise ScheduleError(
            "the schedule gathers parameters (GATHER_PARAMS); Megatron's distributed optimizer does that itself, so use"
            " a schedule without"
        )


def _require_own_kinds(schedule: Schedule) -> None:
    for worker in schedule.live:
        nexts: dict[int, int] = {}
        for instruction in schedule.program(worker):
            if not isinstance(instruction, _KNOWN):
                raise ScheduleError(f"worker {worker}: {instruction}: Megatron's loop cannot run {instruction.token}")
            for compute in computes((instruction,)):
                if compute.micro_batch.pipeline != worker.pipeline:
                    raise ScheduleError(
                        f"worker {worker}: {compute} is a micro-batch of another pipeline; in Megatron's loop each"
                        " data-parallel replica runs its own"
                    )
                if not isinstance(compute, Forward):
                    continue
                wanted = nexts.get(compute.stage, 0)
                if compute.micro_batch.index != wanted:
                    expected = replace(compute, micro_batch=MicroBatch(worker.pipeline, wanted))
                    raise ScheduleError(
                        f"worker {worker}: {compute} comes where {expected} should; data iterators hand out"
                        " micro-batches in order, so every stage must run them in order"
                    )
                nexts[compute.stage] = wanted + 1


def completing_computes(program: Sequence[Compute]) -> frozenset[Compute]:
    """Return the computes of a rank that complete gradients of a chunk (`RankOrder.completing`)."""
    completing: set[Compute] = set()
    for stage in {compute.stage for compute in program}:
        stage_computes = [compute for compute in program if compute.stage == stage]
        last_input = [compute for compute in stage_computes if isinstance(compute, BackwardInput | Backward)][-1:]
        last_weight = [compute for compute in stage_computes if isinstance(compute, BackwardWeight | Backward)][-1:]
        if not any(isinstance(compute, Backward) for compute in last_input) or last_input == last_weight:
            completing.update(last_input, last_weight)
    return frozenset(completing)
