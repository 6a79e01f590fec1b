"""Elastic layouts against re-routing: periods of plans without dead workers, over the even share of the work.

    python benchmarks/elastic.py             # all rows, about ten minutes on 2 cores
    python benchmarks/elastic.py --rows 3 --from 4
    python benchmarks/elastic.py --chunks 2 --rows 8

All units of a fault-free worker take F = I = W = 1. Workers hold 1.25 times the fault-free state and the activations of
2 P micro-batches. The even share is all work divided by all live workers. "re-routing, bound" is the lower bound with
the given stages, "re-routing" the planner's plan with them. The first plan is the one that training continues with
immediately. CPU seconds of planning are given for the first plan, in a process that has planned before, and for the
layout.
"""

from __future__ import annotations

import argparse
import random
import time

from recycle.job import Job, price
from recycle.job.shape import Worker
from recycle.solve.planner import plan

ROWS = (
    (4, 8, 64, 64, 1, "anywhere"),
    (4, 8, 64, 64, 3, "in one pipeline"),
    (4, 8, 64, 64, 3, "spread"),
    (4, 8, 64, 32, 1, "anywhere"),
    (4, 8, 64, 16, 1, "anywhere"),
    (2, 8, 32, 32, 1, "anywhere"),
    (8, 4, 64, 32, 1, "anywhere"),
    (8, 4, 64, 32, 4, "spread"),
    (16, 16, 256, 96, 1, "anywhere"),
    (16, 16, 256, 96, 13, "spread"),
    (24, 64, 256, 128, 77, "spread"),
)
"""D, P, m, layers, dead workers, where."""

HEAD = (
    *("D, P, m, layers", "dead", "elastic / even share", "re-routing, bound", "re-routing"),
    *("units copied", "CPU seconds", "first plan", "CPU seconds of it"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="how many rows, from the first")
    parser.add_argument("--from", type=int, default=0, dest="first", help="rows to leave out before them")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    parser.add_argument("--seed", type=int, default=1, help="of the dead workers")
    parser.add_argument("--chunks", type=int, default=1, help="stages of each fault-free worker")
    parser.add_argument("--only-first", action="store_true", dest="only_first", help="the first plans alone")
    options = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for D, P, m, layers, count, where in ROWS[options.first :][: options.rows]:
        V = options.chunks
        text = f"[shape]\npipelines = {D}\nranks = {P}\nmicro_batches = {m}\nchunks = {V}\n"
        text += f"[memory]\nlimit = {2 * P * V}\n"
        text += f"[times]\nforward = {1 / V}\nbackward_input = {1 / V}\nbackward_weight = {1 / V}\n"
        job = price(Job.from_toml(f'{text}[model]\nlayers = {layers}\n[planner]\nlayout = "elastic"\n'))
        fixed = price(Job.from_toml(f"{text}[model]\nlayers = {layers}\n"))
        chance = random.Random(options.seed)
        among = [Worker(0, rank) for rank in range(P)] if where == "in one pipeline" else list(job.shape.workers())
        dead = chance.sample(among, count)
        for _ in range(2):
            begun = time.process_time()
            first = plan(fixed, dead, quick=True)
            at_once = time.process_time() - begun
        if options.only_first:
            print(
                f"| {D}, {P}, {m}, {layers} | {count} {where} | {at_once:.2f} s, {first.seconds:.2f} s of the clock |"
            )
            continue
        begun = time.process_time()
        made = plan(job, dead, seconds=options.seconds)
        seconds = time.process_time() - begun
        rerouted = plan(fixed, dead, seconds=options.seconds / 4)
        bound, copied = (
            3 * D * P * m / (D * P - count),
            sum(move.units[1] - move.units[0] for move in made.moves if move.units),
        )
        print(
            f"| {D}, {P}, {m}, {layers} | {count} {where} | {made.period / bound:.3f}"
            f" | {(made.fixed_bound or rerouted.lower_bound) / bound:.3f} | {rerouted.period / bound:.3f}"
            f" | {copied} | {seconds:.1f} | {first.period / bound:.3f} | {at_once:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
