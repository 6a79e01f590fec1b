"""The planner against simpler methods: greedy 1F1B, schedule families, and the job without its slow workers.

    python benchmarks/planner_rivals.py [--jobs N] [--seconds S] [--seed N] [--processes N] [--largest N]
                                        [--only FAMILY ...]

Random jobs as in `planner_random`, of every family in turn, but smaller. The same job without each of its slow workers,
and without all of them, is planned in the same time. Greedy 1F1B assigns the micro-batches of dead workers to their
peers in turn; an idle worker takes a backward if one is ready, else a forward while fewer are in flight than 1F1B's
warm-up and the memory allow. A schedule family competes if it is valid for the job and places its stages as the planner
does. `simulate` times all of them. The kernels are compiled before, so that no plan waits for them. The output is how
many plans each rival beats, and by how much at most.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.planner_random import FAMILIES, drawn
from recycle.errors import PlanError, ScheduleError
from recycle.ir import families
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.job.shape import MicroBatch, Shape, Worker
from recycle.plans import errors
from recycle.solve.planner import plan
from recycle.solve.search.compile_kernels import compile_all

BEATEN = 1e-6
"""Share of the period by which a rival must be ahead to count, above the rounding of sums."""


@dataclass(frozen=True)
class Outcome:
    """One job: its plan's period, and the period of every rival that could take part."""

    job: str
    period: float
    rivals: dict[str, float]


def greedy(job: PricedJob, dead: list[Worker]) -> Schedule | None:
    """Greedy 1F1B on the survivors; None with several chunks, or where it comes to a halt."""
    shape, prices = job.shape, job.prices
    if shape.chunks > 1:
        return None
    hosts = _dealt(shape, dead)
    limits = job.limits or [float("inf")] * shape.ranks
    times = [prices.per_stage(kind, shape.stages) for kind in ("forward", "backward_input", "backward_weight")]
    split = job.planner.decoupled
    programs: dict[Worker, list[Instruction]] = defaultdict(list)
    ready: dict[Worker, dict[str, list[tuple[int, int]]]] = {w: {"B": [], "F": []} for w in shape.workers()}
    in_flight: dict[Worker, int] = defaultdict(int)
    busy: dict[Worker, float] = defaultdict(float)
    for k in range(shape.pipelines):
        for j in range(shape.micro_batches):
            heapq.heappush(ready[hosts[0, k, j]]["F"], (j, k))
    events: list[tuple[float, int, str, tuple[int, int], int]] = []
    now = 0.0

    def start(w: Worker) -> None:
        warm_up = min(limits[w.rank], shape.ranks - w.rank)
        kind = "B" if ready[w]["B"] else "F" if ready[w]["F"] and in_flight[w] < warm_up else None
        if kind is None or busy[w] > now:
            return
        j, k = heapq.heappop(ready[w][kind])
        s, speed = w.rank, prices.speed_of(w)
        if kind == "F":
            programs[w].append(Forward(s, MicroBatch(k, j)))
            in_flight[w] += 1
            seconds = first = times[0][s] * speed
        else:
            backward = [BackwardInput, BackwardWeight] if split else [Backward]
            programs[w] += [cls(s, MicroBatch(k, j)) for cls in backward]
            in_flight[w] -= 1
            seconds = (times[1][s] + times[2][s]) * speed
            first = times[1][s] * speed if split else seconds
        busy[w] = now + seconds
        heapq.heappush(events, (now + seconds, w.pipeline * shape.ranks + s, "idle", (j, k), s))
        link = 0.0 if kind == "F" and s + 1 == shape.ranks else prices.latency
        heapq.heappush(events, (now + first + link, w.pipeline * shape.ranks + s, kind, (j, k), s))

    for w in shape.workers():
        start(w)
    while events:
        now, number, kind, (j, k), s = heapq.heappop(events)
        w = Worker(*divmod(number, shape.ranks))
        if kind == "F":
            w = hosts[min(s + 1, shape.ranks - 1), k, j]
            heapq.heappush(ready[w]["F" if s + 1 < shape.ranks else "B"], (j, k))
        elif kind == "B" and s > 0:
            w = hosts[s - 1, k, j]
            heapq.heappush(ready[w]["B"], (j, k))
        start(w)
    optimizer = "staggered" if job.planner.staggered else "barrier"
    return Schedule.build(shape, programs, failed=dead, optimizer=optimizer)


def _dealt(shape: Shape, dead: list[Worker]) -> dict[tuple[int, int, int], Worker]:
    """The worker of each (stage, pipeline, micro-batch): its own, or the peers of a dead one in turn."""
    hosts = {}
    for s in range(shape.stages):
        live = [Worker(k, s) for k in range(shape.pipelines) if Worker(k, s) not in dead]
        turn = 0
        for j in range(shape.micro_batches):
            for k in range(shape.pipelines):
                hosts[s, k, j] = home = Worker(k, s)
                if home in dead:
                    hosts[s, k, j] = live[turn % len(live)]
                    turn += 1
    return hosts


def rivals(job: PricedJob, dead: list[Worker], seconds: float) -> Iterator[tuple[str, float]]:
    """(name, period) of every rival that can take part."""
    built = greedy(job, dead)
    if built is not None:
        yield "greedy 1F1B", simulate(built, job.prices).period
    optimizer = "staggered" if job.planner.staggered else "barrier"
    for name, family in families.FAMILIES.items() if not dead else ():
        try:
            built = family(job.shape, optimizer=optimizer)
        except ScheduleError:
            continue
        if built.placement == Schedule.build(job.shape, {}).placement and not errors(built, job):
            yield name, simulate(built, job.prices).period
    slow = [worker for worker in job.shape.workers() if job.prices.speed_of(worker) != 1 and worker not in dead]
    for without in dict.fromkeys([*((worker,) for worker in slow), tuple(slow)]) if slow else ():
        try:
            yield "without slow workers", plan(job, [*dead, *without], seconds=seconds).period
        except PlanError:
            continue


def measured(family: str, number: int, seed: int, seconds: float, largest: int) -> Outcome:
    """Plan one job, and its rivals."""
    job, dead, text = drawn(family, number, seed, largest)
    period = plan(job, dead, seconds=seconds).period
    found: dict[str, float] = {}
    for name, rival in rivals(job, dead, seconds):
        found[name] = min(rival, found.get(name, rival))
    return Outcome(text, period, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--largest", type=int, default=6, help="pipelines, and ranks, at most")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    arguments = parser.parse_args()
    kinds = arguments.only or list(FAMILIES)
    begun = time.perf_counter()
    taken: dict[str, int] = defaultdict(int)
    ahead: dict[str, list[tuple[float, str]]] = defaultdict(list)
    options = (arguments.seed, arguments.seconds, arguments.largest)
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), compile_all) as pool:
        jobs = [(kinds[number % len(kinds)], number) for number in range(arguments.jobs)]
        futures = [pool.submit(measured, *job, *options) for job in jobs]
        for future in futures:
            outcome = future.result()
            for name, period in outcome.rivals.items():
                taken[name] += 1
                if period < outcome.period * (1 - BEATEN):
                    ahead[name].append((outcome.period / period - 1, f"{outcome.job}: {outcome.period:g}, {period:g}"))
                    print(f"{name}: {ahead[name][-1][1]}", flush=True)
    print(f"{arguments.jobs} jobs of at most {arguments.largest} x {arguments.largest}, {arguments.seconds:g} s each,")
    print(f"seed {arguments.seed}, {time.perf_counter() - begun:.0f} s in all")
    print(f"{'rival':<24}{'took part':>10}{'ahead':>8}{'at most %':>11}")
    for name, count in taken.items():
        most = max((gain for gain, _ in ahead[name]), default=0.0)
        print(f"{name:<24}{count:>10}{len(ahead[name]):>8}{100 * most:>11.1f}")


if __name__ == "__main__":
    main()
