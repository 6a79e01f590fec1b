"""Fill a plan library: select vectors, order them and share the time.

All vectors with up to N dead workers are planned if they are few. Otherwise the library holds

    all with few dead         as many failures as give at most `LIKELY` vectors
    (k, ..., k), k up to N    serves every set whose most affected stage has k dead; other stages have idle workers
    of each number of dead    the normalized vectors (`solve/normalize.py`), which live workers can move to

The list scheduler plans all vectors first; searches then improve plans that do not meet their bound. Plans are stored
immediately, so a later call continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from recycle.errors import PlanError
from recycle.job import Job, PricedJob, price
from recycle.plans import (
    Entry,
    Plan,
    PlanLibrary,
    Vector,
    cache_path,
    cached_plan,
    count_vectors,
    likely_vectors,
)
from recycle.solve.effort import Deadline
from recycle.solve.normalize import StageBounds, normal_vectors
from recycle.solve.planner import plan_vector, write_to_cache
from recycle.solve.problem import Problem
from recycle.solve.processes import map_unordered

MOST, LIKELY = 2_000, 200
"""Number of vectors up to which all are planned; else limit for those with the fewest dead workers."""
WORTH_PROCESSES = 300_000
"""Operations of all first plans from which starting processes pays."""
SHORTEST = 0.2
"""Minimum seconds of a search."""


class LibraryProgress(NamedTuple):
    """Progress of a library: `done` of `total` plans of a phase, and the latest plan begun or made."""

    phase: str
    done: int
    total: int
    vector: Vector
    entry: Entry | None


LibraryProgressCallback = Callable[[LibraryProgress], None]


def library_vectors(job: PricedJob, failures: int) -> tuple[list[Vector], bool]:
    """Return (vectors of a library for up to `failures` dead workers, whether these are all), likeliest first."""
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
    progress: LibraryProgressCallback | None = None,
    *,
    cache: str | Path | None = None,
    processes: int = 1,
    seconds: float | None = None,
    again: bool = False,
) -> list[Entry]:
    """Make the plans of `library_vectors` in `directory`, and return the stored plans, likeliest first.

    Args:
        directory: the library to fill; None to fill only the cache.
        progress: called with each plan when it is begun and when it is made.
        cache: directory of plans that outlives runs, read before planning and written after.
        seconds: limit for all plans; searches share what the first plans leave.
        again: search again for existing plans that do not meet their bound, and keep the better plan.

    Raises:
        PlanError: the directory cannot be written, a plan cannot be made, or the time does not suffice for first plans.
            Plans made until then are stored.
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
    progress: LibraryProgressCallback | None = None,
    *,
    cache: str | Path | None = None,
    processes: int = 1,
    seconds: float | None = None,
) -> None:
    """Plan the vectors missing in `entries`, then search for those with only a list scheduler's plan.

    `entries` is updated with each stored plan. Arguments and errors as in `plan_library`.
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
                    progress(LibraryProgress(phase, begun, len(wanted), vector, None))
                yield job, vector, quick, share, None if cache is None else str(cache)

        for done, ((_, vector, *_), new) in enumerate(map_unordered(_make, tasks(), count)):
            entries[vector] = _store(library, entries.get(vector), new)
            if progress:
                progress(LibraryProgress(phase, done + 1, len(wanted), vector, entries[vector]))

    missing = [vector for vector in vectors if vector not in entries]
    operations = len(missing) * Problem.from_job(job).size
    run("first plans", missing, True, processes if operations > WORTH_PROCESSES else 1)
    missing_count = sum(vector not in entries for vector in vectors)
    if missing_count and seconds is not None:
        raise PlanError(
            f"{seconds:g} seconds are too few: {missing_count} of {len(vectors)} vectors have no plan yet;"
            f" the plans made so far are kept; run the command again to continue, or allow more time"
        )
    hurried = [vector for vector in vectors if entries[vector].quick]
    run("searching", hurried, False, min(processes, len(hurried)))


def _share(job: PricedJob, deadline: Deadline, plans: int, processes: int) -> float | None:
    if job.planner.steps is not None:
        return None
    return min(job.planner.seconds, deadline.seconds_left * processes / plans)


def _make(job: PricedJob, vector: Vector, quick: bool, seconds: float | None, cache: str | None) -> Plan:
    path = None if cache is None else cache_path(cache, job, vector)
    kept = None if path is None else cached_plan(path, job, vector)
    if kept is not None:
        return kept
    result = plan_vector(job, vector, quick, seconds=None if quick else seconds)
    was_hurried = seconds is not None and seconds < job.planner.seconds
    if path is not None and (result.gap == 0 or not (quick or was_hurried)):
        write_to_cache(result, path)
    return result


def _store(library: PlanLibrary | None, before: Entry | None, new: Plan) -> Entry:
    if before is not None:
        new = replace(new, lower_bound=max(new.lower_bound, before.lower_bound))
    if before is not None and before.period < new.period:
        if library is None:
            return msgspec.structs.replace(before, quick=False)
        kept = library.read(before)
        if kept is not None:
            best = max(kept, new, key=lambda plan: plan.certified_bound or 0.0)
            searched = {**kept.planner, "quick": False}
            new = replace(kept, planner=searched, lower_bound=new.lower_bound, certificate=best.certificate)
    return Entry.of(new) if library is None else library.add(new)
