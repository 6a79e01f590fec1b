"""The checker: apply the rules of `recycle.ir.rules` to a schedule and collect findings.

A defect is reported once, by the rule nearest to its cause. Omitted transfers, reduces and steps are implied, as
`lower` adds them, unless the schedule is about to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from recycle.errors import JobError, ScheduleError
from recycle.ir.event_graph import EventGraph
from recycle.ir.lower import lowered_graph
from recycle.ir.memory import require_limits
from recycle.ir.rules import Finding, Inspection, Rule, all_rules
from recycle.ir.rules.rule import Severity
from recycle.ir.schedule import Schedule
from recycle.job.cut import profile_of_cut
from recycle.job.profile import Profile
from recycle.job.shape import Worker

__all__ = ["Finding", "Findings", "check", "explain", "require_no_errors"]


class Findings(list[Finding]):
    """At most the first `MOST_DESCRIBED` findings of each rule; `more` maps rule codes to the number of others."""

    def __init__(self, findings: Iterable[Finding] = (), more: Mapping[str, int] | None = None) -> None:
        super().__init__(findings)
        self.more = dict(more or {})

    def number(self, severity: Severity) -> int:
        """Count the findings of a severity, including those not in the list."""
        severities = {finding.rule: finding.severity for finding in self}
        listed = sum(finding.severity == severity for finding in self)
        return listed + sum(count for rule, count in self.more.items() if severities[rule] == severity)


def check(
    schedule: Schedule,
    *,
    profile: Profile | None = None,
    limits: Sequence[float] | None = None,
    byte_limit: float | None = None,
    about_to_run: bool = False,
    graph: EventGraph | None = None,
) -> Findings:
    """Check a schedule, lowered or not. Findings are sorted by severity, worker and position; an empty list is valid.

    Args:
        profile: supplies `weight_stash` for `limits`, and bytes for `byte_limit`; unit times and weights if None.
        limits: activations (in chunks) that the worker of each rank may hold, one number per rank.
        byte_limit: bytes that any worker may hold, including the static bytes of its stages.
        about_to_run: whether workers execute the schedule as it is, so that nothing is implied.
        graph: result of `recycle.ir.lower.lowered_graph` for this schedule, if known.

    Raises:
        JobError: `limits` has not one number per rank, a limit is negative or not a number, or a per-stage list of
            `profile` has the wrong length.
    """
    shape, profile = schedule.shape, profile_of_cut(profile or Profile.uniform(), schedule.shape)
    if limits is not None:
        require_limits(limits, shape.ranks)
    if byte_limit is not None and not (isinstance(byte_limit, int | float | np.number) and byte_limit >= 0):
        raise JobError(f"byte_limit: {byte_limit!r} is not a number of bytes")
    inspection = Inspection(schedule, profile, limits, byte_limit, about_to_run, graph or lowered_graph(schedule))
    findings: list[Finding] = []
    more: dict[str, int] = {}
    for rule in all_rules():
        if not (rule.presumes_valid and any(finding.severity == "error" for finding in findings)):
            listed, omitted = rule.findings(inspection)
            findings += listed
            if omitted:
                more[rule.code] = omitted

    def place(finding: Finding) -> tuple[bool, int, int]:
        worker = -1 if finding.worker is None else shape.worker_index(Worker.parse(finding.worker))
        return finding.severity != "error", worker, -1 if finding.position is None else finding.position

    return Findings(sorted(findings, key=place), more)


def require_no_errors(findings: Findings) -> None:
    """Raise ScheduleError for the first error among the findings."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        place = f"worker {first.worker}, position {first.position}: " if first.worker is not None else ""
        more = f" ({findings.number('error') - 1} more errors; see `recycle check`)" if len(errors) > 1 else ""
        raise ScheduleError(f"the schedule does not pass check: {place}{first.rule}: {first.message}{more}")


def explain(code: str) -> Rule | None:
    """Return the rule with this code, None without one; its `documentation` explains the rule."""
    return next((rule for rule in all_rules() if rule.code == code), None)
