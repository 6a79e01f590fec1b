"""How long the communicators of a generation take to form: communicators of a worker, and seconds.

    python benchmarks/formation.py [--seconds 0.2] [--shapes 16x16x64,...]

For each shape one worker dies, rejoins, and dies again. Plans, shared communicators, order of formation and reuse are
the executor's. Time is simulated: each communicator takes the given seconds from when all its members have begun it,
and a process forms a few at a time.

    start       no communicator exists
    fault       in the middle of an iteration: receives wait on every lane, so no lane is reused; sums without the dead
                worker are reused
    fault, idle no transfer was in progress between survivors: only communicators that the plan changes are formed
    rejoin      between two iterations, with the lane that copies the state
    fault again in the middle of an iteration, like the first one; lanes that the plan without faults does not need were
                kept as spares

`most` is the largest number of communicators of a worker, `formed` of those that one worker forms, `in turn` the
seconds if a process formed one at a time. `step` is the simulated time of an iteration with shared communicators, over
that with one per lane.
"""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from recycle import Job, Schedule, Worker, simulate
from recycle.exec.transport.base import Lane, sum_groups
from recycle.exec.transport.formation import AT_ONCE, SUM, formation_order
from recycle.ir.communicators import lanes_of
from recycle.ir.lower import lower
from recycle.job import price
from recycle.job.footprint import COMMUNICATORS
from recycle.job.profile import Profile
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training

SHAPES = "4x4x8,8x8x32,16x16x64,32x16x64,24x64x64"
LATENCY = 0.1
"""Time of a transfer, in units of a forward, for `step`."""
Key = tuple[str, tuple[Worker, ...]]
"""Purpose, and members, processes by rank."""


def plan(pipelines: int, ranks: int, micro_batches: int, dead: Collection[Worker]) -> tuple[Schedule, dict]:
    """The plan that training begins with while there is none from a search, and the role of each process."""
    text = f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
    job = price(Job.from_toml(f"{text}[memory]\nlimit = {ranks + 4}\n[planner]\nsteps = 1\n"))
    vector = [sum(worker.rank == rank for worker in dead) for rank in range(ranks)]
    made = Plan.from_text(plan_for_training(job, vector, True), "plan")
    return lower(made.schedule), made.roles(dead)


def needed(schedule: Schedule, roles: Mapping[Worker, Worker], joins: Collection[Lane] = ()) -> list[Key]:
    """The communicators of a generation, in the order in which they form."""
    process = {role: played_by for played_by, role in roles.items()}
    copies = {(roles[source], roles[joiner]) for source, joiner in joins}
    keys = []
    for wanted in formation_order(lanes_of(schedule), sum_groups(schedule), copies):
        members = tuple(process[role] for role in wanted.members)
        keys.append((wanted.purpose, members if len(wanted.lanes) == 1 else tuple(sorted(members))))
    return keys


def turns(keys: Sequence[Key], at_once: int) -> int:
    """The longest chain of communicators, each of which begins once it is among the first of all its members."""
    free: dict[Worker, list[int]] = {}
    last = 0
    for _, members in keys:
        slots = [free.setdefault(worker, [0] * at_once) for worker in members]
        ends = 1 + max(min(of_worker) for of_worker in slots)
        for of_worker in slots:
            of_worker[of_worker.index(min(of_worker))] = ends
        last = max(last, ends)
    return last


def spares(held: Collection[Key], needed_now: Collection[Key]) -> set[Key]:
    """The unneeded communicators of `held` that both ends keep; `held` is in the order of the last use."""
    of: dict[Worker, list[Key]] = {}
    for key in held:
        if key not in needed_now:
            for worker in key[1]:
                of.setdefault(worker, []).append(key)
    own = Counter(worker for key in needed_now for worker in key[1])
    dropped = {key for w, keys in of.items() for key in keys[: max(0, len(keys) + own[w] - COMMUNICATORS)]}
    return set(held) - set(needed_now) - dropped


def degree(keys: Collection[Key]) -> int:
    return max(Counter(worker for _, members in keys for worker in members).values(), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="that a communicator takes to form")
    parser.add_argument("--shapes", default=SHAPES, help="pipelines x ranks x micro-batches, with commas between them")
    options = parser.parse_args()
    profile = Profile(latency=LATENCY)
    print(f"{options.seconds} s per communicator; Python {platform.python_version()}, torch {torch.__version__}")
    columns = ("needed", "most", "changed", "made", "formed", "seconds", "in turn", "step")
    print(f"{'shape':10} {'generation':12}" + "".join(f"{column:>9}" for column in columns))
    for shape in options.shapes.split(","):
        size = tuple(map(int, shape.split("x")))
        dead = Worker(1, size[1] // 2)

        def row(
            name: str,
            of: Sequence[Key],
            before: Collection[Key],
            kept: Collection[Key],
            step: float,
            shape: str = shape,
        ) -> None:
            made = [key for key in of if key not in kept]
            figures = (len(of), degree(of), len(set(of) - set(before)), len(made), degree(made))
            seconds = [options.seconds * turns(made, at_once) for at_once in (AT_ONCE, 1)]
            print(
                f"{shape:10} {name:12}"
                + "".join(f"{figure:9}" for figure in figures)
                + "".join(f"{each:9.1f}" for each in seconds)
                + f"{step:9.4f}",
                flush=True,
            )

        healthy, healthy_roles = plan(*size, ())
        failed, failed_roles = plan(*size, (dead,))
        source = min(worker for worker in healthy_roles if worker.rank == dead.rank)
        all_live, without = needed(healthy, healthy_roles), needed(failed, failed_roles)
        joined = needed(healthy, healthy_roles, [(source, dead)])
        survive = [key for key in all_live if dead not in key[1]]
        sums = [key for key in survive if key[0] == SUM]
        steps = [
            simulate(plan, profile, shared=True).period / simulate(plan, profile).period for plan in (healthy, failed)
        ]
        row("start", all_live, (), (), steps[0])
        row("fault", without, all_live, sums, steps[1])
        row("fault, idle", without, all_live, survive, steps[1])
        row("re-join", joined, without, without, steps[0])
        idle = spares([*without, *joined], joined)
        row("fault again", without, joined, {*idle, *sums}, steps[1])


if __name__ == "__main__":
    main()
