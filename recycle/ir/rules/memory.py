"""Memory: what a worker holds at once stays within its limit, in activations or in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from recycle.ir.memory import TOLERANCE, held_activations, static_bytes
from recycle.ir.rules.rule import Defect, Inspection, rule

_HINT = "run a B or W of a held micro-batch before it, delay this forward, or raise the limit"


@rule("activation-limit", "more activations held than allowed")
def activation_limit(inspection: Inspection) -> Iterator[Defect]:
    """An activation is held from the start of its F to the end of its W or B; of a split backward, the profile's
    `weight_stash` share is what stays between I and W. Counted in chunks, in program order, against the limit of the
    worker's rank. The finding points at the instruction that sets the peak and says when it starts.
    Incomplete schedules are not judged."""
    if inspection.limits is None or not inspection.complete.all():
        return
    shape = inspection.schedule.shape
    peaks, rows = held_activations(inspection.schedule, inspection.profile, in_bytes=False)
    for w, (peak, row) in enumerate(zip(peaks, rows, strict=True)):
        limit = inspection.limits[w % shape.ranks]
        if row >= 0 and peak > limit + TOLERANCE and not inspection.dead[w]:
            yield Defect(
                f"worker {shape.worker_at(w)} holds {peak:g} activations here{inspection.time_of(row)}, the limit of"
                f" rank {w % shape.ranks} is {limit:g}",
                _HINT,
                row,
            )


@rule("byte-limit", "more bytes held than allowed")
def byte_limit(inspection: Inspection) -> Iterator[Defect]:
    """The bytes of the activations held, by the profile's weight of each stage, and what the stages that the worker
    hosts need beside them, against one limit for all workers. The finding points at the instruction that sets the
    peak and says when it starts, or at the worker when its stages alone exceed the limit."""
    if inspection.byte_limit is None or not inspection.complete.all():
        return
    schedule, profile, limit = inspection.schedule, inspection.profile, inspection.byte_limit
    static = static_bytes(schedule, profile)
    peaks, rows = held_activations(schedule, profile, in_bytes=True)
    for w, (peak, row) in enumerate(zip(peaks, rows, strict=True)):
        worker, fixed = schedule.shape.worker_at(w), static[w]
        if inspection.dead[w] or fixed + peak <= limit * (1 + TOLERANCE):
            continue
        if fixed > limit or row < 0:
            yield Defect(
                f"its stages alone need {fixed:.6g} bytes, the limit is {limit:.6g}",
                "place fewer stages on it, split the model further, or raise the limit",
                worker=worker,
            )
        else:
            yield Defect(
                f"worker {worker} holds {fixed + peak:.6g} bytes here{inspection.time_of(row)} ({fixed:.6g} static,"
                f" {peak:.6g} of activations), the limit is {limit:.6g}",
                _HINT,
                row,
            )
