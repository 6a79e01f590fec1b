"""Optimizer: on each live host of a stage one reduce, after its last gradient, then one step; peers reduce alike.

These rules apply once a schedule has any REDUCE_GRAD or STEP; until then `lower` implies them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.dependencies import Cause
from recycle.ir.instruction import GatherParameters, Instruction, OptimizerStep, ReduceBucket, ReduceGradients
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, extremes, listed, repeats, rest, rule
from recycle.shape import MOST_BUCKETS


def hosted_rows(inspection: Inspection, cls: type[Instruction]) -> tuple[Rows, Rows]:
    """(rows, worker * stages + stage) of the stage-wide kind that stand on a host of their stage."""
    pieces = inspection.pieces
    at = np.flatnonzero((pieces.kind == cls.kind) & pieces.valid)
    at = at[inspection.hosted[pieces.worker[at], pieces.stage[at]] & ~inspection.dead[pieces.worker[at]]]
    return pieces.row[at], pieces.worker[at] * inspection.schedule.shape.stages + pieces.stage[at]


def _absent(inspection: Inspection, cls: type[Instruction], verb: str, hint: str) -> Iterator[Defect | Rest]:
    if not inspection.has_optimizer:
        return
    shape, token = inspection.schedule.shape, cls.token
    wanted = inspection.hosted & ~inspection.dead[:, None]
    there = np.zeros(wanted.size, dtype=np.bool_)
    there[hosted_rows(inspection, cls)[1]] = True
    absent = wanted & ~there.reshape(wanted.shape)
    if not (inspection.pieces.kind == cls.kind).any():
        yield Defect(f"the schedule has no {token} at all: no stage {verb}", hint)
        return
    workers = np.flatnonzero(absent.any(axis=1))
    for (w,) in described(workers):
        stages = np.flatnonzero(absent[w]).tolist()
        yield Defect(
            f"worker {shape.worker_at(w)} hosts stage {listed(stages)} and never {verb} it",
            f"add {stages[0]}{token}: {hint}",
            worker=shape.worker_at(w),
        )
    yield rest(workers)


@rule("missing-reduce", "a host that never reduces its stage")
def missing_reduce(inspection: Inspection) -> Iterator[Defect | Rest]:
    """REDUCE_GRAD sums a stage's gradient over all live workers that host it, also those that computed nothing: all
    of them need the sum for the same step, and the others wait for them. One per host and stage."""
    yield from _absent(
        inspection, ReduceGradients, "reduces", "every live host of a stage reduces once, before its STEP"
    )


@rule("missing-step", "a host that never steps its stage")
def missing_step(inspection: Inspection) -> Iterator[Defect | Rest]:
    """Every live worker that hosts a stage keeps its own copy of the parameters and must step it in each iteration,
    or the copies drift apart. One STEP per host and stage, after its REDUCE_GRAD."""
    yield from _absent(
        inspection, OptimizerStep, "steps", "every live host of a stage steps once, after its REDUCE_GRAD"
    )


@rule("missing-gather", "a host that never gathers its stage")
def missing_gather(inspection: Inspection) -> Iterator[Defect | Rest]:
    """GATHER_PARAMS says that each host of a stage steps its own part of the parameters, and needs the rest from the
    others. Where a schedule has one, every host gathers every stage that it hosts once, after its STEP."""
    if (inspection.pieces.kind == GatherParameters.kind).any():
        hint = "every live host of a stage gathers once, after its STEP"
        yield from _absent(inspection, GatherParameters, "gathers", hint)


@rule("duplicate-update", "a stage reduced or stepped twice on one worker")
def duplicate_update(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A second REDUCE_GRAD would sum (and scale) sums, a second STEP would apply one gradient twice, a second
    GATHER_PARAMS waits for peers that have one. Remove it."""
    for cls in (ReduceGradients, OptimizerStep, ReduceBucket, GatherParameters):
        rows, keys = hosted_rows(inspection, cls)
        again = rows[repeats(keys * MOST_BUCKETS + inspection.schedule.columns.bucket[rows])[0]]
        for (row,) in described(again):
            yield Defect(
                f"the stage has its {cls.token} on this worker already",
                "once per iteration, host and stage: remove one of the two",
                row,
            )
        yield rest(again)


@rule("early-reduce", "a reduce before the stage's last gradient")
def early_reduce(inspection: Inspection) -> Iterator[Defect | Rest]:
    """REDUCE_GRAD takes the stage's gradient as it is; what W or B adds later is lost, or waits for the reduce that
    waits for it. It comes after the last W or B of its stage, and of the stages tied to it, on its worker."""
    reduces, behind = early(inspection, Cause.REDUCE, ReduceGradients)
    for reduce, late in described(reduces, behind):
        yield Defect(
            f"{inspection.at(late)} adds to this gradient afterwards",
            "move the REDUCE_GRAD behind the stage's last W or B on this worker",
            reduce,
            others=(late,),
        )
    yield rest(reduces)


@rule("early-step", "a step before a reduce that the barrier waits for")
def early_step(inspection: Inspection) -> Iterator[Defect | Rest]:
    """With optimizer = "barrier" no stage steps before all stages have reduced. A worker that hosts several stages
    therefore reduces all of them before it steps any; the other way round it waits for itself."""
    steps, behind = early(inspection, Cause.STEP, OptimizerStep)
    for step, late in described(steps, behind):
        yield Defect(
            f"the barrier waits for {inspection.at(late)}, which comes later",
            'move every REDUCE_GRAD of the worker before its first STEP, or use optimizer = "staggered"',
            step,
            others=(late,),
        )
    yield rest(steps)


def early(inspection: Inspection, cause: Cause, cls: type[Instruction]) -> tuple[Rows, Rows]:
    """(rows of `cls` that wait for a join, last row that the join waits for behind each), both on one worker."""
    graph, kind, worker = inspection.graph, inspection.lowered.columns.kind, inspection.lowered.columns.worker
    into = np.flatnonzero((graph.target >= graph.rows) & (graph.source < graph.rows))
    out = np.flatnonzero((graph.source >= graph.rows) & (graph.target < graph.rows) & (graph.cause == cause))
    out = out[kind[graph.target[out]] == cls.kind]
    workers, waiting = inspection.schedule.shape.worker_count, graph.target[out]
    joined = graph.target[into] * workers + worker[graph.source[into]]
    late = extremes(np.maximum, joined, graph.source[into], graph.source[out] * workers + worker[waiting], -1)
    given, behind = inspection.origin[waiting[late > waiting]], inspection.origin[late[late > waiting]]
    known = (given >= 0) & (behind >= 0)
    known[known] = ~(inspection.stray_updates[given[known]] | inspection.stray_updates[behind[known]])
    given, behind = given[known], behind[known]
    by_row = np.lexsort((behind, given))
    return given[by_row], behind[by_row]
