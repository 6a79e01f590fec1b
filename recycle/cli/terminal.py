"""What commands share: options, results as JSON or lines, tables, curves of one line, progress on standard error."""

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
"""Takes a phase, how much of it is done (None: as much as before), of how much, and what to show for its name."""


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class Result:
    """What a command has made; one that returns it has the option `--json`.

    Attributes:
        figures: what `--json` prints, or makes that.
        shown: lines for people, of which empty ones are left out, or what prints them.
        status: exit status.
    """

    figures: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    shown: Sequence[str] | Callable[[], None]
    status: int = 0

    def print(self, as_json: bool) -> None:
        """Print it. Raises typer.Exit for a status other than 0."""
        if as_json:
            print(json.dumps(self.figures() if callable(self.figures) else self.figures))
        elif callable(self.shown):
            self.shown()
        else:
            print("\n".join(filter(None, self.shown)))
        if self.status:
            raise typer.Exit(self.status)


def spark(values: Sequence[float], most: float) -> str:
    """A character per value, from blank for 0 to a full block for `most` and beyond."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, max(0, round(top * value / most)))] for value in values)


def width() -> int:
    """Characters of a line of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    left: Container[str] = (),
    box: Box | None = None,
    least: int = 0,
) -> None:
    """Print a table, its cells on the right but for the columns in `left`.

    Args:
        rows: None draws a line.
        box: what it is framed with.
        least: characters that a line may have however narrow the terminal is.
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
    """A bar on standard error for each phase of a work, with how much is done of how much.

    Args:
        otherwise: takes their place where that is no terminal.
        transient: they go when the work is done.
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
    """Prints a line for each twentieth of a work, in place of a bar where there is no terminal."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, phase: str, done: float | None, total: float, shown: str) -> None:
        if done is not None and done - self._told >= max(total / 20, 1):
            self._told = done
            print(f"{phase} {done} of {total} ({shown})", file=sys.stderr)


@contextmanager
def megabytes(phase: str) -> Iterator[Callable[[int, int], None]]:
    """Takes how many bytes are done, of how many."""
    with progress_bars(otherwise=TwentiethLines()) as advance:
        yield lambda done, whole: advance(phase, done // 10**6, whole // 10**6, "MB")
