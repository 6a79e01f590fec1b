"""Kinds of instruction that tests register, and take back."""

from __future__ import annotations

from recycle.exec.worker.kinds import RUNS
from recycle.ir.instruction import Instruction
from recycle.ir.kinds import unregister
from recycle.ir.rules import KIND_RULES
from viz.kinds import LOOKS


def forget(kind: type[Instruction]) -> None:
    """Take back the kind that was registered last, and what executor, checker and viewer know of it."""
    RUNS.pop(kind, None)
    KIND_RULES.pop(kind, None)
    LOOKS.pop(kind, None)
    unregister(kind)
