"""recycle's schedules in Megatron's own loop against megatron-core's 1F1B: same script, model and processes.

    python -m benchmarks.drop_in [--rounds N] [--steps N] [--ranks P] [--micro-batches M]

Each process trains one model with megatron-core's DDP, and torch's AdamW on `main_grad`, as Megatron jobs do. Rounds
alternate between the loops: megatron-core's, recycle's with 1F1B, recycle's with ZB-H1. Each round starts with another
loop, and its first iterations are not counted. The result is the median over rounds of the ratios to megatron-core's
median, with a bootstrapped 95 % interval. The last lines give the simulated period of ZB-H1 with the measured F, I and
W. All loops run in the same processes under shims that let Megatron run without a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from recycle import Profile, Shape, simulate
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.lower import with_barrier
from tests.megatron.jobs import ROWS, Case, Jobs, batches, build, forward_step

WARM_UP = 3
"""Iterations of each round that do not count."""
RESAMPLED = 2000
LOOPS = (None, "1f1b", "zb-h1")
SEQUENCE = 128
MODEL = {"layers": 4, "hidden": 512, "heads": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=13, help="iterations per round and loop")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    given = parser.parse_args()
    case = Case(None, given.ranks, micro_batches=given.micro_batches, sequence=SEQUENCE, model=MODEL)
    with Jobs(given.ranks) as jobs:
        found = jobs.call(partial(_train, given.rounds, given.steps), case)
    seconds = {loop: [max(rank[0][loop][round_] for rank in found) for round_ in range(given.rounds)] for loop in LOOPS}
    print(f"P = {given.ranks}, m = {given.micro_batches}, 4 layers, hidden 512, {ROWS} x {SEQUENCE} tokens, {given}")
    for loop in LOOPS:
        print(_line("megatron-core's 1F1B" if loop is None else f"recycle's {loop}", seconds[loop], seconds[None]))
    forward, input_, weight = (statistics.mean(rank[1][kind] for rank in found) for kind in ("F", "I", "W"))
    shape, profile = Shape(1, given.ranks, given.micro_batches), Profile.uniform(forward, input_, weight)
    ratio = (
        simulate(with_barrier(zb_h1(shape)), profile).period
        / simulate(with_barrier(one_f_one_b(shape)), profile).period
    )
    print(f"  simulated: zb-h1 {ratio:.3f} at F {1e3 * forward:.1f}, I {1e3 * input_:.1f}, W {1e3 * weight:.1f} ms;")
    print("  reductions and steps, which no schedule shortens, are in the measured ratios and not in this one")


def _train(rounds: int, steps: int, case: Case) -> tuple[dict[str | None, list[float]], dict[str, float]]:
    """Seconds of an iteration by loop and round in this process, and medians of F, I and W in ZB-H1's runs."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from recycle.megatron import forward_backward_func

    chunks, named = build(case)
    optimizer = torch.optim.AdamW(list(named.values()), lr=1e-4, fused=True)
    loops: dict[str | None, Any] = {None: get_forward_backward_func()}
    loops |= {name: forward_backward_func(name) for name in LOOPS if name is not None}
    step = forward_step(case)
    found: dict[str | None, list[float]] = {loop: [] for loop in LOOPS}
    computed: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    for round_ in range(rounds):
        for turn in range(len(LOOPS)):
            loop = LOOPS[(round_ + turn) % len(LOOPS)]
            torch.distributed.barrier()
            starts = []
            for iteration in range(steps):
                starts.append(time.perf_counter())
                chunks[0].zero_grad_buffer()
                loops[loop](
                    forward_step_func=step,
                    data_iterator=batches(0, iteration, case.micro_batches, SEQUENCE),
                    model=chunks,
                    num_microbatches=case.micro_batches,
                    seq_length=SEQUENCE,
                    micro_batch_size=ROWS,
                )
                for parameter in named.values():
                    parameter.grad = parameter.main_grad
                optimizer.step()
                for parameter in named.values():
                    parameter.grad = None
                if loop == "zb-h1" and iteration >= WARM_UP:
                    for one in loops[loop].computed:
                        if one.token in computed:
                            computed[one.token].append(one.seconds / one.count)
            starts.append(time.perf_counter())
            found[loop].append(statistics.median(after - before for before, after in pairwise(starts[WARM_UP:])))
    return found, {kind: statistics.median(of) for kind, of in computed.items()}


def _line(name: str, seconds: list[float], others: list[float]) -> str:
    """Median milliseconds, and the median of the rounds' ratios with its interval."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    low, high = medians[RESAMPLED * 25 // 1000], medians[RESAMPLED * 975 // 1000]
    return (
        f"  {name:<22} {1000 * statistics.median(seconds):8.1f} ms   ratio {statistics.median(ratios):.3f}"
        f"  (95 %: {low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
