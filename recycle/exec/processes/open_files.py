"""How many open files the processes of a run need, asked of the machine before any of them starts."""

from __future__ import annotations

import resource

from recycle.errors import JobError

BASE = 48
"""Of any process of a run: Python's own, logs, pipes, the agent; up to 30 were counted, in a launcher."""
PER_CHILD = 8
"""Of a launcher or agent, for each process it starts: its connections, a descriptor, and room to spare."""
PER_PEER = 4
"""Of a worker's process, for each other: a connection in the group of all, one among a stage's hosts; as many of the
generation before."""


def require_open_files(started_here: int, in_all: int) -> None:
    """Raise this process's limit of open files, which its children inherit, to what a run needs.

    Args:
        started_here: processes that this one starts.
        in_all: processes of the run.

    Raises:
        JobError: the machine does not allow so many.
    """
    needed = BASE + max(PER_CHILD * started_here, PER_PEER * in_all)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise JobError(
            f"a run of {in_all} processes, {started_here} of them on this machine, needs {needed} open files, and the"
            f" limit here is {hard}; raise it: ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
