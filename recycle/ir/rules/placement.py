"""Placement: work stands on live workers that host its stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.kinds import Transfer, is_kind
from recycle.ir.rules.rule import SHOWN, Defect, Inspection, Rest, described, firsts, listed, rest, rule


@rule("no-host", "a stage without a live host")
def no_host(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A stage whose every host has failed, or that the placement gives to nobody, has no live copy of its parameters:
    no schedule can run it. Give it to another worker that can copy them, or go back to a checkpoint."""
    hosted = inspection.hosted
    stages = np.flatnonzero(~hosted[~inspection.dead].any(axis=0))
    for (stage,) in described(stages):
        dead = _listed(inspection, np.flatnonzero(hosted[:, stage]))
        why = f"its hosts {dead} have all failed" if dead else "the placement gives it to no worker"
        hint = "place it on a live worker, or restart from a checkpoint"
        yield Defect(f"stage {stage} has no live host: {why}", hint)
    yield rest(stages)


def _listed(inspection: Inspection, workers: Rows) -> str:
    """Some workers, by index, as `listed` lists them."""
    return listed([inspection.schedule.shape.worker_at(w) for w in workers[:SHOWN].tolist()], len(workers))


@rule("failed-worker", "work on, or a transfer with, a failed worker")
def failed_worker(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A failed worker runs nothing, sends nothing and receives nothing. Its micro-batches go to peers of its stage,
    with their transfers. Reported once per failed worker that has a program, and once per live worker and failed
    peer otherwise."""
    schedule, c = inspection.schedule, inspection.schedule.columns
    sizes = np.diff(c.offsets)
    busy = np.flatnonzero(inspection.dead & (sizes > 0))
    for (w,) in described(busy):
        yield Defect(
            f"worker {schedule.shape.worker_at(w)} has failed, yet it has a program of {int(sizes[w])} instruction(s)",
            "give its micro-batches to peers of its stage, or take it off the list of failed workers",
            int(c.offsets[w]),
        )
    yield rest(busy)
    silent = inspection.dead & (sizes == 0)
    rows = np.flatnonzero(is_kind(c.kind, Transfer))
    rows = rows[silent[c.peer[rows]] & ~inspection.dead[c.worker[rows]]]
    lanes = c.worker[rows].astype(np.int64) * schedule.shape.worker_count + c.peer[rows]
    _, places, counts = firsts(lanes)
    for row, entries in described(rows[places], counts):
        more = f" (and {entries - 1} more transfers with it)" if entries > 1 else ""
        yield Defect(
            f"worker {schedule.shape.worker_at(c.peer[row])} has failed and takes no part in any transfer{more}",
            "exchange the value with the peer that took over the micro-batch",
            row,
        )
    yield rest(places)


@rule("not-hosted", "a stage run by a worker that does not host it")
def not_hosted(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A worker can compute, reduce and step only the stages whose parameters it holds: those the placement gives it.
    Work moves between workers of *different pipelines* that host the same stage, never along a pipeline. Reported
    once per worker and stage, at the first instruction."""
    shape, pieces = inspection.schedule.shape, inspection.pieces
    at = np.flatnonzero(~is_kind(pieces.kind, Transfer) & pieces.valid)
    at = at[~inspection.hosted[pieces.worker[at], pieces.stage[at]] & ~inspection.dead[pieces.worker[at]]]
    at = at[np.argsort(pieces.row[at], kind="stable")]
    keys, places, counts = firsts(pieces.worker[at] * shape.stages + pieces.stage[at])
    for key, place, entries in described(keys, places, counts):
        w, stage = divmod(key, shape.stages)
        worker = shape.worker_at(w)
        hosts = _listed(inspection, np.flatnonzero(inspection.hosted[:, stage] & ~inspection.dead))
        more = f", {entries} times in all" if entries > 1 else ""
        yield Defect(
            f"worker {worker} hosts stage {listed(inspection.schedule.stages_of(worker)) or 'none'}, not {stage}{more}",
            f"move it to a host of stage {stage} ({hosts or 'none is alive'}), or change the placement",
            int(pieces.row[at[place]]),
        )
    yield rest(keys)
