"""Compare elastic layouts with fixed ones, for a section of docs/measurements/comparison.md.

    python -m benchmarks.paper.elastic [SETTING ...] [--sets N] [--days N]

Settings are the job files in this folder, priced by the analytic model. The ideal with dead nodes is the throughput of
the fault-free zero-bubble schedule times the share of live nodes. Figures are means over random sets of dead nodes.
Nothing is measured on GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from benchmarks.paper.cases import LARGE, PERIODS, SMALL, periodic, settings, table
from recycle.systems.comparison import Comparison, at_dead_shares, compare
from recycle.systems.failure_generator import Generator
from recycle.systems.scenario import Scenario

MOVING = ("recycle_elastic", "elaswave")
SYSTEMS = ("recycle", *MOVING, "oobleck")
SETS, DAYS = 5, 30.0
GOAL = 0.99
"""Of the fault-scaled ideal, in every row."""


def section(every: Mapping[str, Scenario], days: float, sets: int = SETS) -> str:
    """The section: what is kept with dead nodes, and goodput with the pauses of moving."""
    dead = [row for name, setting in every.items() for row in _dead_rows(name, setting, sets)]
    goodput = [row for name, setting in every.items() for row in _goodput_rows(name, setting, days)]
    kept = [float(row[2 + SYSTEMS.index("recycle_elastic")]) for row in dead]
    first = sum(best for _, best in goodput)
    words = (
        "`recycle_elastic` re-routes at once and moves layers at the next boundary of iterations, where that pays;"
        " `elaswave` repartitions each pipeline and resizes its micro-batches, as far as published. Throughput with"
        " dead nodes divided by that of a fault-free zero-bubble schedule times the share of live nodes, mean of"
        f" {sets} random sets of dead nodes. `recycle_elastic` reaches {GOAL:g} in {sum(one >= GOAL for one in kept)}"
        f" of {len(kept)} rows; the least is {min(kept):.3f}."
    )
    pauses = (
        f"Goodput in samples/s under generated hardware failures ({days:g} days), and with one failure per period and"
        " nodes that return after two periods. `copies` is the share of time, in per cent, that moving layers takes."
        f" `recycle_elastic` is first in {first} of {len(goodput)} rows."
    )
    return "\n\n".join(
        [
            "## Layers that move",
            words,
            table(["setting", "dead nodes", *SYSTEMS], dead).strip(),
            pauses,
            table(["setting", "failures", *SYSTEMS, "copies"], [cells for cells, _ in goodput]).strip(),
        ]
    )


def _dead_rows(name: str, setting: Scenario, sets: int) -> list[list[str]]:
    rows: dict[int, list[str]] = {}
    for one in at_dead_shares(setting, SYSTEMS, sets):
        ratios = one.of_scaled["zero-bubble"]
        cells = [f"{ratios[system]:.3f}" if ratios[system] else "-" for system in SYSTEMS]
        rows[one.dead] = [name, f"{one.dead} of {setting.nodes}", *cells]
    return list(rows.values())


def _goodput_rows(name: str, setting: Scenario, days: float) -> list[tuple[list[str], bool]]:
    """The cells of each row, and whether `recycle_elastic` is first in it."""
    traces = {"hardware": Generator(days=days, seed=1).trace(setting.nodes)}
    if name in SMALL:
        traces |= {f"one per {label}": periodic(setting.nodes, hours, True) for label, hours in PERIODS}
    return [
        _goodput([name, label], compared)
        for (label, _), compared in zip(traces.items(), compare(setting, list(traces.values()), SYSTEMS), strict=True)
    ]


def _goodput(label: list[str], compared: Comparison) -> tuple[list[str], bool]:
    goodput = {outcome.system: outcome.goodput for outcome in compared.outcomes}
    (moving,) = (outcome for outcome in compared.outcomes if outcome.system == "recycle_elastic")
    cells = [f"{goodput[system]:.2f}" if goodput[system] else "-" for system in SYSTEMS]
    copies = 100 * (moving.lost["copy"] + moving.lost["rebuild"]) / moving.seconds
    best = max(goodput, key=lambda system: (round(goodput[system], 6), system == moving.system))
    return [*label, *cells, f"{copies:.3f}"], best == moving.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=[*SMALL, *LARGE], help="names of job files; all if left out")
    parser.add_argument("--sets", type=int, default=SETS, help="random dead sets for each share")
    parser.add_argument("--days", type=float, default=DAYS, help="of the generated traces")
    options = parser.parse_args()
    begun = time.process_time()
    print(section(settings(options.settings), options.days, options.sets))
    print(f"{time.process_time() - begun:.0f} CPU seconds")


if __name__ == "__main__":
    main()
