"""Lowering: add transfers, reduces and steps to a compute-only order.

A pass is skipped if its instructions are present. SEND follows its producer and RECV precedes its consumer such that
all transfers follow one global order, so a worker with unbuffered, serial transfers never deadlocks.

With gradient buckets, the last W's of a stage on a worker are split into parts per bucket, run bucket by bucket. Only
those last W's are split that the worker runs without a break, after all other work of the stage. A final B is split
into I and W first. Gradients stay bitwise equal. Limits: a final overlapped pair is not split.

`forward_only` keeps the forwards, each on its worker, to evaluate the model with the lanes of training. The n-th
micro-batch that enters at a worker of stage 0 reaches stage s in slot n + s. A worker runs its forwards by slot,
deepest stage first, which never deadlocks. Limits: the order ignores the durations of forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from recycle.ir.columns import Columns, Flags, Rows, compute_chains, compute_order, is_nothing, occurrences, offsets_of
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
from recycle.ir.operations import operations_of
from recycle.ir.schedule import Schedule

_OFFSET = np.array([receive.row.needs[0].offset for _, receive in CARRIERS.values()], dtype=np.int64)
"""`ValueKind` -> producing stage relative to the consumer's stage."""


def lower(schedule: Schedule) -> Schedule:
    """Add transfers, reduces, steps and gathers to a schedule; only transfers to a forward-only schedule.

    Never raises; an invalid schedule stays invalid.
    """
    return lower_with_origin(schedule)[0]


def lower_with_origin(schedule: Schedule) -> tuple[Schedule, Rows]:
    """Lower a schedule; also return the original row of each row, -1 for added rows."""
    origin = np.arange(len(schedule.columns), dtype=np.int64)
    splits_weights = schedule.buckets > 1 and not schedule.forward_only
    if splits_weights and not is_kind(schedule.columns.kind, (*implied_kinds(), Part)).any():
        schedule, origin = _split_last_weights(schedule)
    passes: list[tuple[tuple[type[Instruction], ...], Callable[[Schedule], tuple[Schedule, Rows]]]]
    passes = [((Transfer,), add_transfers), (implied_kinds(), add_reduce_and_step)]
    if schedule.gathers:
        passes.append(((GatherParameters,), add_gathers))
    for classes, add in passes[:1] if schedule.forward_only else passes:
        if not is_kind(schedule.columns.kind, classes).any():
            schedule, origin_of_rows = add(schedule)
            origin = np.append(origin, -1)[origin_of_rows]
    return schedule, origin


def lowered_graph(schedule: Schedule, serialised: bool = False, shared: bool = False) -> EventGraph:
    """Build the event graph of the lowered schedule, for callers that both simulate and check."""
    lowered, origin = lower_with_origin(schedule)
    return replace(event_graph(lowered, serialised, shared=shared), origin=origin)


def implied_kinds() -> tuple[type[Instruction], ...]:
    """Return the kinds added at the end of each program if a schedule has none of them: REDUCE_GRAD, STEP."""
    return kinds_where(lambda row: row.implied)


def add_transfers(schedule: Schedule) -> tuple[Schedule, Rows]:
    """Add a SEND and a RECV for each value that crosses to another worker.

    On each worker the ends keep the global order of transfers. Within this order a RECV is as late as possible: right
    before its consumer, or before the next end.
    """
    graph = dependencies(schedule)
    crossings, rank = graph.crossings, _global_rank(schedule.columns, graph)
    by_rank = np.argsort(rank[crossings.producer], kind="stable")
    producer, consumer = crossings.producer[by_rank], crossings.consumer[by_rank]
    value, stage = crossings.value[by_rank], crossings.stage[by_rank]
    pipeline, index = np.divmod(crossings.micro_batch[by_rank], schedule.shape.micro_batches)
    sender, receiver = schedule.columns.worker[producer], schedule.columns.worker[consumer]
    kinds = np.array([[end.kind for end in pair] for pair in CARRIERS.values()])[value]
    ends = {
        "kind": kinds.T.ravel(),
        "stage": np.concatenate([stage, stage - _OFFSET[value]]),
        "pipeline": np.tile(pipeline, 2),
        "index": np.tile(index, 2),
        "peer": np.concatenate([receiver, sender]),
    }
    # All ends, sends first: the row before which each is inserted, before the global order is enforced.
    is_send = np.repeat([True, False], len(value))
    worker = np.concatenate([sender, receiver])
    place = np.concatenate([producer + 1, consumer])
    by_worker = np.lexsort((np.tile(np.arange(len(value)), 2), worker))
    place = _before_following_ends(place[by_worker], is_send[by_worker])
    return insert(schedule, worker[by_worker], place, {name: column[by_worker] for name, column in ends.items()})


def _global_rank(columns: Columns, graph: Dependencies) -> Rows:
    """Return the position of each compute row in one order that respects dependencies and programs; cycles last."""
    before, after = compute_order(columns)
    source, target = np.concatenate([graph.source, before]), np.concatenate([graph.target, after])
    order = topological_order(source, target, graph.nodes)
    rank = np.full(graph.nodes, -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank = rank[: graph.rows]
    lost = np.flatnonzero(rank < 0)
    rank[lost] = graph.nodes + np.arange(len(lost))
    return rank


def _before_following_ends(place: Rows, is_send: Flags) -> Rows:
    """Move each receive before the ends that follow it, given ends sorted by worker and global order."""
    bound = np.minimum.accumulate((place - is_send)[::-1])[::-1]
    return np.where(is_send, place, bound)


def add_reduce_and_step(schedule: Schedule) -> tuple[Schedule, Rows]:
    """End each live worker's program with a REDUCE_GRAD, then a STEP, for each stage it hosts, last stage first.

    All reduces precede all steps, so peers reduce in one order and a barrier between them cannot deadlock. With several
    buckets, the sums of all but the last begin as soon as the bucket is complete.
    """
    origin_of_rows = np.arange(len(schedule.columns), dtype=np.int64)
    if schedule.buckets > 1 and not (schedule.columns.kind == ReduceBucket.kind).any():
        worker, place, stage, bucket = _bucket_starts(schedule)
        begins = {"kind": np.full(len(stage), ReduceBucket.kind), "stage": stage, "bucket": bucket}
        schedule, origin_of_rows = insert(schedule, worker, place, begins)
    lowered, rows = _append_to_programs(schedule, implied_kinds())
    return lowered, np.append(origin_of_rows, -1)[rows]


def add_gathers(schedule: Schedule) -> tuple[Schedule, Rows]:
    """End each live worker's program with a GATHER_PARAMS for each stage it hosts, last stage first."""
    return _append_to_programs(schedule, (GatherParameters,))


def _append_to_programs(schedule: Schedule, classes: Sequence[type[Instruction]]) -> tuple[Schedule, Rows]:
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
    """Insert rows into the programs, each before row `place`; also return each row's original row, -1 for new rows.

    `added` has the columns of the new rows, sorted by worker; rows with the same place keep their order.
    """
    c = schedule.columns
    given = 2 * (np.arange(len(c)) + c.worker) + 1  # keeps the end of a program apart from the start of the next
    order = np.argsort(np.concatenate([given, 2 * (place + worker)]), kind="stable")
    none = np.full(len(place), -1, dtype=np.int32)
    named = [name for name in Columns.FIELDS if name in added or not is_nothing(getattr(c, name))]
    columns = {name: np.append(getattr(c, name), added.get(name, none))[order] for name in named}
    offsets = c.offsets + offsets_of(worker, schedule.shape.worker_count)
    return replace(schedule, columns=Columns.from_arrays(offsets, **columns)), np.where(order < len(c), order, -1)


def _split_last_weights(schedule: Schedule) -> tuple[Schedule, Rows]:
    c, buckets = schedule.columns, schedule.buckets
    chain = compute_chains(c)[1]
    begins = np.any([np.diff(column[chain], prepend=-2) != 0 for column in (c.worker, c.stage, c.kind)], axis=0)
    first = np.full(len(c), -1, dtype=np.int64)  # row -> first row of its run of the same kind and stage
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
    ops = operations_of(schedule)
    at = ops.select(*makers_of(ValueKind.WEIGHT_GRADIENT))
    order = np.lexsort((ops.row[at], ops.host[at]))
    last = np.diff(ops.host[at[order]], append=-1) != 0
    return np.sort(ops.row[at][order][last])


def _bucket_starts(schedule: Schedule) -> tuple[Rows, Rows, Rows, Rows]:
    """Return (worker, next row, stage, bucket) of each REDUCE_BUCKET, sorted by worker and place.

    A sum begins after the last row that adds to the bucket, else at the end of the program. All workers begin their
    sums in one order, last stage first, so no two workers wait for each other in different sums.
    """
    shape, count = schedule.shape, schedule.buckets - 1
    live = [w for w, worker in enumerate(shape.workers()) if worker not in schedule.failed]
    worker = np.array([w for w in live for _ in schedule.placement[w]], dtype=np.int64)
    stage = np.array([s for w in live for s in sorted(schedule.placement[w], reverse=True)], dtype=np.int64)
    ops, offsets = operations_of(schedule), schedule.columns.offsets
    at = ops.select(*makers_of(ValueKind.WEIGHT_GRADIENT))
    host = find(worker * shape.stages + stage, ops.host[at])
    at, host = at[host >= 0], host[host >= 0]
    is_part = ops.kind[at] == WeightPart.kind
    next_row = np.zeros((len(stage), schedule.buckets), dtype=np.int64)
    np.maximum.at(next_row, (host[is_part], ops.bucket[at[is_part]]), ops.row[at[is_part]] + 1)
    np.maximum.at(next_row, host[~is_part], ops.row[at[~is_part], None] + 1)
    place = np.where(next_row > 0, next_row, offsets[worker + 1, None])[:, :count].ravel()
    worker = np.repeat(worker, count)
    # Rows of later workers have larger numbers, so one running maximum serves all workers.
    return worker, np.maximum.accumulate(place), np.repeat(stage, count), np.tile(np.arange(count), len(stage))


def buckets_of(columns: Columns) -> int:
    """Return the number of gradient buckets in lowered programs."""
    return int((columns.bucket + 1 + (columns.kind == ReduceBucket.kind)).max(initial=1))


def with_barrier(schedule: Schedule) -> Schedule:
    """Lower a schedule and move every STEP after the reduces of its program, and GATHER_PARAMS after the steps."""
    schedule = lower(schedule)
    c = schedule.columns
    last = (c.kind == OptimizerStep.kind) + 2 * (c.kind == GatherParameters.kind)
    rows = np.lexsort((np.arange(len(c)), last, c.worker))
    return replace(schedule, columns=c.take(rows, c.offsets), optimizer="barrier")


def with_first_micro_batches(schedule: Schedule, count: int) -> Schedule:
    """Return a lowered schedule with the first `count` micro-batches of each pipeline only, in the same order.

    An overlapped pair without one of its halves becomes the other.
    """
    c = schedule.columns
    by_name = {name: getattr(c, name) for name in c.FIELDS}
    lacks_first, lacks_second = c.index >= count, c.index2 >= count
    is_forward = (c.stage2 >= 0) & lacks_second
    is_backward = (c.stage2 >= 0) & lacks_first
    by_name["kind"] = np.where(is_forward, Forward.kind, np.where(is_backward, Backward.kind, c.kind))
    for name in ("stage", "pipeline", "index"):
        second = by_name[f"{name}2"]
        by_name[name] = np.where(is_backward, second, by_name[name])
        by_name[f"{name}2"] = np.where(is_forward | is_backward, -1, second)
    kept = np.flatnonzero(by_name["index"] < count)
    return replace(schedule, columns=Columns.from_arrays(c.offsets, **by_name).take(kept))


def forward_only(schedule: Schedule) -> Schedule:
    """Return the compute-only schedule of the forwards of a valid schedule, including those in overlapped pairs."""
    c = schedule.columns
    rows = np.flatnonzero(is_kind(c.kind, (Forward, OverlappedPair)))
    first = rows[c.stage[rows] == 0]
    entry = np.zeros((schedule.shape.pipelines, schedule.shape.micro_batches), dtype=np.int64)
    entry[c.pipeline[first], c.index[first]] = occurrences(c.worker[first])
    slot = entry[c.pipeline[rows], c.index[rows]] + c.stage[rows]
    rows = rows[np.lexsort((-c.stage[rows], slot, c.worker[rows]))]
    offsets = offsets_of(c.worker[rows], schedule.shape.worker_count)
    kept = {name: getattr(c, name)[rows] for name in ("stage", "pipeline", "index")}
    columns = Columns.from_arrays(offsets, kind=np.full(len(rows), Forward.kind), **kept)
    return replace(
        schedule, columns=columns, optimizer="staggered", ties=(), buckets=1, gathers=False, forward_only=True
    )
