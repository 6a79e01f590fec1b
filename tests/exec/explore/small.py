"""Small worlds: every end of a process, and every order of messages one or two steps from the usual one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.exec.explore.cluster import Cluster, Scenario
from tests.exec.explore.rules import Violation
from tests.exec.explore.stories import outcome_of


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

    A deviation ends a process after one of its effects, takes the role from an agent at one of its writes, or has a
    receiver get a message after the next one of another sender. Orders that differ only in messages to different
    receivers are run once (`Kernel.races`).
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
            if (violation := outcome_of(cluster)) is not None:
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
    for point in crash_points(cluster, lambda name: re.match(r"agent ([12]$|. role)|worker [12]\.", name) is not None):
        yield replace(scenario, crashes=scenario.crashes | {point})
    detours = scenario.detours or frozenset()
    for number in cluster.kernel.races():
        if number > max(detours, default=-1):
            yield replace(scenario, detours=detours | {number})
