"""Random runs under a virtual clock, for a given time; the shortest story of a run that violates a rule.

    python -m tests.exec.explore [--minutes N] [--jobs N] [--first SEED] [--seed SEED [--run DIR]] [--small]

Each seed draws a small job and faults, and runs agents, leader, election and workers (cluster.py). A run that violates
a rule (rules.py) is made shorter: fewer faults, steps and workers, as long as it violates the same rule. What is left
is printed as a timeline. Exit code 1 if a rule is violated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from recycle.job.shape import place_workers
from tests.exec.explore.cluster import Cluster, Fault, Scenario, job_of
from tests.exec.explore.rules import Violation

WEIGHTS = {
    "kill worker": 4,
    "stop worker": 2,
    "leave worker": 1,
    "drain worker": 2,
    "kill agent": 2,
    "stop agent": 3,
    "lose node": 2,
    "leave node": 1,
    "cut": 2,
    "isolate": 3,
    "cut from store": 2,
    "fill disk": 1,
    "stall store": 2,
    "slow store": 3,
    "lose answers": 2,
    "lose leases": 1,
}
"""How often a seed has a kind of fault."""
OF_ALL = {"fill disk", "stall store", "slow store", "lose answers", "lose leases"}
INSTANT = {"kill worker", "leave worker", "kill agent", "lose node", "leave node", "lose leases"}
PLANNED = ["kill", "kill", "drain", "nan", "exception", "stop", "stall", "slow=3"]
PLANNED += ["kill.gather", "kill.commit", "kill.step"]
"""Faults that the worker's own injector strikes."""
LEAST: dict[str, Any] = {
    "checkpoint_every": 0,
    "eval_every": 0,
    "slow_messages": 0.0,
    "staggered": False,
    "tensor_parallel": 1,
    "sharded": False,
    "elastic": False,
    "digests": 0,
    "clip": 9.0,
}
"""What a shorter story is without."""
TRIES = 12
"""Seeds with which a shorter story is tried."""


CPU_SECONDS = 20.0
"""Far more than a run takes."""


def draw_scenario(seed: int) -> Scenario:
    draws = random.Random(seed)

    def chance(share: float) -> bool:
        return draws.random() < share

    pipelines, ranks = draws.choice([(2, 1), (2, 1), (2, 1), (2, 2), (2, 2), (3, 1), (3, 2)])
    per_node = draws.choice([1, 1, 2]) if ranks > 1 else 1
    steps = draws.choice([2, 4])
    sharded = chance(0.2)
    scenario = Scenario(
        pipelines=pipelines,
        ranks=ranks,
        per_node=per_node,
        steps=steps,
        checkpoint_every=draws.choice([0, 0, 0, 2]),
        eval_every=draws.choice([0, 0, 2]),
        staggered=chance(0.7),
        tensor_parallel=2 if chance(0.1) else 1,
        sharded=sharded,
        elastic=not sharded and ranks > 1 and chance(0.3),
        digests=draws.choice([0, 0, 0, 1, 2]),
        clip=draws.choice([9.0, 9.0, 1.5]),
        slow_messages=draws.choice([0.0, 0.0, 0.02]),
        seed=seed,
    )
    places = place_workers(job_of(scenario.calm).shape, per_node)
    homes = {worker: node for node, workers in enumerate(places) for worker in workers}
    workers = list(homes)
    spared = frozenset[int]()
    if chance(0.6):  # all of a pipeline is never struck, or of so many that each shard has a copy there
        safe = draws.sample(range(pipelines), pipelines - 1 if sharded else 1)
        spared = frozenset(number for number, worker in enumerate(workers) if worker.pipeline in safe)
    spared_nodes = {homes[workers[number]] for number in spared}
    nodes = [node for node in set(homes.values()) if node not in spared_nodes]
    others = [number for number in range(len(workers)) if number not in spared and homes[workers[number]] in nodes]
    planned = list[str]()
    for worker in [workers[draws.choice(others)]] if others and chance(0.3) else ():
        kind, step = draws.choice(PLANNED), draws.randrange(steps)
        if (kind == "kill" and step < steps - 1) and chance(0.5):
            planned.append(f"rejoin:{worker}@{draws.randrange(step + 1, steps)}")
        name, _, phase = kind.partition(".")
        is_late = phase == "gather" and not sharded
        planned.append(f"{name}:{worker}@{step}" + (f".{phase}" if phase and not is_late else ""))
    faults = list[Fault]()
    for kind in draws.choices(list(WEIGHTS), list(WEIGHTS.values()), k=draws.choice([0, 1, 1, 2, 2, 3, 4])):
        targets = [0] if kind in OF_ALL else others if "worker" in kind else nodes
        if not targets or (kind == "cut" and spared):
            continue
        time = draws.random() * (2.0 * steps + 6.0)
        seconds = draws.choice([0.5, 2.0, 4.0, 7.0, 15.0]) * (0.5 + draws.random())
        if kind in OF_ALL:  # without an answer for `store_timeout` a run may end
            seconds = min(seconds, 6.0)
        faults.append(Fault(time, kind, draws.choice(targets), 0.0 if kind in INSTANT else seconds))
        if chance(0.25) and targets != [0]:
            faults.append(Fault(time + draws.random() * 5.0, "kill worker", draws.choice(others), 0.0))
    return replace(scenario, spared=spared, planned=tuple(planned), faults=tuple(sorted(faults)))


def violation_of(scenario: Scenario, trace: Callable[[str], None] | None = None) -> Violation | None:
    """What a run violates; None if it violates no rule."""
    return _outcome_of(Cluster(scenario, trace))


def _outcome_of(cluster: Cluster, directory: Path | None = None) -> Violation | None:
    def stop(*_: object) -> None:
        raise Violation("loop", f"more than {CPU_SECONDS:g} s of CPU time: {traceback.format_stack(limit=8)}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        cluster.run(directory)
    except Violation as violation:
        return violation
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    return None


def shorter(scenario: Scenario) -> Iterator[Scenario]:
    """What may be left out."""
    for place in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:place] + scenario.faults[place + 1 :])
    if scenario.steps > 2:
        yield replace(scenario, steps=scenario.steps - 1)
    for place in range(len(scenario.planned)):  # a rejoin stands before its kill
        yield replace(scenario, planned=scenario.planned[:place] + scenario.planned[place + 1 :])
    for name, least in LEAST.items():
        if getattr(scenario, name) != least:
            yield replace(scenario, **{name: least})
    if scenario.ranks > 1 and not scenario.spared:
        yield replace(scenario, ranks=1, per_node=1)
    if scenario.pipelines > 2 and not scenario.spared:
        yield replace(scenario, pipelines=2)


def shortest(scenario: Scenario, rule: str) -> Scenario:
    """The shortest scenario that still violates the rule."""
    seeds = count(1_000_000_000)
    while True:
        for candidate in shorter(scenario):
            tried = (replace(candidate, seed=seed) for seed in (scenario.seed, *islice(seeds, TRIES)))
            found = next((one for one in tried if _rule_of(one) == rule), None)
            if found is not None:
                scenario = found
                break
        else:
            return scenario


def _rule_of(scenario: Scenario) -> str:
    violation = violation_of(scenario)
    return "" if violation is None else violation.rule


def crash_points(cluster: Cluster, may_end: Callable[[str], bool]) -> list[tuple[str, int]]:
    """All (process, number of its effects) after which it may end in a run like this one.

    A process that ends between two of its effects leaves the same world as one that ends after the first of them, so
    these are all of its ends under this run's order of messages.
    """
    effects = sorted(cluster.kernel.effects.items())
    return [(name, number) for name, count in effects if may_end(name) for number in range(1, count + 1)]


SMALL = (
    Scenario(ranks=1, steps=2, staggered=False, spared=frozenset({0}), detours=frozenset()),
    Scenario(3, 1, steps=2, spared=frozenset({0}), detours=frozenset()),
    Scenario(ranks=2, per_node=2, steps=2, spared=frozenset({0, 1}), detours=frozenset()),
)
"""Two or three agents with a worker each, and two agents with two; agent 0 and its workers live, so runs end well."""


def small_worlds(
    end: float, print_line: Callable[[str], None], worlds: Sequence[Scenario] = SMALL, depth: int = 2
) -> tuple[int, dict[Scenario, Violation]]:
    """Run each world with every deviation, then with every second one, up to `depth`, until the time ends.

    A deviation ends a process after one of its effects, or has a receiver get a message after the next one of another
    sender. Orders that differ only in messages to different receivers are run once (`Kernel.races`).
    """
    runs, found = 0, dict[Scenario, Violation]()
    known, level = set[Scenario](), list(worlds)
    for deviations in range(depth + 1):
        following, level_runs = list[Scenario](), 0
        for scenario in level:
            if time.monotonic() > end:
                print_line(f"{deviations} deviations: {level_runs} of {len(level)} runs, the time has ended")
                return runs, found
            cluster = Cluster(scenario)
            runs, level_runs = runs + 1, level_runs + 1
            if (violation := _outcome_of(cluster)) is not None:
                found[scenario] = violation
                print_line(f"{scenario}: {violation}")
            elif deviations < depth:
                more = [candidate for candidate in _deviating(cluster) if candidate not in known]
                known.update(more)
                following += more
        print_line(f"{deviations} deviations: all of {len(level)} runs, {len(found)} violate a rule")
        level = following
    return runs, found


def _deviating(cluster: Cluster) -> Iterator[Scenario]:
    """The scenarios with one more deviation."""
    scenario = cluster.scenario
    for point in crash_points(cluster, lambda name: re.match(r"agent [12]|worker [12]\.", name) is not None):
        yield replace(scenario, crashes=scenario.crashes | {point})
    detours = scenario.detours or frozenset()
    for number in cluster.kernel.races():
        if number > max(detours, default=-1):
            yield replace(scenario, detours=detours | {number})


def _explore(asked: argparse.Namespace, place: int, end: float, outcomes: Any) -> None:
    for seed in count(asked.first + place, asked.jobs):
        if time.monotonic() > end:
            break
        violation = violation_of(draw_scenario(seed))
        outcomes.put((seed, "", "") if violation is None else (seed, violation.rule, str(violation)))
    outcomes.put(None)


def main() -> int:
    """Run seeds; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="for how long")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="only this one, with its history")
    parser.add_argument("--run", type=Path, help="of --seed: a new run directory, for `recycle view`")
    parser.add_argument("--whole", action="store_true", help="do not make stories shorter")
    parser.add_argument("--find", type=int, help="run at most so many seeds, and stop at the first violation")
    parser.add_argument("--small", action="store_true", help="all ends of processes and orders of messages")
    asked = parser.parse_args()
    if asked.small:
        runs, failures = small_worlds(time.monotonic() + 60 * asked.minutes, print)
        print(f"{runs} runs, {len(failures)} violate a rule")
        return 1 if failures else 0
    if asked.find is not None:
        for seed in range(asked.first, asked.first + asked.find):
            if (violation := violation_of(draw_scenario(seed))) is not None:
                print(f"seed {seed}: {violation}")
                return 1
        return 0
    if asked.seed is not None:
        return _tell(asked.seed, asked.whole, asked.run)
    began, seeds, found, running = time.monotonic(), 0, dict[int, str](), asked.jobs
    forks = multiprocessing.get_context("fork")
    outcomes: Any = forks.SimpleQueue()
    for place in range(asked.jobs):
        arguments = asked, place, began + 60 * asked.minutes, outcomes
        forks.Process(target=_explore, args=arguments, daemon=True).start()
    while running:
        if (outcome := outcomes.get()) is None:
            running -= 1
            continue
        seed, rule, text = outcome
        seeds += 1
        if rule:
            found[seed] = rule
            print(f"seed {seed}: {text[:1500]}", flush=True)
    seconds = time.monotonic() - began
    print(f"{seeds} seeds in {seconds:.0f} s, {len(found)} violate a rule {dict(Counter(found.values())) or ''}")
    if found and not asked.whole:
        _tell(min(found))
    return 1 if found else 0


def _tell(seed: int, is_whole: bool = False, directory: Path | None = None) -> int:
    """Print the history of a seed, and leave its run directory; the exit code."""
    scenario = draw_scenario(seed)
    if directory is not None:
        directory.mkdir(parents=True)
        scenario = replace(scenario, trace=True)
    if not is_whole and (violation := violation_of(scenario)) is not None:
        scenario = shortest(scenario, violation.rule)
    violation = _outcome_of(Cluster(scenario, print), directory)
    print(f"{scenario}\n{violation or 'no rule is violated'}")
    return 0 if violation is None else 1


if __name__ == "__main__":
    sys.exit(main())
