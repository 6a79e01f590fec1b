"""Random histories of the leader: real decisions, simulated workers, clock and faults.

Each seed draws a small job and faults (deaths, hangs, cuts, failures to form, wrong numbers, departures, ends of the
leader at any action), lives through the run with a virtual clock and checks the rules of rules.py.
`python -m tests.exec.explore --leader` runs seeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from recycle.exec.leader.state import PlannedFault
from recycle.job import PricedJob
from recycle.job.shape import Worker
from tests.exec.leader.faults import FAULTS, WRONG
from tests.exec.leader.world import Figures, Scenario, World
from tests.exec.runs import job

Sections = dict[str, dict[str, Any]]
LIMITS = {
    "heartbeat": 1.0,
    "dead_after": 5.0,
    "hung_after": 6.0,
    "hung_factor": 4.0,
    "warm_up": 20.0,
    "form_timeout": 8.0,
    "transport_timeout": 25.0,
    "start_deadline": 40.0,
    "rejoin_deadline": 30.0,
    "grace": 40.0,
    "lease": 8,
}


@cache
def _job(sections: str) -> PricedJob:
    keys = json.loads(sections)
    shape = keys["shape"]
    return job(shape["pipelines"], shape["ranks"], shape["micro_batches"], **keys)


def job_of(sections: Sections) -> PricedJob:
    """The job of these sections, with deadlines that suit the simulated workers; made once."""
    return _job(json.dumps({"membership": LIMITS} | sections))


def draw_scenario(draws: random.Random) -> Scenario:
    """What a seed begins with."""

    def chance(share: float) -> bool:
        return draws.random() < share

    pipelines, ranks = draws.choice([(2, 1), (2, 2), (2, 2), (2, 3), (3, 1), (3, 2), (3, 2), (4, 1)])
    digests = draws.choice([0, 0, 0, 1, 2])
    sections: Sections = {
        "shape": {"pipelines": pipelines, "ranks": ranks, "micro_batches": 2},
        "train": {
            "checkpoint_every": draws.choice([0, 2, 2, 4]),
            "checkpoint_deadline": 30.0,
            "non_finite": draws.choice(["skip", "fatal"]),
        },
        "planner": {"staggered": chance(0.7)},
        "integrity": {"digests": digests},
        "eval": {"every": draws.choice([0, 0, 0, 2, 3])},
    }
    if chance(0.15):
        sections["shape"]["tensor_parallel"] = 2
    if chance(0.2):
        sections["train"] |= {"sharded_optimizer": True, "optimizer_copies": 2}
    elif ranks > 1 and chance(0.3):
        sections["planner"] |= {"layout": "elastic", "move_when": draws.choice(["always", "worth"])}
    drawn = job_of(sections)
    workers = list(drawn.shape.workers())
    steps = draws.randint(3, 10)
    most = 2.0 * steps + 6.0
    strikes: list[tuple[float, str, Worker | None]] = []
    weights = [weight for weight, _ in FAULTS.values()]
    for kind in draws.choices(list(FAULTS), weights, k=draws.choice([0, 1, 1, 2, 2, 3, 4])):
        strikes.append((draws.random() * most + (0.0 if chance(0.15) else 4.0), kind, None))
        if chance(0.3):
            strikes.append((strikes[-1][0] + draws.random() * 6.0, draws.choice(["kill", "kill", "cut", "form"]), None))
    phases = ["compute", "gather"]
    faults = [
        PlannedFault(draws.choice(phases), draws.choice(workers), draws.randint(0, steps - 1), strikes=chance(0.4))
        for _ in range(draws.choice([0, 0, 1, 2]))
    ]
    kinds = {kind for _, kind, _ in strikes}
    return Scenario(
        job=drawn,
        steps=steps,
        faults=tuple(faults),
        absent=frozenset(Worker(pipelines - 1, r) for r in range(ranks) if chance(0.3)) if chance(0.1) else frozenset(),
        restarts=draws.choice([0, 0, 1, 2, 3]),
        strikes=tuple(strikes),
        crashes=frozenset(draws.randint(1, 30 + 8 * steps) for _ in range(draws.choice([0, 0, 1, 1, 2, 3]))),
        nodes=draws.choice([1, 2, 2, 3]),
        plans_fail=chance(0.03),
        fails_to_start=chance(0.05),
        disk_fails=chance(0.1),
        is_wrong=bool(kinds & WRONG),
        is_struck=bool(strikes) or bool(faults),
        large_norms=draws.choice([0.0, 0.0, 0.2]),
        slow_messages=draws.choice([0.0, 0.02, 0.1, 0.3]),
        eagerness=draws.choice([0.0, 0.5, 1.0]),
        resumed=1 if chance(0.08) else None,
    )


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> Figures:
    """Live through the history of a seed. Raises Violation."""
    draws = random.Random(seed)
    scenario = draw_scenario(draws)
    if trace is not None:
        trace(str(scenario))
    return World(scenario, draws, trace).run()
