"""Load the compiled kernels, or start the process that compiles them.

A search with a deadline continues in plain Python while a separate process compiles.
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
"""Seconds left for loading, or for waiting for compilation, to pay; operations times orders for either."""
STALE_SECONDS = 300.0
"""Seconds after which a compile process counts as failed and another one is started."""
KERNELS = (list_schedule, time_from_idle, anneal_order, insert)


def load_if_worth_it(problem: Problem, orders: float, deadline: Deadline, *, is_search: bool = True) -> None:
    """Load the compiled kernels if making so many orders pays for it; a search may start the compilation."""
    if are_loaded() or deadline.seconds_left <= WORTH_LOADING or problem.size * orders <= WORTH_COMPILING_FOR:
        return
    if deadline.seconds_left > WORTH_COMPILING or is_cached(*KERNELS):
        load(*KERNELS)
    elif is_search:
        start_compile_process()


def are_loaded() -> bool:
    return is_loaded(*KERNELS)


def start_compile_process() -> None:
    """Start the compile process, once for all processes that share the cache; do nothing if the cache is read-only."""
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
