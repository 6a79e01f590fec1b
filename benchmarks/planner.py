"""The planner on its targets: period, proven bound, gap, and planning time.

    python benchmarks/planner.py [--only NAME ...] [--scale F] [--processes N] [--cp-sat SECONDS] [--json FILE]

gap is period / bound - 1 with all bounds of `recycle.solve.bounds`; "closed" is the gap to the closed forms alone,
which separates progress of the schedule from progress of the bound. "first" is the time of the first valid order. Sets
of dead workers were drawn once and are in `dead_sets.json`, by D x P : number of dead workers. `--scale` shortens the
planner's time limits. If OR-tools is installed (extra `bench`), CP-SAT solves the small cases for `--cp-sat` seconds
each (default 45, 0 for none). The last column is its period, its bound if that differs, and the time when it ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle.job import Job, PricedJob, price
from recycle.job.shape import Worker
from recycle.plans import PlanLibrary
from recycle.solve.bounds import closed_form
from recycle.solve.filling import plan_library
from recycle.solve.planner import plan
from recycle.solve.problem import Problem

DEAD_SETS = json.loads((Path(__file__).parent / "dead_sets.json").read_text())
MEASURED = {"forward": 100.0, "backward_input": 115.0, "backward_weight": 85.0, "link": 4.0, "step": 40.0}
CP_SAT_SECONDS = 45.0 if importlib.util.find_spec("ortools") else 0.0
UNEVEN = {
    "forward": [95, 125, 120, 90, 105, 125, 115, 130],
    "backward_input": [135, 95, 135, 90, 155, 125, 110, 130],
    "backward_weight": [75, 75, 95, 100, 100, 95, 90, 70],
    "link": 4.0,
    "step": 40.0,
}
"""Stages of unlike weight, drawn once."""
CP_SAT_UP_TO = 2_000
"""Operations of the largest case that CP-SAT is asked about."""


@dataclass(frozen=True)
class Case:
    """One row: a job, its dead workers, and what is expected of the plan."""

    name: str
    shape: tuple[int, int, int]
    cap: int | list[int]
    dead: str
    seconds: float
    target: str
    times: dict[str, Any] = field(default_factory=dict)
    stash: float = 1.0
    planner: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1

    def job(self) -> PricedJob:
        shape = zip(("pipelines", "ranks", "micro_batches"), self.shape, strict=True)
        lines = ["[shape]", *(f"{key} = {n}" for key, n in shape), f"chunks = {self.chunks}"]
        lines += ["[times]", *(f"{key} = {value}" for key, value in self.times.items())]
        lines += ["[memory]", f"limit = {self.cap}", f"weight_stash = {self.stash}"]
        lines += ["[planner]", *(f"{key} = {str(value).lower()}" for key, value in self.planner.items())]
        return price(Job.from_toml("\n".join(lines), self.name))

    def workers(self) -> list[Worker]:
        pipelines, ranks, _ = self.shape
        text = DEAD_SETS.get(f"{pipelines}x{ranks}:{self.dead}", self.dead)
        return [Worker.parse(name) for name in text.split(",") if name]


def cases() -> list[Case]:
    whole, barrier = {"decoupled": False, "staggered": False}, {"staggered": False}
    worked = [
        ([4, 3, 2, 1], whole, "36"), (4, whole, "33"), (8, {"decoupled": False}, "33"), ([4, 3, 2, 1], barrier, "32"),
        (4, barrier, "29"), ([4, 3, 2, 1], {}, "32"), (4, {}, "29"), (5, {}, "28"), (6, {}, "27"),
    ]  # fmt: skip
    rows = [
        Case(f"worked-{n}", (3, 4, 6), cap, "1.2", 30, target, planner=planner)
        for n, (cap, planner, target) in enumerate(worked)
    ]
    rows += [Case(f"d4p4-{cap}", (4, 4, 8), cap, "1.2", 9, target) for cap, target in ((4, "<= 35"), (7, "33"))]
    rows += [Case(f"d4p8-{cap}", (4, 8, 16), cap, "1.3", 30, target) for cap, target in ((8, "<= 2 %"), (15, "0 %"))]
    rows += [Case(f"d16p16-{n}", (16, 16, 64), 16, str(n), 55, "<= 3 %") for n in (1, 6, 13)]
    rows += [Case(f"d24p64-{n}", (24, 64, 64), 64, str(n), 115, "<= 5 %") for n in (1, 15, 77)]
    rows += [Case(f"d24p64-{n}-cap127", (24, 64, 64), 127, str(n), 115, "<= 2 %") for n in (1, 15, 77)]
    rows.append(Case("d24p64m256-77", (24, 64, 256), 64, "77", 115, "first <= 2 s"))
    for shape, dead in (((4, 8, 16), "1.3,2.6"), ((8, 8, 32), "1.4,2.7"), ((16, 16, 64), "1.4,2.7")):
        for cap in (shape[1], 2 * shape[1] - 1):
            for stash in (1.0, 0.6):
                name = f"measured-d{shape[0]}p{shape[1]}-{cap}-{stash:g}"
                rows.append(Case(name, shape, cap, dead, 60, "<= 4 %", MEASURED, stash))
    rows.append(Case("uneven-d4p8", (4, 8, 12), 8, "1.3,2.6", 30, "", UNEVEN, 0.6))
    rows.append(Case("d32p64-2-chunks", (32, 64, 64), 128, "3.7", 115, "<= 5 %", chunks=2))
    rows += [Case(f"d64p32-{n}", (64, 32, 128), 32, str(n), 240, "<= 300 s") for n in (20, 205)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of cases, or beginnings of them")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the time limits")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--cp-sat", type=float, default=CP_SAT_SECONDS, metavar="SECONDS", help="per small case; 0: leave it out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, as they come")
    arguments = parser.parse_args()
    rows: list[dict[str, str]] = []
    titles = ("case", "D,P,m", "cap", "dead", "period", "bound", "gap", "closed", "first s", "s", "target", "CP-SAT")
    print("".join(f"{title:>{width}}" for title, width in zip(titles, WIDTHS, strict=True)))
    for case in cases():
        if arguments.only and not any(case.name.startswith(name) for name in arguments.only):
            continue
        row = measured(case, arguments)
        print("".join(f"{cell:>{width}}" for cell, width in zip(row, WIDTHS, strict=True)), flush=True)
        rows.append(dict(zip(titles, row, strict=True)))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if not arguments.only or any("library".startswith(name) for name in arguments.only):
        print(library(arguments))


def library(arguments: argparse.Namespace) -> str:
    """What a library costs and gives; targets: 10 minutes, 10 ms a lookup, a second on the spot."""
    job = Case("library", (32, 8, 32), 8, "", 0, "").job()
    random, workers = Random(0), list(job.shape.workers())
    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        entries = plan_library(job, 64, Path(directory), seconds=600 * arguments.scale, processes=arguments.processes)
        took = time.perf_counter() - begun
        shelf, lookups, made = PlanLibrary(Path(directory), job), [], []
        for dead in (random.sample(workers, random.randint(1, 64)) for _ in range(200)):
            begun = time.perf_counter()
            shelf.lookup(dead)
            lookups.append(1e3 * (time.perf_counter() - begun))
            if len(made) < 20:
                begun = time.perf_counter()
                plan(job, dead, quick=True)
                made.append(time.perf_counter() - begun)
    gaps = [entry.period / entry.lower_bound - 1 for entry in entries]
    return (
        f"library 32,8,32 up to 64 dead: {len(entries)} plans in {took:.0f} s, mean gap {mean(gaps):.2%}, largest"
        f" {max(gaps):.1%}; lookup {median(lookups):.1f} ms in the median, {max(lookups):.1f} ms at most;"
        f" a plan on the spot {median(made):.2f} s in the median, {max(made):.2f} s at most"
    )


WIDTHS = (23, 12, 10, 6, 9, 9, 8, 10, 9, 8, 10, 16)


def measured(case: Case, arguments: argparse.Namespace) -> list[str]:
    job, dead = case.job(), case.workers()
    begun, first = time.perf_counter(), 0.0

    def progress(stage: str, period: float) -> None:
        nonlocal first
        if not first and period < float("inf"):
            first = time.perf_counter() - begun

    made = plan(job, dead, seconds=case.seconds * arguments.scale, processes=arguments.processes, progress=progress)
    took = time.perf_counter() - begun
    problem = Problem.from_job(job, made.schedule.failed)
    weaker = closed_form(problem)
    peer = ""
    if arguments.cp_sat and problem.size <= CP_SAT_UP_TO:
        peer = cp_sat(problem, arguments.cp_sat)
    return [
        case.name, ",".join(map(str, case.shape)), str(case.cap).replace(" ", ""), str(len(dead)), f"{made.period:g}",
        f"{made.lower_bound:g}", f"{made.gap:.2%}", f"{made.period / weaker - 1:.1%}", f"{first:.1f}", f"{took:.1f}",
        case.target, peer,
    ]  # fmt: skip


def cp_sat(problem: Problem, seconds: float) -> str:
    if importlib.util.find_spec("ortools") is None:
        return "no ortools"
    from benchmarks import cp_sat as peer

    return peer.summary(problem, seconds)


if __name__ == "__main__":
    main()
