"""R: a stage's forward again, on the worker of the stage before, which holds a copy of the stage (Bamboo).

What R makes is kept for the backward that would be wanted if the stage's own worker died, until the backward of the
stage before of the same micro-batch shows that it lives. Nobody else uses it: it is none of the forwards that a
micro-batch needs, and no part of completeness. Its input must be at hand, because no transfer brings it.

The kind in whole: its rule, its row, its class. It is registered as one from outside the package would be.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.dependencies import find
from recycle.ir.instruction import Backward, BackwardInput, Compute, Forward, is_kind
from recycle.ir.kinds import InstructionKind, Need, Origin, ValueKind, register
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, repeats, rest, rule
from recycle.ir.unmet import Why


@rule("redundant", "a redundant forward that could not stand in for anything")
def redundant(inspection: Inspection) -> Iterator[Defect | Rest]:
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
    rows, stages = pieces.row[at], pieces.stage[at]
    again = np.zeros(len(at), dtype=np.bool_)
    again[repeats(key[at])[0]] = True
    doubled = np.isin(key[at], forward)
    apart = np.isin(rows, inspection.origin[inspection.graph.missing.with_reason(Why.NOT_LOCAL).row])
    found = find(key[backward], key[at] - shape.global_micro_batches)
    shown_live = np.append(pieces.row[backward], len(inspection.schedule.columns))[found]
    wrong = np.flatnonzero((stages == 0) | again | doubled | apart | (shown_live < rows))
    for place, row, stage, before in described(wrong, rows[wrong], stages[wrong], shown_live[wrong]):
        if stage == 0:
            yield Defect("stage 0 has no stage before it, whose worker would hold its copy", "remove it", row)
        elif again[place]:
            yield Defect("the same redundant forward is there already", "remove one of the two", row)
        elif doubled[place]:
            yield Defect(f"this worker runs the forward of stage {stage} itself", "remove the redundant one", row)
        elif apart[place]:
            yield Defect(
                f"the output of stage {stage - 1} is made on another worker, and none is sent for a redundant forward",
                f"move it to the worker that runs stage {stage - 1} of this micro-batch",
                row,
            )
        else:
            yield Defect(
                f"{inspection.at(before)} comes before it, which shows that stage {stage} lives",
                "move it before that backward, or remove it",
                row,
            )
    yield rest(wrong)


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
