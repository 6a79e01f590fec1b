"""`recycle schedule`, `check` and `convert`: build, check and convert schedule files."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recycle.cli import pricing
from recycle.cli.terminal import JsonOption, Result, width
from recycle.errors import CODES, JobError, ScheduleError
from recycle.ir import formats
from recycle.ir.check import Findings, check as findings_of, explain as rule_of
from recycle.ir.families import FAMILIES, TWO_CHUNKS
from recycle.ir.lower import forward_only as forwards_of, lower as lowered
from recycle.ir.replays import MOST_ROUNDS, with_replays
from recycle.ir.rules import all_rules
from recycle.ir.rules.rule import MOST_DESCRIBED
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import DRAWN, simulate
from recycle.job.shape import MOST_BUCKETS, Shape, Worker

SHOWN = 30
"""Findings in the text output; `--json` has all, up to `MOST_DESCRIBED` of each rule."""
AROUND = 4
"""Instructions drawn before and after the instruction of a finding."""


def schedule(
    family: str,
    ranks: int,
    micro_batches: int,
    pipelines: int = 1,
    chunks: int | None = None,
    group_size: int | None = None,
    times: str | None = None,
    output: Path | None = None,
    lower: bool = False,
    optimizer: Literal["staggered", "barrier"] = "staggered",
    buckets: Annotated[int, typer.Option(min=1, max=MOST_BUCKETS)] = 1,
    gather: bool = False,
    replays: str | None = None,
    forward_only: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Build a schedule of a known family: into a file, as a picture on a terminal, or as the file's text elsewhere.

    Example: **recycle schedule 1f1b -D 3 -P 4 -m 6 -o 1f1b.json**

    Args:
        family: name of the family, for example 1f1b.
        ranks (-P --ranks): workers per pipeline.
        micro_batches (-m --micro-batches): micro-batches per pipeline.
        pipelines (-D): data-parallel pipelines.
        chunks (-V): stages per worker; 2 for families on the V, else 1.
        group_size (N): interleaved: micro-batches per turn of a chunk; default P.
        times (F,I,W): zb-v, v-half, v-min: times to optimize the order for.
        output (-o): file to write; else print it.
        lower: write sends, receives, reduces and steps too.
        optimizer: each stage steps by itself, or all together.
        buckets (N): sum each stage's gradients in N buckets.
        gather: gather parameters after the steps of a sharded optimizer.
        replays (N|gaps): replay all work on peers once in N iterations, or in the schedule's gaps; writes the first
            iteration, lowered.
        forward_only: only the forwards, as in an evaluation.
    """
    if family not in FAMILIES:
        raise ScheduleError(f"{family!r} is not a family: known are {', '.join(FAMILIES)}")
    if chunks is None:
        chunks = 2 if family in TWO_CHUNKS else 1
    shape = Shape(pipelines, ranks, micro_batches, chunks)
    given = {"group_size": group_size, "times": None if times is None else pricing.times_of(times)}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    for option in options:
        takers = [known for known, build in FAMILIES.items() if option in signature(build).parameters]
        if family not in takers:
            raise ScheduleError(f"--{option.replace('_', '-')}: {family} does not take it, only {', '.join(takers)}")
    built = replace(FAMILIES[family](shape, optimizer=optimizer, **options), buckets=buckets, gathers=gather)
    if forward_only:
        if buckets > 1:
            raise ScheduleError(f"--buckets: {buckets}, but --forward-only sums no gradients; give only one")
        if gather:
            raise ScheduleError("--gather: --forward-only steps no parameters; give only one")
        if replays is not None:
            raise ScheduleError("--replays: needs the backwards, which --forward-only leaves out; give only one")
        built = forwards_of(built)
    if replays is not None:
        built = _with_replays(built, replays)
    if lower:
        built = lowered(built)
    if output is not None:
        formats.write(built, output)
        count = len(built.columns)
        figures = {"file": str(output), "family": family, "shape": shape.to_json(), "instructions": count}
        Result(figures, [f"{output}: {family}, {shape}, {count} instructions"]).print(as_json)
    elif as_json or not sys.stdout.isatty():
        print(built.dumps(), end="")
    else:
        _show(built)


def _with_replays(schedule: Schedule, every: str) -> Schedule:
    if schedule.shape.pipelines < 2:
        raise ScheduleError("--replays: with 1 pipeline no worker has a peer; give -D 2 or more")
    if every == "gaps":
        return with_replays(schedule, "gaps").schedule(0)
    if not every.isdecimal() or not 1 <= int(every) <= MOST_ROUNDS:
        raise ScheduleError(f"--replays: {every!r} is neither gaps nor a number of iterations up to {MOST_ROUNDS}")
    return with_replays(schedule, int(every)).schedule(0)


def _show(schedule: Schedule) -> None:
    timeline = simulate(schedule)
    if schedule.shape.worker_count <= DRAWN:
        print(timeline.text(width()))
    print(f"{schedule.metadata['family']}, {schedule.shape}, {len(schedule.columns)} instructions")
    print(f"makespan {timeline.makespan:g}   period {timeline.period:g}   bubble ratio {timeline.bubble_ratio:.4g}")
    print("times 1,1,1; -o FILE writes the schedule, --json prints the file")


def check(
    file: Annotated[Path | None, typer.Argument()] = None,
    job: Path | None = None,
    strict: bool = False,
    explain: str | None = None,
) -> Result:
    """Check a schedule against every rule.

    Exit status: 0 valid, 1 errors found, 2 unreadable or bad arguments.

    Example: **recycle check plan.json --job job.toml --strict**

    Args:
        file: schedule file, or folder of traces.
        job: job file: its memory limits count too.
        strict: warnings count as errors for the exit status.
        explain (CODE): explain a rule or the code of a message, and check nothing.
    """
    if explain is not None:
        rule = rule_of(explain)
        if explain in CODES:
            return Result({"code": explain, "documentation": CODES[explain]}, [f"{explain}: {CODES[explain]}"])
        if rule is None:
            known = ", ".join([*(rule.code for rule in all_rules()), *CODES])
            raise ScheduleError(f"{explain!r} is not a code: known are {known}")
        return Result(
            {"rule": rule.code, "severity": rule.severity, "title": rule.title, "documentation": rule.documentation},
            [f"{rule.code} ({rule.severity}): {rule.title}\n\n{rule.documentation}"],
        )
    if file is None:
        raise ScheduleError("check: name a schedule file, or a rule with --explain CODE")
    checked = formats.read(file)
    if job is None:
        findings = findings_of(checked)
    else:
        profile, limits, byte_limit = pricing.job_limits(checked, file, job)
        findings = findings_of(checked, profile=profile, limits=limits, byte_limit=byte_limit)
    errors = findings.number("error")
    listed = [{key: value for key, value in asdict(finding).items() if key != "others"} for finding in findings]
    figures = {"file": str(file), "valid": not errors, "findings": listed, "more": findings.more}
    status = int(bool(errors or (strict and findings)))
    return Result(figures, partial(_print_findings, file, checked, findings), status)


def _print_findings(file: Path, schedule: Schedule, findings: Findings) -> None:
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
    w = schedule.shape.worker_index(Worker.parse(worker))
    first, last = schedule.columns.offsets[w : w + 2].tolist()
    row = first + position
    begin, end = max(first, row - AROUND), min(last, row + AROUND + 1)
    names = {i: str(schedule.instruction(i)) for i in range(begin, end)}
    cells = [f">{name}<" if i == row else name for i, name in names.items()]
    before, after = "... " if begin > first else "", " ..." if end < last else ""
    return f"{worker} | {before}{' '.join(cells)}{after}"


def convert(
    source: Path,
    target: Path,
    from_format: str | None = None,
    to_format: str | None = None,
    times: pricing.TimesOption = None,
    overlap: pricing.Overlap = None,
    comm: pricing.Comm = None,
    profile: pricing.ProfileFile = None,
) -> Result:
    """Convert a schedule file. Formats not named are known by suffix, then by content.

    Only timelines (chrome-trace) hold times; the other formats hold an order. Times that are not given come from IN if
    it is a timeline or trace: for executed times, the medians of each stage.

    Example: **recycle convert plan.json plan.trace.json --times 1,2,1**

    Args:
        source (IN): file to read, or directory of traces.
        target (OUT): file to write.
        from_format (--from NAME): format of IN.
        to_format (--to NAME): format of OUT.
    """
    named = {"--times": times, "--overlap": overlap, "--comm": comm, "--profile": profile}
    given = [option for option, value in named.items() if value is not None]
    written = formats.written_as(target, to_format)
    if given and not formats.FORMATS[written].timed:
        timed = ", ".join(name for name, entry in formats.FORMATS.items() if entry.timed)
        raise JobError(f"convert: {given[0]} is for timelines ({timed}), and {target} is written as {written}")
    read = formats.read_input(source, from_format)
    if formats.FORMATS[written].timed:
        pricing.require_one("convert", times=times, profile=profile)
        converted = read.schedule
        formats.write(converted, target, written, pricing.resolve_profile(times, profile, overlap, comm, read.profile))
    else:
        converted = read.order()
        formats.write(converted, target, written)
    count = len(converted.columns)
    figures = {"file": str(target), "format": written, "shape": converted.shape.to_json(), "instructions": count}
    return Result(figures, [f"{target}: {converted.shape}, {count} instructions"])
