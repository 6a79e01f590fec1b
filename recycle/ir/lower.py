"""Lowering: a compute-only order -> the same order with sends, receives, reduces and steps.

Small passes, each of which does nothing where its instructions are there already. All are pure functions of the order.
SEND goes right after its producer and RECV before its consumer, such that all transfers follow one global order; a
worker that carries its transfers one at a time, unbuffered, then never deadlocks, and no lane is ever out of step
between its two ends.

Where a stage's gradients are reduced in buckets, a bucket is whole when the last W of the stage has computed its
weights. So of the last instructions of a stage on a worker, those W's behind which the worker computes nothing else for
the stage and nothing between them, each is cut into its parts for the buckets, and these run bucket by bucket, all
parts for bucket 0 first. While the later parts run, the earlier buckets are summed. A B at the end is taken for its I
and W. The gradients are the same bits: each weight is still added to in the order of the
micro-batches. Limits: where an overlapped pair comes last nothing is cut, and the buckets begin behind it.

`forward_only` keeps the forwards alone, which evaluate the model with the workers and stages of a training schedule.
Every forward stays on the worker that runs it in training. So micro-batches of a dead worker are re-routed as in
training, and every activation goes over a lane that training has too. The order is made anew, since that of training
makes room for backwards: each worker runs what has come to it, the deepest stage first, as if every forward took one
unit of time (list scheduling; Graham 1969). What is under way between workers stays few, and nothing is held.
Limits: the order does not know what forwards really take.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from recycle.ir.columns import Columns, Flags, Rows, compute_chains, compute_order, is_nothing, offsets_of
from recycle.ir.dependencies import Dependencies, dependencies, find
from recycle.ir.event_graph import EventGraph, event_graph, topological_order
from recycle.ir.instruction import (
    CARRIERS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    OverlappedPair,
    Part,
    ReduceBucket,
    Transfer,
    WeightPart,
    is_kind,
)
from recycle.ir.kinds import ValueKind, kinds_where, makers_of
from recycle.ir.pieces import work
from recycle.ir.schedule import Schedule

_OFFSET = np.array([receive.row.needs[0].offset for _, receive in CARRIERS.values()], dtype=np.int64)
"""`ValueKind` -> stage of its producer, relative to the consumer's."""


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its transfers, reduces, steps and gathers written out; a forward-only one has transfers alone.

    Never raises; what is broken stays broken.
    """
    return lower_with_origin(schedule)[0]


def lower_with_origin(schedule: Schedule) -> tuple[Schedule, Rows]:
    """`lower`, and for each row of the result the row it came from, -1 for rows that lowering added."""
    origin = np.arange(len(schedule.columns), dtype=np.int64)
    is_cut = schedule.buckets > 1 and not schedule.forward_only
    if is_cut and not is_kind(schedule.columns.kind, (*implied_kinds(), Part)).any():
        schedule, origin = _cut_last_weights(schedule)
    passes: list[tuple[tuple[type[Instruction], ...], Callable[[Schedule], tuple[Schedule, Rows]]]]
    passes = [((Transfer,), add_transfers), (implied_kinds(), add_reduce_and_step)]
    if schedule.gathers:
        passes.append(((GatherParameters,), add_gathers))
    for classes, add in passes[:1] if schedule.forward_only else passes:
        if not is_kind(schedule.columns.kind, classes).any():
            schedule, came_from = add(schedule)
            origin = np.append(origin, -1)[came_from]
    return schedule, origin


def lowered_graph(schedule: Schedule, serialised: bool = False) -> EventGraph:
    """The event graph of a schedule as `lower` writes it out, for who simulates and checks the same schedule.

    Args:
        schedule: lowered or compute-only.
        serialised: as in `event_edges`.
    """
    lowered, origin = lower_with_origin(schedule)
    return replace(event_graph(lowered, serialised), origin=origin)


def implied_kinds() -> tuple[type[Instruction], ...]:
    """What a schedule without any of them gets at the end of each program: REDUCE_GRAD, STEP."""
    return kinds_where(lambda row: row.implied)


def add_transfers(schedule: Schedule) -> tuple[Schedule, Rows]:
    """Write a SEND and a RECV for each value that crosses to another worker.

    On each worker the ends keep the global order of transfers. A RECV goes as late as that allows: right before its
    consumer, or before the next end in the order.
    """
    graph = dependencies(schedule)
    found, rank = graph.crossings, _global_rank(schedule.columns, graph)
    by_rank = np.lexsort((found.stage, found.value, rank[found.producer]))
    producer, consumer = found.producer[by_rank], found.consumer[by_rank]
    value, stage = found.value[by_rank], found.stage[by_rank]
    pipeline, index = np.divmod(found.micro_batch[by_rank], schedule.shape.micro_batches)
    sender, receiver = schedule.columns.worker[producer], schedule.columns.worker[consumer]
    kinds = np.array([[end.kind for end in pair] for pair in CARRIERS.values()])[value]
    ends = {
        "kind": kinds.T.ravel(),
        "stage": np.concatenate([stage, stage - _OFFSET[value]]),
        "pipeline": np.tile(pipeline, 2),
        "index": np.tile(index, 2),
        "peer": np.concatenate([receiver, sender]),
    }
    # All ends, the sends first: where each would stand by itself, as the row that it comes before.
    is_send = np.repeat([True, False], len(value))
    worker = np.concatenate([sender, receiver])
    place = np.concatenate([producer + 1, consumer])
    by_worker = np.lexsort((np.tile(np.arange(len(value)), 2), worker))
    place = _no_later_than_the_next(place[by_worker], is_send[by_worker])
    return insert(schedule, worker[by_worker], place, {name: column[by_worker] for name, column in ends.items()})


def _global_rank(columns: Columns, graph: Dependencies) -> Rows:
    """Position of each compute row in one global order that respects dependencies and every program.

    Rows on or behind a dependency cycle come last, by place in the file, so that broken orders can be lowered too.
    """
    before, after = compute_order(columns)
    source, target = np.concatenate([graph.source, before]), np.concatenate([graph.target, after])
    order = topological_order(source, target, graph.nodes)
    rank = np.full(graph.nodes, -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank = rank[: graph.rows]
    lost = np.flatnonzero(rank < 0)
    rank[lost] = graph.nodes + np.arange(len(lost))
    return rank


def _no_later_than_the_next(place: Rows, is_send: Flags) -> Rows:
    """Places of ends, by worker and global order, such that no receive is behind an end that follows it.

    Nothing comes between a producer and its send either. The rows of later workers have larger numbers, so one
    running minimum from the back serves all workers.
    """
    bound = np.minimum.accumulate((place - is_send)[::-1])[::-1]
    return np.where(is_send, place, bound)


def add_reduce_and_step(schedule: Schedule) -> tuple[Schedule, Rows]:
    """End each live worker's program with a REDUCE_GRAD, then a STEP, for each stage it hosts, last stage first.

    All reduces come before all steps, so that peers reduce in one order and a barrier between them cannot deadlock.
    Where a stage has several buckets, the sums of all but the last begin as soon as they are whole.
    """
    came_from = np.arange(len(schedule.columns), dtype=np.int64)
    if schedule.buckets > 1 and not (schedule.columns.kind == ReduceBucket.kind).any():
        worker, place, stage, bucket = _bucket_starts(schedule)
        begins = {"kind": np.full(len(stage), ReduceBucket.kind), "stage": stage, "bucket": bucket}
        schedule, came_from = insert(schedule, worker, place, begins)
    lowered, rows = _at_the_ends(schedule, implied_kinds())
    return lowered, np.append(came_from, -1)[rows]


def add_gathers(schedule: Schedule) -> tuple[Schedule, Rows]:
    """End each live worker's program with a GATHER_PARAMS for each stage it hosts, last stage first."""
    return _at_the_ends(schedule, (GatherParameters,))


def _at_the_ends(schedule: Schedule, classes: Sequence[type[Instruction]]) -> tuple[Schedule, Rows]:
    ends = [
        (w, cls.kind, stage)
        for w, worker in enumerate(schedule.shape.workers())
        if worker not in schedule.failed
        for cls in classes
        for stage in sorted(schedule.placement[w], reverse=True)
    ]
    worker, kind, stage = np.array(ends, dtype=np.int64).reshape(-1, 3).T
    return insert(schedule, worker, schedule.columns.offsets[worker + 1], {"kind": kind, "stage": stage})


def insert(schedule: Schedule, worker: Rows, place: Rows, added: dict[str, Rows]) -> tuple[Schedule, Rows]:
    """The schedule with rows added, each to the program of `worker` before row `place`, and where all rows came from.

    Args:
        added: columns of the rows, by worker, and in the order that they keep where several come before one row.
    """
    c = schedule.columns
    given = 2 * (np.arange(len(c)) + c.worker) + 1  # the end of one program is no place in the next
    order = np.argsort(np.concatenate([given, 2 * (place + worker)]), kind="stable")
    none = np.full(len(place), -1, dtype=np.int32)
    named = [name for name in Columns.FIELDS if name in added or not is_nothing(getattr(c, name))]
    columns = {name: np.append(getattr(c, name), added.get(name, none))[order] for name in named}
    offsets = c.offsets + offsets_of(worker, schedule.shape.worker_count)
    return replace(schedule, columns=Columns.from_arrays(offsets, **columns)), np.where(order < len(c), order, -1)


def _cut_last_weights(schedule: Schedule) -> tuple[Schedule, Rows]:
    """The schedule with the last W's of each stage in parts, and for each of its rows the one that it came from."""
    c, buckets = schedule.columns, schedule.buckets
    chain = compute_chains(c)[1]
    begins = np.any([np.diff(column[chain], prepend=-2) != 0 for column in (c.worker, c.stage, c.kind)], axis=0)
    first = np.full(len(c), -1, dtype=np.int64)  # row -> the first of its kind and stage that lead to it in one go
    first[chain] = chain[begins][np.cumsum(begins) - 1]
    last = _last_gradients(schedule)
    whole = last[c.kind[last] == Backward.kind]
    first[whole] = whole
    weights = np.flatnonzero(np.isin(first, first[last[c.kind[last] == BackwardWeight.kind]]))
    cut = np.append(whole, weights)
    kept = np.setdiff1d(np.arange(len(c)), cut)
    rows = np.concatenate([kept, whole, np.tile(cut, buckets)])
    bucket = np.concatenate([c.bucket[kept], np.full(len(whole), -1), np.repeat(np.arange(buckets), len(cut))])
    numbers = np.full(len(whole), BackwardInput.kind), np.full(len(cut) * buckets, WeightPart.kind)
    order = np.lexsort((rows, bucket, np.concatenate([kept, whole, np.tile(first[cut], buckets)])))
    rows, offsets = rows[order], offsets_of(c.worker[rows], schedule.shape.worker_count)
    columns = {name: getattr(c, name)[rows] for name in Columns.FIELDS}
    columns |= {"kind": np.concatenate([c.kind[kept], *numbers])[order], "bucket": bucket[order]}
    return replace(schedule, columns=Columns.from_arrays(offsets, **columns)), rows


def _last_gradients(schedule: Schedule) -> Rows:
    """The last row of each worker and stage that adds to the stage's gradients."""
    pieces = work(schedule)
    at = pieces.of(*makers_of(ValueKind.WEIGHT_GRADIENT))
    host = pieces.worker[at] * schedule.shape.stages + pieces.stage[at]
    order = np.lexsort((pieces.row[at], host))
    last = np.diff(host[order], append=-1) != 0
    return np.sort(pieces.row[at][order][last])


def _bucket_starts(schedule: Schedule) -> tuple[Rows, Rows, Rows, Rows]:
    """(worker, row that it comes before, stage, bucket) of each REDUCE_BUCKET, by worker, then by its place there.

    A worker begins the sum of a bucket right behind what adds to it last, or at its program's end where it computes
    nothing for the stage. All workers begin their sums in one order, the last stage first, as each must, so that none
    waits in one sum for a peer who waits in another.
    """
    shape, count, stages = schedule.shape, schedule.buckets - 1, schedule.shape.stages
    live = [w for w, worker in enumerate(shape.workers()) if worker not in schedule.failed]
    worker = np.array([w for w in live for _ in schedule.placement[w]], dtype=np.int64)
    stage = np.array([s for w in live for s in sorted(schedule.placement[w], reverse=True)], dtype=np.int64)
    pieces, offsets = work(schedule), schedule.columns.offsets
    at = pieces.of(*makers_of(ValueKind.WEIGHT_GRADIENT))
    host = find(worker * stages + stage, pieces.worker[at] * stages + pieces.stage[at])
    at, host = at[host >= 0], host[host >= 0]
    is_part = pieces.kind[at] == WeightPart.kind
    behind = np.zeros((len(stage), schedule.buckets), dtype=np.int64)
    np.maximum.at(behind, (host[is_part], pieces.bucket[at[is_part]]), pieces.row[at[is_part]] + 1)
    np.maximum.at(behind, host[~is_part], pieces.row[at[~is_part], None] + 1)
    place = np.where(behind > 0, behind, offsets[worker + 1, None])[:, :count].ravel()
    worker = np.repeat(worker, count)
    # Rows of later workers have larger numbers, so one running maximum serves all.
    return worker, np.maximum.accumulate(place), np.repeat(stage, count), np.tile(np.arange(count), len(stage))


def buckets_of(columns: Columns) -> int:
    """In how many buckets each stage is reduced, as written in lowered programs."""
    return int((columns.bucket + 1 + (columns.kind == ReduceBucket.kind)).max(initial=1))


def with_barrier(schedule: Schedule) -> Schedule:
    """The lowered schedule run with the barrier: every STEP moves to the end of its program, behind all reduces, and
    every GATHER_PARAMS behind the steps."""
    schedule = lower(schedule)
    c = schedule.columns
    last = (c.kind == OptimizerStep.kind) + 2 * (c.kind == GatherParameters.kind)
    rows = np.lexsort((np.arange(len(c)), last, c.worker))
    return replace(schedule, columns=c.take(rows, c.offsets), optimizer="barrier")


def forward_only(schedule: Schedule) -> Schedule:
    """The compute-only schedule of the forwards of `schedule`, those in overlapped pairs too."""
    c = schedule.columns
    rows = np.flatnonzero(is_kind(c.kind, (Forward, OverlappedPair)))
    rows = rows[np.lexsort((rows, _begins(schedule, rows), c.worker[rows]))]
    offsets = offsets_of(c.worker[rows], schedule.shape.worker_count)
    kept = {name: getattr(c, name)[rows] for name in ("stage", "pipeline", "index")}
    columns = Columns.from_arrays(offsets, kind=np.full(len(rows), Forward.kind), **kept)
    return replace(
        schedule, columns=columns, optimizer="staggered", ties=(), buckets=1, gathers=False, forward_only=True
    )


def _begins(schedule: Schedule, rows: Rows) -> Rows:
    """When each of these forwards begins; one that nothing leads to, in a broken schedule, behind all others."""
    c = schedule.columns
    worker, stage = c.worker[rows].tolist(), c.stage[rows].tolist()
    micro_batch = list(zip(c.pipeline[rows].tolist(), c.index[rows].tolist(), strict=True))
    following: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for place in range(len(rows)):
        following.setdefault((stage[place], micro_batch[place]), []).append(place)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(schedule.shape.worker_count)]
    for place in range(len(rows)):
        if stage[place] == 0:
            heapq.heappush(ready[worker[place]], (0, place))
    begins, now = np.full(len(rows), len(rows) + 1, dtype=np.int64), 0
    while any(ready):
        ran = [heapq.heappop(waiting)[1] for waiting in ready if waiting]
        begins[ran] = now
        for place in ran:
            for after in following.pop((stage[place] + 1, micro_batch[place]), ()):
                heapq.heappush(ready[worker[after]], (-stage[after], after))
        now += 1
    return begins
