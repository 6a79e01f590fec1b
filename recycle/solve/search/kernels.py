"""When a search loads the compiled kernels, and what compiles them where no compiled code is there yet.

Compiling takes much longer than most searches, so that a search against the clock does not wait for it: it goes on in
plain Python, a process beside it compiles, and a search that comes to its next part, or comes later, loads the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from recycle.ir.compiled import cache_folder, is_cached, is_loaded, load
from recycle.solve.effort import Deadline
from recycle.solve.problem import Problem
from recycle.solve.search.event_loop import list_schedule
from recycle.solve.search.insertion import insert
from recycle.solve.search.order_kernels import anneal_order, time_from_idle

WORTH_LOADING, WORTH_COMPILING, WORTH_COMPILING_FOR = 2.0, 100.0, 200_000
"""Seconds that must be left for loading what has been compiled to pay, and for waiting until it is; and operations
times orders made for either."""
STALE_SECONDS = 300.0
"""After so long a process that was to compile is taken to have failed, and another one is started."""
KERNELS = (list_schedule, time_from_idle, anneal_order, insert)


def load_if_worth_it(problem: Problem, orders: float, deadline: Deadline, *, is_search: bool = True) -> None:
    """Load the compiled kernels if so many orders may be made and timed until the deadline that this pays.

    Args:
        is_search: where the kernels have not been compiled and the deadline is near, start a process that does.
    """
    if are_loaded() or deadline.left <= WORTH_LOADING or problem.size * orders <= WORTH_COMPILING_FOR:
        return
    if deadline.left > WORTH_COMPILING or is_cached(*KERNELS):
        load(*KERNELS)
    elif is_search:
        compile_beside()


def are_loaded() -> bool:
    """Whether the search runs compiled."""
    return is_loaded(*KERNELS)


def compile_beside() -> None:
    """Start the process that compiles, once for all that share the place of the compiled code; where that cannot be
    written to there is none.

    It begins in the folder of this copy of the package, so that it imports this one, wherever the caller found it.
    """
    mark = cache_folder(insert) / "compiling"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        if mark.exists() and time.time() - mark.stat().st_mtime > STALE_SECONDS:
            mark.unlink(missing_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except OSError:
        return
    quiet = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-m", "recycle.solve.search.compile_kernels", str(mark.absolute())],
        cwd=Path(__file__).absolute().parents[3],
        stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True,
    )  # fmt: skip
