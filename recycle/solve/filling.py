"""Filling a plan library: which vectors, in which order, in how much time; and a plan for the workers alive right now.

All vectors with up to N dead are planned where they are few. Where they are many (8 stages of 32 workers have more
than 10^9 with up to 64 dead), these are:

    all with few dead         as many failures as come to `LIKELY` vectors: what will happen most
    (k, ..., k), k up to N    serves every set whose most-hit stage has k dead, at that stage's load; the others idle
    of each number of dead    the normalized ones (`solve/normalize.py`), to which live workers can be moved

So every set of up to N dead that leaves each stage a host finds a plan. First each vector gets the list scheduler's
plan, which makes the library usable early; then the search improves those that do not meet their bound. A plan is
stored the moment it is there: whatever ends the filling, the next one goes on from it. The result does not depend on
the number of processes; where time is limited in seconds, it depends on the machine as every plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from recycle.errors import PlanError
from recycle.job import Job, PricedJob, price
from recycle.job.shape import Worker
from recycle.plans import (
    Entry,
    Move,
    Plan,
    PlanLibrary,
    Vector,
    cache_path,
    cached_plan,
    count_vectors,
    dead_roles,
    failure_vector,
    likely_vectors,
)
from recycle.solve.bounds import lower_bound
from recycle.solve.effort import Deadline
from recycle.solve.normalize import StageBounds, normal_vectors
from recycle.solve.planner import keep, plan, plan_vector
from recycle.solve.problem import Problem
from recycle.solve.processes import map_unordered

MOST, LIKELY = 2_000, 200
"""Vectors up to which all are planned; and beyond that, up to how many all those with the fewest dead are."""
WORTH_PROCESSES = 300_000
"""Operations of all first plans together from which starting processes for them pays."""
SHORTEST = 0.2
"""Seconds for a search; less is not worth starting one."""
NEAR = 1.05
"""How far above the lower bound a plan for more dead workers may be before one for the very set is made."""


class Filling(NamedTuple):
    """How far a library is: `done` of `total` plans of a phase, and the one that was just begun or made."""

    phase: str
    done: int
    total: int
    vector: Vector
    made: Entry | None


FillingProgress = Callable[[Filling], None]


def library_vectors(job: PricedJob, failures: int) -> tuple[list[Vector], bool]:
    """(vectors that a library for up to `failures` dead holds, whether those are all there are), likeliest first."""
    shape = job.shape
    failures = min(failures, shape.ranks * (shape.pipelines - 1))
    counts = list(accumulate(count_vectors(shape, failures)))
    if counts[-1] <= MOST:
        return list(likely_vectors(shape, failures)), True
    few = max(dead for dead, count in enumerate(counts) if count <= LIKELY or dead <= 1)
    likely = list(likely_vectors(shape, few))
    rungs = [(k,) * shape.ranks for k in range(1, min(failures, shape.pipelines - 1) + 1)]
    bounds = StageBounds(job, failures)
    normal = [vector for dead in range(few + 1, failures + 1) for vector in normal_vectors(bounds, dead)]
    single = 1 + shape.ranks
    return list(dict.fromkeys([*likely[:single], *rungs, *likely[single:], *normal])), False


def plan_library(
    job: Job,
    failures: int,
    directory: str | Path | None,
    progress: FillingProgress | None = None,
    *,
    cache: str | Path | None = None,
    processes: int = 1,
    seconds: float | None = None,
    again: bool = False,
) -> list[Entry]:
    """Plans for up to `failures` dead (`library_vectors`), in `directory`; those that are there and valid are kept.

    Args:
        directory: the library to fill; None when the plans are only wanted in the cache.
        progress: called with each plan when it is begun and when it is made.
        cache: directory of plans that outlive runs, read before planning and written after.
        processes: plans made at the same time.
        seconds: for all plans together; the searches share what the first plans leave.
        again: search once more for those that are there and do not meet their bound, with the job's present effort;
            the better plan stays.

    Returns:
        What is stored, likeliest first.

    Raises:
        PlanError: the directory cannot be written, a plan cannot be made, or the time does not suffice for a first
            plan of each vector; what was made by then is stored.
    """
    job = price(job)
    library = None if directory is None else PlanLibrary(Path(directory), job)
    if library is not None:
        library.prepare()
    vectors, _ = library_vectors(job, failures)
    entries: dict[Vector, Entry] = {}
    for vector in vectors:
        entry = None if library is None else library.entry(vector)
        if library is not None and entry is not None and library.proven(entry):
            entries[vector] = msgspec.structs.replace(entry, quick=entry.quick or (again and entry.gap > 0))
    fill(job, library, vectors, entries, progress, cache=cache, processes=processes, seconds=seconds)
    stored = {} if library is None else library.entries()
    return [stored.get(vector, entries[vector]) for vector in vectors]


def fill(
    job: PricedJob,
    library: PlanLibrary | None,
    vectors: Sequence[Vector],
    entries: dict[Vector, Entry],
    progress: FillingProgress | None = None,
    *,
    cache: str | Path | None = None,
    processes: int = 1,
    seconds: float | None = None,
) -> None:
    """Plan those of `vectors` that `entries` lacks, then search where only the list scheduler was asked so far.

    `entries` is kept up to date with what is stored. Arguments and errors as in `plan_library`.
    """
    deadline = Deadline(seconds)

    def run(phase: str, wanted: list[Vector], quick: bool, count: int) -> None:
        begun = 0

        def tasks() -> Iterator[tuple[PricedJob, Vector, bool, float | None, str | None]]:
            nonlocal begun
            for begun, vector in enumerate(wanted):
                share = _share(job, deadline, len(wanted) - begun, count)
                if deadline.is_over or (not quick and share is not None and share < SHORTEST):
                    return
                if progress:
                    progress(Filling(phase, begun, len(wanted), vector, None))
                yield job, vector, quick, share, None if cache is None else str(cache)

        for done, ((_, vector, *_), made) in enumerate(map_unordered(_make, tasks(), count)):
            entries[vector] = _store(library, entries.get(vector), made)
            if progress:
                progress(Filling(phase, done + 1, len(wanted), vector, entries[vector]))

    missing = [vector for vector in vectors if vector not in entries]
    operations = len(missing) * Problem.of(job).size
    run("first plans", missing, True, processes if operations > WORTH_PROCESSES else 1)
    left = sum(vector not in entries for vector in vectors)
    if left and seconds is not None:
        raise PlanError(
            f"{seconds:g} seconds are too few: {left} of {len(vectors)} vectors have no plan yet;"
            f" what is planned is kept: run it again to go on, or allow more time"
        )
    hurried = [vector for vector in vectors if entries[vector].quick]
    run("searching", hurried, False, min(processes, len(hurried)))


def _share(job: PricedJob, deadline: Deadline, plans: int, processes: int) -> float | None:
    """Seconds for the next of so many searches; None when the job limits it in steps or not at all."""
    if job.planner.steps is not None:
        return None
    return min(job.planner.seconds, deadline.left * processes / plans)


def _make(job: PricedJob, vector: Vector, quick: bool, seconds: float | None, cache: str | None) -> Plan:
    """One plan, from the cache where it is there; runs in a process of its own."""
    path = None if cache is None else cache_path(cache, job, vector)
    kept = None if path is None else cached_plan(path, job, vector)
    if kept is not None:
        return kept
    made = plan_vector(job, vector, quick, seconds=None if quick else seconds)
    was_hurried = seconds is not None and seconds < job.planner.seconds
    if path is not None and (made.gap == 0 or not (quick or was_hurried)):
        keep(made, path)
    return made


def _store(library: PlanLibrary | None, before: Entry | None, made: Plan) -> Entry:
    """The better of the two with the better of the bounds, marked as searched once a search was made."""
    if before is not None:
        made = replace(made, lower_bound=max(made.lower_bound, before.lower_bound))
    if before is not None and before.period < made.period:
        if library is None:
            return msgspec.structs.replace(before, quick=False)
        kept = library.read(before)
        if kept is not None:
            made = replace(kept, planner={**kept.planner, "quick": False}, lower_bound=made.lower_bound)
    return Entry.of(made) if library is None else library.add(made)


def serve(
    job: PricedJob, failed: Iterable[Worker], library: PlanLibrary | None = None
) -> tuple[Plan, dict[Worker, Worker], list[Move]]:
    """What `PlanLibrary.lookup` finds, or the list scheduler's plan where the library has none, or none that is near.

    Under a second on 256 workers; milliseconds where the library serves.

    Raises:
        PlanError: no plan exists: a stage has no live worker, or a cap is too small.
    """
    failed = frozenset(failed)
    found = None
    if library is not None and job.prices.are_peers_alike:
        try:
            found = library.lookup(failed)
        except PlanError:
            found = None  # what is wrong with the set itself, planning says
        else:
            dead = dead_roles(job.shape, failure_vector(job.shape, failed))
            if found[0].period <= NEAR * lower_bound(Problem.of(job, dead)):
                return found
    made = plan(job, failed, quick=True)
    if found is not None and found[0].period <= made.period:
        return found
    return made, made.roles(failed), []
