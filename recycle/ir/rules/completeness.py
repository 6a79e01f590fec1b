"""Rules for completeness: each micro-batch once per stage, with all its halves on the worker of its forward."""

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
    RecvActivation,
    ReduceBucket,
    SendActivation,
    Transfer,
    WaitSendActivation,
    WeightPart,
    is_kind,
)
from recycle.ir.kinds import MOST_KINDS
from recycle.ir.operations import outside_buckets
from recycle.ir.rules.rule import Defect, Inspection, and_more, extremes, firsts, grouped, listed, repeats, rule
from recycle.job.shape import MOST_BUCKETS


@rule("stage-range", "a stage that the shape does not have")
def stage_range(inspection: Inspection) -> Iterator[Defect]:
    """Stages count from 0 to P * V - 1. An instruction, or a group of tied stages, that names another stage cannot
    run. Change the stage, or the shape of the schedule. Reported once per worker."""
    stages, ops = inspection.shape.stages, inspection.operations
    hint = f"stages count from 0 to {stages - 1}: change the stage or the shape"
    outside = (ops.stage < 0) | (ops.stage >= stages)
    yield _per_worker(inspection, ops.row[outside], f"the shape has {stages} stage(s), none with this number", hint)
    for tie in inspection.schedule.ties:
        strange = [stage for stage in tie if not 0 <= stage < stages]
        if strange:
            yield Defect(f"the tie {list(tie)} names stage {strange[0]}, the shape has {stages} stage(s)", hint)


@rule("micro-batch-range", "a micro-batch that the shape does not have")
def micro_batch_range(inspection: Inspection) -> Iterator[Defect]:
    """Micro-batches are written `pipeline.index`, the pipeline from 0 to D - 1, the index from 0 to m - 1. Change
    the micro-batch, or the shape of the schedule. Reported once per worker."""
    shape, ops = inspection.shape, inspection.operations
    in_stage = (ops.stage >= 0) & (ops.stage < shape.stages) & ~outside_buckets(ops, inspection.schedule.buckets)
    last = f"{shape.pipelines - 1}.{shape.micro_batches - 1}"
    yield _per_worker(
        inspection,
        ops.row[in_stage & ~ops.valid],
        f"the shape ({shape}) has no such micro-batch",
        f"micro-batches run from 0.0 to {last}: rename it, or enlarge the shape",
    )


def _per_worker(inspection: Inspection, rows: Rows, message: str, hint: str) -> Defect:
    rows = np.unique(rows)
    _, first, count = firsts(inspection.columns.worker[rows])
    return Defect(lambda entry: message + and_more(count[entry], "on this worker"), hint, rows[first])


@rule("bucket-range", "a bucket that the schedule does not have")
def bucket_range(inspection: Inspection) -> Iterator[Defect]:
    """A schedule with `buckets` = N has the buckets 0 to N - 1. W_PART names any of them, REDUCE_BUCKET any but the
    last, which REDUCE_GRAD sums. Change the bucket, or the schedule's `buckets`."""
    buckets, ops = inspection.schedule.buckets, inspection.operations
    rows = np.unique(ops.row[outside_buckets(ops, buckets)])
    is_sum = inspection.columns.kind[rows] == ReduceBucket.kind
    for sums, why in ((False, "none with this number"), (True, "and REDUCE_GRAD sums the last one")):
        hint = f"buckets count from 0 to {buckets - 1 - sums}: change the bucket, or `buckets`"
        if buckets == sums:
            hint = "remove it, or raise `buckets`"
        yield Defect(f"the schedule has {buckets} bucket(s), {why}", hint, rows, where=is_sum == sums)


@rule("beyond-forward", "a training instruction in a forward-only schedule")
def beyond_forward(inspection: Inspection) -> Iterator[Defect]:
    """A schedule with `forward_only` evaluates the model: it holds F, SEND_F and RECV_F. Remove the other
    instruction, or remove `forward_only` to train with the schedule."""
    if inspection.schedule.forward_only:
        kinds = Forward, SendActivation, RecvActivation, WaitSendActivation
        evaluates = is_kind(inspection.columns.kind, kinds)
        message = "the schedule is forward-only, and this instruction is for training"
        yield Defect(message, "remove it, or forward_only", np.flatnonzero(~evaluates))


@rule("duplicate", "a forward or backward that occurs twice")
def duplicate(inspection: Inspection) -> Iterator[Defect]:
    """Each micro-batch is used once per iteration and stage. A second F, B, I or W of the same micro-batch and
    stage, on any worker, would count its gradient twice. Remove one of the two."""
    ops, at = inspection.operations, inspection.computes
    at = at[np.argsort(ops.row[at], kind="stable")]
    key = inspection.cell[at] * MOST_KINDS + ops.kind[at]
    second, first = repeats(key * (MOST_BUCKETS + 1) + ops.bucket[at])
    yield Defect(
        "{other} does the same work",
        "each micro-batch counts once per stage: remove one of the two",
        ops.row[at[second]],
        others=ops.row[at[first]],
    )


@rule("mixed-backward", "a whole backward together with one of its halves")
def mixed_backward(inspection: Inspection) -> Iterator[Defect]:
    """A backward is one B, or I and W. B together with I or W of the same micro-batch and stage computes the same
    gradient twice. Keep B, or keep I and W."""
    _, whole, *halves = inspection.counts.values()
    mixed = (whole > 0) & (sum(halves) + inspection.parts[1] > 0)
    yield Defect(
        "{other} does the same work: a B includes I and W",
        "keep either the B, or the I and the W",
        _first_rows(inspection, _by_cell(inspection, mixed, BackwardInput, BackwardWeight, WeightPart)),
        others=_first_rows(inspection, _by_cell(inspection, mixed, Backward)),
    )


@rule("weight-parts", "a W whose parts are incomplete, or that occurs in addition to them")
def weight_parts(inspection: Inspection) -> Iterator[Defect]:
    """A W may be split into parts, a W_PART for the weights of each bucket. Each part must occur once, and the W
    itself must not. Add the missing parts, or write the W instead of the parts."""
    (fewest, most), buckets = inspection.parts, inspection.schedule.buckets
    weights = inspection.computes[inspection.operations.kind[inspection.computes] == BackwardWeight.kind]
    whole = (most > 0) & (np.bincount(inspection.cell[weights], minlength=inspection.cells) > 0)
    yield Defect(
        "{other} does the same work: the parts add up to that W",
        "keep either the W, or its parts for all buckets",
        _first_rows(inspection, _by_cell(inspection, whole, WeightPart)),
        others=_first_rows(inspection, _by_cell(inspection, whole, BackwardWeight)),
    )
    at = _by_cell(inspection, (most > 0) & (fewest == 0) & ~whole, WeightPart)
    parts, rows = grouped(at, inspection.cell[at]), _first_rows(inspection, at)

    def absent(entry: int) -> list[int]:
        return sorted(set(range(buckets)) - set(inspection.operations.bucket[parts[entry]].tolist()))

    yield Defect(
        lambda entry: f"this W lacks the part for bucket {listed(absent(entry))} (of {buckets} buckets)",
        lambda entry: (
            f"add {inspection.at(rows[entry]).instruction.rsplit('/', 1)[0]}/{absent(entry)[0]} on its worker, or write"
            " one whole W"
        ),
        rows,
    )


def _first_rows(inspection: Inspection, at: Rows) -> Rows:
    return inspection.operations.row[at[firsts(inspection.cell[at])[1]]]


def _by_cell(inspection: Inspection, cells: Flags, *classes: type[Instruction]) -> Rows:
    ops, at = inspection.operations, inspection.computes
    at = at[cells[inspection.cell[at]] & is_kind(ops.kind[at], classes)]
    return at[np.lexsort((ops.row[at], inspection.cell[at]))]


@rule("missing", "a forward or backward that is missing")
def missing(inspection: Inspection) -> Iterator[Defect]:
    """Every stage must run F and B, or F, I and W, of every micro-batch of all pipelines; peers run the micro-batches
    of failed workers. A forward-only schedule needs F alone. Micro-batches that a whole stage or the whole schedule
    lacks are reported together. Add the instruction, or correct the shape.
    """
    shape, (f, b, i, w) = inspection.shape, inspection.counts.values()
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
        yield _incomplete(inspection, kind, name, hole)


def _absent(inspection: Inspection, absent: Flags) -> Iterator[Defect]:
    needed = "forward" if inspection.schedule.forward_only else "forward and backward"
    hint = f"add its {needed}, on its home worker or on a peer; or correct the shape"
    nowhere = absent.all(axis=0)
    if nowhere.any():
        yield Defect(f"no stage runs micro-batch {inspection.micro_batches(np.flatnonzero(nowhere))}", hint)
    stages = np.flatnonzero((absent & ~nowhere).any(axis=1) & inspection.hosts.any(axis=0))

    def message(entry: int) -> str:
        names = inspection.micro_batches(np.flatnonzero(absent[stages[entry]] & ~nowhere))
        return f"stage {stages[entry]} does not run micro-batch {names}"

    yield Defect(message, hint, np.full(len(stages), -1))


def _incomplete(inspection: Inspection, kind: type[Instruction], name: str, hole: Flags) -> Defect:
    ops = inspection.operations
    at = inspection.computes[hole[inspection.cell[inspection.computes]]]
    if kind is BackwardWeight:  # it belongs after its input gradient
        at = at[is_kind(ops.kind[at], BackwardInput)]
    at = at[np.lexsort((ops.row[at], ops.host[at]))]
    of_host = grouped(at, ops.host[at])
    first = np.array([at[0] for at in of_host], dtype=np.int64)

    def numbers(entry: int) -> Rows:
        return np.unique(ops.micro_batch[of_host[entry]])

    return Defect(
        lambda entry: (
            f"the {name} of stage {ops.stage[first[entry]]} is missing for micro-batch"
            f" {inspection.micro_batches(numbers(entry))}"
        ),
        lambda entry: (
            f"add {ops.stage[first[entry]]}{kind.token}{inspection.micro_batch(numbers(entry)[0])} to worker {{worker}}"
        ),
        ops.row[first],
    )


@rule("apart", "a backward on another worker than its forward")
def apart(inspection: Inspection) -> Iterator[Defect]:
    """B, I and W need the activation that their F kept on its worker, and W needs what its I kept there.
    Activations are not sent to other workers of the same stage, so all halves of a micro-batch run on the worker of
    its F. Move them together."""
    worker, ops, at = inspection.columns.worker, inspection.operations, inspection.computes
    cells, rows = inspection.cells_of(inspection.apart), inspection.origin[inspection.apart.row]
    reported = (rows >= 0) & inspection.complete[cells] & ~inspection.misplaced[cells]
    cells, rows = cells[reported], rows[reported]
    makers = at[is_kind(ops.kind[at], (Forward, BackwardInput))]  # one or two in a complete cell
    first = extremes(np.minimum, inspection.cell[makers], ops.row[makers], cells, len(worker))
    last = extremes(np.maximum, inspection.cell[makers], ops.row[makers], cells, -1)
    others = np.select([worker[maker] != worker[rows] for maker in (first, last)], (first, last), -1)
    hint = "move it to that worker, or move the forward and all halves of the backward together"
    yield Defect("it needs the result of {other}", hint, rows, others=others, where=others >= 0)
    yield Defect("its forward ran on another worker", hint, rows, where=others < 0)


@rule("not-lowered", "a schedule about to run without its transfers, reduces or steps")
def not_lowered(inspection: Inspection) -> Iterator[Defect]:
    """A schedule file may leave out transfers, reduces and steps: they are implied. A program that workers execute
    must contain them. Call `lower` first."""
    added = inspection.lowered.columns.kind[inspection.origin < 0]
    if not inspection.about_to_run or not len(added):
        return
    transfers = int(is_kind(added, Transfer).sum())
    left_out = [f"{transfers} transfer(s)"] if transfers else []
    if transfers < len(added):
        left_out.append("every REDUCE_GRAD and STEP")
    yield Defect(f"the schedule lacks {' and '.join(left_out)}", "call lower(schedule) before running it")
