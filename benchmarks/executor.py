"""recycle's executor against megatron-core's 1F1B: same model, weights, data, processes and threads.

    python benchmarks/executor.py [--rounds N] [--steps N] [--only NAME]

Measured is the time from one iteration of a worker to the next: forwards, backwards, reductions, global norm, optimizer
step and, for recycle, the commit. Rounds alternate between all variants, because machines are noisy. The result is the
median over rounds of the ratios of the medians, with a bootstrapped 95 % interval.

Megatron's model consists of its own modules. In recycle's Llama, norms, rotary positions and gates are one node of the
graph each (`recycle.exec.model.fused`), with the same bits; all other layers and kernels are the same.

The lines below each case give the simulated periods with the F, I, W and step that the ZB-H1 run measured. The
difference between the simulated and the measured ratio is the executor's overhead.

Megatron's schedule runs under shims that let it run without a GPU and affect every torch call. The line "shims" gives
their cost for a stage's F and B, on the same model in the same processes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Job, Profile, Schedule, Shape, simulate
from recycle.exec.launch.launcher import train
from recycle.exec.processes.forkserver import ForkServer
from recycle.exec.profile.executed import executed
from recycle.ir.families import one_f_one_b, zb_h1, zb_h2
from recycle.ir.formats.run_trace import read_trace
from recycle.ir.lower import with_barrier
from tests.exec.megatron_reference import MegatronReference

WARM_UP = 10
"""Iterations of each round that do not count: the first of a run steps with the barrier, and the memory of a fresh
process is not all there yet, while Megatron's processes stay."""
RESAMPLED = 2000

JOB = """
[shape]
pipelines = {pipelines}
ranks = {ranks}
micro_batches = {micro_batches}
[model]
layers = 4
hidden = 512
heads = 8
sequence = 256
{model}
[data]
micro_batch_size = {rows}
[train]
accumulation = "{accumulation}"
clip = 1e9
"""
MODELS = {"gpt": "", "llama": 'kind = "llama"\nffn = 1376\nconfig = {num_query_groups = 4}'}
"""Family -> its keys of `[model]`."""
VARIANTS = {
    "1F1B": (one_f_one_b, True, "fast"),
    "1F1B, barrier": (one_f_one_b, False, "fast"),
    "1F1B, exact": (one_f_one_b, True, "exact"),
    "ZB-H1": (zb_h1, True, "fast"),
    "ZB-H1, barrier": (zb_h1, False, "fast"),
    "ZB-H2": (zb_h2, True, "fast"),
    "ZB-H2, barrier": (zb_h2, False, "fast"),
}
"""Name -> (family, staggered, accumulation)."""
CASES = {
    "P2-m2": ((1, 2, 2), ("1F1B", "1F1B, barrier", "1F1B, exact", "ZB-H1", "ZB-H1, barrier")),
    "P2-m4": ((1, 2, 4), tuple(VARIANTS)),
    "P2-m8": ((1, 2, 8), ("1F1B", "1F1B, exact")),
    "P4-m8": ((1, 4, 8), ("1F1B", "1F1B, exact")),
    "D2-P2-m4": ((2, 2, 4), ("1F1B", "1F1B, exact")),
    "llama-P2-m4": ((1, 2, 4), ("1F1B", "1F1B, barrier", "1F1B, exact", "ZB-H1", "ZB-H1, barrier")),
}
"""Name, which begins with the family where it is not "gpt" -> ((D, P, m), variants)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=25, help="iterations per round and variant")
    parser.add_argument("--only", choices=[*CASES, "exact"], help="one case alone")
    parser.add_argument("--family", choices=MODELS, default="gpt", help="of the comparison of exact with fast")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps: {arguments.steps}, but {WARM_UP} warm up and do not count; give {WARM_UP + 2} or more")
    server = ForkServer("gpt")
    try:
        for name, (size, variants) in CASES.items():
            if arguments.only in (None, name):
                compare(name, size, variants, server, arguments)
        if arguments.only in (None, "exact"):
            exact_cost(server, arguments)
    finally:
        server.close()


def compare(
    name: str, size: tuple[int, int, int], variants: tuple[str, ...], server: ForkServer, arguments: argparse.Namespace
) -> None:
    """Print the ratios of every variant to megatron-core's 1F1B, for one shape."""
    family = name.partition("-")[0] if name.partition("-")[0] in MODELS else "gpt"
    theirs: list[float] = []
    parts: list[Profile] = []
    ours: dict[str, list[float]] = {variant: [] for variant in variants}
    with MegatronReference(job_of(size, family=family)) as megatron:
        shims = megatron.shim_cost(20)
        for _ in range(arguments.rounds):
            starts = [times[WARM_UP:] for times in megatron.train(arguments.steps)]
            theirs.append(statistics.median(after - before for times in starts for before, after in pairwise(times)))
            for variant in variants:
                seconds, profile = our_seconds(size, variant, server, arguments.steps, family=family)
                ours[variant].append(seconds)
                if variant == "ZB-H1":
                    parts.append(profile)
    print(f"\n{name}: 4 layers, hidden 512, sequence 256, {arguments.rounds} rounds of {arguments.steps} iterations")
    print(f"  {'megatron-core 1F1B':<20} {1000 * statistics.median(theirs):8.1f} ms   shims {100 * (shims - 1):+.1f} %")
    for variant, seconds in ours.items():
        print(line(variant, seconds, theirs), flush=True)
    if parts:
        print_simulated(Shape(*size), variants, parts)


def print_simulated(shape: Shape, variants: tuple[str, ...], profiles: list[Profile]) -> None:
    """What the schedules' periods are to that of 1F1B with the barrier, at the medians of the profiles."""
    names = ("forward", "backward_input", "backward_weight", "step")
    middle = {name: statistics.median(_mean(profile, name, shape) for profile in profiles) for name in names}
    profile = Profile(**middle)
    base = simulate(with_barrier(one_f_one_b(shape)), profile).period
    ratios = []
    for variant in variants:
        family, staggered, _ = VARIANTS[variant]
        schedule = family(shape) if staggered else with_barrier(family(shape))
        ratios.append(f"{variant} {simulate(schedule, profile).period / base:.3f}")
    times = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in middle.items())
    print(f"  simulated at {times} ms: {'; '.join(ratios)}", flush=True)


def _mean(profile: Profile, name: str, shape: Shape) -> float:
    return statistics.mean(profile.per_stage(name, shape.stages))


def line(name: str, seconds: list[float], others: list[float]) -> str:
    """Median milliseconds, and the median of the rounds' ratios with its interval."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    low, high = medians[RESAMPLED * 25 // 1000], medians[RESAMPLED * 975 // 1000]
    milliseconds = 1000 * statistics.median(seconds)
    return (
        f"  {name:<20} {milliseconds:8.1f} ms   ratio {statistics.median(ratios):.3f}  (95 %: {low:.3f} to {high:.3f})"
    )


def exact_cost(server: ForkServer, arguments: argparse.Namespace) -> None:
    """What `exact` costs against `fast`, with 1,024 tokens per micro-batch."""
    seconds: dict[str, list[float]] = {"1F1B": [], "1F1B, exact": []}
    for _ in range(arguments.rounds):
        for variant, found in seconds.items():
            found.append(our_seconds((1, 2, 4), variant, server, arguments.steps, 4, arguments.family)[0])
    print(f"\nexact against fast: {arguments.family}, P2-m4, hidden 512, 1,024 tokens per micro-batch")
    print(line("1F1B, exact", seconds["1F1B, exact"], seconds["1F1B"]))


def job_of(size: tuple[int, int, int], accumulation: str = "fast", rows: int = 1, family: str = "gpt") -> Job:
    pipelines, ranks, micro_batches = size
    text = JOB.format(
        pipelines=pipelines,
        ranks=ranks,
        micro_batches=micro_batches,
        rows=rows,
        accumulation=accumulation,
        model=MODELS[family],
    )
    return Job.from_toml(text)


def our_seconds(
    size: tuple[int, int, int], variant: str, server: ForkServer, steps: int, rows: int = 1, family: str = "gpt"
) -> tuple[float, Profile]:
    """Median seconds from one iteration to the next, and what each kind of instruction took."""
    build, staggered, accumulation = VARIANTS[variant]
    job = job_of(size, accumulation, rows, family)
    schedule: Schedule = build(job.shape)
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    try:
        result = train(
            job, folder / "run", steps=steps, schedule=schedule if staggered else with_barrier(schedule), server=server
        )
        trace = read_trace(folder / "run" / "trace.json")
        profile = executed(folder / "run").profile
    finally:
        shutil.rmtree(folder)
    assert result.modes["staggered"] == (steps - 1 if staggered else 0), result.modes
    period = trace.period(WARM_UP, steps - 1)
    assert period is not None
    return period, profile


if __name__ == "__main__":
    main()
