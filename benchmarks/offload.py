"""Idle time of plans with and without offloads, at equal memory on the device.

    python benchmarks/offload.py [--seconds S] [--copies SHARE ...] [--only MODEL]

Stage times are those of zero-bubble pipeline parallelism (`gaps.ZERO_BUBBLE`), one pipeline and one chunk per worker.
The limit is in activations; 1F1B's first worker holds as many as there are ranks. A copy of an activation, in either
direction, takes a share of F. Idle time is period / (m (F + I + W)) - 1 in per cent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.gaps import zero_bubble_task
from recycle.solve.planner import plan

ROWS = (("1.5B", 8, 24), ("6.2B", 8, 24), ("6.2B", 8, 64), ("14.6B", 16, 48))
"""Model, ranks and micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="per plan")
    parser.add_argument("--copies", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="time of a copy over F")
    parser.add_argument("--only", default="", help="model")
    arguments = parser.parse_args()
    head = [f"copy {share:g} F" for share in arguments.copies]
    print("| model, P, m, limit | without | " + " | ".join(head) + " | bound without | with |")
    print("|---" * (len(head) + 4) + "|")
    for model, ranks, micro_batches in ROWS:
        for limit in (ranks // 2, ranks, 3 * ranks // 2) if model.startswith(arguments.only) else ():
            task = zero_bubble_task((model, ranks, micro_batches, limit), 1)
            ideal, forward = task.ideal, task.job.prices.per_stage("forward", ranks)[0]
            assert ideal is not None

            def idle(period: float, ideal: float = ideal) -> str:
                return f"{100 * max(0.0, period / ideal - 1):.1f} %"

            bare = plan(task.job, seconds=arguments.seconds)
            cells, bound = [], 0.0
            for share in arguments.copies:
                memory = msgspec.structs.replace(task.job.memory, offload="auto", host_bandwidth=1 / (share * forward))
                planned = plan(task.job.with_sections(memory=memory), seconds=arguments.seconds)
                moved = planned.summary().get("offloads", 0) / (ranks * micro_batches)
                cells.append(f"{idle(planned.period)} ({moved:.0%} leave)")
                bound = planned.lower_bound
            row = [f"{model}, {ranks}, {micro_batches}, {limit}", idle(bare.period), *cells]
            print(f"| {' | '.join([*row, idle(bare.lower_bound), idle(bound)])} |", flush=True)


if __name__ == "__main__":
    main()
