"""Buckets: each part of a W once, and on each live host of a stage the sum of each bucket once, when it is whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.dependencies import Cause
from recycle.ir.instruction import BackwardWeight, ReduceBucket, WeightPart
from recycle.ir.pieces import outside_buckets
from recycle.ir.rules.optimizer import early, hosted_rows
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, listed, rest, rule


@rule("bucket-range", "a bucket that the schedule does not have")
def bucket_range(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A schedule with `buckets` = N has the buckets 0 to N - 1. W_PART names any of them, REDUCE_BUCKET any but the
    last, which REDUCE_GRAD sums. Change the bucket, or the schedule's `buckets`."""
    buckets, pieces = inspection.schedule.buckets, inspection.pieces
    rows = np.unique(pieces.row[outside_buckets(pieces, buckets)])
    for (row,) in described(rows):
        is_sum = inspection.schedule.columns.kind[row] == ReduceBucket.kind
        yield Defect(
            f"the schedule has {buckets} bucket(s), and REDUCE_GRAD sums the last one"
            if is_sum
            else f"the schedule has {buckets} bucket(s), none with this number",
            f"buckets count from 0 to {buckets - 1 - is_sum}: change the bucket, or `buckets`"
            if buckets > is_sum
            else "remove it, or raise `buckets`",
            row,
        )
    yield rest(rows)


@rule("weight-parts", "a W in parts that is not whole, or is there as a whole too")
def weight_parts(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A W may be cut into parts, W_PART, one for the weights of each bucket. All of them together are the W: each is
    there once, and the W itself is not. Add the parts that are missing, or write the W in place of the parts."""
    (fewest, most), buckets = inspection.parts, inspection.schedule.buckets
    weights = inspection.computes[inspection.pieces.kind[inspection.computes] == BackwardWeight.kind]
    whole = np.bincount(inspection.cell[weights], minlength=inspection.cells) > 0
    cells = np.flatnonzero((most > 0) & (whole | (fewest == 0)))
    for (cell,) in described(cells):
        parts = inspection.in_cell(cell, WeightPart)
        row = int(inspection.pieces.row[parts].min())
        if whole[cell]:
            w = int(inspection.pieces.row[inspection.in_cell(cell, BackwardWeight)][0])
            yield Defect(
                f"{inspection.at(w)} does this work too: its parts are that W",
                "keep either the W, or its parts for all buckets",
                row,
                others=(w,),
            )
        else:
            absent = np.setdiff1d(np.arange(buckets), inspection.pieces.bucket[parts])
            text = str(inspection.schedule.instruction(row)).rsplit("/", 1)[0]
            yield Defect(
                f"of this W the part for bucket {listed(absent.tolist())} is missing, of {buckets}",
                f"add {text}/{absent[0]} on its worker, or write the W as a whole",
                row,
            )
    yield rest(cells)


@rule("missing-bucket", "a host that never begins the sum of a bucket")
def missing_bucket(inspection: Inspection) -> Iterator[Defect | Rest]:
    """REDUCE_BUCKET sums a bucket of a stage's gradients over all live workers that host the stage, also those that
    computed nothing: the others wait for them. One per host, stage and bucket but the last one, which is
    REDUCE_GRAD's."""
    shape, count = inspection.schedule.shape, inspection.schedule.buckets - 1
    rows, hosts = hosted_rows(inspection, ReduceBucket)
    if not count or not (len(rows) or inspection.has_optimizer):
        return
    wanted = (inspection.hosted & ~inspection.dead[:, None]).ravel()
    there = np.zeros((wanted.size, count), dtype=np.bool_)
    there[hosts, inspection.schedule.columns.bucket[rows]] = True
    absent = np.flatnonzero(wanted & ~there.all(axis=1))
    for (host,) in described(absent):
        w, stage = divmod(host, shape.stages)
        buckets = np.flatnonzero(~there[host]).tolist()
        first = f"{stage}{ReduceBucket.token}/{buckets[0]}"
        yield Defect(
            f"worker {shape.worker_at(w)} hosts stage {stage} and never begins the sum of its bucket {listed(buckets)}",
            f"add {first}, before its REDUCE_GRAD; or leave out every reduce and step, and all are implied",
            worker=shape.worker_at(w),
        )
    yield rest(absent)


@rule("early-bucket", "the sum of a bucket before the last gradient in it")
def early_bucket(inspection: Inspection) -> Iterator[Defect | Rest]:
    """REDUCE_BUCKET takes the bucket's gradients as they are; what a W, a B or a part for that bucket adds later is
    lost. It comes after the last of them on its worker; parts for other buckets may still follow."""
    sums, behind = early(inspection, Cause.REDUCE, ReduceBucket)
    for begun, late in described(sums, behind):
        yield Defect(
            f"{inspection.at(late)} adds to this bucket afterwards",
            "move the REDUCE_BUCKET behind the last W, B or part for its bucket on this worker",
            begun,
            others=(late,),
        )
    yield rest(sums)
