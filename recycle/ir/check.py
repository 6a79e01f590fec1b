"""The checker: rules -> findings. `check` returns what is wrong with a schedule, and never raises or asserts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from recycle.ir.schedule import Schedule
from recycle.profile import Profile


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: code of the rule.
        severity: "error" (the schedule must not run) or "warning".
        worker, position: where; None when the finding is about the whole schedule. Positions count from 0 in the
            program as it was given.
        instruction: text of the instruction there, or None.
        message, hint: what is wrong, and what to do.
    """

    rule: str
    severity: Literal["error", "warning"]
    worker: str | None
    position: int | None
    instruction: str | None
    message: str
    hint: str


def check(
    schedule: Schedule,
    *,
    profile: Profile | None = None,
    limits: Sequence[float] | None = None,
    byte_limit: float | None = None,
    about_to_run: bool = False,
) -> list[Finding]:
    """All findings, errors first, by worker and position; an empty list means that the schedule is valid."""
    return []
