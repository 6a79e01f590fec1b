"""How a worker's process ended, in words: for events, and for the error of a run that ends with it.

The words are those of the processes ("killed by signal 9", "ended with exit code 1"), and behind them the last lines of
the worker's log where they say more than that.
"""

from __future__ import annotations

_LAST_LINES = "; its last lines: "
"""Between how a process ended and what it wrote last. Agents write it, whoever coordinates reads it."""

LINE_SEPARATOR = " | "
"""Between two lines of a log's end, as `Processes.tail` gives it."""


def with_last_lines(how: str, lines: str) -> str:
    """How a process ended, with the end of its log if there is one."""
    return f"{how}{_LAST_LINES}{lines}" if lines else how


def last_line(how: str, tail: str) -> tuple[str, str]:
    """How a process ended without the end of its log, and the log's last line.

    Args:
        how: how it ended, with or without the end of its log.
        tail: the end of its log, for a `how` without one; "" when there is none.
    """
    bare, _, lines = how.partition(_LAST_LINES)
    return bare, (lines or tail).rpartition(LINE_SEPARATOR)[2]
