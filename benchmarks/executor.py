"""Our 1F1B against megatron-core's own, in one run: the same model, weights, data, processes and threads.

    python benchmarks/executor.py [--rounds N] [--steps N]

Rounds alternate between the two, because machines are noisy; what counts is the median over rounds of the ratio of
the two medians. An iteration is the forward and backward of all micro-batches with the reduction of gradients, from
the first start to the last end over all processes; optimizer steps and commits are left out on both sides. Megatron's
schedule runs under the shims that let it run without a GPU at all; they cost it some microseconds per torch call,
which is why the model is large enough for arithmetic to dominate.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Job
from recycle.exec.launcher import train
from recycle.exec.processes import ForkServer
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Kind
from recycle.ir.trace import Trace, read
from tests.exec.megatron_reference import MegatronReference

WARM_UP = 2
"""Iterations of each round that do not count."""

JOB = """
[shape]
pipelines = {pipelines}
ranks = 2
micro_batches = 8
[model]
layers = 4
hidden = 256
heads = 8
sequence = 128
[data]
micro_batch_size = 2
[train]
accumulation = "{accumulation}"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="iterations per round and side")
    arguments = parser.parse_args()
    server = ForkServer("gpt")
    try:
        for pipelines in (1, 2):
            with MegatronReference(Job.from_toml(JOB.format(pipelines=pipelines, accumulation="fast"))) as megatron:
                compare(megatron, server, pipelines, arguments.rounds, arguments.steps)
    finally:
        server.close()


def compare(megatron: MegatronReference, server: ForkServer, pipelines: int, rounds: int, steps: int) -> None:
    """Print a line per round and the medians, for one D."""
    print(f"\nP=2 D={pipelines} m=8, 4 layers, hidden 256, sequence 128, micro-batch 2: milliseconds per iteration")
    print("  round  megatron-core  ours (fast)  ratio  ours (exact)  ratio")
    ratios: dict[str, list[float]] = {"fast": [], "exact": []}
    for number in range(rounds):
        theirs = statistics.median([megatron.iteration(step).seconds for step in range(steps)][WARM_UP:])
        line = f"  {number:>5}  {theirs * 1000:>13.1f}"
        for accumulation in ("fast", "exact"):
            ours = our_seconds(Job.from_toml(JOB.format(pipelines=pipelines, accumulation=accumulation)), server, steps)
            ratios[accumulation].append(ours / theirs)
            line += f"  {ours * 1000:>{11 if accumulation == 'fast' else 12}.1f}  {ours / theirs:>5.3f}"
        print(line, flush=True)
    for accumulation, found in ratios.items():
        spread = f"lowest {min(found):.3f}, highest {max(found):.3f}"
        print(f"  median ratio, {accumulation:<5}: {statistics.median(found):.3f} ({spread})")


def our_seconds(job: Job, server: ForkServer, steps: int) -> float:
    """Median seconds of an iteration of our 1F1B with one process per worker."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    try:
        train(job, folder / "run", steps=steps, schedule=one_f_one_b(job.shape), server=server)
        trace = read(folder / "run" / "trace.json")
    finally:
        shutil.rmtree(folder)
    return statistics.median([iteration_seconds(trace.window(step, step)) for step in trace.steps][WARM_UP:])


def iteration_seconds(one: Trace) -> float:
    """From the first start to the end of the last reduction."""
    counted = one.columns.kind != Kind.OPTIMIZER_STEP
    return float(np.max(one.end[counted]) - np.min(one.start[counted]))


if __name__ == "__main__":
    main()
