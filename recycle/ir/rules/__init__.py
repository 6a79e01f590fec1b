"""The rules of the checker, one row each. A rule's file holds its function; its documentation is that docstring.

The order is that in which findings at one place are reported: causes before consequences. Rules about one kind of
instruction alone stand in that kind's row.
"""

from __future__ import annotations

from recycle.ir.kinds import KIND_CLASSES
from recycle.ir.rules import buckets, completeness, evaluation, memory, optimizer, order, placement, reduces, transfers
from recycle.ir.rules.rule import Finding, Inspection, ProgramPosition, Rule

_BEFORE: tuple[Rule, ...] = (
    completeness.stage_range,
    completeness.micro_batch_range,
    buckets.bucket_range,
    placement.no_host,
    placement.failed_worker,
    placement.not_hosted,
    evaluation.beyond_forward,
    completeness.missing,
    completeness.duplicate,
    completeness.mixed_backward,
    buckets.weight_parts,
    completeness.apart,
    completeness.not_lowered,
)
_BEHIND: tuple[Rule, ...] = (
    order.order,
    transfers.wrong_peer,
    transfers.duplicate_transfer,
    transfers.not_made_here,
    transfers.unreceived,
    transfers.unsent,
    transfers.no_transfer,
    transfers.fifo,
    optimizer.missing_reduce,
    optimizer.missing_step,
    optimizer.missing_gather,
    optimizer.duplicate_update,
    optimizer.early_reduce,
    buckets.missing_bucket,
    buckets.early_bucket,
    optimizer.early_step,
    reduces.reduce_order,
    order.deadlock,
    memory.activation_limit,
    memory.byte_limit,
    order.serialised_transport,
    order.late_send,
    transfers.unused_transfer,
)

__all__ = ["Finding", "Inspection", "ProgramPosition", "Rule", "all_rules"]


def all_rules() -> tuple[Rule, ...]:
    """Every rule, those of the registered kinds among them."""
    return (*_BEFORE, *(rule for cls in KIND_CLASSES for rule in cls.row.rules), *_BEHIND)
