"""The rules of the checker: each is a function in one of these files, and its documentation is that docstring.

The order is that in which findings at one place are reported: causes before consequences. A kind of instruction that is
defined outside the package enters its rules in `KIND_RULES`.
"""

from __future__ import annotations

from recycle.ir.instruction import KIND_CLASSES, Instruction
from recycle.ir.rules import completeness, optimizer, order, placement, transfers
from recycle.ir.rules.rule import Finding, Inspection, ProgramPosition, Rule

KIND_RULES: dict[type[Instruction], tuple[Rule, ...]] = {}
"""Rules about one kind of instruction alone, of kinds that are defined outside the package."""
_FILES = (placement, completeness, order, transfers, optimizer)

__all__ = ["KIND_RULES", "Finding", "Inspection", "ProgramPosition", "Rule", "all_rules"]


def all_rules() -> tuple[Rule, ...]:
    """Every rule, those of the registered kinds among them; what presumes a valid schedule comes last."""
    own = (rule for file in _FILES for rule in vars(file).values() if isinstance(rule, Rule))
    of_kinds = (rule for cls in KIND_CLASSES for rule in KIND_RULES.get(cls, ()))
    return tuple(sorted(dict.fromkeys((*own, *of_kinds)), key=lambda rule: rule.presumes_valid))
