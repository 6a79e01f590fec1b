"""`recycle check`: the rules, and what they find in a file."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from recycle.cli.pricing import job_limits
from recycle.cli.terminal import JsonOption, print_result
from recycle.errors import ScheduleError
from recycle.ir import formats
from recycle.ir.check import Finding, Findings, explain
from recycle.ir.check import check as findings_of
from recycle.ir.rules import all_rules
from recycle.ir.rules.rule import MOST_DESCRIBED
from recycle.ir.schedule import Schedule
from recycle.job.shape import Worker

SHOWN = 30
"""Findings printed for people; `--json` prints all, of each rule the first `MOST_DESCRIBED`."""
AROUND = 4
"""Instructions drawn before and after the one that a finding points at."""


def check(
    file: Annotated[Path | None, typer.Argument(help="Schedule file, or folder of traces.")] = None,
    job: Annotated[Path | None, typer.Option(help="Job file: its memory limits count too.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors for the exit status.")] = False,
    as_json: JsonOption = False,
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Explain a rule, and check nothing.")] = None,
) -> None:
    """Check a schedule against every rule.

    Exit status: 0 valid, 1 errors found, 2 unreadable or bad arguments.

    Example: **recycle check plan.json --job job.toml --strict**
    """

    if explain is not None:
        _explain(explain, as_json)
        return
    if file is None:
        raise ScheduleError("check: name a schedule file, or a rule with --explain CODE")
    schedule = formats.read(file)
    if job is None:
        findings = findings_of(schedule)
    else:
        profile, limits, byte_limit = job_limits(schedule, file, job)
        findings = findings_of(schedule, profile=profile, limits=limits, byte_limit=byte_limit)
    errors = findings.number("error")
    if as_json:
        listed = [_finding_as_json(finding) for finding in findings]
        print(json.dumps({"file": str(file), "valid": not errors, "findings": listed, "more": findings.more}))
    else:
        _print(file, schedule, findings)
    if errors or (strict and findings):
        raise typer.Exit(1)


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    """A finding as scripts get it; the other places it touches are in its message, and the viewer frames them."""
    return {key: value for key, value in asdict(finding).items() if key != "others"}


def _explain(code: str, as_json: bool) -> None:
    rule = explain(code)
    if rule is None:
        raise ScheduleError(f"{code!r} is not a rule: known are {', '.join(rule.code for rule in all_rules())}")
    print_result(
        as_json,
        {"rule": rule.code, "severity": rule.severity, "title": rule.title, "documentation": rule.documentation},
        f"{rule.code} ({rule.severity}): {rule.title}\n\n{rule.documentation}",
    )


def _print(file: Path, schedule: Schedule, findings: Findings) -> None:
    for finding in findings[:SHOWN]:
        where = f" on worker {finding.worker}" if finding.worker else ""
        where += f", position {finding.position}: {finding.instruction}" if finding.position is not None else ""
        print(f"{finding.severity} {finding.rule}{where}")
        for line in (finding.message, f"-> {finding.hint}"):
            print(textwrap.fill(line, 116, initial_indent="    ", subsequent_indent="    ", break_long_words=False))
        if finding.worker and finding.position is not None:
            print(f"    {_excerpt(schedule, finding.worker, finding.position)}")
    left_out = Counter(finding.rule for finding in findings[SHOWN:]) + Counter(findings.more)
    if left_out:
        of_rules = ", ".join(f"{count:,} of {rule}" for rule, count in left_out.most_common())
        where = f"lists the first {MOST_DESCRIBED:,} of each rule" if findings.more else "prints them all"
        print(f"... and {left_out.total():,} more findings: {of_rules} (--json {where})")
    if findings:
        errors, warnings = findings.number("error"), findings.number("warning")
        print(f"{file}: {errors:,} error(s), {warnings:,} warning(s); recycle check --explain CODE explains a rule")
    else:
        print(f"{file}: valid, {len(schedule.columns)} instructions")


def _excerpt(schedule: Schedule, worker: str, position: int) -> str:
    """The program around a position, with the instruction there between > and <."""
    w = schedule.shape.worker_index(Worker.parse(worker))
    first, last = schedule.columns.offsets[w : w + 2].tolist()
    row = first + position
    begin, end = max(first, row - AROUND), min(last, row + AROUND + 1)
    names = {i: str(schedule.instruction(i)) for i in range(begin, end)}
    cells = [f">{name}<" if i == row else name for i, name in names.items()]
    before, after = "... " if begin > first else "", " ..." if end < last else ""
    return f"{worker} | {before}{' '.join(cells)}{after}"
