"""The advice against published runs, simulations and alternatives; docs/advice.md has the results.

    python benchmarks/advice.py published       # predicted and published shares of effective time
    python benchmarks/advice.py closed-form     # closed form and simulation, in 50 random settings
    python benchmarks/advice.py often           # the same with up to ten times as many failures
    python benchmarks/advice.py alternatives    # 200 random configurations beside the advised one, all simulated
    python benchmarks/advice.py scale           # CPU time for 98,304 GPUs

`published` predicts from `published_runs.toml` by the advice's closed form for a job that restarts from a checkpoint.
The inputs were committed before the first prediction.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from math import exp, inf, sqrt
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle.advice.advise import Advice, Setting, advice_of, advise, first_plan, simulate, with_value
from recycle.advice.candidates import Candidate, candidates, job_of, least_period
from recycle.advice.expectation import DAY, FailureModel, kept_share
from recycle.job import Job
from recycle.systems.failures import FailureTrace

JOB = """
[shape]
pipelines = 4
ranks = 2
micro_batches = 16
[times]
profile = "analytic"
[model]
layers = 8
hidden = 4096
heads = 32
sequence = 2048
vocabulary = 51200
[train]
precision = "bf16"
accumulation = "fast"
"""
CLUSTERS = ((32, 2, 16, 20.0), (24, 1, 15, 100.0), (64, 8, 24, 60.0))
"""GPUs, GPUs of a node, micro-batches of each of 4 pipelines, and failures per 1,000 node-days."""
LARGE = Path(__file__).with_name("paper") / "145b.toml"

Case = tuple[float, float, float]
"""Least loss, as stated, most loss."""


class Unpublished(msgspec.Struct, forbid_unknown_fields=True):
    pause: Case
    stall: Case


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """A published run; see the file."""

    name: str
    gpus: int
    source: str
    stated: str
    failures: Case
    published: tuple[float, float]
    pause: Case | None = None
    every: Case | None = None
    stall: Case | None = None

    def predict(self, unpublished: Unpublished) -> Case:
        best, stated, worst = (
            self._share(case, self.pause or unpublished.pause, self.stall or unpublished.stall) for case in range(3)
        )
        return best, stated, worst

    def _share(self, case: int, pause: Case, stall: Case) -> float:
        rate = self.failures[case] / DAY
        every = self.every[case] if self.every else sqrt(2 * stall[case] / rate)
        return effective_share(rate, pause[case], every, stall[case])


class Runs(msgspec.Struct, forbid_unknown_fields=True):
    unpublished: Unpublished
    runs: list[Run]


def effective_share(rate: float, pause: float, every: float, stall: float) -> float:
    """Return the effective share of the time if each failure stops all workers and returns to the last checkpoint.

    A failure in a pause begins it again, so the share of the time outside pauses is e^(-rate * pause).

    Args:
        rate: failures per second.
        pause: seconds from a failure until training continues.
        every, stall: seconds of training between checkpoints, and those that one takes.
    """
    return exp(-rate * pause) * kept_share(rate, every + stall) * every / (every + stall)


def published() -> str:
    """Return the table of predictions, in Markdown."""
    known = msgspec.toml.decode(Path(__file__).with_name("published_runs.toml").read_bytes(), type=Runs)
    titles = ("run", "GPUs", "published", "predicted", "interval", "error, in points", "inside")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for run in known.runs:
        best, stated, worst = run.predict(known.unpublished)
        low, high = run.published
        error = max(stated - high, 0.0) - max(low - stated, 0.0)
        figure = f"{low:.0%}" if low == high else f"over {low:.0%}" if high == 1 else f"{low:.0%} to {high:.0%}"
        cells = (
            run.name,
            f"{run.gpus:,}",
            figure,
            f"{stated:.1%}",
            f"{worst:.1%} to {best:.1%}",
            f"{100 * error:+.1f}" if error else "0",
            "yes" if worst <= high and best >= low else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Comparison(NamedTuple):
    """Expected and simulated effective share of a configuration; `error` is the standard error of the latter."""

    advice: Advice
    expected: float
    simulated: float
    error: float

    @property
    def difference(self) -> float:
        return self.expected / self.simulated - 1 if self.simulated else 0.0


def random_setting(seed: int, highest: float = 60.0) -> Setting:
    """Return 4 to 64 nodes of 1 to 8 GPUs over 30 to 720 days, with random failures, repairs and pauses.

    The failure rate is 2 to `highest` per 1,000 node-days. Up to 30 % of the failures are silent corruption, which half
    of the jobs find by replays. Slow nodes take up to three times as long, for 12 minutes to 10 hours.
    """
    chance = random.Random(seed)
    per_node, nodes = chance.choice([1, 2, 4, 8]), chance.choice([4, 8, 16, 32, 64])
    median = 2 * 20 ** chance.random()
    failures = FailureModel(
        rate=2 * (highest / 2) ** chance.random(),
        repair_median=median,
        repair_p90=median * 2 * 10 ** chance.random(),
        burst=0.3 * chance.random(),
        burst_nodes=chance.randint(2, 8),
        spread=0.3 * 15 ** chance.random(),
        announced=0.5 * chance.random(),
    )
    setting = Setting(Job.from_toml(JOB), nodes * per_node, per_node, 30 * 24 ** chance.random(), failures)
    setting = with_value(setting, "pauses.detect", 5 * 24 ** chance.random())
    setting = with_value(setting, "pauses.restart", 30 * 30 ** chance.random())
    setting = with_value(setting, "failures.corrupt", 0.3 * chance.random())
    setting = with_value(setting, "failures.slow", 2 * 50 ** chance.random())
    setting = with_value(setting, "failures.slow_factor", 1 + 2 * chance.random())
    setting = with_value(setting, "failures.slow_hours", 0.2 * 50 ** chance.random())
    return with_value(setting, "integrity.every", chance.choice([0, 10]))


def random_advice(setting: Setting, seed: int) -> Iterator[Advice]:
    """Yield random candidates of a setting that fit into memory, with the planner's first period."""
    every, dead = list(candidates(setting.job, setting.gpus, setting.per_node)), setting.dead()
    random.Random(seed).shuffle(every)
    for candidate in every:
        job = job_of(setting.job, candidate, setting.per_node)
        if job is not None and least_period(job)[0] < inf:
            yield advice_of(setting, candidate, job, first_plan(job)[0], dead)


def compared(seed: int, highest: float = 60.0, traces: int = 12) -> Comparison:
    """Compare closed form and simulation in one random setting, over traces of seeds that nothing else uses."""
    setting = random_setting(seed, highest)
    advice = next(random_advice(setting, seed))
    seeds = range(1000 * (seed + 1), 1000 * (seed + 1) + traces)
    shares = [outcome.ettr for outcome in simulate(setting, advice, setting.traces(seeds))]
    error = statistics.stdev(shares) / sqrt(traces)
    return Comparison(advice, advice.expected.effective, statistics.mean(shares), error)


def closed_form(highest: float = 60.0, settings: int = 50) -> str:
    lines, differences = ["seed  closed form  simulated  standard error  difference"], list[float]()
    for seed in range(settings):
        result = compared(seed, highest)
        differences.append(abs(result.difference))
        figures = f"{result.expected:11.4f}  {result.simulated:9.4f}  {result.error:14.4f}  {result.difference:+10.2%}"
        lines.append(f"{seed:4}  {figures}")
    within = sum(each <= 0.02 for each in differences)
    middle = statistics.median(differences)
    lines.append(f"{within} of {settings} within 2 %; largest {max(differences):.2%}, median {middle:.3%}")
    return "\n".join(lines)


def goodput(setting: Setting, advice: Advice, traces: Sequence[FailureTrace]) -> float:
    return statistics.mean(outcome.goodput for outcome in simulate(setting, advice, traces))


def alternatives(count: int = 200) -> str:
    """Simulate random configurations and the advised one over the same failures, on three clusters."""
    lines = []
    for gpus, per_node, micro_batches, rate in CLUSTERS:
        job = Job.from_toml(JOB.replace("micro_batches = 16", f"micro_batches = {micro_batches}"))
        setting = Setting(job, gpus, per_node, 60.0, FailureModel(rate=rate))
        traces = setting.traces(range(3))
        chosen = advise(setting, 1, seeds=())[0]
        own, found = goodput(setting, chosen, traces), list[tuple[float, Candidate]]()
        for advice in islice(random_advice(setting, 0), count):
            found.append((goodput(setting, advice, traces) / own - 1, advice.candidate))
        found.sort(reverse=True)
        lines.append(f"{gpus} GPUs in nodes of {per_node}, {rate:g} failures per 1,000 node-days: {chosen.candidate}")
        lines += [f"  {gain:+.2%} {candidate}" for gain, candidate in found[:3]]
        lines.append(f"  {sum(gain > 0.01 for gain, _ in found)} of {len(found)} are better by over 1 %")
    return "\n".join(lines)


def scale(gpus: int = 98304) -> str:
    job = Job.load(LARGE)
    job = replace(job, grid=replace(job.grid, micro_batches=384))  # global batch 18,432
    setting, start = Setting(job, gpus, 8, 60.0, FailureModel()), time.process_time()
    best = advise(setting, 5, seeds=())[0]
    spent, number = time.process_time() - start, sum(1 for _ in candidates(job, gpus, 8))
    return f"{gpus} GPUs, {number} candidates: {spent:.1f} s of CPU time; first {best.candidate}"


def often() -> str:
    return closed_form(600.0)


MODES = {
    "published": published,
    "closed-form": closed_form,
    "often": often,
    "alternatives": alternatives,
    "scale": scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=list(MODES))
    print(MODES[parser.parse_args().mode]())


if __name__ == "__main__":
    main()
