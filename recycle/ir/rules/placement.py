"""Placement and memory: work stands on live workers that host its stage, and what these hold is within their limit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.kinds import Transfer, is_kind
from recycle.ir.memory import TOLERANCE, held_activations, static_bytes
from recycle.ir.rules.rule import Defect, Inspection, Place, listed, rule


@rule("no-host", "a stage without a live host")
def no_host(inspection: Inspection) -> Iterator[Defect]:
    """A stage whose every host has failed, or that the placement gives to nobody, has no live copy of its parameters:
    no schedule can run it. Give it to another worker that can copy them, or go back to a checkpoint."""
    stages = np.flatnonzero(~inspection.hosts.any(axis=0))

    def why(place: Place) -> str:
        dead = inspection.workers(np.flatnonzero(inspection.hosted[:, stages[place.index]]))
        return f"its hosts {dead} have all failed" if dead else "the placement gives it to no worker"

    yield Defect(
        "stage {stage} has no live host: {why}",
        "place it on a live worker, or restart from a checkpoint",
        per=stages,
        tells={"stage": stages, "why": why},
    )


@rule("failed-worker", "work on, or a transfer with, a failed worker")
def failed_worker(inspection: Inspection) -> Iterator[Defect]:
    """A failed worker runs nothing, sends nothing and receives nothing. Its micro-batches go to peers of its stage,
    with their transfers. Reported once per failed worker that has a program, and once per live worker and failed
    peer otherwise."""
    shape, c = inspection.schedule.shape, inspection.schedule.columns
    sizes = np.diff(c.offsets)
    busy = np.flatnonzero(inspection.dead & (sizes > 0))

    yield Defect(
        "worker {worker} has failed, yet it has a program of {size} instruction(s)",
        "give its micro-batches to peers of its stage, or take it off the list of failed workers",
        c.offsets[busy],
        tells={"size": sizes[busy]},
    )
    silent = inspection.dead & (sizes == 0)
    rows = np.flatnonzero(is_kind(c.kind, Transfer))
    rows = rows[silent[c.peer[rows]] & ~inspection.dead[c.worker[rows]]]

    yield Defect(
        "worker {peer} has failed and takes no part in any transfer",
        "exchange the value with the peer that took over the micro-batch",
        rows,
        per=c.worker[rows].astype(np.int64) * shape.worker_count + c.peer[rows],
        more="transfers with it",
        tells={"peer": lambda place: shape.worker_at(c.peer[rows[place.index]])},
    )


@rule("not-hosted", "a stage run by a worker that does not host it")
def not_hosted(inspection: Inspection) -> Iterator[Defect]:
    """A worker can compute, reduce and step only the stages whose parameters it holds: those the placement gives it.
    Work moves between workers of *different pipelines* that host the same stage, never along a pipeline. Reported
    once per worker and stage, at the first instruction."""
    shape, pieces = inspection.schedule.shape, inspection.pieces
    at = np.flatnonzero(~is_kind(pieces.kind, Transfer) & pieces.valid)
    at = at[~inspection.hosted[pieces.worker[at], pieces.stage[at]] & ~inspection.dead[pieces.worker[at]]]
    at = at[np.argsort(pieces.row[at], kind="stable")]
    workers, stages = pieces.worker[at], pieces.stage[at]

    def hosts(place: Place) -> str:
        return inspection.workers(np.flatnonzero(inspection.hosts[:, stages[place.index]])) or "none is alive"

    yield Defect(
        "worker {worker} hosts stage {hosted}, not {stage}{times}",
        "move it to a host of stage {stage} ({hosts}), or change the placement",
        pieces.row[at],
        per=workers * shape.stages + stages,
        tells={
            "hosted": lambda place: listed(inspection.schedule.placement[workers[place.index]]) or "none",
            "stage": stages,
            "times": lambda place: f", {place.count} times in all" if place.count > 1 else "",
            "hosts": hosts,
        },
    )


_LESS_MEMORY = "run a B or W of a held micro-batch before it, delay this forward, or raise the limit"


@rule("activation-limit", "more activations held than allowed")
def activation_limit(inspection: Inspection) -> Iterator[Defect]:
    """An activation is held from the start of its F to the end of its W or B; of a split backward, the profile's
    `weight_stash` share is what stays between I and W. Counted in chunks, in program order, against the limit of the
    worker's rank. The finding points at the instruction that sets the peak and says when it starts.
    Incomplete schedules are not judged."""
    if inspection.limits is None or not inspection.complete.all():
        return
    shape = inspection.schedule.shape
    peaks, rows = map(np.array, held_activations(inspection.schedule, inspection.profile, in_bytes=False))
    limits = np.tile(np.array(inspection.limits, dtype=float), shape.pipelines)
    over = (rows >= 0) & (peaks > limits + TOLERANCE) & ~inspection.dead
    yield Defect(
        "worker {worker} holds {peak:g} activations here{time}, the limit of rank {rank} is {limit:g}",
        _LESS_MEMORY,
        rows,
        where=over,
        tells={
            "peak": peaks,
            "time": lambda place: inspection.time_of(rows[place.index]),
            "rank": np.arange(len(rows)) % shape.ranks,
            "limit": limits,
        },
    )


@rule("byte-limit", "more bytes held than allowed")
def byte_limit(inspection: Inspection) -> Iterator[Defect]:
    """The bytes of the activations held, by the profile's weight of each stage, and what the stages that the worker
    hosts need beside them, against one limit for all workers. The finding points at the instruction that sets the
    peak and says when it starts, or at the worker when its stages alone exceed the limit."""
    if inspection.byte_limit is None or not inspection.complete.all():
        return
    schedule, profile, limit = inspection.schedule, inspection.profile, inspection.byte_limit
    static = np.array(static_bytes(schedule, profile))
    peaks, rows = map(np.array, held_activations(schedule, profile, in_bytes=True))
    over = ~inspection.dead & (static + peaks > limit * (1 + TOLERANCE))
    alone = (static > limit) | (rows < 0)
    yield Defect(
        f"its stages alone need {{static:.6g}} bytes, the limit is {limit:.6g}",
        "place fewer stages on it, split the model further, or raise the limit",
        worker=np.arange(len(rows)),
        where=over & alone,
        tells={"static": static},
    )
    yield Defect(
        "worker {worker} holds {held:.6g} bytes here{time} ({static:.6g} static, {peak:.6g} of activations), the limit"
        f" is {limit:.6g}",
        _LESS_MEMORY,
        rows,
        where=over & ~alone,
        tells={
            "held": static + peaks,
            "time": lambda place: inspection.time_of(rows[place.index]),
            "static": static,
            "peak": peaks,
        },
    )
