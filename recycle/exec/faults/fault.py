"""A fault as it is written: `KIND[=ARGUMENT]:WORKER@STEP[-STEP][.PHASE]`, for example `kill:1.1@10`."""

from __future__ import annotations

from dataclasses import dataclass

from recycle.exec.membership.members import member_name
from recycle.shape import Worker

BETWEEN = ("commit", "step", "stepped", "undo", "acknowledge", "form", "copy")
"""Phases between instructions: the worker has reported; is about to step; has stepped; is about to take it back; and
of a generation that begins with the step: is about to acknowledge it, to form its groups, to copy a state to or from
a worker that joins."""
PHASES = ("forward", "backward", "reduce", *BETWEEN)
"""Where a fault strikes: in the middle of such instructions, or between them."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: name of a row of `kinds.KINDS`.
        phase: None for the middle of the iteration.
        argument: number behind the `=`; None when none is given.
        last: last step of a fault that lasts, None for one that strikes at `step` alone.
        other: the second worker of a fault that strikes a pair.
        tensor_rank: which process of the worker is struck.
    """

    kind: str
    worker: Worker
    step: int
    phase: str | None = None
    argument: float | None = None
    last: int | None = None
    other: Worker | None = None
    tensor_rank: int = 0

    def __str__(self) -> str:
        given = self.other if self.other is not None else None if self.argument is None else f"{self.argument:g}"
        written = "" if given is None else f"={given}"
        last = "" if self.last is None else f"-{self.last}"
        struck = member_name(self.worker, self.tensor_rank)
        return f"{self.kind}{written}:{struck}@{self.step}{last}" + (f".{self.phase}" if self.phase else "")

    def lasts(self, step: int) -> bool:
        """Whether it holds in iteration `step`."""
        return self.step <= step <= (self.step if self.last is None else self.last)
