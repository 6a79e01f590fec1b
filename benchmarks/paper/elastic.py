"""Layers that move beside layers that stay: throughput with dead nodes, over the fault-scaled zero-bubble ideal.

    python -m benchmarks.paper.elastic [SETTING ...] [--sets N]

Settings are the job files beside this one, priced by the analytic model; of each share of dead nodes the mean over
random sets. The ideal is the fault-free zero-bubble schedule times the share of live nodes. Nothing here is measured on
GPUs.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.paper.comparison import LARGE, SMALL, settings
from recycle.systems.comparison import at_dead_shares

SYSTEMS = ("recycle", "recycle_elastic", "elaswave", "oobleck")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=[*SMALL, *LARGE], help="names of job files; all if left out")
    parser.add_argument("--sets", type=int, default=5, help="random dead sets for each share")
    options = parser.parse_args()
    print(f"| setting | dead | nodes | {' | '.join(SYSTEMS)} | CPU seconds |")
    print(f"|{'---|' * (len(SYSTEMS) + 4)}")
    for name, setting in settings(options.settings).items():
        begun = time.process_time()
        for row in at_dead_shares(setting, SYSTEMS, options.sets):
            ratios = row.of_scaled["zero-bubble"]
            shown = " | ".join(f"{ratios[system]:.3f}" for system in SYSTEMS)
            seconds = time.process_time() - begun
            print(f"| {name} | {row.share:.2%} | {row.dead} of {setting.nodes} | {shown} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
