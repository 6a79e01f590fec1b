"""Compare systems over the same trace on one scenario, with fault-free references.

Splitting the backward pass also shortens the fault-free iteration, so there are two references: fault-free 1F1B and a
fault-free zero-bubble schedule. Each runs on the best grid of all nodes that fits, with plain ZeRO-1 if the job shards
its optimizer's state. The fault-scaled ideal is a reference times the mean share of live nodes: a system that spreads
the work of dead workers evenly and at no cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recycle.errors import JobError, RecycleError
from recycle.ir.plugins import SYSTEMS_GROUP, entry_points, load_entry_point
from recycle.systems import SYSTEMS, VARIANTS
from recycle.systems.cluster import CAUSES, Outcome, run
from recycle.systems.failures import FailureTrace
from recycle.systems.grids import PipelineGrids
from recycle.systems.scenario import Scenario
from recycle.systems.system import System

KNOWN: dict[str, Callable[[Scenario], System]] = {
    **{entry.name: load_entry_point(entry) for entry in entry_points(SYSTEMS_GROUP, {**SYSTEMS, **VARIANTS})},
    **SYSTEMS,
    **VARIANTS,
}
"""All systems by name, including entry points of other packages."""
ZERO_BUBBLE = ("zb-h1", "zb-h2")
SHARES = (0.01, 0.023, 0.05, 0.0875, 0.10)
"""Shares of dead nodes. In a year of 400 servers 2.3 % were down on average and 8.75 % at most (InfiniteHBD)."""
SystemProgress = Callable[[str, float], None]
"""Called with the system's name and the completed share of its run."""


@dataclass(frozen=True)
class Reference:
    """A fault-free schedule on all nodes; 0 samples per second if no grid fits into memory."""

    name: str
    layout: str
    samples_per_second: float

    def ratio(self, outcome: Outcome) -> float | None:
        """Return goodput over the reference's; None if no grid of the reference fits."""
        return outcome.goodput / self.samples_per_second if self.samples_per_second else None


@dataclass(frozen=True)
class Comparison:
    """Results of all systems on one trace; `live` is the mean share of live nodes."""

    trace: FailureTrace
    references: tuple[Reference, ...]
    live: float
    outcomes: tuple[Outcome, ...]


def references(scenario: Scenario) -> tuple[Reference, ...]:
    """Return fault-free 1F1B and zero-bubble, each on its best grid."""
    results, scenario = [], scenario.with_copies(1)
    for name, families in (("1f1b", ("1f1b",)), ("zero-bubble", ZERO_BUBBLE)):
        grids = [grid for family in families if (grid := PipelineGrids(scenario, family).best(len(scenario.node_of)))]
        best = min(grids, key=lambda grid: grid.period, default=None)
        if best is None:
            results.append(Reference(name, "", 0.0))
        elif best.period > 0:
            results.append(Reference(name, f"{best.pipelines} x {best.ranks}", scenario.samples / best.period))
        else:
            raise JobError("[times]: an iteration takes no time; give a time above 0")
    return tuple(results)


def system_names(systems: str | None) -> list[str]:
    """Parse a list such as "recycle,oobleck"; None for all systems. Raises JobError for unknown names."""
    names = list(SYSTEMS) if systems is None else [name.strip() for name in systems.split(",") if name.strip()]
    for name in names:
        if name not in KNOWN:
            raise JobError(f"--systems: {name!r} is not a system: choose from {', '.join(KNOWN)}")
    if not names:
        raise JobError(f"--systems: name at least one of {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(names))


def make_system(name: str, scenario: Scenario) -> System:
    """Create a system of `KNOWN`. Raises JobError if another package's system cannot be created."""
    make = KNOWN[name]
    if name in SYSTEMS or name in VARIANTS:
        return make(scenario)
    try:
        system = make(scenario)
    except RecycleError:
        raise
    except Exception as error:
        raise JobError(f"--systems: {name} raised {type(error).__name__}: {error}") from error
    if not hasattr(system, "begin") or not hasattr(system, "change"):
        raise JobError(f"--systems: {name} returned {type(system).__name__}, not a System")
    return system


def compare(
    scenario: Scenario,
    traces: Sequence[FailureTrace],
    systems: Sequence[str],
    seed: int = 0,
    progress: SystemProgress | None = None,
) -> list[Comparison]:
    """Run all systems over traces of any population, fitted to the scenario's nodes with a seed."""
    fault_free = references(scenario)
    comparisons = []
    for trace in traces:
        fitted = trace.fitted(scenario.nodes, seed)
        known = replace(scenario, failure_rate=fitted.rate)
        outcomes = []
        for name in systems:
            report = None if progress is None else (lambda share, name=name: progress(name, share))
            system = make_system(name, known)
            outcomes.append(replace(run(system, known, fitted, progress=report), system=name, copies=copies_of(system)))
            if progress is not None:
                progress(name, 1.0)
        live = fitted.node_seconds() / (fitted.nodes * fitted.end) if fitted.end else 1.0
        comparisons.append(Comparison(fitted, fault_free, live, tuple(outcomes)))
    return comparisons


def copies_of(system: System) -> int:
    scenario = getattr(system, "scenario", None) or getattr(system, "setting", None)
    return scenario.copies if isinstance(scenario, Scenario) else 0


@dataclass(frozen=True)
class DeadShare:
    """Throughput with a share of dead nodes, relative to a fault-free reference times the live share.

    Attributes:
        share: requested share.
        dead: resulting number of nodes, at least one.
        of_scaled: reference -> system -> mean ratio over random dead sets; 0 if the system does not run.
    """

    share: float
    dead: int
    of_scaled: dict[str, dict[str, float]]


def at_dead_shares(
    scenario: Scenario,
    systems: Sequence[str],
    sets: int = 1,
    seed: int = 0,
    shares: Sequence[float] = SHARES,
    fault_free: Sequence[Reference] = (),
) -> list[DeadShare]:
    """Return throughput with dead nodes and without pauses: `sets` random dead sets per share.

    Args:
        fault_free: those of the scenario if known.
    """
    fault_free = [each for each in fault_free or references(scenario) if each.samples_per_second]
    instances = {name: KNOWN[name](scenario) for name in systems}
    results = []
    for share in shares:
        dead = min(scenario.nodes, max(1, round(share * scenario.nodes)))
        sums = dict.fromkeys(systems, 0.0)
        for number in range(sets):
            gone = frozenset(random.Random(seed + number).sample(range(scenario.nodes), dead))
            for name, system in instances.items():
                sums[name] += system.begin(scenario.all_nodes - gone).rate / sets
        live = 1 - dead / scenario.nodes
        scaled = {
            reference.name: {name: sums[name] / (reference.samples_per_second * live) if live else 0.0 for name in sums}
            for reference in fault_free
        }
        results.append(DeadShare(share, dead, scaled))
    return results


def outcome_as_json(outcome: Outcome, compared: Comparison) -> dict[str, Any]:
    misfit = outcome.misfit
    cost = outcome.gpu_seconds_per_sample
    return {
        "name": outcome.system,
        "trace": compared.trace.name,
        "fits": misfit is None,
        "misfit": None if misfit is None else asdict(misfit),
        "optimizer_copies": outcome.copies,
        "layout": outcome.layout,
        "goodput": outcome.goodput,
        "fault_free": outcome.fault_free,
        "ettr": outcome.ettr,
        "of_references": {reference.name: reference.ratio(outcome) for reference in compared.references},
        "samples": outcome.samples,
        "dropped": outcome.dropped,
        "seconds": outcome.seconds,
        "gpu_seconds_per_sample": None if cost == float("inf") else cost,
        "bytes_copied": outcome.bytes,
        "lost": {cause: outcome.lost[cause] for cause in CAUSES},
        "events": outcome.events,
        "timeline": [
            {
                "time": transition.time,
                "event": transition.event,
                "live": len(transition.state.live),
                "pause": transition.pause,
                "rate": transition.state.rate,
            }
            for transition in outcome.transitions
        ],
    }
