"""Routes: the worker of each unit of each micro-batch, as legs.

A leg is a run of neighboring units that one worker runs of one micro-batch. The number of micro-batches per unit and
worker is given. At every boundary between units the fewest possible micro-batches change workers. Micro-batches that
leave a worker are spread evenly over the next hosts and stay in their pipeline if possible. All legs form one schedule,
whose stages are delimited by the ends of all legs; only the ends of legs are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from recycle.ir.columns import Columns
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward, OptimizerStep, ReduceGradients
from recycle.ir.schedule import Optimizer, Schedule
from recycle.job.shape import MicroBatch, Shape, Worker
from recycle.solve.layout.units import Parts
from recycle.solve.problem import Order
from recycle.solve.problem_arrays import FORWARD, Operations


@dataclass(frozen=True, eq=False)
class Routes:
    """Legs of all micro-batches of an iteration, by micro-batch, then unit.

    Attributes:
        workers: workers that run legs.
        host: [legs], index in `workers`.
        begin, end: [legs], first unit, and end (exclusive).
        micro_batch: [legs], number in the order through the model.
        parts: the units that each worker hosts.
    """

    workers: tuple[Worker, ...]
    host: Operations
    begin: Operations
    end: Operations
    micro_batch: Operations
    parts: tuple[Parts, ...]

    def __len__(self) -> int:
        return len(self.host)

    @property
    def after(self) -> Operations:
        """[legs], the next leg of the same micro-batch, or -1."""
        following = np.arange(1, len(self) + 1)
        following[-1] = -1
        following[:-1][np.diff(self.micro_batch) != 0] = -1
        return following

    def common_cut(self) -> tuple[int, ...]:
        """Return the units of each stage between neighboring ends of legs."""
        return tuple(np.diff(np.unique(np.concatenate([self.begin, self.end]))).tolist())

    def names(self, shape: Shape) -> list[MicroBatch]:
        """Return the micro-batch of each route, from the pipeline of its first worker if possible."""
        first = np.flatnonzero(np.diff(self.micro_batch, prepend=-1))
        free = {k: list(range(shape.micro_batches))[::-1] for k in range(shape.pipelines)}
        names: list[MicroBatch | None] = []
        for host in self.host[first].tolist():
            home = self.workers[host].pipeline
            names.append(MicroBatch(home, free[home].pop()) if free[home] else None)
        spare = (MicroBatch(k, j) for k, remaining in free.items() for j in remaining[::-1])
        return [name or next(spare) for name in names]


def routes_of(workers: Sequence[Worker], quotas: Operations, groups: Sequence[int], parts: Sequence[Parts]) -> Routes:
    """Return routes in which each worker runs the given number of micro-batches of each unit.

    Args:
        quotas: [workers, units]; each unit's column sums to all micro-batches.
        groups: pipeline or chain of each worker, in which micro-batches stay if possible.
        parts: units that each worker hosts; the first and last unit of each range have a micro-batch.
    """
    count = int(quotas[:, 0].sum())
    current = np.array(_evenly_mixed(dict(enumerate(quotas[:, 0].tolist()))), dtype=np.int64)
    hosts = [current]
    for before, wanted in zip(quotas.T[:-1], quotas.T[1:], strict=True):
        current = current.copy()
        change = wanted - before
        for worker, flows in _flows(groups, change).items():
            own = np.flatnonzero(hosts[-1] == worker)
            leaving = sum(flows.values())
            chosen = own[((np.arange(leaving) + 0.5) * len(own) / leaving).astype(np.int64)]
            current[chosen] = _evenly_mixed(flows)
        hosts.append(current)
    by_unit = np.array(hosts)
    starts = np.ones_like(by_unit, dtype=bool)
    starts[1:] = by_unit[1:] != by_unit[:-1]
    micro_batch, begin = np.nonzero(starts.T)
    end = np.append(begin[1:], 0)
    end[np.append(np.diff(micro_batch) != 0, True)] = len(by_unit)
    host = by_unit[begin, micro_batch]
    used = np.unique(host)
    assert len(np.unique(micro_batch)) == count
    return Routes(
        tuple(workers[w] for w in used),
        np.searchsorted(used, host),
        begin,
        end,
        micro_batch,
        tuple(parts[w] for w in used),
    )


def _flows(groups: Sequence[int], change: Operations) -> dict[int, dict[int, int]]:
    surplus = {w: -c for w, c in enumerate(change.tolist()) if c < 0}
    wanted = {w: c for w, c in enumerate(change.tolist()) if c > 0}
    flows: dict[int, dict[int, int]] = {w: {} for w in surplus}
    in_group = [(w, v) for w in surplus for v in wanted if groups[w] == groups[v]]
    for w, v in in_group + [(w, v) for w in surplus for v in wanted]:
        amount = min(surplus[w], wanted[v])
        if amount:
            flows[w][v] = flows[w].get(v, 0) + amount
            surplus[w] -= amount
            wanted[v] -= amount
    return flows


def _evenly_mixed(counts: dict[int, int]) -> list[int]:
    places = sorted(((i + 0.5) / count, key) for key, count in counts.items() for i in range(count))
    return [key for _, key in places]


def joint_schedule(
    shape: Shape,
    routes: Routes,
    programs: Order,
    names: Sequence[MicroBatch],
    failed: Sequence[Worker],
    optimizer: Optimizer,
    *,
    split: bool,
    tied: bool = False,
) -> Schedule:
    """Return one schedule of all legs, without transfers. Each worker reduces its first stage first.

    Args:
        programs: operations of each worker of `routes`, `kind * legs + leg`, with F, I (or B) and W as 0 to 2.
        names: micro-batch of each route.
        split: the backward pass is split into I and W.
        tied: the first and last stage share a weight and reduce together, on all workers last to avoid deadlocks.
    """
    cut = routes.common_cut()
    shape = Shape(shape.pipelines, shape.ranks, shape.micro_batches, shape.chunks, cut)
    ends = np.concatenate([[0], np.cumsum(cut)])
    first, last = np.searchsorted(ends, routes.begin), np.searchsorted(ends, routes.end)
    codes = np.array([cls.kind for cls in (Forward, BackwardInput if split else Backward, BackwardWeight)])
    pipeline, index = np.array(names, dtype=np.int64).T
    rows_by_worker = [np.zeros((4, 0), dtype=np.int64)] * shape.worker_count  # kind, stage, pipeline, index
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
        computed = np.array([np.repeat(codes[kind], sizes), stage, pipeline[micro_batch], index[micro_batch]])
        updates = np.array(_updates(stages, shared, together=optimizer == "barrier")).T
        rows_by_worker[shape.worker_index(worker)] = np.concatenate([computed, updates], axis=1)
    offsets = np.cumsum([0, *(rows.shape[1] for rows in rows_by_worker)])
    kind, stage, pipeline, index = np.concatenate(rows_by_worker, axis=1)
    columns = Columns.from_arrays(offsets, kind=kind, stage=stage, pipeline=pipeline, index=index)
    return Schedule.from_columns(shape, columns, placement=placement, failed=failed, optimizer=optimizer)


def _updates(stages: Sequence[int], shared: Collection[int], *, together: bool) -> list[tuple[int, int, int, int]]:
    groups = [[stage for stage in stages if stage not in shared], [stage for stage in stages if stage in shared]]
    groups = [[*groups[0], *groups[1]]] if together else [*([stage] for stage in groups[0]), groups[1]]
    kinds = ReduceGradients.kind, OptimizerStep.kind
    return [(kind, stage, -1, -1) for group in groups for kind in kinds for stage in group]
