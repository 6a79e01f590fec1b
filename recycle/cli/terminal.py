"""What commands show on a terminal beside text: tables, curves of one line, and progress on standard error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import progress
from rich.console import Console

WIDE = 60
"""Characters of a curve."""
_LEVELS = " ▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], most: float) -> str:
    """A character per value, from blank for 0 to a full block for `most` and beyond."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, max(0, round(top * value / most)))] for value in values)


def width() -> int:
    """Characters of a line of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


@contextmanager
def progress_bar(transient: bool = False) -> Iterator[progress.Progress | None]:
    """A progress bar on standard error, with how much is done of how much; None where that is no terminal.

    Args:
        transient: it goes when the work is done.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=transient) as bar:
        yield bar
