"""`recycle profile`: measures times and bytes of a job's instructions, or extracts them from a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recycle.cli.terminal import Result, print_table, progress_bars, seconds_text
from recycle.errors import JobError, ScheduleError
from recycle.files import require_writable
from recycle.ir import formats
from recycle.job import Job
from recycle.job.profile import Profile

if TYPE_CHECKING:
    from recycle.exec.profile.executed import ExecutedRun

TIMES = ("forward", "backward_input", "backward_weight", "reduce", "step")
BYTES = ("message", "activation", "static")


def profile(
    target: Annotated[Path | None, typer.Argument()] = None,
    output: Path | None = None,
    trace: Path | None = None,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
) -> Result:
    """Measure F, I, W, B, reduce, step, bytes and links of a job's real stages on this machine.

    Stages are measured one after the other, with nothing else running. `[times] profile = "FILE"` in the job then plans
    with the times, and `[memory] limit = "20 GiB"` with the bytes. For a run directory the profile holds the executed
    times; the table compares them with the plan.

    Example: **recycle profile job.toml -o measured.json**

    Example: **recycle profile runs/mine -o executed.json**

    Example: **recycle profile --from traces/iteration_4 -o traced.json**

    Args:
        target (JOB|RUN_DIR): job file, or the directory of a run.
        output (-o FILE): profile file to write.
        trace (--from TRACE): trace, or folder of traces: take the times from it.
        repeats (N): measurements of each instruction.
    """

    if output is not None:
        require_writable(output)
    if (target is None) == (trace is None):
        raise JobError("profile: give a job file, a run directory, or a trace with --from TRACE, only one of them")
    if trace is not None:
        return _profile_trace(trace, output)
    assert target is not None
    if output is None:
        raise JobError("profile: needs the file to write: -o FILE")
    if target.is_dir():
        from recycle.exec.profile.executed import executed

        ran = executed(target)
        ran.profile.save(output)
        periods = {"period": ran.period, "planned_period": ran.planned_period, "period_error": ran.period_error}
        return Result(_figures(ran.profile, output) | periods, partial(_print_executed, ran, output))
    job = Job.load(target)
    from recycle.exec.profile.profiler import measure

    with progress_bars(otherwise=_print_progress) as report:
        measured = measure(job, repeats, lambda what, done, total: report(what, done, total, f"measuring {what}"))
    measured.require(job.shape)
    measured.save(output)
    return Result(_figures(measured, output), partial(_print_measured, measured, job.shape.stages, output))


def _print_measured(measured: Profile, stages: int, output: Path) -> None:
    _table(measured, stages)
    for half, names in measured.measured.get("placement", {}).items():
        print(f"gradients computed in {half}: {', '.join(names)}")
    print(_link(measured))
    print(f'{output}: written, hash {measured.digest()}; use it with [times] profile = "{output}"')


def _figures(profile: Profile, output: Path | None) -> dict[str, Any]:
    file = None if output is None else str(output)
    return {"file": file, "hash": profile.digest(), "profile": profile.to_json()}


def _profile_trace(trace: Path, output: Path | None) -> Result:
    source = formats.read_input(trace)
    measured = source.profile()
    if measured is None:
        raise ScheduleError(f"{trace}: has an order without times: give an executed trace or a timeline")
    if output is not None:
        measured.save(output)
    unit = "seconds" if source.trace is not None else "units of the timeline"
    return Result(
        _figures(measured, output), partial(_print_traced, measured, source.schedule.shape.stages, unit, output)
    )


def _print_traced(measured: Profile, stages: int, unit: str, output: Path | None) -> None:
    print(unit)
    _print_stages(measured, stages, ("forward", "backward_input", "backward_weight", "step"))
    print(f"link between two workers: {seconds_text(measured.latency)}")
    if output is not None:
        print(f"{output}: written, hash {measured.digest()}")


def _print_progress(what: str, done: float | None, total: float, _: str) -> None:
    print(f"measured {done} of {total} {what}", file=sys.stderr)


def _print_executed(ran: ExecutedRun, output: Path) -> None:
    stages = len(ran.profile.forward) if isinstance(ran.profile.forward, list) else 1
    _table(ran.profile, stages, ran.planned)
    for worker, factor in ran.profile.speed.items():
        print(f"worker {worker} took {factor:g} times as long as its peers")
    if ran.period is not None:
        planned = "" if ran.planned_period is None else f", planned {seconds_text(ran.planned_period)}"
        error = "" if ran.period_error is None else f" ({ran.period_error:+.1%}, median over the steps)"
        print(f"executed period {seconds_text(ran.period)}{planned}{error}")
    print(f"{output}: written, hash {ran.profile.digest()}")


def _table(profile: Profile, stages: int, planned: Profile | None = None) -> None:
    gathers = ("gather",) if profile.gather and any(profile.per_stage("gather", stages)) else ()
    columns = (*TIMES, *gathers, *(() if planned is not None else BYTES))
    print(
        "seconds" + (" executed / planned" if planned is not None else ", median ± half the interquartile range; bytes")
    )
    _print_stages(profile, stages, columns, planned)


def _print_stages(profile: Profile, stages: int, columns: Sequence[str], planned: Profile | None = None) -> None:
    print_table(
        ("stage", *(name.removeprefix("backward_") for name in columns)),
        [(str(stage), *(_cell(profile, name, stage, stages, planned) for name in columns)) for stage in range(stages)],
        least=120,
    )


def _cell(profile: Profile, name: str, stage: int, stages: int, planned: Profile | None) -> str:
    value = profile.per_stage(name, stages)[stage]
    if name in BYTES:
        return _bytes(value)
    if planned is not None:
        return f"{seconds_text(value)} / {seconds_text(planned.per_stage(name, stages)[stage])}"
    spread = profile.measured.get("spread", {}).get(name)
    return seconds_text(value) + (f" ±{spread[stage] / 2:.0%}" if spread else "")


def _link(profile: Profile) -> str:
    bandwidth = "" if profile.bandwidth is None else f", {_bytes(profile.bandwidth)}/s"
    link = f"link between two workers: {seconds_text(profile.latency)}{bandwidth}"
    host = "" if profile.host_bandwidth is None else f"; host: {_bytes(profile.host_bandwidth)}/s"
    return f"{link}{host}; held from I to W: {profile.weight_stash:.0%} of an activation"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
