"""How a worker's process ended, in words: for events, and for the error of a run that ends with it.

The words are those of the processes ("killed by signal 9", "ended with exit code 1"), and behind them the last lines of
the worker's log where they say more than that.
"""

from __future__ import annotations

REFUSED_THE_JOB = "refused the job"
"""How a worker ended that says what is wrong with the job in the last line of its log."""

LINE_SEPARATOR = " | "
"""Between two lines of a log's end, as `Processes.tail` gives it."""


def with_last_lines(how: str, lines: str) -> str:
    """How a process ended, with the end of its log if there is one."""
    return f"{how}; its last lines: {lines}" if lines else how
