"""Mean gaps of the planner by family of jobs. The figures may not get worse.

    python benchmarks/gaps.py [SECTION ...] [--seeds N] [--processes N] [--write]

`gaps.json` holds the latest means, by section:

    small    a few random jobs of at most 3 x 3 and the worked example, with the steps of a fraction of a second; a test
             plans them
    1 s      random jobs of three seeds, published rows and the rows of zero-bubble's automatic schedules, with the
             steps of about a second: three minutes of one core
    20 s     the same jobs with twenty times as many steps

Budgets are steps, so the figures depend only on the code. They are inversely proportional to the operations that are
searched; all initial orders are made. A gap is period / bound - 1 in per cent. The bound is the closed form, because
the linear programs take minutes on some of these jobs without a deadline, so a plan states a smaller gap. For
zero-bubble rows it is period / (m (F + I + W)) - 1. These families are small and their figures scatter by half a point
between random seeds of the search, so their gaps are means over the seeds 0 to N - 1 (`--seeds`, three by default).

Without `--write` each section is compared with the file; the exit status is 1 if a mean is worse by more than 0.3
points. With `--write` the file is updated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.planner import Case, cases as published_cases
from benchmarks.planner_random import FAMILIES, drawn
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.solve import bounds
from recycle.solve.effort import Deadline
from recycle.solve.planner import plan
from recycle.solve.problem import Problem

FILE = Path(__file__).with_name("gaps.json")
ALLOWED = 0.3
"""Points by which a mean may be worse."""
SECOND_OF_WORK, SECOND = 25_000_000, 50_000
"""Steps times operations that a search makes in a second, and steps of small problems."""
LARGEST = 10_000
"""Operations of the largest published row."""
ZERO_BUBBLE = {
    "1.5B": (18.522, 18.086, 9.337, 0.601, 0.3664),
    "6.2B": (29.718, 29.444, 19.927, 0.527, 0.4324),
    "14.6B": (11.347, 11.248, 8.132, 0.379, 0.4324),
    "28.3B": (10.419, 10.207, 7.715, 0.408, 0.4324),
}
"""F, I, W and link in milliseconds, and weight_stash (Qi et al., "Zero Bubble Pipeline Parallelism", 2023)."""
ONE_CHUNK = (
    *(("1.5B", 8, 24, 8), ("1.5B", 8, 24, 16), ("1.5B", 8, 32, 16), ("6.2B", 8, 24, 12), ("6.2B", 8, 24, 16)),
    *(("6.2B", 8, 64, 16), ("14.6B", 16, 48, 24), ("14.6B", 16, 48, 32), ("14.6B", 16, 128, 32)),
    *(("28.3B", 32, 96, 32), ("28.3B", 32, 96, 64)),
)
TWO_CHUNKS = (
    *(("1.5B", 8, 24, 16), ("6.2B", 8, 24, 16), ("6.2B", 8, 64, 16), ("14.6B", 16, 48, 32), ("28.3B", 32, 96, 64)),
    *(("1.5B", 8, 24, 8), ("6.2B", 8, 24, 10), ("14.6B", 16, 48, 16)),
)
"""Model, ranks, micro-batches and limit in chunks, for which zero-bubble's automatic schedules were timed."""
FLOOR = (
    *(((4, 8, 8), "1.3", 8), ((4, 8, 8), "1.3", 15), ((4, 8, 16), "1.3,2.6", 8), ((4, 8, 16), "1.3,2.3", 8)),
    *(((8, 4, 16), "1.2", 4), ((8, 4, 16), "1.2", 7), ((8, 8, 16), "1.4", 8), ((8, 8, 16), "1.4", 15)),
    *(((8, 8, 32), "1.4", 8), ((8, 8, 32), "1.4,2.7", 15), ((1, 4, 6), "", 4), ((1, 8, 16), "", 8)),
)
"""Shape, dead workers and limit of further published rows."""


@dataclass(frozen=True)
class Section:
    """Jobs and how long each is planned.

    Attributes:
        seconds: typical duration of the steps.
        jobs: random jobs of each family and seed.
        largest: pipelines, and ranks, of a random job at most.
        published: beginnings of the names of published cases.
        zero_bubble: whether zero-bubble's rows are planned.
    """

    seconds: float
    jobs: int
    largest: int
    published: tuple[str, ...]
    zero_bubble: bool


SECTIONS = {
    "small": Section(0.006, 1, 3, ("worked",), False),
    "1 s": Section(1.0, 3, 8, ("",), True),
    "20 s": Section(20.0, 3, 8, ("",), True),
}
SEEDS = (100, 101, 102)
SEARCH_SEEDS = 3
"""Search seeds of a zero-bubble row."""


@dataclass(frozen=True)
class Task:
    """A job to plan; `ideal` is the period to compare with, None for the bound."""

    family: str
    job: PricedJob
    dead: tuple[Worker, ...] = ()
    ideal: float | None = None


def tasks(section: Section) -> Iterator[Task]:
    """The jobs of a section, by family."""
    for family in FAMILIES:
        for seed in SEEDS:
            for number in range(section.jobs):
                job, dead, _ = drawn(family, number, seed, section.largest)
                yield Task(family, job, tuple(dead))
    further = [Case(f"floor-{n}", shape, cap, dead, 0, "") for n, (shape, dead, cap) in enumerate(FLOOR)]
    for case in [*published_cases(), *further]:
        if case.name.startswith(section.published):
            task = Task("published", case.job(), tuple(case.workers()))
            if Problem.from_job(task.job, task.dead).size <= LARGEST:
                yield task
    for chunks, rows in ((1, ONE_CHUNK), (2, TWO_CHUNKS)) if section.zero_bubble else ():
        for row in rows:
            yield zero_bubble_task(row, chunks)


def zero_bubble_task(row: tuple[str, int, int, int], chunks: int) -> Task:
    """The job of a row of `ONE_CHUNK` or `TWO_CHUNKS`."""
    model, ranks, micro_batches, limit = row
    *times, link, stash = ZERO_BUBBLE[model]
    keys = ("forward", "backward_input", "backward_weight")
    of_chunk = {key: time / chunks for key, time in zip(keys, times, strict=True)}
    case = Case(model, (1, ranks, micro_batches), limit, "", 0, "", of_chunk | {"link": link}, stash, chunks=chunks)
    return Task(f"zero-bubble-v{chunks}", case.job(), ideal=micro_batches * sum(times))


def steps_of(task: Task, seconds: float) -> int:
    """The number of steps that typically takes so many seconds."""
    problem = Problem.from_job(task.job, task.dead)
    is_copied = not task.dead and problem.peers_are_alike
    size = problem.size // (problem.shape.pipelines if is_copied else 1)
    return max(1, int(seconds * min(SECOND, SECOND_OF_WORK / size)))


def gap_of(task: Task, seconds: float, seeds: int = SEARCH_SEEDS) -> float:
    """The gap of a task's plan in per cent; of a zero-bubble row the mean over so many search seeds."""
    gaps = []
    for seed in range(1 if task.ideal is None else seeds):
        planner = msgspec.structs.replace(task.job.planner, seed=seed)
        with mock.patch.object(bounds, "lower_bound", _closed_form):
            planned = plan(msgspec.structs.replace(task.job, planner=planner), task.dead, steps=steps_of(task, seconds))
        gaps.append(planned.gap if task.ideal is None else planned.period / task.ideal - 1)
    return 100 * mean(gaps)


def _closed_form(problem: Problem, _: Deadline) -> float:
    return bounds.closed_form(problem)


def means(section: Section, processes: int = 1, seeds: int = SEARCH_SEEDS) -> dict[str, dict[str, Any]]:
    """The number of jobs of each family, their mean gap and the largest."""
    planned = list(tasks(section))
    measure = partial(gap_of, seconds=section.seconds, seeds=seeds)
    if processes < 2:
        gaps = [measure(task) for task in planned]
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            gaps = list(pool.map(measure, planned))
    by_family: dict[str, list[float]] = {}
    for task, gap in zip(planned, gaps, strict=True):
        by_family.setdefault(task.family, []).append(gap)
    return {
        family: {"jobs": len(gaps), "mean": round(mean(gaps), 3), "worst": round(max(gaps), 3)}
        for family, gaps in by_family.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["1 s"], choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--processes", type=int, default=1, help="plans at the same time")
    parser.add_argument("--seeds", type=int, default=SEARCH_SEEDS, help="search seeds of each zero-bubble row")
    parser.add_argument("--write", action="store_true", help="write the figures to the file")
    arguments = parser.parse_args()
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    is_worse = False
    for name in arguments.sections:
        rows = means(SECTIONS[name], arguments.processes, arguments.seeds)
        print(f"{name:<16}{'jobs':>6}{'mean %':>9}{'was':>9}{'worst %':>9}")
        for family, row in rows.items():
            before = kept.get(name, {}).get(family, {}).get("mean")
            is_worse |= before is not None and row["mean"] > before + ALLOWED
            print(f"{family:<16}{row['jobs']:>6}{row['mean']:>9.2f}{before if before is not None else '-':>9}", end="")
            print(f"{row['worst']:>9.2f}", flush=True)
        kept[name] = rows
        if arguments.write:
            FILE.write_text(json.dumps(kept, indent=1) + "\n")
    return int(is_worse and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
