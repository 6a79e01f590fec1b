"""`recycle drain` removes workers from a live run; `recycle report` breaks down a run's time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from recycle.cli.terminal import Result, print_table
from recycle.runs.read_report import RunReader, RunRecord
from recycle.runs.report import GenerationChange, RunReport, TimePart

COSTS = (TimePart.REDONE, TimePart.WAITING, TimePart.PLANNING, TimePart.FORMING, TimePart.MOVING, TimePart.STARTING)


def drain(run: Path, worker: str, within: Annotated[float | None, typer.Option(min=0.0)] = None) -> None:
    """Let a worker, or all workers of a node, leave a run without repeated work; return when they have ended.

    The run prepares the plan without them during training; they leave at the end of the iteration after that.

    Example: **recycle drain runs/tiny 1.1** (a worker)

    Example: **recycle drain runs/tiny 2 --in 60** (node 2)

    Args:
        run: run directory of a live run.
        worker: position of the worker, such as 1.1, or the number of a node.
        within (--in SECONDS): kill the worker if it has not left by then, and repeat the iteration; no limit if left
            out.
    """
    from recycle.exec.launch import run_address

    run_address.drain(run, worker, within, lambda line: print(line, flush=True))


def report(run: Path, prometheus: bool = False) -> Result:
    """Break down the time of a run: useful, waiting, redone and so on, which add up to the wall clock.

    Also print what the plans promised, and the cost of each failure, departure and return.

    Example: **recycle report runs/tiny**

    Args:
        run: run directory; the run may be live.
        prometheus: print the run's metrics in Prometheus' text format instead.
    """
    record = RunReader(run).read()
    shown = partial(_print_metrics, record) if prometheus else partial(_print, record.report)
    return Result(to_json(record.report), shown)


def _print_metrics(record: RunRecord) -> None:
    from recycle.runs.exporter import exposition

    print(exposition(record), end="")


def _print(loaded: RunReport) -> None:
    wall = loaded.wall
    rows = [(part.value, f"{seconds:.3f}", _share(seconds, wall)) for part, seconds in loaded.parts.items() if seconds]
    print(f"{loaded.steps} step{'s' * (loaded.steps != 1)} in {wall:.3f} s")
    print_table(("part", "seconds", "share"), [*rows, None, ("all", f"{wall:.3f}", _share(wall, wall))], left=("part",))
    if loaded.expected is not None and loaded.fault_free is not None:
        effective = _share(loaded.measured, wall)
        print(f"iterations: {loaded.measured:.3f} s, {effective} of the run, by their plans {loaded.expected:.3f} s")
        print(f"with all workers all the time: {loaded.fault_free:.3f} s, {_share(loaded.fault_free, wall)} of the run")
    if loaded.changes:
        used = [part for part in COSTS if any(part in change.costs for change in loaded.changes)]
        print_table(
            ("step", "at", "change", *(part.value for part in used), "all", "slower after", "what"),
            [_row(change, used) for change in loaded.changes],
            left=("change", "what"),
            least=160,
        )


def _row(change: GenerationChange, parts: Sequence[TimePart]) -> list[str]:
    costs = [f"{change.costs[part]:.3f}" if part in change.costs else "" for part in parts]
    slower = "" if change.slower is None else f"{change.slower:.3f}"
    return [str(change.step), f"{change.time:.3f}", change.kind, *costs, f"{change.seconds:.3f}", slower, change.what]


def _share(seconds: float, wall: float) -> str:
    return f"{seconds / wall:.1%}" if wall else ""


def to_json(loaded: RunReport) -> dict[str, Any]:
    return {
        "steps": loaded.steps,
        "wall": round(loaded.wall, 6),
        "parts": {part.value: round(seconds, 6) for part, seconds in loaded.parts.items()},
        "measured": round(loaded.measured, 6),
        "effective_ratio": round(loaded.effective_ratio, 6),
        "expected": loaded.expected,
        "fault_free": loaded.fault_free,
        "changes": [
            {
                "step": change.step,
                "time": round(change.time, 6),
                "kind": change.kind,
                "what": change.what,
                "costs": {part.value: round(seconds, 6) for part, seconds in change.costs.items()},
                "seconds": round(change.seconds, 6),
                "slower": change.slower,
            }
            for change in loaded.changes
        ],
    }
