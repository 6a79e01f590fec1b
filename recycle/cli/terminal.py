"""Shared output of commands: options, results as JSON or lines, tables, one-line curves, progress on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich import progress
from rich.box import Box
from rich.console import Console
from rich.table import Table

WIDE = 60
"""Characters of a curve."""
_LEVELS = " ▁▂▃▄▅▆▇█"
Advance = Callable[[str, float | None, float, str], None]
"""(phase, amount done or None if unchanged, total, text for the phase's name) -> None."""


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class Result:
    """Result of a command; commands that return it have the option `--json`.

    Attributes:
        figures: the output of `--json`, or a function that returns it.
        shown: lines of text, of which empty ones are dropped, or a function that prints them.
    """

    figures: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    shown: Sequence[str] | Callable[[], None]
    status: int = 0

    def print(self, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.figures() if callable(self.figures) else self.figures))
        elif callable(self.shown):
            self.shown()
        else:
            print("\n".join(filter(None, self.shown)))
        if self.status:
            raise typer.Exit(self.status)


def spark(values: Sequence[float], most: float) -> str:
    """Return a character per value, from blank for 0 to a full block for `most` and beyond."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, max(0, round(top * value / most)))] for value in values)


def width() -> int:
    """Return the width of the terminal in characters; 120 without a terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    left: Container[str] = (),
    box: Box | None = None,
    least: int = 0,
) -> None:
    """Print a table, right-aligned except for the columns in `left`.

    Args:
        rows: None draws a line.
        least: minimum width in characters, on any terminal.
    """
    table = Table(box=box, pad_edge=box is not None)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if title in left else "right", no_wrap=not place)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    Console(width=max(width(), least)).print(table)


@contextmanager
def progress_bars(otherwise: Advance = lambda *_: None, transient: bool = False) -> Iterator[Advance]:
    """Show a progress bar on standard error for each phase of a task.

    Args:
        otherwise: called instead if standard error is not a terminal.
        transient: remove the bars at the end.
    """
    if not sys.stderr.isatty():
        yield otherwise
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    tasks: dict[str, progress.TaskID] = {}
    with progress.Progress(*columns, console=Console(stderr=True), transient=transient) as bars:

        def advance(phase: str, done: float | None, total: float, shown: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, description=shown)

        yield advance


class TwentiethLines:
    """Prints a line per twentieth of the work, instead of a bar, outside a terminal."""

    def __init__(self) -> None:
        self._printed = 0.0

    def __call__(self, phase: str, done: float | None, total: float, shown: str) -> None:
        if done is not None and done - self._printed >= max(total / 20, 1):
            self._printed = done
            print(f"{phase} {done} of {total} ({shown})", file=sys.stderr)


@contextmanager
def megabytes(phase: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function for progress in bytes: (done, total)."""
    with progress_bars(otherwise=TwentiethLines()) as advance:
        yield lambda done, total: advance(phase, done // 10**6, total // 10**6, "MB")


def seconds_text(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"
