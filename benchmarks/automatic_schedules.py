"""Compare the planner with the automatic schedules of zero-bubble pipeline parallelism, at equal memory.

    python benchmarks/automatic_schedules.py [--seconds S ...] [--chunks 1 2] [--busy N]

One row per model, size and memory limit of `gaps`: one chunk per rank, then two, with `placement = "auto"`. The figures
are periods over m (F + I + W). The automatic schedules (greedy in eight variants for one chunk; greedy ZB-V and the
search for building blocks for two) were made by the authors' program, checked under the same limits and timed by
`simulate`. `--busy` runs endless loops at the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.gaps import ONE_CHUNK, TWO_CHUNKS, zero_bubble_task
from recycle.solve.planner import plan

AUTOMATIC = {
    1: (1.1884, 1.0453, 1.0036, 1.0498, 1.0029, 1.0011, 1.0606, 1.0067, 1.0025, 1.1657, 1.0038),
    2: (1.0756, 1.0420, 1.0158, 1.0526, 1.0561, 1.4270, 1.1694, 1.3272),
}
"""Period of the automatic schedule of each row, by chunks per rank (Qi et al., 2023, and 2024)."""


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run endless loops in other processes."""
    loops = [get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 20.0], help="for each plan")
    parser.add_argument("--chunks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--busy", type=int, default=0, help="number of endless loops in other processes")
    arguments = parser.parse_args()
    with busy(arguments.busy):
        for chunks in arguments.chunks:
            print(f"| model, P, m, limit | automatic |{''.join(f' {s:g} s |' for s in arguments.seconds)} bound |")
            ratios: dict[float, list[float]] = {seconds: [] for seconds in arguments.seconds}
            for row, automatic in zip(ONE_CHUNK if chunks == 1 else TWO_CHUNKS, AUTOMATIC[chunks], strict=True):
                task = zero_bubble_task(row, chunks)
                grid = msgspec.structs.replace(task.job.grid, placement="auto" if chunks == 2 else "loop")
                cells, bound = [], 0.0
                assert task.ideal is not None
                for seconds in arguments.seconds:
                    planned = plan(msgspec.structs.replace(task.job, grid=grid), seconds=seconds)
                    period, placing = planned.period / task.ideal, planned.schedule.placing
                    cells.append(f"{period:.4f}{f' {placing}' if chunks == 2 else ''}")
                    ratios[seconds].append(period / automatic)
                    bound = planned.lower_bound / task.ideal
                name = f"{row[0]}, {row[1]}, {row[2]}, {row[3]}"
                print(f"| {name} | {automatic:.4f} | {' | '.join(cells)} | {bound:.4f} |", flush=True)
            for seconds, found in ratios.items():
                print(f"{seconds:g} s, over automatic: mean {mean(found):.4f}, at most {max(found):.4f}", flush=True)


if __name__ == "__main__":
    main()
