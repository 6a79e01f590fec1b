"""The rules of the checker, one row each. A rule's file holds its function; its documentation is that docstring.

The order is that in which findings at one place are reported: causes before consequences. A kind of instruction that is
defined outside the package enters its rules in `KIND_RULES`.
"""

from __future__ import annotations

from recycle.ir.instruction import (
    KIND_CLASSES,
    Instruction,
    RedundantForward,
    Replay,
    WaitSendActivation,
    WaitSendGradient,
)
from recycle.ir.rules import completeness, optimizer, order, placement, transfers
from recycle.ir.rules.rule import Finding, Inspection, ProgramPosition, Rule

KIND_RULES: dict[type[Instruction], tuple[Rule, ...]] = {
    RedundantForward: (placement.redundant,),
    Replay: (placement.replay,),
    WaitSendActivation: (placement.wait_send,),
    WaitSendGradient: (placement.wait_send,),
}
"""Rules about one kind of instruction alone."""
_BEFORE: tuple[Rule, ...] = (
    completeness.stage_range,
    completeness.micro_batch_range,
    completeness.bucket_range,
    placement.no_host,
    placement.failed_worker,
    placement.not_hosted,
    completeness.beyond_forward,
    completeness.missing,
    completeness.duplicate,
    completeness.mixed_backward,
    completeness.weight_parts,
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
    optimizer.missing_bucket,
    optimizer.early_bucket,
    optimizer.early_step,
    optimizer.reduce_order,
    order.deadlock,
    placement.activation_limit,
    placement.byte_limit,
    order.serialised_transport,
    order.late_send,
    transfers.unused_transfer,
)

__all__ = ["KIND_RULES", "Finding", "Inspection", "ProgramPosition", "Rule", "all_rules"]


def all_rules() -> tuple[Rule, ...]:
    """Every rule, those of the registered kinds among them."""
    of_kinds = dict.fromkeys(rule for cls in KIND_CLASSES for rule in KIND_RULES.get(cls, ()))
    return (*_BEFORE, *of_kinds, *_BEHIND)
