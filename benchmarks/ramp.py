"""Period of iterations with a part of the batch, under the plan of the whole batch and under plans made for the part.

    python benchmarks/ramp.py [--seconds 3]

D=4 P=4 m=16, F = I = W = 1, eight activations per worker. Prints own period and relative excess for each set of dead
workers, and for the families that fit.
"""

from __future__ import annotations

import argparse
import warnings

from recycle import Profile, Shape, Worker, lower, simulate
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.lower import with_first_micro_batches
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.solve.planner import plan

WHOLE, PARTS = 16, (4, 8, 12)
DEAD = ((), ("1.2",), ("1.2", "0.1"))


def job(micro_batches: int, seconds: float) -> PricedJob:
    shape = f"[shape]\npipelines = 4\nranks = 4\nmicro_batches = {micro_batches}\n"
    return price(Job.from_toml(f"{shape}[memory]\nlimit = 8\n[planner]\nseconds = {seconds}\n"))


def period(schedule: Schedule) -> float:
    return simulate(lower(schedule), Profile.uniform(forward=1, backward_input=1, backward_weight=1)).period


def report(name: str, whole: Schedule, own: dict[int, Schedule]) -> None:
    for part, schedule in own.items():
        needed = period(schedule)
        excess = period(with_first_micro_batches(lower(whole), part)) / needed - 1
        print(f"{name:<24} m={part:<3} {needed:6.1f} {excess:+7.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="planning time of each plan")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # simulate warns of the micro-batches that the whole shape has besides
    for family in (one_f_one_b, zb_h1):
        report(family.__name__, family(Shape(4, 4, WHOLE)), {part: family(Shape(4, 4, part)) for part in PARTS})
    for dead in DEAD:
        failed = frozenset(map(Worker.parse, dead))
        plans = {m: plan(job(m, given.seconds), failed).schedule for m in (WHOLE, *PARTS)}
        name = f"plan without {' '.join(dead)}" if dead else "plan"
        report(name, plans[WHOLE], {part: plans[part] for part in PARTS})


if __name__ == "__main__":
    main()
