"""The planner beside CP-SAT, a constraint solver that gets the same problems: a peer for periods, an oracle for bounds.

    python benchmarks/cp_sat.py [--seconds N] [--random N]

CP-SAT gets the whole problem: which peer runs each re-routed micro-batch, every order, memory as a cumulative resource
and the period as the longest window of a stage. The rows of the worked example are printed with the planner's bound
and plan beside its own; `--random` then draws small jobs of every kind and counts bounds above a proven optimum, which
must be none. Needs ortools (the extra `bench`), which works in a process of its own, as its copy of HiGHS and the
planner's do not go together. Limits: one chunk per worker; times that some factor makes whole.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import random
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle.job import Job, PricedJob, price
from recycle.shape import Worker
from recycle.solve.bounds import lower_bound
from recycle.solve.planner import plan
from recycle.solve.problem import Problem

FACTORS = (1, 2, 4, 5, 10, 20, 100)
SLOT = 1000
"""Parts of an activation in which memory is counted."""
CAPS: tuple[int | list[int], ...] = ([4, 3, 2, 1], 4, 5, 6)


@dataclass(frozen=True)
class Answer:
    """What CP-SAT came to: its best period (None without one), its proven bound, and how long it took."""

    status: str
    period: float | None
    bound: float
    seconds: float


def solve(problem: Problem, seconds: float) -> Answer:
    """CP-SAT's answer to the whole problem, in whole units of the smallest time step that all times share."""
    from ortools.sat.python import cp_model

    if problem.shape.chunks > 1:
        raise SystemExit("cp_sat: one chunk per worker only")
    cut = _factor(problem)
    model, period = _model(problem, cut)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    begun = time.monotonic()
    status = solver.solve(model)
    took = time.monotonic() - begun
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(solver.status_name(status).lower(), None, solver.best_objective_bound / cut, took)
    bound = solver.best_objective_bound / cut
    return Answer(solver.status_name(status).lower(), solver.value(period) / cut, bound, took)


def in_child(problem: Problem, seconds: float) -> Answer:
    """`solve` in a process without the planner's HiGHS."""
    with concurrent.futures.ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(solve, problem, seconds).result()


def summary(problem: Problem, seconds: float) -> str:
    """`in_child` in a table's cell: best period, proven bound where that is less, and when it ended."""
    if problem.shape.chunks > 1 or not problem.grain:
        return "not modelled"
    answer = in_child(problem, seconds)
    period = "none" if answer.period is None else f"{answer.period:g}"
    proven = "" if answer.status == "optimal" else f" >= {answer.bound:g}"
    return f"{period}{proven} {answer.seconds:.0f} s"


def _factor(problem: Problem) -> int:
    speeds = set(problem.speed)
    times = [t * speed for t in problem.times.tolist() for speed in speeds] + [*problem.finish, problem.link]
    for factor in FACTORS:
        if all(abs(t * factor - round(t * factor)) < 1e-9 for t in times):
            return factor
    raise SystemExit("cp_sat: no factor makes these times whole")


def _model(problem: Problem, cut: int) -> tuple[Any, Any]:
    from ortools.sat.python import cp_model

    shape, n, kinds = problem.shape, problem.micro_batches, problem.kinds
    stages, m, plane = shape.stages, shape.micro_batches, shape.stages * problem.micro_batches
    model = cp_model.CpModel()
    most = sum(problem.times) * n * max(problem.speed) + sum(problem.finish) + 2 * stages * problem.link
    horizon = round(2 * most * cut)
    start = [model.new_int_var(0, horizon, f"start{x}") for x in range(problem.size)]
    end = [model.new_int_var(0, horizon, f"end{x}") for x in range(problem.size)]
    busy: dict[int, list[Any]] = {w: [] for hosts in problem.hosts for w in hosts}
    held: dict[int, list[tuple[Any, int]]] = {w: [] for w in busy}
    chosen: dict[tuple[int, int, int], Any] = {}
    for s in range(stages):
        for g in range(n):
            home = g // m * shape.ranks + s
            hosts = [home] if home in problem.hosts[s] else problem.hosts[s]
            for w in hosts:
                chosen[s, g, w] = model.new_bool_var(f"on{s}_{g}_{w}") if len(hosts) > 1 else True
            if len(hosts) > 1:
                model.add_exactly_one(chosen[s, g, w] for w in hosts)
            rows = [kind * plane + s * n + g for kind in range(kinds)]
            for w in hosts:
                here = chosen[s, g, w]
                for kind, x in enumerate(rows):
                    length = round(problem.duration(kind, s, w) * cut)
                    busy[w].append(model.new_optional_interval_var(start[x], length, end[x], here, f"run{x}_{w}"))
                _hold(model, problem, held[w], start, end, rows, here, horizon)
    hop = round(problem.link * cut)
    for x, (made, here) in enumerate(zip(problem.needs.tolist(), problem.needs_here.tolist(), strict=True)):
        if made >= 0:
            model.add(start[x] >= end[made] + hop)
        if here >= 0:
            model.add(start[x] >= end[here])
    for w, intervals in busy.items():
        model.add_no_overlap(intervals)
        if problem.cap[w] < n:
            spans, parts = zip(*held[w], strict=True)
            model.add_cumulative(spans, parts, int(problem.cap[w] * SLOT + 1e-6))
    period = model.new_int_var(0, horizon, "period")
    last = [model.new_int_var(0, horizon, f"last{s}") for s in range(stages)]
    for s, hosts in enumerate(problem.hosts):
        finish = round(problem.finish[s] * cut)
        for g in range(n):
            model.add(last[s] >= end[(kinds - 1) * plane + s * n + g] + finish)
        for w in hosts:
            first = model.new_int_var(0, horizon, f"first{w}") if problem.staggered else 0
            model.add(last[s] - first <= period)
            work = sum(round(problem.duration(kind, s, w) * cut) for kind in range(kinds))
            here = [(g, chosen[s, g, w]) for g in range(n) if (s, g, w) in chosen]
            model.add(first + work * sum(on for _, on in here) + finish <= last[s])
            if problem.staggered:
                for g, on in here:
                    model.add(first <= start[s * n + g]).only_enforce_if(on)
    _break_symmetry(model, problem, start, chosen)
    model.minimize(period)
    return model, period


def _hold(
    model: Any,
    problem: Problem,
    held: list[tuple[Any, int]],
    start: list[Any],
    end: list[Any],
    rows: list[int],
    here: Any,
    horizon: int,
) -> None:
    """The slot of one micro-batch: whole until its I ends, the stashed share until its W does."""
    parts = [SLOT] if not problem.split else [SLOT, round(problem.stash * SLOT)]
    if len(parts) == 2 and parts[1] == SLOT:
        parts, spans = [SLOT], [(start[rows[0]], end[rows[2]])]
    else:
        spans = [(start[rows[0]], end[rows[1]]), *((end[rows[1]], end[rows[2]]) for _ in parts[1:])]
    for (first, last), part in zip(spans, parts, strict=True):
        length = model.new_int_var(0, horizon, "")
        held.append((model.new_optional_interval_var(first, length, last, here, ""), part))


def _break_symmetry(model: Any, problem: Problem, start: list[Any], chosen: dict[Any, Any]) -> None:
    """Micro-batches of one pipeline are alike: they can be named by their order on the homes before the first dead one.

    Only exchanges that keep every host are used: up to the first dead stage of its pipeline, forwards go by index; in
    a pipeline without dead workers everything does. W follow their I. Pipelines that are dead and fast alike, and
    whose peers are, can be named by their first start.
    """
    shape, n, m = problem.shape, problem.micro_batches, problem.shape.micro_batches
    stages, plane = shape.stages, shape.stages * problem.micro_batches
    signature: dict[Any, list[int]] = {}
    for k in range(shape.pipelines):
        workers = [k * shape.ranks + s for s in range(stages)]
        dead = [s for s, w in enumerate(workers) if w not in problem.hosts[s]]
        until = dead[0] if dead else stages - 1
        for g in range(k * m, k * m + m - 1):
            for s in range(until + 1):
                model.add(start[s * n + g] <= start[s * n + g + 1])
            for x in range(plane + g, problem.size, n):
                if not dead:
                    model.add(start[x] <= start[x + 1])
        figures = tuple((w in problem.hosts[s], problem.speed[w], problem.cap[w]) for s, w in enumerate(workers))
        signature.setdefault(figures, []).append(k)
    for alike in signature.values():
        for k, other in itertools.pairwise(alike):
            model.add(start[k * m] <= start[other * m])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for CP-SAT and for the planner, per row")
    parser.add_argument("--random", type=int, default=0, help="small random jobs on which to test the bounds")
    arguments = parser.parse_args()
    if importlib.util.find_spec("ortools") is None:
        raise SystemExit("cp_sat: ortools is missing; pip install -c constraints.txt -e '.[bench]'")
    print("D=3 P=4 m=6, worker 1.2 dead     cap          bound   plan   CP-SAT  its bound  seconds")
    for staggered in (False, True):
        for cap in CAPS:
            job = _job((3, 4, 6), memory={"limit": cap}, planner={"staggered": staggered, "seconds": arguments.seconds})
            dead = [Worker(1, 2)]
            problem = Problem.of(job, dead)
            answer = in_child(problem, arguments.seconds)
            name = "staggered" if staggered else "barrier"
            row = (
                f"{lower_bound(problem):>6g} {plan(job, dead).period:>6g} {answer.period or '-':>8} {answer.bound:>10g}"
            )
            print(f"  {name:<30} {cap!s:<12} {row} {answer.seconds:>8.1f}", flush=True)
    if arguments.random:
        _check_bounds(arguments.random, arguments.seconds)


def _check_bounds(count: int, seconds: float) -> None:
    closed = met = 0
    wrong: list[int] = []
    problems = [_small(random.Random(seed)) for seed in range(count)]
    with concurrent.futures.ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answers = list(pool.map(solve, problems, [min(seconds, 5.0)] * count))
    for seed, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
        if answer.status != "optimal":
            continue
        closed += 1
        assert answer.period is not None
        bound = lower_bound(problem)
        met += bound > answer.period - 1e-6
        if bound > answer.period + 1e-6:
            wrong.append(seed)
    print(f"{count} small random jobs: {closed} closed, {met} bounds equal the optimum, above it: {wrong or 'none'}")


def _small(draw: random.Random) -> Problem:
    """A small problem of any times, caps, links and dead workers."""
    pipelines, ranks = draw.choice([1, 1, 2, 2, 3]), draw.randint(1, 4)
    m = draw.randint(1, 6 if pipelines * ranks <= 3 else 3)
    plain = draw.random() < 0.5
    times = (
        {}
        if plain
        else {
            name: [draw.choice([0.5, 1.0, 1.0, 1.5, 2.0, 3.0]) for _ in range(ranks)]
            for name in ("forward", "backward_input", "backward_weight")
        } | {"link": draw.choice([0.0, 0.5, 1.0]), "step": draw.choice([0.0, 0.5])}
    )  # fmt: skip
    limit = draw.choice([None, draw.randint(1, 4), [draw.randint(1, 4) for _ in range(ranks)]])
    job = _job(
        (pipelines, ranks, m),
        times=times,
        memory={"limit": limit, "weight_stash": draw.choice([0.0, 0.5, 1.0, 1.0])},
        planner={"decoupled": draw.random() < 0.8, "staggered": draw.random() < 0.7},
    )
    dead = [Worker(k, r) for r in range(ranks) for k in draw.sample(range(pipelines), draw.randint(0, pipelines - 1))]
    return Problem.of(job, dead)


def _job(shape: tuple[int, int, int], **sections: Any) -> PricedJob:
    grid = dict(zip(("pipelines", "ranks", "micro_batches"), shape, strict=True))
    made = msgspec.convert({"shape": grid, **sections}, type=Job)
    made.validate()
    return price(made)


if __name__ == "__main__":
    main()
