"""Optimizer: on each live host of a stage one reduce, after its last gradient, then one step; peers reduce alike.

These rules speak once a schedule has any REDUCE_GRAD or STEP; until then `lower` implies them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.dependencies import Cause, reduce_conflicts
from recycle.ir.instruction import Instruction, OptimizerStep, ReduceGradients
from recycle.ir.rules.rule import Defect, Inspection, listed, repeats, rule


def _hosted_rows(inspection: Inspection, cls: type[Instruction]) -> tuple[Rows, Rows]:
    """(rows, worker * stages + stage) of the reduces or steps that stand on a host of their stage."""
    pieces = inspection.pieces
    at = np.flatnonzero((pieces.kind == cls.kind) & pieces.valid)
    at = at[inspection.hosted[pieces.worker[at], pieces.stage[at]] & ~inspection.dead[pieces.worker[at]]]
    return pieces.row[at], pieces.worker[at] * inspection.schedule.shape.stages + pieces.stage[at]


def _absent(inspection: Inspection, cls: type[Instruction], verb: str, hint: str) -> Iterator[Defect]:
    if not inspection.has_optimizer:
        return
    shape, token = inspection.schedule.shape, cls.token
    wanted = inspection.hosted & ~inspection.dead[:, None]
    there = np.zeros(wanted.size, dtype=np.bool_)
    there[_hosted_rows(inspection, cls)[1]] = True
    absent = wanted & ~there.reshape(wanted.shape)
    if not (inspection.pieces.kind == cls.kind).any():
        yield Defect(f"the schedule has no {token} at all: no stage {verb}", hint)
        return
    for w in np.flatnonzero(absent.any(axis=1)).tolist():
        stages = np.flatnonzero(absent[w]).tolist()
        yield Defect(
            f"worker {shape.worker_at(w)} hosts stage {listed(stages)} and never {verb} it",
            f"add {stages[0]}{token}: {hint}",
            worker=shape.worker_at(w),
        )


@rule("missing-reduce", "a host that never reduces its stage")
def missing_reduce(inspection: Inspection) -> Iterator[Defect]:
    """REDUCE_GRAD sums a stage's gradient over all live workers that host it, also those that computed nothing: all
    of them need the sum for the same step, and the others wait for them. One per host and stage."""
    yield from _absent(
        inspection, ReduceGradients, "reduces", "every live host of a stage reduces once, before its STEP"
    )


@rule("missing-step", "a host that never steps its stage")
def missing_step(inspection: Inspection) -> Iterator[Defect]:
    """Every live worker that hosts a stage keeps its own copy of the parameters and must step it in each iteration,
    or the copies drift apart. One STEP per host and stage, after its REDUCE_GRAD."""
    yield from _absent(
        inspection, OptimizerStep, "steps", "every live host of a stage steps once, after its REDUCE_GRAD"
    )


@rule("duplicate-update", "a stage reduced or stepped twice on one worker")
def duplicate_update(inspection: Inspection) -> Iterator[Defect]:
    """A second REDUCE_GRAD would sum (and scale) sums, a second STEP would apply one gradient twice. Remove it."""
    for cls in (ReduceGradients, OptimizerStep):
        rows, keys = _hosted_rows(inspection, cls)
        for row in rows[repeats(keys)[0]].tolist():
            yield Defect(
                f"the stage has its {cls.token} on this worker already",
                "once per iteration, host and stage: remove one of the two",
                row,
            )


@rule("early-reduce", "a reduce before the stage's last gradient")
def early_reduce(inspection: Inspection) -> Iterator[Defect]:
    """REDUCE_GRAD takes the stage's gradient as it is; what W or B adds later is lost, or waits for the reduce that
    waits for it. It comes after the last W or B of its stage, and of the stages tied to it, on its worker."""
    for late, reduce in early(inspection, Cause.REDUCE, ReduceGradients):
        yield Defect(
            f"{inspection.at(late)} adds to this gradient afterwards",
            "move the REDUCE_GRAD behind the stage's last W or B on this worker",
            reduce,
            others=(late,),
        )


@rule("early-step", "a step before a reduce that the barrier waits for")
def early_step(inspection: Inspection) -> Iterator[Defect]:
    """With optimizer = "barrier" no stage steps before all stages have reduced. A worker that hosts several stages
    therefore reduces all of them before it steps any; the other way round it waits for itself."""
    for late, step in early(inspection, Cause.STEP, OptimizerStep):
        yield Defect(
            f"the barrier waits for {inspection.at(late)}, which comes later",
            'move every REDUCE_GRAD of the worker before its first STEP, or use optimizer = "staggered"',
            step,
            others=(late,),
        )


def early(inspection: Inspection, cause: Cause, cls: type[Instruction]) -> Iterator[tuple[int, int]]:
    """(last row that a join waits for, row of `cls` before it that waits for the join), both on one worker."""
    graph, kind, worker = inspection.graph, inspection.lowered.columns.kind, inspection.lowered.columns.worker
    into = np.flatnonzero((graph.target >= graph.rows) & (graph.source < graph.rows))
    out = np.flatnonzero((graph.source >= graph.rows) & (graph.target < graph.rows) & (graph.cause == cause))
    out = out[kind[graph.target[out]] == cls.kind]
    last = np.full((graph.nodes - graph.rows, inspection.schedule.shape.worker_count), -1, dtype=np.int64)
    np.maximum.at(last, (graph.target[into] - graph.rows, worker[graph.source[into]]), graph.source[into])
    waiting = graph.target[out]
    late = last[graph.source[out] - graph.rows, worker[waiting]]
    for row, behind in sorted(zip(waiting[late > waiting].tolist(), late[late > waiting].tolist(), strict=True)):
        given, given_behind = inspection.given(row), inspection.given(behind)
        if given is not None and given_behind is not None and not inspection.stray_updates[[given, given_behind]].any():
            yield given_behind, given


@rule("reduce-order", "peers that reduce two stages in different orders")
def reduce_order(inspection: Inspection) -> Iterator[Defect]:
    """REDUCE_GRAD is collective: it ends when all live hosts of the stage have come to it. Two workers that host the
    same two stages must therefore reduce them in the same order, or each waits in a reduce that the other has not
    reached."""
    for row, other_row in conflicting_reduces(inspection):
        yield Defect(
            f"worker {inspection.schedule.position(other_row)[0]} reduces its stages in another order:"
            f" {inspection.at(other_row)} comes first there",
            "reduce the stages that two workers share in one order on both, for example last stage first",
            row,
            others=(other_row,),
        )


def conflicting_reduces(inspection: Inspection) -> list[tuple[int, int]]:
    """The pairs of `reduce_conflicts` among the reduces that stand on a host of their stage."""
    rows, keys = _hosted_rows(inspection, ReduceGradients)
    return reduce_conflicts(rows, *np.divmod(keys, inspection.schedule.shape.stages))
