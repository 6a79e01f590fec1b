"""Settings of the comparison (the job files in this folder), failures at equal intervals, and Markdown tables."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from recycle.job import Job
from recycle.systems.failures import FailureTrace, NodeChange
from recycle.systems.scenario import Scenario

HERE = Path(__file__).resolve().parent
SMALL, LARGE = ("gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"), ("18b", "39b", "76b", "145b")
PERIODS = (("6 h", 6.0), ("2 h", 2.0), ("30 min", 0.5))


def settings(names: Iterable[str]) -> dict[str, Scenario]:
    return {name: Scenario.of(Job.load(HERE / f"{name}.toml")) for name in names}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without the columns that are "-" in every row."""
    rows = list(rows)
    shown = [index for index in range(len(head)) if any(row[index] != "-" for row in rows)]
    head, rows = [head[index] for index in shown], [[row[index] for index in shown] for row in rows]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def periodic(nodes: int, hours: float, back: bool) -> FailureTrace:
    """One failure per period for twelve periods, at the middle of each; a node is back after two of them, or never."""
    order = random.Random(0).sample(range(nodes), min(12, nodes))
    changes: dict[float, tuple[set[int], set[int]]] = {}
    for number, node in enumerate(order):
        at = (number + 0.5) * hours * 3600
        changes.setdefault(at, (set(), set()))[0].add(node)
        if back:
            changes.setdefault(at + 2 * hours * 3600, (set(), set()))[1].add(node)
    end = 12 * hours * 3600
    moments = [NodeChange(at, frozenset(f), frozenset(j)) for at, (f, j) in sorted(changes.items()) if at < end]
    return FailureTrace("periodic", nodes, frozenset(range(nodes)), tuple(moments), end)
