"""The planner against CP-SAT, a constraint solver, on the same problems: a peer for periods, an oracle for bounds.

    python benchmarks/cp_sat.py [--seconds N] [--random N]

CP-SAT solves the whole problem: the host of each micro-batch and stage, every order, memory as a cumulative resource,
transfers in queues, and the period as the longest window of a rank or lane. The first table has the worked example and
small jobs with two chunks per worker and little memory, with the planner's bound and plan. `--random` draws small jobs
of every kind (dead and slow workers, links, chunks, ties) and counts bounds above the period of a valid schedule; there
must be none. Needs ortools (extras `test` and `bench`), which runs in a separate process because its copy of HiGHS
conflicts with the planner's. Limits: reduce and step are at the end of each program; times must become integers when
multiplied by a common factor.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.job import Job, PricedJob, price
from recycle.job.shape import Worker
from recycle.solve.bounds import lower_bound
from recycle.solve.planner import plan
from recycle.solve.problem import Order, Problem

FACTORS = (1, 2, 4, 5, 10, 20, 100)
SLOT = 1000
"""Parts of an activation in which memory is counted."""
CAPS: tuple[int | list[int], ...] = ([4, 3, 2, 1], 4, 5, 6)
TWO_CHUNKS = (
    (1, 2, 4, 2), (1, 2, 6, 2), (1, 3, 4, 2), (1, 3, 4, 3), (1, 3, 6, 3), (1, 4, 4, 3), (1, 5, 5, 4),
    (2, 2, 3, 2), (2, 2, 3, 3), (2, 2, 4, 3), (2, 3, 3, 3),
)  # fmt: skip
"""Pipelines, ranks, micro-batches and cap of jobs with two chunks per worker and little memory; of two pipelines worker
0.0 is dead."""


@dataclass(frozen=True)
class Answer:
    """What CP-SAT came to: its best period and order (None without one), its proven bound, and how long it took."""

    status: str
    period: float | None
    bound: float
    seconds: float
    order: Order | None = None


def solve(problem: Problem, seconds: float, workers: int = 2) -> Answer:
    """CP-SAT's answer to the whole problem, in whole units of the smallest time step that all times share.

    Args:
        seconds: wall limit; of a single worker, which CP-SAT measures in the work done, a limit that no load changes.
    """
    from ortools.sat.python import cp_model

    cut = _factor(problem)
    model, period, start, end, chosen = _model(problem, cut)
    solver = cp_model.CpSolver()
    if workers == 1:
        solver.parameters.max_deterministic_time = seconds
    else:
        solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    begun = time.monotonic()
    status = solver.solve(model)
    took = time.monotonic() - begun
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(solver.status_name(status).lower(), None, solver.best_objective_bound / cut, took)
    order: Order = [[] for _ in problem.cap]
    for x in sorted(range(problem.size), key=lambda x: (solver.value(start[x]), solver.value(end[x]), x)):
        stage, g = divmod(x % (problem.size // problem.kinds), problem.micro_batches)
        (host,) = (w for w in problem.hosts[stage] if solver.value(chosen.get((stage, g, w), False)))
        order[host].append(x)
    bound = solver.best_objective_bound / cut
    return Answer(solver.status_name(status).lower(), solver.value(period) / cut, bound, took, order)


def in_child(problem: Problem, seconds: float) -> Answer:
    """`solve` in a process without the planner's HiGHS."""
    with concurrent.futures.ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(solve, problem, seconds).result()


def summary(problem: Problem, seconds: float) -> str:
    """`in_child` in a table's cell: best period, proven bound where that is less, and when it ended."""
    if not problem.grain:
        return "not modelled"
    answer = in_child(problem, seconds)
    period = "none" if answer.period is None else f"{answer.period:g}"
    proven = "" if answer.status == "optimal" else f" >= {answer.bound:g}"
    return f"{period}{proven} {answer.seconds:.0f} s"


def _factor(problem: Problem) -> int:
    speeds = set(problem.speed)
    times = [t * speed for t in problem.times.tolist() for speed in speeds] + [*problem.update_seconds, problem.link]
    for factor in FACTORS:
        if all(abs(t * factor - round(t * factor)) < 1e-9 for t in times):
            return factor
    raise SystemExit("cp_sat: no factor makes these times whole")


def _model(problem: Problem, cut: int) -> tuple[Any, Any, list[Any], list[Any], dict[tuple[int, int, int], Any]]:
    """(the model, its period, start and end of each operation, whether each (stage, micro-batch, worker) is chosen)."""
    from ortools.sat.python import cp_model

    shape, n, kinds = problem.shape, problem.micro_batches, problem.kinds
    stages, m, plane = shape.stages, shape.micro_batches, shape.stages * problem.micro_batches
    model = cp_model.CpModel()
    most = sum(problem.times) * n * max(problem.speed) + sum(problem.update_seconds) + 2 * n * stages * problem.link
    horizon = round(2 * most * cut)
    start = [model.new_int_var(0, horizon, f"start{x}") for x in range(problem.size)]
    end = [model.new_int_var(0, horizon, f"end{x}") for x in range(problem.size)]
    busy: dict[int, list[Any]] = {w: [] for hosts in problem.hosts for w in hosts}
    held: dict[int, list[tuple[Any, int]]] = {w: [] for w in busy}
    work: dict[int, list[Any]] = {w: [] for w in busy}
    first = {w: model.new_int_var(0, horizon, f"first{w}") if problem.staggered else 0 for w in busy}
    chosen: dict[tuple[int, int, int], Any] = {}
    for s, live in enumerate(problem.hosts):
        for g in range(n):
            hosts = _first_named(problem, live, g) if s < shape.ranks else live
            if not problem.reroute:
                hosts = [g // m * shape.ranks + s % shape.ranks]
            for w in hosts:
                chosen[s, g, w] = model.new_bool_var(f"on{s}_{g}_{w}") if len(hosts) > 1 else True
            model.add_exactly_one(chosen[s, g, w] for w in hosts)
            rows = [kind * plane + s * n + g for kind in range(kinds)]
            for w in hosts:
                here = chosen[s, g, w]
                lengths = [round(problem.duration(kind, s, w) * cut) for kind in range(kinds)]
                for x, length in zip(rows, lengths, strict=True):
                    busy[w].append(model.new_optional_interval_var(start[x], length, end[x], here, f"run{x}_{w}"))
                work[w].append(sum(lengths) * here)
                if problem.staggered:
                    model.add(first[w] <= start[rows[0]]).only_enforce_if(here)
                _hold(model, problem, held[w], start, end, rows, here, horizon)
    hop = round(problem.link * cut) if shape.ranks > 1 else 0
    lanes: dict[tuple[int, int], list[Any]] = {}
    period = model.new_int_var(0, horizon, "period")
    for x, (made, here) in enumerate(zip(problem.needs.tolist(), problem.needs_here.tolist(), strict=True)):
        if made >= 0:
            sent = model.new_int_var(0, horizon, f"sent{x}") if hop else end[made]
            model.add(sent >= end[made])
            model.add(start[x] >= sent + hop)
            ends = [[(w, on) for (s, g, w), on in chosen.items() if s * n + g == y % plane] for y in (made, x)]
            for (sender, sends), (receiver, receives) in product(*ends) if hop else ():
                lanes.setdefault((sender, receiver), []).append((end[made], sent, _both(model, sends, receives)))
        if here >= 0:
            model.add(start[x] >= end[here])
    for lane, transfers in lanes.items():
        _queue(model, transfers, hop, model.new_int_var(0, horizon, f"opened{lane}"), period)
    for w, intervals in busy.items():
        rank = w % shape.ranks
        finish = round(problem.rank_update_seconds[rank] * cut)
        model.add_no_overlap(intervals)
        if problem.cap[w] < n * shape.chunks:
            spans, parts = zip(*held[w], strict=True)
            model.add_cumulative(spans, parts, int(problem.cap[w] * SLOT + 1e-6))
        last = model.new_int_var(0, horizon, f"last{w}")
        for s in range(rank, stages, shape.ranks):
            for g in range(n):
                model.add(last >= end[(kinds - 1) * plane + s * n + g] + finish)
        model.add(last - first[w] <= period)
        model.add(sum(work[w]) + finish <= period)
    group = n if problem.reroute else m
    for g in range(n - 1):
        if (g + 1) % group:
            model.add(start[g] <= start[g + 1])
    model.minimize(period)
    return model, period, start, end, chosen


def _queue(model: Any, transfers: list[tuple[Any, Any, Any]], hop: int, opened: Any, period: Any) -> None:
    """One lane, one transfer at a time, in the order in which they are made; all of them within a period.

    Args:
        transfers: (when it is made, when it is sent, whether it takes this lane).
        opened: when the first may be sent.
    """
    for _, sent, crosses in transfers:
        model.add(opened <= sent).only_enforce_if(crosses)
        model.add(sent + hop - opened <= period).only_enforce_if(crosses)
    for (made, sent, crosses), (other_made, other_sent, other_crosses) in combinations(transfers, 2):
        comes_first = model.new_bool_var("")
        model.add(made <= other_made).only_enforce_if(comes_first, crosses, other_crosses)
        model.add(sent + hop <= other_sent).only_enforce_if(comes_first, crosses, other_crosses)
        model.add(other_made <= made).only_enforce_if(~comes_first, crosses, other_crosses)
        model.add(other_sent + hop <= sent).only_enforce_if(~comes_first, crosses, other_crosses)


def _both(model: Any, one: Any, other: Any) -> Any:
    """Whether both are chosen, where True stands for a choice without an alternative."""
    if one is True or other is True:
        return other if one is True else one
    both = model.new_bool_var("")
    model.add_bool_or([~one, ~other, both])
    return both


def _first_named(problem: Problem, hosts: list[int], micro_batch: int) -> list[int]:
    """Hosts without those that alike ones stand for: they are named by the first micro-batch that they run."""
    kinds: dict[tuple[float, float], list[int]] = {}
    for w in hosts:
        kinds.setdefault((problem.speed[w], problem.cap[w]), []).append(w)
    return [w for alike in kinds.values() for w in alike[: micro_batch + 1]]


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
            planner = {"staggered": staggered, "seconds": arguments.seconds}
            job = _job((3, 4, 6), memory={"limit": cap}, planner=planner)
            _print_row("staggered" if staggered else "barrier", str(cap), job, [Worker(1, 2)], arguments.seconds)
    print("two chunks per worker")
    for pipelines, ranks, m, cap in TWO_CHUNKS:
        job = _job((pipelines, ranks, m), 2, memory={"limit": cap}, planner={"seconds": arguments.seconds})
        dead = [Worker(0, 0)] if pipelines > 1 else []
        name = f"D={pipelines} P={ranks} m={m}" + (", worker 0.0 dead" if dead else "")
        _print_row(name, str(cap), job, dead, arguments.seconds)
    if arguments.random:
        _check_bounds(arguments.random, arguments.seconds)


def _print_row(name: str, cap: str, job: PricedJob, dead: list[Worker], seconds: float) -> None:
    problem = Problem.of(job, dead)
    answer, made = in_child(problem, seconds), plan(job, dead)
    row = f"{made.lower_bound:>6.4g} {made.period:>6g} {answer.period or '-':>8} {answer.bound:>10g}"
    print(f"  {name:<30} {cap:<12} {row} {answer.seconds:>8.1f}", flush=True)


def _check_bounds(count: int, seconds: float) -> None:
    closed = met = 0
    wrong: list[int] = []
    cases = [small_job(random.Random(seed)) for seed in range(count)]
    problems = [Problem.of(job, dead) for job, dead in cases]
    with concurrent.futures.ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answers = pool.map(solve, problems, [min(seconds, 5.0)] * count)
        for seed, ((job, _), problem, answer) in enumerate(zip(cases, problems, answers, strict=True)):
            if answer.order is None:
                continue
            bound, period = lower_bound(problem), valid_period(job, problem, answer.order)
            closed += answer.status == "optimal"
            met += bound > period - 1e-6
            if bound > period + 1e-6:
                wrong.append(seed)
    print(f"{count} small random jobs: {closed} closed, {met} bounds equal the best period, above: {wrong or 'none'}")


def valid_period(job: PricedJob, problem: Problem, order: Order) -> float:
    """The simulated period of an order, which must be valid, also with the first and the last stage tied.

    Raises:
        ValueError: `check` finds an error.
    """
    schedule, last = problem.schedule(order), problem.shape.stages - 1
    tied = replace(schedule, ties=((0, last),) if problem.shape.chunks == 1 and last else ())
    for one in (schedule, tied):
        for finding in check(one, profile=job.prices, limits=job.limits):
            if finding.severity == "error":
                raise ValueError(f"CP-SAT's schedule is not valid: {finding}")
    return min(simulate(one, job.prices).period for one in (schedule, tied))


def small_job(draw: random.Random, most: int = 6) -> tuple[PricedJob, list[Worker]]:
    """A job of any times, caps, links, chunks and techniques, with slow and dead workers.

    Args:
        most: micro-batches per pipeline; half of it where there are more than three workers and chunks.
    """
    pipelines, ranks = draw.choice([1, 1, 2, 2, 3]), draw.randint(1, 4)
    chunks = draw.choice([1, 1, 2]) if ranks <= 2 else 1
    m = draw.randint(1, most if pipelines * ranks * chunks <= 3 else (most + 1) // 2)
    stages = ranks * chunks
    times: dict[str, Any] = {}
    if draw.random() < 0.6:
        for name in ("forward", "backward_input", "backward_weight"):
            times[name] = [draw.choice([0.5, 1.0, 1.0, 1.5, 2.0, 3.0]) for _ in range(stages)]
        times["step"] = draw.choice([0.0, 0.5, [draw.choice([0.0, 0.5, 2.0]) for _ in range(stages)]])
    times["link"] = draw.choice([0.0, 0.0, 0.5, 1.0, 3.0])
    limits = [draw.randint(chunks, chunks + 3) for _ in range(ranks)]
    planner = {"decoupled": draw.random() < 0.8, "staggered": draw.random() < 0.7}
    memory = {"limit": draw.choice([None, limits[0], limits]), "weight_stash": draw.choice([0.0, 0.5, 1.0, 1.0])}
    job = _job((pipelines, ranks, m), chunks, times=times, memory=memory, planner=planner)
    slow = draw.sample(list(job.shape.workers()), min(job.shape.worker_count, draw.choice([0, 0, 1, 1, 2])))
    speed = {str(worker): draw.choice([0.5, 1.5, 2.0, 3.0]) for worker in slow}
    job = msgspec.structs.replace(job, prices=replace(job.prices, speed=speed))
    dead = [Worker(k, r) for r in range(ranks) for k in draw.sample(range(pipelines), draw.randint(0, pipelines - 1))]
    return job, dead


def _job(shape: tuple[int, int, int], chunks: int = 1, **sections: Any) -> PricedJob:
    grid = dict(zip(("pipelines", "ranks", "micro_batches"), shape, strict=True))
    made = msgspec.convert({"shape": {**grid, "chunks": chunks}, **sections}, type=Job)
    made.validate()
    return price(made)


if __name__ == "__main__":
    main()
