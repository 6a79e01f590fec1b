"""Kinds of instruction that tests register and unregister."""

from recycle.exec.worker.kinds import RUNS
from recycle.ir.instruction import Instruction
from recycle.ir.kinds import unregister
from recycle.ir.rules import KIND_RULES
from viz.kinds import LOOKS


def forget(kind: type[Instruction]):
    """Unregister the kind registered last, and its entries in executor, checker and viewer."""
    RUNS.pop(kind, None)
    KIND_RULES.pop(kind, None)
    LOOKS.pop(kind, None)
    unregister(kind)
