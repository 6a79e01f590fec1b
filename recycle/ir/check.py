"""The checker: rules -> findings. `check` returns what is wrong with a schedule; the schedule never makes it raise.

The rules stand in `recycle.ir.rules`, one function each, and ask `dependencies` and the event graph; none knows by
itself what needs what. A defect is reported once, by the rule nearest its cause. What a schedule leaves out altogether
(transfers, or reduces and steps) is implied as `lower` writes it, unless it is about to run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recycle.errors import JobError
from recycle.ir.rules import Finding, Inspection, Rule, all_rules
from recycle.ir.schedule import Schedule
from recycle.profile import Profile
from recycle.shape import Worker

__all__ = ["Finding", "check", "explain"]


def check(
    schedule: Schedule,
    *,
    profile: Profile | None = None,
    limits: Sequence[float] | None = None,
    byte_limit: float | None = None,
    about_to_run: bool = False,
) -> list[Finding]:
    """All findings, errors first, by worker and position; an empty list means that the schedule is valid.

    Args:
        schedule: lowered, partly lowered or compute-only. Positions in findings are those of this schedule.
        profile: gives `weight_stash` for the limits, and bytes for `byte_limit`; unit times and weights if left out.
        limits: activations (in chunks) that the worker of each rank may hold, one number per rank.
        byte_limit: bytes that any worker may hold, static bytes of its stages included.
        about_to_run: workers execute the schedule as it is, so that nothing is implied.

    Raises:
        JobError: `limits` has not one number per rank, a limit is negative or no number, or a list of `profile` has not
            one entry per stage.
    """
    shape, profile = schedule.shape, profile or Profile.uniform()
    if limits is not None:
        _require_limits(limits, shape.ranks)
    if byte_limit is not None and not byte_limit >= 0:
        raise JobError(f"byte_limit: {byte_limit!r} is not a number of bytes")
    inspection = Inspection(schedule, profile, limits, byte_limit, about_to_run)
    findings: list[Finding] = []
    for rule in all_rules():
        if not (rule.presumes_valid and any(finding.severity == "error" for finding in findings)):
            findings += rule.findings(inspection)

    def place(finding: Finding) -> tuple[bool, int, int]:
        worker = -1 if finding.worker is None else shape.worker_index(Worker.parse(finding.worker))
        return finding.severity != "error", worker, -1 if finding.position is None else finding.position

    return sorted(findings, key=place)


def _require_limits(limits: Sequence[float], ranks: int) -> None:
    if not isinstance(limits, Sequence | np.ndarray):
        raise JobError(f"limits: write one number of activations per rank, for example [{limits}] * {ranks}")
    if len(limits) != ranks:
        raise JobError(f"limits: lists {len(limits)} ranks, the schedule has {ranks}")
    for rank, limit in enumerate(limits):
        if not isinstance(limit, int | float | np.number) or not limit >= 0:
            raise JobError(f"limits: {limit!r} of rank {rank} is not a number of activations (0 or more)")


def explain(code: str) -> Rule | None:
    """The rule with this code, None when there is none; its `documentation` is a paragraph for people."""
    return next((rule for rule in all_rules() if rule.code == code), None)
