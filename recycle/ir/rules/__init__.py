"""The rules of the checker: one function per rule; its docstring is the documentation of the rule.

Findings at one place are reported in the order of the rules, causes before consequences. Kinds of other packages add
their rules to `KIND_RULES`.
"""

from __future__ import annotations

from recycle.ir.instruction import KIND_CLASSES, Instruction
from recycle.ir.rules import completeness, optimizer, order, placement, transfers
from recycle.ir.rules.rule import Finding, Inspection, ProgramPosition, Rule

KIND_RULES: dict[type[Instruction], tuple[Rule, ...]] = {}
"""Rules for instruction kinds of other packages."""
_FILES = (placement, completeness, order, transfers, optimizer)

__all__ = ["KIND_RULES", "Finding", "Inspection", "ProgramPosition", "Rule", "all_rules"]


def all_rules() -> tuple[Rule, ...]:
    """Return every rule, including rules of registered kinds; rules that presume a valid schedule come last."""
    own = (rule for file in _FILES for rule in vars(file).values() if isinstance(rule, Rule))
    of_kinds = (rule for cls in KIND_CLASSES for rule in KIND_RULES.get(cls, ()))
    return tuple(sorted(dict.fromkeys((*own, *of_kinds)), key=lambda rule: rule.presumes_valid))
