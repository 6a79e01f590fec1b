"""REPLAY: a host of a stage runs the forward and the backward of a micro-batch that a peer ran again, to check it.

What goes in, the stage's input and the gradient by its output, comes from those who made it, as it came to the peer.
What comes out (output, gradient by the input, what the micro-batch adds to the gradients of the weights) is compared
with the peer's by checksums and then dropped: nobody uses it, and the state does not change. So a replay is none of the
instructions that a micro-batch needs, and nothing waits for it but what follows on its own worker.

It costs F + I + W and, while it runs, an activation. The two transfers that bring its inputs are written by `lower` and
priced as any other; the checksums go the way of the worker's report. Limits: what goes in wrongly is not seen here, but
where it was made.

The kind in whole: its rule, its row, its class. It is registered as one from outside the package would be.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.dependencies import find
from recycle.ir.instruction import Compute, Forward, ReduceGradients
from recycle.ir.kinds import InstructionKind, Need, ValueKind, register
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, repeats, rest, rule


@rule("replay", "a replay that could not check anything")
def replay(inspection: Inspection) -> Iterator[Defect | Rest]:
    """REPLAY runs a stage on a micro-batch again, to be compared with what another host of the stage made of it. So it
    stands on a host that does not run the forward itself, once, and before that host's REDUCE_GRAD of the stage: what
    differs must be known when the iteration is committed, and the weights must still be those of the iteration."""
    pieces, stages = inspection.pieces, inspection.schedule.shape.stages
    at = np.flatnonzero((pieces.kind == Replay.kind) & pieces.valid)
    at = at[inspection.hosted[pieces.worker[at], pieces.stage[at]]]
    if not len(at):
        return
    key = pieces.worker * inspection.cells + inspection.cell
    own = np.isin(key[at], key[(pieces.kind == Forward.kind) & pieces.valid])
    again = np.zeros(len(at), dtype=np.bool_)
    again[repeats(key[at])[0]] = True
    reduces = np.flatnonzero((pieces.kind == ReduceGradients.kind) & pieces.valid)
    host = pieces.worker * stages + pieces.stage
    found = find(host[reduces], host[at])
    rows, end = pieces.row[at], len(inspection.schedule.columns)
    reduce = np.where(found >= 0, np.append(pieces.row[reduces], end)[found], end)
    wrong = np.flatnonzero(own | again | (reduce < rows))
    for place, row, before in described(wrong, rows[wrong], reduce[wrong]):
        if own[place]:
            yield Defect("this worker runs the forward itself", "move the replay to another host of the stage", row)
        elif again[place]:
            yield Defect("the same replay is there already", "remove one of the two", row)
        else:
            yield Defect(
                f"{inspection.at(before)} comes before it, so that the iteration may be committed without it",
                "move the replay before that reduce",
                row,
                others=(before,),
            )
    yield rest(wrong)


@register(
    InstructionKind(
        token="REPLAY",
        title="forward and backward of a peer, run again to check it",
        needs=(Need(ValueKind.ACTIVATION, -1), Need(ValueKind.INPUT_GRADIENT, +1)),
        seconds=("forward", "backward_input", "backward_weight"),
        holds=True,
        frees=lambda profile: 1.0,
        run=lambda worker, one, activation, gradient: worker.replay(one, activation, gradient),
        rules=(replay,),
        letter="C",
        paints=("redundant",),
        words=("replay", "check"),
    )
)
class Replay(Compute):
    """`2REPLAY1.5`: stage 2's forward and backward of micro-batch 5 of pipeline 1, run again by a peer of its host."""

    __slots__ = ()
