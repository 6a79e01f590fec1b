"""R: a stage's forward again, on the worker of the stage before, which holds a copy of the stage (Bamboo).

What R makes is kept for the backward that would be wanted if the stage's own worker died, until the backward of the
stage before of the same micro-batch shows that it lives. Nobody else uses it: it is none of the forwards that a
micro-batch needs, and no part of completeness. Its input must be at hand, because no transfer brings it.

The kind in whole: its rule, its row, its class. It is registered as one from outside the package would be.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.dependencies import Why
from recycle.ir.instruction import Backward, BackwardInput, Compute, Forward, is_kind
from recycle.ir.kinds import InstructionKind, Need, Origin, ValueKind, register
from recycle.ir.rules.rule import Defect, Inspection, repeats, rule


@rule("redundant", "a redundant forward that could not stand in for anything")
def redundant(inspection: Inspection) -> Iterator[Defect]:
    """R runs a stage's forward a second time, on the worker of the stage before, which would do the backward too if
    the stage's own worker died. So its input is the output of an F on the same worker; it comes before that worker's
    own backward of the micro-batch, which shows that the stage is alive; it stands there once, on a worker that does
    not run the stage's F anyway. The first stage has no stage before it."""
    pieces, shape = inspection.pieces, inspection.schedule.shape
    at = np.flatnonzero((pieces.kind == RedundantForward.kind) & pieces.valid)
    at = at[inspection.hosted[pieces.worker[at], pieces.stage[at]]]
    if not len(at):
        return
    key = pieces.worker * inspection.cells + inspection.cell
    forward = key[(pieces.kind == Forward.kind) & pieces.valid]
    backward = np.flatnonzero(is_kind(pieces.kind, (Backward, BackwardInput)) & pieces.valid)
    first_backward = dict(zip(key[backward][::-1].tolist(), pieces.row[backward][::-1].tolist(), strict=True))
    apart = {inspection.given(missing.row) for missing in inspection.graph.missing if missing.why == Why.NOT_LOCAL}
    again = set(repeats(key[at])[0].tolist())
    doubled = set(np.flatnonzero(np.isin(key[at], forward)).tolist())
    for place, piece in enumerate(at.tolist()):
        row, stage = int(pieces.row[piece]), int(pieces.stage[piece])
        before = first_backward.get(int(key[piece]) - shape.global_micro_batches, row)
        if stage == 0:
            yield Defect("stage 0 has no stage before it, whose worker would hold its copy", "remove it", row)
        elif place in again:
            yield Defect("the same redundant forward is there already", "remove one of the two", row)
        elif place in doubled:
            yield Defect(f"this worker runs the forward of stage {stage} itself", "remove the redundant one", row)
        elif row in apart:
            yield Defect(
                f"the output of stage {stage - 1} is made on another worker, and none is sent for a redundant forward",
                f"move it to the worker that runs stage {stage - 1} of this micro-batch",
                row,
            )
        elif before < row:
            yield Defect(
                f"{inspection.at(before)} comes before it, which shows that stage {stage} lives",
                "move it before that backward, or remove it",
                row,
            )


@register(
    InstructionKind(
        token="R",
        title="forward of the next stage, run again on its copy",
        needs=(Need(ValueKind.ACTIVATION, -1, Origin.SAME_WORKER),),
        seconds=("redundant_forward",),
        holds=True,
        frees=lambda profile: 1 - profile.redundant_stash,
        released_by=(ValueKind.INPUT_GRADIENT, -1),
        run=lambda worker, one, activation: worker.stages[one.stage].redundant_forward(one.micro_batch, activation),
        release=lambda worker, one: worker.stages[one.stage].release(one.micro_batch),
        rules=(redundant,),
        paints=("redundant",),
        words=("redundant",),
    )
)
class RedundantForward(Compute):
    """`2R1.5`: stage 2's forward of micro-batch 5 of pipeline 1, run again by the worker of stage 1."""

    __slots__ = ()
