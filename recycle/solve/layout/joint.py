"""The schedule of an elastic layout: its stages lie between the ends of any legs.

A worker hosts several such stages, those of a range in a row, and runs a leg's forwards, or backwards, one behind the
other. So only the ends of legs are sent, and every unit is in one stage, whose gradients are summed over all its hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from recycle.ir.columns import Columns
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward, OptimizerStep, ReduceGradients
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import MicroBatch, Shape, Worker
from recycle.solve.layout.routes import Routes
from recycle.solve.problem_arrays import FORWARD, Operations


def joint_schedule(
    shape: Shape,
    routes: Routes,
    programs: Sequence[Operations],
    names: Sequence[MicroBatch],
    failed: Sequence[Worker],
    optimizer: Optimizer,
    *,
    split: bool,
    tied: bool = False,
) -> Schedule:
    """One schedule of all legs, without transfers.

    Each worker reduces its first stage first: then no worker waits for one that is further down the model and so ends
    later. From the last stage on, workers that share stages with different neighbours would wait for each other in a
    row from the end of the model to its beginning, and all stages would step together. With the barrier a stage steps
    once all are reduced, so that steps follow all reduces.

    Args:
        shape: of the job.
        programs: operations of each worker of `routes`, `kind * legs + leg`, with F, I (or B), W and B as 0 to 3.
        names: the micro-batch that goes each route.
        failed: dead workers. Live ones that run nothing host nothing.
        split: whether the backward pass is cut into I and W.
        tied: the first and the last stage share a weight and so reduce together; all workers do that last, or workers
            that host one of the two and others in between would wait for each other.
    """
    cut = routes.common_cut()
    shape = Shape(shape.pipelines, shape.ranks, shape.micro_batches, shape.chunks, cut)
    ends = np.concatenate([[0], np.cumsum(cut)])
    first, last = np.searchsorted(ends, routes.begin), np.searchsorted(ends, routes.end)
    codes = np.array([cls.kind for cls in (Forward, BackwardInput if split else Backward, BackwardWeight, Backward)])
    pipeline, index = (np.array([name[i] for name in names]) for i in (0, 1))
    by_worker: list[dict[str, Operations]] = [dict.fromkeys(_COLUMNS, _NONE) for _ in range(shape.worker_count)]
    placement: dict[Worker | str, Sequence[int]] = {}
    for worker, program, parts in zip(routes.workers, programs, routes.parts, strict=True):
        ranges = [range(*np.searchsorted(ends, part).tolist()) for part in parts]
        stages = [stage for each in ranges for stage in each]
        placement[worker] = tuple(stages)
        kind, leg = np.divmod(program, len(routes))
        sizes = last[leg] - first[leg]
        offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        upwards = np.repeat(np.where(kind == FORWARD, 1, -1), sizes)
        stage = np.repeat(np.where(kind == FORWARD, first[leg], last[leg] - 1), sizes) + upwards * offset
        micro_batch = np.repeat(routes.micro_batch[leg], sizes)
        shared = {0, shape.stages - 1} if tied else set()
        updates = np.array(_updates(stages, shared, together=optimizer == "barrier"), dtype=np.int64).reshape(-1, 2)
        none = np.full(len(updates), -1)
        by_worker[shape.worker_index(worker)] = {
            "kind": np.append(np.repeat(codes[kind], sizes), updates[:, 0]),
            "stage": np.append(stage, updates[:, 1]),
            "pipeline": np.append(pipeline[micro_batch], none),
            "index": np.append(index[micro_batch], none),
        }
    offsets = np.cumsum([0, *(len(rows["kind"]) for rows in by_worker)])
    columns = {name: np.concatenate([rows[name] for rows in by_worker]) for name in _COLUMNS}
    return Schedule.from_columns(
        shape, Columns.from_arrays(offsets, **columns), placement=placement, failed=failed, optimizer=optimizer
    )


def _updates(stages: Sequence[int], shared: Collection[int], *, together: bool) -> list[tuple[int, int]]:
    """(kind, stage) of the reduces and steps that end a worker's program."""
    groups = [[one for one in stages if one not in shared], [one for one in stages if one in shared]]
    groups = [[*groups[0], *groups[1]]] if together else [*([one] for one in groups[0]), groups[1]]
    return [(kind, stage) for group in groups for kind in (ReduceGradients.kind, OptimizerStep.kind) for stage in group]


_COLUMNS = ("kind", "stage", "pipeline", "index")
_NONE = np.zeros(0, dtype=np.int64)
