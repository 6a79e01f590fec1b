"""Work that is done a second time, R and REPLAY: it stands where it can be of use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Flags, Rows
from recycle.ir.dependencies import find
from recycle.ir.instruction import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    ReduceGradients,
    RedundantForward,
    Replay,
)
from recycle.ir.rules.rule import Defect, Inspection, repeats, rule
from recycle.ir.values import Why


@rule("redundant", "a redundant forward that could not stand in for anything")
def redundant(inspection: Inspection) -> Iterator[Defect]:
    """R runs a stage's forward a second time, on the worker of the stage before, which would do the backward too if
    the stage's own worker died. So its input is the output of an F on the same worker; it comes before that worker's
    own backward of the micro-batch, which shows that the stage is alive; it stands there once, on a worker that does
    not run the stage's F anyway. The first stage has no stage before it."""
    pieces, shape = inspection.pieces, inspection.schedule.shape
    at = _hosted(inspection, RedundantForward)
    if not len(at):
        return
    key, rows, stages = _worker_and_cell(inspection), pieces.row[at], pieces.stage[at]
    backward = pieces.of(Backward, BackwardInput)
    found = find(key[backward], key[at] - shape.global_micro_batches)
    shown_live = np.append(pieces.row[backward], len(inspection.schedule.columns))[found]
    far = inspection.origin[inspection.graph.missing.with_reason(Why.NOT_LOCAL).row]
    first, again, doubled, apart, late = _first_of(
        stages == 0, _is_again(key[at]), _runs_itself(inspection, key, at), np.isin(rows, far), shown_live < rows
    )
    remove = "stage 0 has no stage before it, whose worker would hold its copy"
    tells = {"stage": stages, "before": stages - 1}
    yield Defect(remove, "remove it", rows, where=first)
    yield Defect("the same redundant forward is there already", "remove one of the two", rows, where=again)
    itself = "this worker runs the forward of stage {stage} itself"
    yield Defect(itself, "remove the redundant one", rows, where=doubled, tells=tells)
    yield Defect(
        "the output of stage {before} is made on another worker, and none is sent for a redundant forward",
        "move it to the worker that runs stage {before} of this micro-batch",
        rows,
        where=apart,
        tells=tells,
    )
    yield Defect(
        "{shown} comes before it, which shows that stage {stage} lives",
        "move it before that backward, or remove it",
        rows,
        where=late,
        tells=tells | {"shown": lambda place: inspection.at(shown_live[place.index])},
    )


@rule("replay", "a replay that could not check anything")
def replay(inspection: Inspection) -> Iterator[Defect]:
    """REPLAY runs a stage on a micro-batch again, to be compared with what another host of the stage made of it. So it
    stands on a host that does not run the forward itself, once, and before that host's REDUCE_GRAD of the stage: what
    differs must be known when the iteration is committed, and the weights must still be those of the iteration."""
    pieces, stages = inspection.pieces, inspection.schedule.shape.stages
    at = _hosted(inspection, Replay)
    if not len(at):
        return
    key, rows = _worker_and_cell(inspection), pieces.row[at]
    reduces = pieces.of(ReduceGradients)
    host = pieces.worker * stages + pieces.stage
    reduce = np.append(pieces.row[reduces], len(inspection.schedule.columns))[find(host[reduces], host[at])]
    own, again, late = _first_of(_runs_itself(inspection, key, at), _is_again(key[at]), reduce < rows)
    move = "move the replay to another host of the stage"
    yield Defect("this worker runs the forward itself", move, rows, where=own)
    yield Defect("the same replay is there already", "remove one of the two", rows, where=again)
    yield Defect(
        "{other} comes before it, so that the iteration may be committed without it",
        "move the replay before that reduce",
        rows,
        where=late,
        others=reduce,
    )


def _hosted(inspection: Inspection, cls: type[Instruction]) -> Rows:
    pieces = inspection.pieces
    at = pieces.of(cls)
    return at[inspection.hosted[pieces.worker[at], pieces.stage[at]]]


def _worker_and_cell(inspection: Inspection) -> Rows:
    return inspection.pieces.worker * inspection.cells + inspection.cell


def _is_again(keys: Rows) -> Flags:
    again = np.zeros(len(keys), dtype=np.bool_)
    again[repeats(keys)[0]] = True
    return again


def _runs_itself(inspection: Inspection, key: Rows, at: Rows) -> Flags:
    return np.isin(key[at], key[inspection.pieces.of(Forward)])


def _first_of(*cases: Flags) -> list[Flags]:
    """Of these cases each only where none before it holds."""
    number = np.select(cases, range(len(cases)), -1)
    return [number == place for place in range(len(cases))]
