"""How long the communicators of a generation take to form: rounds, communicators, and seconds.

    python benchmarks/formation.py [--seconds 0.2] [--shapes 16x16x64,...]

For each shape one worker dies, rejoins, and dies again. Plans, order of formation and reuse of communicators are the
executor's. Time is simulated: forming a communicator keeps all its members busy for the given seconds.

    start       no communicator exists
    fault       in the middle of an iteration: receives wait on every lane, so no lane is reused; sums without the dead
                worker are reused
    fault, idle no transfer was in progress between survivors: only communicators that the plan changes are formed
    rejoin      between two iterations, with the lane that copies the state
    fault again in the middle of an iteration, like the first one; lanes that the plan without faults does not need were
                kept as spares

`changed` counts the communicators that the previous generation did not have, `degree` is the most that one process
forms, `rounds` the longest chain of communicators that form one after the other, and `sorted` that chain if all formed
again in the order of their names.
"""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from recycle import Job, Schedule, Worker
from recycle.exec.transport.base import Lane, sum_groups
from recycle.exec.transport.communicators import SPARES
from recycle.exec.transport.formation import formation_order, lanes_of
from recycle.ir.lower import lower
from recycle.job import price
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training

SHAPES = "4x4x8,8x8x32,16x16x64,32x16x64,24x64x64"
Key = tuple[int | None, tuple[Worker, ...]]
"""Number of the sum, None for a lane, and its members, processes by rank."""


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
    lanes = {*lanes_of(schedule), *((roles[source], roles[joiner]) for source, joiner in joins)}
    keys = []
    for wanted in formation_order(lanes, sum_groups(schedule)):
        members = tuple(process[role] for role in wanted.members)
        keys.append((wanted.stage, members if wanted.stage is None else tuple(sorted(members))))
    return keys


def rounds(keys: Sequence[Key]) -> int:
    """The longest chain of communicators, each of which forms once all its members are free."""
    free: dict[Worker, int] = {}
    for _, members in keys:
        ends = 1 + max(free.get(worker, 0) for worker in members)
        free.update(dict.fromkeys(members, ends))
    return max(free.values(), default=0)


def spares(held: Collection[Key], needed_now: Collection[Key]) -> set[Key]:
    """The unneeded communicators of `held` that both ends keep; `held` is in the order of the last use."""
    of: dict[Worker, list[Key]] = {}
    for key in held:
        if key not in needed_now:
            for worker in key[1]:
                of.setdefault(worker, []).append(key)
    dropped = {key for keys in of.values() for key in keys[: max(0, len(keys) - SPARES)]}
    return set(held) - set(needed_now) - dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="that a communicator takes to form")
    parser.add_argument("--shapes", default=SHAPES, help="pipelines x ranks x micro-batches, with commas between them")
    options = parser.parse_args()
    print(f"{options.seconds} s per communicator; Python {platform.python_version()}, torch {torch.__version__}")
    columns = ("needed", "changed", "made", "degree", "rounds", "seconds", "sorted", "seconds")
    print(f"{'shape':10} {'generation':12}" + "".join(f"{column:>9}" for column in columns))
    for shape in options.shapes.split(","):
        size = tuple(map(int, shape.split("x")))
        dead = Worker(1, size[1] // 2)

        def row(
            name: str, of: Sequence[Key], before: Collection[Key], kept: Collection[Key], shape: str = shape
        ) -> None:
            made = [key for key in of if key not in kept]
            degree = max(Counter(worker for _, members in made for worker in members).values(), default=0)
            by_name = sorted(of, key=lambda key: (key[0] is not None, key[0] or 0, key[1]))
            chain, chain_before = rounds(made), rounds(by_name)
            figures = (len(of), len(set(of) - set(before)), len(made), degree, chain)
            print(
                f"{shape:10} {name:12}"
                + "".join(f"{figure:9}" for figure in figures)
                + f"{chain * options.seconds:9.1f}{chain_before:9}{chain_before * options.seconds:9.1f}",
                flush=True,
            )

        healthy, healthy_roles = plan(*size, ())
        failed, failed_roles = plan(*size, (dead,))
        source = min(worker for worker in healthy_roles if worker.rank == dead.rank)
        all_live, without = needed(healthy, healthy_roles), needed(failed, failed_roles)
        joined = needed(healthy, healthy_roles, [(source, dead)])
        survive = [key for key in all_live if dead not in key[1]]
        sums = [key for key in survive if key[0] is not None]
        row("start", all_live, (), ())
        row("fault", without, all_live, sums)
        row("fault, idle", without, all_live, survive)
        row("re-join", joined, without, without)
        idle = spares([*without, *joined], joined)
        row("fault again", without, joined, {*idle, *sums})


if __name__ == "__main__":
    main()
