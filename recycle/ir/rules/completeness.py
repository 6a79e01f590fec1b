"""Completeness: each micro-batch exactly once per stage, all its halves on the worker that ran its forward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Flags, Rows
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Transfer,
    WeightPart,
    is_kind,
)
from recycle.ir.kinds import MOST_KINDS
from recycle.ir.pieces import outside_buckets
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, firsts, repeats, rest, rule
from recycle.shape import MOST_BUCKETS


@rule("stage-range", "a stage that the shape does not have")
def stage_range(inspection: Inspection) -> Iterator[Defect | Rest]:
    """Stages count from 0 to P * V - 1. An instruction, or a group of tied stages, that names another stage cannot be
    placed anywhere. Change the stage, or the shape that the schedule was built with. Reported once per worker."""
    stages, pieces = inspection.schedule.shape.stages, inspection.pieces
    hint = f"stages count from 0 to {stages - 1}: change the stage or the shape"
    outside = (pieces.stage < 0) | (pieces.stage >= stages)
    message = f"the shape has {stages} stage(s), none with this number"
    yield from _per_worker(inspection, pieces.row[outside], message, hint)
    for tie in inspection.schedule.ties:
        strange = [stage for stage in tie if not 0 <= stage < stages]
        if strange:
            yield Defect(f"the tie {list(tie)} names stage {strange[0]}, the shape has {stages} stage(s)", hint)


@rule("micro-batch-range", "a micro-batch that the shape does not have")
def micro_batch_range(inspection: Inspection) -> Iterator[Defect | Rest]:
    """Micro-batches are written `pipeline.index`, the pipeline from 0 to D - 1, the index from 0 to m - 1. Any other
    is data that nobody loads. Change the micro-batch, or the shape that the schedule was built with. Reported once
    per worker."""
    shape, pieces = inspection.schedule.shape, inspection.pieces
    in_stage = (
        (pieces.stage >= 0) & (pieces.stage < shape.stages) & ~outside_buckets(pieces, inspection.schedule.buckets)
    )
    last = f"{shape.pipelines - 1}.{shape.micro_batches - 1}"
    yield from _per_worker(
        inspection,
        pieces.row[in_stage & ~pieces.valid],
        f"the shape ({shape}) has no such micro-batch",
        f"micro-batches run from 0.0 to {last}: rename it, or enlarge the shape",
    )


def _per_worker(inspection: Inspection, rows: Rows, message: str, hint: str) -> Iterator[Defect | Rest]:
    """A defect at the first of the rows of each worker, with a note on the others."""
    rows = np.unique(rows)
    _, places, counts = firsts(inspection.schedule.columns.worker[rows])
    for row, entries in described(rows[places], counts):
        more = f" (and {entries - 1} more on this worker)" if entries > 1 else ""
        yield Defect(message + more, hint, row)
    yield rest(places)


@rule("duplicate", "a forward or backward is there twice")
def duplicate(inspection: Inspection) -> Iterator[Defect | Rest]:
    """Each micro-batch is used exactly once per iteration and stage. A second F, B, I or W of the same micro-batch
    and stage would count its gradient twice, on whichever worker it stands. Remove one of the two."""
    pieces, at = inspection.pieces, inspection.computes
    at = at[np.argsort(pieces.row[at], kind="stable")]
    key = inspection.cell[at] * MOST_KINDS + pieces.kind[at]
    again, first = repeats(key * (MOST_BUCKETS + 1) + pieces.bucket[at])
    for row, original in described(pieces.row[at[again]], pieces.row[at[first]]):
        yield Defect(
            f"the same work is there already: {inspection.at(original)}",
            "each micro-batch counts once per stage: remove one of the two",
            row,
            others=(original,),
        )
    yield rest(again)


@rule("mixed-backward", "a whole backward beside one of its halves")
def mixed_backward(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A backward is written either as one B or as I and W. B together with I or W of the same micro-batch and stage
    computes the same gradient twice. Keep B, or keep I and W."""
    _, whole, *halves = inspection.counts.values()
    cells = np.flatnonzero((whole > 0) & (sum(halves) + inspection.parts[1] > 0))
    for (cell,) in described(cells):
        row = int(_rows(inspection, cell, BackwardInput, BackwardWeight, WeightPart)[0])
        b = int(_rows(inspection, cell, Backward)[0])
        yield Defect(
            f"{inspection.at(b)} does this work too: B is I and W in one go",
            "keep either the B, or the I and the W",
            row,
            others=(b,),
        )
    yield rest(cells)


def _rows(inspection: Inspection, cell: int, *classes: type[Instruction]) -> Rows:
    return np.sort(inspection.pieces.row[inspection.in_cell(cell, *classes)])


@rule("missing", "a forward or backward that is not there")
def missing(inspection: Inspection) -> Iterator[Defect | Rest]:
    """Every stage must run F and B, or F, I and W, of every micro-batch of all pipelines, those of a failed worker
    too: a peer takes them. Micro-batches that a whole stage or the whole schedule leaves out are reported together.
    Add the instruction that is missing, or correct the shape. A forward-only schedule needs the F alone."""
    shape, (f, b, i, w) = inspection.schedule.shape, inspection.counts.values()
    if inspection.parts[1].any():
        w = w + inspection.parts[1]
    yield from _absent(inspection, ((f + b + i + w) == 0).reshape(shape.stages, shape.global_micro_batches))
    split = (b == 0) & ((i > 0) | (w > 0))
    holes = (
        (Forward, "forward", (f == 0) & (b + i + w > 0)),
        (Backward, "backward (B, or I and W)", (f > 0) & (b + i + w == 0)),
        (BackwardWeight, "weight gradient", split & (w == 0)),
        (BackwardInput, "input gradient", split & (i == 0)),
    )
    for kind, name, hole in holes[:1] if inspection.schedule.forward_only else holes:
        yield from _incomplete(inspection, kind, name, hole)


def _absent(inspection: Inspection, absent: Flags) -> Iterator[Defect | Rest]:
    """Micro-batches that no stage runs, then those that single stages leave out."""
    needed = "forward" if inspection.schedule.forward_only else "forward and backward"
    hint = f"add its {needed}, on its home worker or on a peer; or correct the shape"
    nowhere = absent.all(axis=0)
    if nowhere.any():
        yield Defect(f"no stage runs micro-batch {inspection.micro_batches(np.flatnonzero(nowhere))}", hint)
    orphaned = ~inspection.hosted[~inspection.dead].any(axis=0)
    stages = np.flatnonzero((absent & ~nowhere).any(axis=1) & ~orphaned)
    for (stage,) in described(stages):
        names = inspection.micro_batches(np.flatnonzero(absent[stage] & ~nowhere))
        yield Defect(f"stage {stage} does not run micro-batch {names}", hint)
    yield rest(stages)


def _incomplete(inspection: Inspection, kind: type[Instruction], name: str, hole: Flags) -> Iterator[Defect | Rest]:
    """One defect per worker and stage, at the first instruction whose other part is missing."""
    pieces, shape = inspection.pieces, inspection.schedule.shape
    at = inspection.computes[hole[inspection.cell[inspection.computes]]]
    key = pieces.worker[at] * shape.stages + pieces.stage[at]
    by_key = np.lexsort((pieces.row[at], key))
    at, (keys, places, counts) = at[by_key], firsts(key[by_key])
    for one, place, entries in described(keys, places, counts):
        worker, stage = divmod(one, shape.stages)
        numbers = np.unique(pieces.micro_batch[at[place : place + entries]])
        yield Defect(
            f"the {name} of stage {stage} is missing for micro-batch {inspection.micro_batches(numbers)}",
            f"add {stage}{kind.token}{inspection.micro_batch(numbers[0])} to worker {shape.worker_at(worker)}",
            int(pieces.row[at[place]]),
        )
    yield rest(keys)


@rule("apart", "a backward is not on the worker that ran its forward")
def apart(inspection: Inspection) -> Iterator[Defect | Rest]:
    """B, I and W need the activation that their F left on its worker, and W what its I left there; activations are
    never sent to another worker of the same stage. So all halves of a micro-batch run where its F ran: move them
    together."""
    worker = inspection.schedule.columns.worker
    cells, rows = inspection.cells_of(inspection.apart), inspection.origin[inspection.apart.row]
    reported = (rows >= 0) & inspection.complete[cells] & ~inspection.misplaced[cells]
    for cell, row in described(cells[reported], rows[reported]):
        makers = _rows(inspection, cell, Forward, BackwardInput).tolist()
        made_by = [maker for maker in makers if worker[maker] != worker[row]]
        yield Defect(
            f"it needs what {inspection.at(made_by[0])} left there" if made_by else "it is not where its forward ran",
            "move it to that worker, or move the forward and all halves of the backward together",
            row,
            others=tuple(made_by[:1]),
        )
    yield rest(cells[reported])


@rule("not-lowered", "a schedule about to run without its transfers, reduces or steps")
def not_lowered(inspection: Inspection) -> Iterator[Defect]:
    """In a file for people or for exchange, transfers, reduces and steps may be left out: they are then implied. What
    workers execute must hold them. Call `lower` first. Without REDUCE_GRAD and STEP, gradients are neither summed,
    scaled nor applied."""
    if not inspection.about_to_run:
        return
    lowered, origin = inspection.lowered.columns.kind, inspection.origin
    added = lowered[origin < 0]
    transfers = int(is_kind(added, Transfer).sum())
    left_out = [f"{transfers} transfer(s)"] if transfers else []
    if transfers < len(added):
        left_out.append("every REDUCE_GRAD and STEP")
    if left_out:
        yield Defect(f"the schedule leaves out {' and '.join(left_out)}", "call lower(schedule) before running it")
