"""The planner on random jobs by family: gaps to the proven bound, and whether plans are on time.

    python benchmarks/planner_random.py [--jobs N] [--seconds S] [--seed N] [--processes N] [--only FAMILY ...]
                                        [--json FILE]

Every job is drawn from the seed, its family and its number: 2 to 16 pipelines of 2 to 16 ranks, 1 to 4 P
micro-batches, stages equal or not, some workers dead. Stages lie on a V in the families vee, else on a loop. Tight
memory holds V to V P activations, loose memory 2 V P or any number. Links cost nothing or little, except in the family
named after them. gap is period / bound - 1. A plan is late if it takes more than 1.2 times its seconds plus half a
second. The line below each row gives its worst job.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle.job import Job, PricedJob, price
from recycle.job.shape import Shape, Worker
from recycle.solve.planner import plan


@dataclass(frozen=True)
class Family:
    """Jobs of one kind, and the gaps that are aimed at: median, p90 and worst, in per cent."""

    chunks: tuple[int, ...]
    is_tight: tuple[bool, ...]
    slow: int
    links: tuple[float, ...]
    target: str
    placement: str = "loop"


SMALL_LINKS = (0.0, 0.0, 0.05, 0.2)
FAMILIES = {
    "v1-loose": Family((1,), (False,), 0, SMALL_LINKS, "0 / 3 / 8"),
    "v1-tight": Family((1,), (True,), 0, SMALL_LINKS, "1.5 / 6 / 12"),
    "v2-loose": Family((2,), (False,), 0, SMALL_LINKS, "1 / 6 / 15"),
    "v2-tight": Family((2,), (True,), 0, SMALL_LINKS, "5 / 15 / 30"),
    "vee-loose": Family((2,), (False,), 0, SMALL_LINKS, "0.5 / 5 / 10", "v"),
    "vee-tight": Family((2,), (True,), 0, SMALL_LINKS, "3 / 10 / 20", "v"),
    "slow": Family((1, 1, 2), (True, False), 2, SMALL_LINKS, "1 / 6 / 12"),
    "link": Family((1, 1, 2), (True, False), 0, (1.0, 1.5, 2.0), "1 / 6 / 12"),
}


@dataclass(frozen=True)
class Row:
    """One job and its plan; times in units of F, `took` in seconds."""

    family: str
    number: int
    job: str
    period: float
    bound: float
    gap: float
    took: float


def drawn(family: str, number: int, seed: int, largest: int = 16) -> tuple[PricedJob, list[Worker], str]:
    """(a job of at most so many pipelines and ranks, its dead workers, both in a line of text)."""
    draw, kind = Random(f"{seed} {family} {number}"), FAMILIES[family]
    shape = Shape(draw.randint(2, largest), draw.randint(2, largest), 1, draw.choice(kind.chunks))
    shape = replace(shape, micro_batches=draw.randint(1, 4 * shape.ranks))
    full = shape.chunks * shape.ranks
    limit = draw.randint(shape.chunks, full) if draw.choice(kind.is_tight) else draw.choice([None, 2 * full])
    times: dict[str, Any] = {"link": draw.choice(kind.links)}
    if draw.random() < 0.5:
        for key in ("forward", "backward_input", "backward_weight"):
            times[key] = [round(draw.uniform(0.6, 1.6), 1) for _ in range(shape.stages)]
    grid = shape.to_json() | {"placement": kind.placement}
    made = msgspec.convert({"shape": grid, "times": times, "memory": {"limit": limit}}, type=Job)
    made.validate()
    job = price(made)
    left = [shape.pipelines - 1] * shape.ranks
    dead: set[Worker] = set()
    for worker in draw.sample(list(shape.workers()), draw.randint(0, max(1, shape.worker_count // 8))):
        if left[worker.rank]:
            left[worker.rank] -= 1
            dead.add(worker)
    live = [worker for worker in shape.workers() if worker not in dead]
    slow = draw.sample(live, draw.randint(1, kind.slow)) if kind.slow else []
    speed = {str(worker): draw.choice([1.2, 1.5, 2.0, 3.0]) for worker in slow}
    job = msgspec.structs.replace(job, prices=replace(job.prices, speed=speed))
    stages = "unequal" if "forward" in times else "equal"
    text = f"{shape}, {kind.placement}, {stages}, limit {limit}, link {times['link']:g}, {len(dead)} dead"
    text += f", slow {speed or 'none'}"
    return job, sorted(dead), text


def measured(family: str, number: int, seed: int, seconds: float) -> Row:
    """Plan one job."""
    job, dead, text = drawn(family, number, seed)
    begun = time.perf_counter()
    made = plan(job, dead, seconds=seconds)
    return Row(family, number, text, made.period, made.lower_bound, made.gap, time.perf_counter() - begun)


def rows(families: list[str], arguments: argparse.Namespace) -> Iterator[Row]:
    """A row for each job, in the order of the families."""
    tasks = [(family, number) for family in families for number in range(per_family(arguments))]
    if arguments.processes < 2:
        yield from (measured(*task, arguments.seed, arguments.seconds) for task in tasks)
        return
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        futures = [pool.submit(measured, *task, arguments.seed, arguments.seconds) for task in tasks]
        yield from (future.result() for future in futures)


def per_family(arguments: argparse.Namespace) -> int:
    return max(1, arguments.jobs // len(FAMILIES))


def summary(family: str, found: list[Row], seconds: float) -> str:
    """A line of the table, and the worst job below it."""
    gaps = [100 * row.gap for row in found]
    p90 = quantiles(gaps, n=10, method="inclusive")[-1] if len(gaps) > 1 else gaps[0]
    met = sum(gap < 1e-6 for gap in gaps)
    late = sum(row.took > 1.2 * seconds + 0.5 for row in found)
    worst = max(found, key=lambda row: row.gap)
    figures = f"{median(gaps):.1f} / {p90:.1f} / {max(gaps):.1f}"
    return (
        f"{family:<10}{len(found):>6}{met:>6}{figures:>24}{FAMILIES[family].target:>18}{late:>6}"
        f"{max(row.took for row in found):>8.1f}\n"
        f"          {worst.number}: {worst.job}: {worst.period:g}, bound {worst.bound:g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300, help="of all families together")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="plans at the same time")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each job there")
    arguments = parser.parse_args()
    families = arguments.only or list(FAMILIES)
    title = f"{'family':<10}{'jobs':>6}{'met':>6}{'median / p90 / worst %':>24}{'target':>18}{'late':>6}{'longest':>8}"
    print(title)
    found: dict[str, list[Row]] = {family: [] for family in families}
    for row in rows(families, arguments):
        found[row.family].append(row)
        if len(found[row.family]) == per_family(arguments):
            print(summary(row.family, found[row.family], arguments.seconds), flush=True)
    if arguments.json:
        listed = [asdict(row) for family in families for row in found[family]]
        arguments.json.write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
