"""Random runs under a virtual clock, for a given time; the shortest story of a run that violates a rule.

    python -m tests.exec.explore [--minutes N] [--jobs N] [--first SEED] [--seed SEED [--run DIR]] [--small]

Each seed draws a small job and faults, and runs agents, leader, election and workers (cluster.py). A run that violates
a rule (rules.py) is made shorter: fewer faults, steps and workers, as long as it violates the same rule. What is left
is printed as a timeline. Exit code 1 if a rule is violated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from recycle.exec.launch.agent import rarely_collect_garbage
from tests.exec.explore.cluster import Cluster
from tests.exec.explore.small import small_worlds
from tests.exec.explore.stories import draw_scenario, outcome_of, shortest, violation_of


def _explore(asked: argparse.Namespace, place: int, end: float, outcomes: Any) -> None:
    try:
        for seed in count(asked.first + place, asked.jobs):
            if time.monotonic() > end:
                break
            violation = violation_of(draw_scenario(seed))
            outcomes.put((seed, "", "") if violation is None else (seed, violation.rule, str(violation)))
    finally:
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
    rarely_collect_garbage()
    if asked.small:
        runs, failures = small_worlds(time.monotonic() + 60 * asked.minutes, partial(print, flush=True))
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
    violation = outcome_of(Cluster(scenario, print), directory)
    print(f"{scenario}\n{violation or 'no rule is violated'}")
    return 0 if violation is None else 1


if __name__ == "__main__":
    sys.exit(main())
