"""The rules of the checker, one row each. A rule's file holds its function; its documentation is that docstring.

Order in the table is the order in which findings at one place are told: causes before consequences.
"""

from __future__ import annotations

from recycle.ir.rules import completeness, memory, optimizer, order, placement, redundant, transfers
from recycle.ir.rules.rule import Finding, Inspection, Place, Rule

RULES: tuple[Rule, ...] = (
    completeness.stage_range,
    completeness.micro_batch_range,
    placement.no_host,
    placement.failed_worker,
    placement.not_hosted,
    completeness.missing,
    completeness.duplicate,
    completeness.mixed_backward,
    completeness.apart,
    completeness.not_lowered,
    redundant.redundant,
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
    optimizer.duplicate_update,
    optimizer.early_reduce,
    optimizer.early_step,
    optimizer.reduce_order,
    order.deadlock,
    memory.activation_limit,
    memory.byte_limit,
    order.serialised_transport,
    order.late_send,
    transfers.unused_transfer,
)

__all__ = ["RULES", "Finding", "Inspection", "Place", "Rule"]
