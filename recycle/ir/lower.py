"""Lowering: a compute-only order -> the same order with sends, receives, reduces and steps.

Two small passes, each of which does nothing where its instructions are there already. Both are pure functions of the
order. SEND goes right after its producer and RECV before its consumer, such that all transfers follow one global
order; a worker that carries its transfers one at a time, unbuffered, then never deadlocks, and no lane is ever
out of step between its two ends.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle.ir.dependencies import CARRIERS, Rows, compute_order, dependencies, group_edges, work
from recycle.ir.graph import topological_order
from recycle.ir.instruction import STAGE_KINDS, TRANSFER_KINDS, Kind
from recycle.ir.schedule import Columns, Schedule

Crossing = tuple[int, int, int, int, int, int]
"""(global rank of the producer, value kind, stage, global micro-batch, producer row, consumer row)."""


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its transfers, reduces and steps written out. Never raises; what is broken stays broken."""
    return lower_with_origin(schedule)[0]


def lower_with_origin(schedule: Schedule) -> tuple[Schedule, Rows]:
    """`lower`, and for each row of the result the row it came from, -1 for rows that lowering added."""
    origin = np.arange(len(schedule.columns), dtype=np.int64)
    for kinds, add in ((TRANSFER_KINDS, add_transfers), (STAGE_KINDS, add_reduce_and_step)):
        if not np.isin(schedule.columns.kind, [int(kind) for kind in kinds]).any():
            schedule, came_from = add(schedule)
            origin = np.append(origin, -1)[came_from]
    return schedule, origin


def add_transfers(schedule: Schedule) -> tuple[Schedule, Rows]:
    """Write a SEND and a RECV for each value that crosses to another worker."""
    c = schedule.columns
    pieces, stages = work(schedule), schedule.shape.stages
    rank = _global_rank(schedule)
    made: dict[tuple[int, int, int], int] = {}
    for kind_of_value, (send, _) in CARRIERS.items():
        producers = (Kind.FORWARD,) if send == Kind.SEND_ACTIVATION else (Kind.BACKWARD_INPUT, Kind.BACKWARD)
        for piece in np.flatnonzero(np.isin(pieces.kind, producers) & pieces.valid).tolist():
            key = (int(kind_of_value), int(pieces.stage[piece]), int(pieces.micro_batch[piece]))
            made.setdefault(key, int(pieces.row[piece]))
    transfers: list[Crossing] = []
    taken: set[tuple[int, int, int, int]] = set()
    for value, (send, _) in CARRIERS.items():
        consumers, step = (
            ((Kind.FORWARD,), -1) if send == Kind.SEND_ACTIVATION else ((Kind.BACKWARD_INPUT, Kind.BACKWARD), 1)
        )
        for piece in np.flatnonzero(np.isin(pieces.kind, consumers) & pieces.valid).tolist():
            stage, micro_batch = int(pieces.stage[piece]) + step, int(pieces.micro_batch[piece])
            producer = made.get((int(value), stage, micro_batch))
            if not 0 <= stage < stages or producer is None:
                continue
            consumer = int(pieces.row[piece])
            once = (int(value), stage, micro_batch, int(c.worker[consumer]))
            if c.worker[producer] != c.worker[consumer] and once not in taken:
                taken.add(once)
                transfers.append((int(rank[producer]), int(value), stage, micro_batch, producer, consumer))
    transfers.sort()
    return _insert(schedule, transfers)


def _global_rank(schedule: Schedule) -> Rows:
    """Position of each compute row in one global order that respects dependencies and every program.

    Rows on or behind a dependency cycle come last, by place in the file, so that broken orders can be lowered too.
    """
    graph = dependencies(schedule)
    before, after = compute_order(schedule.columns)
    source, target = np.concatenate([graph.source, before]), np.concatenate([graph.target, after])
    offsets, targets = group_edges(target, source, graph.nodes)
    order = topological_order(offsets, targets, np.bincount(target, minlength=graph.nodes))
    rank = np.full(graph.nodes, -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank = rank[: graph.rows]
    lost = np.flatnonzero(rank < 0)
    rank[lost] = graph.nodes + np.arange(len(lost))
    return rank


def _insert(schedule: Schedule, transfers: list[Crossing]) -> tuple[Schedule, Rows]:
    """Put each transfer's two ends into the programs.

    On each worker the ends keep the global order of transfers. A RECV goes as late as that allows: right before its
    consumer, or before the next end in the order.
    """
    c, shape = schedule.columns, schedule.shape
    m = shape.micro_batches
    ends: list[list[tuple[int, tuple[int, ...], bool]]] = [[] for _ in range(shape.worker_count)]
    for _, value, stage, micro_batch, producer, consumer in transfers:
        send, receive = list(CARRIERS.values())[value]
        sender, receiver = int(c.worker[producer]), int(c.worker[consumer])
        home = divmod(micro_batch, m)
        to_stage = stage + (1 if send == Kind.SEND_ACTIVATION else -1)
        ends[sender].append((producer + 1, (int(send), stage, *home, receiver), True))
        ends[receiver].append((consumer, (int(receive), to_stage, *home, sender), False))
    table: list[tuple[int, ...]] = []
    origin: list[int] = []
    offsets = [0]
    for w in range(shape.worker_count):
        places: list[tuple[int, tuple[int, ...]]] = []
        latest = int(c.offsets[w + 1])
        for place, end, is_send in reversed(ends[w]):
            if not is_send:
                place = min(place, latest)
            latest = min(latest, place - 1 if is_send else place)  # nothing comes between a producer and its send
            places.append((place, end))
        places.reverse()
        places.sort(key=lambda entry: entry[0])  # moves something in orders with a cycle only
        at = 0
        for row in range(int(c.offsets[w]), int(c.offsets[w + 1]) + 1):
            while at < len(places) and places[at][0] <= row:
                table.append((*places[at][1], -1, -1, -1))
                origin.append(-1)
                at += 1
            if row < c.offsets[w + 1]:
                table.append(tuple(int(getattr(c, name)[row]) for name in Columns.FIELDS))
                origin.append(row)
        offsets.append(len(table))
    array = np.array(table, dtype=np.int64).reshape(len(table), len(Columns.FIELDS))
    columns = Columns.from_arrays(np.array(offsets), **{name: array[:, i] for i, name in enumerate(Columns.FIELDS)})
    return replace(schedule, columns=columns), np.array(origin, dtype=np.int64)


def add_reduce_and_step(schedule: Schedule) -> tuple[Schedule, Rows]:
    """End each live worker's program with a REDUCE_GRAD, then a STEP, for each stage it hosts, last stage first.

    All reduces come before all steps, so that peers reduce in one order and a barrier between them cannot deadlock.
    """
    c, shape = schedule.columns, schedule.shape
    added: list[list[tuple[int, int]]] = []
    for worker in shape.workers():
        stages = sorted(schedule.stages_of(worker), reverse=True) if worker not in schedule.failed else []
        kinds = (Kind.REDUCE_GRADIENTS, Kind.OPTIMIZER_STEP)
        added.append([(int(kind), stage) for kind in kinds for stage in stages])
    offsets = np.concatenate([[0], np.cumsum(np.diff(c.offsets) + [len(extra) for extra in added])]).astype(np.int64)
    origin = np.full(int(offsets[-1]), -1, dtype=np.int64)
    for w in range(shape.worker_count):
        size = int(c.offsets[w + 1] - c.offsets[w])
        origin[offsets[w] : offsets[w] + size] = np.arange(c.offsets[w], c.offsets[w + 1])
    full = {
        name: np.where(origin >= 0, getattr(c, name)[origin] if len(c) else -1, -1).astype(np.int64)
        for name in Columns.FIELDS
    }
    for w, extra in enumerate(added):
        end = int(offsets[w + 1])
        for i, (kind, stage) in enumerate(extra):
            full["kind"][end - len(extra) + i] = kind
            full["stage"][end - len(extra) + i] = stage
    return replace(schedule, columns=Columns.from_arrays(offsets, **full)), origin


def with_barrier(schedule: Schedule) -> Schedule:
    """The lowered schedule run with the barrier: every STEP moves to the end of its program, behind all reduces."""
    schedule = lower(schedule)
    c = schedule.columns
    is_step = c.kind == Kind.OPTIMIZER_STEP
    rows = np.lexsort((np.arange(len(c)), is_step, c.worker))
    return replace(schedule, columns=c.take(rows, c.offsets), optimizer="barrier")
