"""Commits where nobody fails and so nobody coordinates: they follow from the reports of all workers alone.

For runs that one process has for itself, and for runs under torchrun, where every process derives the same commit from
the reports of all. Stages step with the barrier.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from recycle.exec.membership.commit import decide
from recycle.exec.membership.messages import Commit, GenerationRecord, Report
from recycle.job import Job
from recycle.shape import Worker


def only_generation(workers: list[Worker], before: int = -1) -> GenerationRecord:
    """The one generation of a run without failures; its workers play themselves.

    Args:
        before: the iteration before its first.
    """
    names = [str(worker) for worker in workers]
    return GenerationRecord(1, names, {name: name for name in names}, "", before)


def commit_of(job: Job, step: int, steps: int, reports: Mapping[str, Report]) -> Commit:
    """The commit of `step` in a run of `steps` iterations."""
    commit = decide(job, step, reports)
    return msgspec.structs.replace(commit, next_mode="barrier", last=steps - 1, finished=step + 1 >= steps)
