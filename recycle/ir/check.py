"""The checker: rules -> findings. `check` returns what is wrong with a schedule; the schedule never makes it raise.

The rules stand in `recycle.ir.rules`, one function each, and ask `dependencies` and the event graph; none knows by
itself what needs what. A defect is reported once, by the rule nearest its cause. What a schedule leaves out altogether
(transfers, or reduces and steps) is implied as `lower` writes it, unless it is about to run.
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
    """What `check` found: a list of findings, of each rule at most the first `MOST_DESCRIBED`.

    Attributes:
        more: code of a rule -> how many more findings it has than are in the list, for those that have more.
    """

    def __init__(self, findings: Iterable[Finding] = (), more: Mapping[str, int] | None = None) -> None:
        super().__init__(findings)
        self.more = dict(more or {})

    def number(self, severity: Severity) -> int:
        """How many findings there are of a severity, those that are not in the list included."""
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
    """The findings, errors first, by worker and position; an empty list means that the schedule is valid.

    Of each rule at most the first 1,000 are listed; `Findings.more` says how many more it has.

    Args:
        schedule: lowered, partly lowered or compute-only. Positions in findings are those of this schedule.
        profile: gives `weight_stash` for the limits, and bytes for `byte_limit`; unit times and weights if left out.
        limits: activations (in chunks) that the worker of each rank may hold, one number per rank.
        byte_limit: bytes that any worker may hold, static bytes of its stages included.
        about_to_run: workers execute the schedule as it is, so that nothing is implied.
        graph: what `recycle.ir.lower.lowered_graph` gives for this schedule, if that is known already.

    Raises:
        JobError: `limits` has not one number per rank, a limit is negative or no number, or a list of `profile` has not
            one entry per stage.
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
            found, left_out = rule.findings(inspection)
            findings += found
            if left_out:
                more[rule.code] = left_out

    def place(finding: Finding) -> tuple[bool, int, int]:
        worker = -1 if finding.worker is None else shape.worker_index(Worker.parse(finding.worker))
        return finding.severity != "error", worker, -1 if finding.position is None else finding.position

    return Findings(sorted(findings, key=place), more)


def require_no_errors(findings: Findings) -> None:
    """Raise ScheduleError with the first error among what `check` found."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        place = f"worker {first.worker}, position {first.position}: " if first.worker is not None else ""
        more = f" ({findings.number('error') - 1} more errors; see `recycle check`)" if len(errors) > 1 else ""
        raise ScheduleError(f"the schedule does not pass check: {place}{first.rule}: {first.message}{more}")


def explain(code: str) -> Rule | None:
    """The rule with this code, None when there is none; its `documentation` is a paragraph for people."""
    return next((rule for rule in all_rules() if rule.code == code), None)
