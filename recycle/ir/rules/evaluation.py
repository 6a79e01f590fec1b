"""Evaluation: what a forward-only schedule may hold."""

from __future__ import annotations

from collections.abc import Iterator

from recycle.ir.instruction import Forward, RecvActivation, SendActivation, is_kind
from recycle.ir.rules.rule import Defect, Inspection, Rest, described, rest, rule


@rule("beyond-forward", "what trains, in a forward-only schedule")
def beyond_forward(inspection: Inspection) -> Iterator[Defect | Rest]:
    """A schedule with `forward_only` evaluates the model: it holds F, SEND_F and RECV_F. Nothing is kept for a
    backward, no gradient is summed and nothing steps, so any other instruction would find nothing to work on. Remove
    it, or train with the schedule by taking `forward_only` out of it."""
    if not inspection.schedule.forward_only:
        return
    rows = (~is_kind(inspection.schedule.columns.kind, (Forward, SendActivation, RecvActivation))).nonzero()[0]
    for (row,) in described(rows):
        yield Defect("the schedule is forward-only, and this is for training", "remove it, or forward_only", row)
    yield rest(rows)
