"""What comparing states costs, and whether every flipped bit of a state is found, in real runs.

    python -m benchmarks.digests cost [--every N] [--repeats R] [--layers L] [--hidden H]
    python -m benchmarks.digests flips [--flips N] [--kind gpt|llama|emulated] [--hosts D] [--every N] [--replay]
    python -m benchmarks.digests clean [--iterations N] [--kind …] [--hosts D] [--every N] [--replay] [--bf16] [--moves]

cost: one stage of a GPT in this process. Iterations with a compared state alternate with others. Both ratios are upper
bounds, because no work is hidden in waits: the seconds of a comparing iteration over those of another, and the mean of
N iterations of which one compares.

flips: one run with N flips of a random bit of a random worker's weights or moments, drawn from the seed. A fenced
worker rejoins before the next flip. The exit status is 1 unless each flip is found within `every` iterations, exactly
the struck worker is fenced, and losses and final states are those of the calm run. A flip without an event `corrupt`
counts as missed. With --replay hosts also replay each other's work once in N iterations, gradient sums are struck, and
kernels get stuck; for N = 1 also activations and inputs are struck. In the first stage several bits of an input are
equivalent, because a flip must leave a valid token.

clean: one run of N iterations without flips, in which workers die, gradients become NaN and workers rejoin at random;
with --moves layers move, too. The exit status is 1 if a worker is suspected (an event `corrupt`, or an iteration that
is repeated because hosts disagree), or a loss differs from the calm run's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import torch

from recycle import Job, MicroBatch
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import Fault, punish
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.trackers import Observer
from recycle.exec.leader.commit import Comparison
from recycle.exec.model.build import build_stages
from recycle.exec.worker.step_state import StepState
from recycle.job import PricedJob, price
from recycle.job.shape import Worker

COST = """
[shape]
pipelines = 1
ranks = 1
micro_batches = {micro_batches}
[model]
layers = {layers}
hidden = {hidden}
heads = 8
sequence = 128
vocabulary = 512
"""
RUN = """
[shape]
pipelines = {hosts}
ranks = 2
micro_batches = {micro_batches}
[planner]
{planner}
[memory]
{memory}
[model]
kind = "{kind}"
layers = {layers}
hidden = 32
heads = 2
sequence = 16
[train]
clip = 1e9
checkpoint_every = {kept}
precision = "{precision}"
trace = "off"
[membership]
drift = 0.0
[integrity]
{key} = {every}
"""
SETTLED = 3
"""Iterations from the last that may find a flip to the re-join, and from that to the next flip."""


def cost(every: int, repeats: int, layers: int, hidden: int, micro_batches: int) -> None:
    torch.set_num_threads(1)
    (stage,) = build_stages(Job.from_toml(COST.format(**locals())), [0], torch.device("cpu")).values()
    updates = StepState({0: stage})
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for iteration in range(2 * repeats + 2):
        is_compared = iteration % 2 == 1
        began = time.perf_counter()
        stage.begin_iteration(iteration)
        for index in range(micro_batches):
            stage.forward(MicroBatch(0, index), None)
            stage.backward(MicroBatch(0, index), None)
        if is_compared:
            updates.compare_state(Comparison(iteration - 1))
            updates.checksums()
        stage.gradient_norms_squared()
        stage.step(iteration, 1.0)
        if iteration >= 2:
            seconds[is_compared].append(time.perf_counter() - began)
    usual, compared = (statistics.median(seconds[whether]) for whether in (False, True))
    weight = sum(tensor.nbytes for tensor in stage.state_tensors()) / 2**20
    print(
        f"{layers} layers of {hidden}, {micro_batches} micro-batches, a state of {weight:.0f} MiB: an iteration takes"
        f" {1000 * usual:.1f} ms, one that is compared {1000 * compared:.1f} ms, {compared / usual:.3f} times as long;"
        f" every {every} iterations: {100 * (compared / usual - 1) / every:.3f} % on average (medians of {repeats})"
    )


def flips_of(count: int, hosts: int, every: int, seed: int, is_replayed: bool = False) -> tuple[list[Fault], int]:
    """The faults, in order, and the iterations that they need."""
    draw, faults, step = random.Random(seed), list[Fault](), every
    targets = ["weight", "moment"]
    if is_replayed:
        targets += ["gradient", "kernel", *(("activation", "input") if every == 1 else ())]
    for _ in range(count):
        worker = Worker(draw.randrange(hosts), draw.randrange(2))
        target = draw.choice(targets)
        bit = draw.randrange(64 if target == "gradient" else 32)
        faults.append(Fault("flip", worker, step, argument=float(bit), target=target))
        back = step + every + SETTLED
        faults.append(Fault("rejoin", worker, back))
        step = back + SETTLED
    return faults, step + every


def job_of(
    kind: str, hosts: int, every: int, is_replayed: bool, precision: str = "fp32", moves: bool = False
) -> PricedJob:
    """What is trained: small enough for hundreds of iterations, and two workers to a pipeline."""
    planner, memory = "seconds = 1.0", ""
    if moves:
        planner, memory = 'layout = "elastic"\nmove_when = "always"\nsteps = 60', "limit = 16\nstate_limit = 1.5"
    micro_batches = 4 if moves else 2
    key, layers, kept = "every" if is_replayed else "digests", 8 if moves else 4, 10 * every if moves else 0
    return price(Job.from_toml(RUN.format(**locals())))


class _AwaitsLayout(Observer):
    """Holds the run behind a death until the planner has said which layout follows; else hundreds of iterations of a
    small model would have passed by then."""

    def __init__(self) -> None:
        self._pause = 0.0

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] in ("detected", "rejoined"):
            self._pause = 0.1
        elif event["kind"] in ("layout", "moved"):
            self._pause = 0.0

    def committed(self, line: dict[str, Any]) -> None:
        time.sleep(self._pause)
        self._pause = min(2.0, 1.5 * self._pause)


def clean(
    iterations: int, kind: str, hosts: int, every: int, seed: int, is_replayed: bool, precision: str, moves: bool
) -> bool:
    job = job_of(kind, hosts, every, is_replayed, precision, moves)
    faults = punish(job.shape, iterations, 12.0, seed, kinds=("kill", "kill", "exception", "nan"))
    dead = set[Worker]()
    for fault in list(faults):  # a worker that was only spoiled does not rejoin
        if fault.kind == "rejoin" and fault.worker not in dead:
            faults.remove(fault)
        elif fault.kind != "nan":
            dead ^= {fault.worker}

    def run(struck: list[Fault]) -> RunResult:
        with tempfile.TemporaryDirectory() as directory:
            observer = _AwaitsLayout() if moves else None
            return train(job, directory, steps=iterations, faults=struck, planner=plan_for_training, observer=observer)

    struck, calm = run(faults), run([])
    suspected = [event for event in [*struck.events, *calm.events] if is_suspicion(event)]
    wrong = [
        line["step"]
        for line, other in zip(struck.metrics, calm.metrics, strict=True)
        if (line["loss"], line["grad_norm"]) != (other["loss"], other["grad_norm"])
    ]
    count = Counter(event["kind"] for event in struck.events)
    how = "replayed" if is_replayed else "compared"
    print(
        f"{kind}, {precision}, {hosts} hosts, {how} every {every}: {2 * iterations} iterations of two runs, with"
        f" {count['detected']} deaths, {sum(fault.kind == 'nan' for fault in faults)} spoilt gradients,"
        f" {count['rejoined']} re-joins and {count['moved']} moves of layers in one of them: {len(suspected)} times"
        f" a worker was suspected; {len(wrong)} of {iterations} losses and norms differ"
    )
    return not suspected and not wrong


def is_suspicion(event: dict[str, Any]) -> bool:
    """Whether an event says that a worker may compute wrong results."""
    return event["kind"] == "corrupt" or (event["kind"] == "undone" and "different things" in event["cause"])


def flips(count: int, kind: str, hosts: int, every: int, seed: int, is_replayed: bool) -> bool:
    job = job_of(kind, hosts, every, is_replayed)
    faults, steps = flips_of(count, hosts, every, seed, is_replayed)

    def run(struck: list[Fault]) -> RunResult:
        with tempfile.TemporaryDirectory() as directory:
            return train(job, directory, steps=steps, faults=struck, planner=plan_for_training)

    struck, calm = run(faults), run([])
    found = [event for event in struck.events if event["kind"] == "corrupt"]
    pending = {fault.step: fault for fault in faults if fault.kind == "flip"}
    right = 0
    for event in found:
        caused = [step for step in pending if step <= event["step"] <= step + every]
        if caused and event["workers"] == [str(pending[caused[0]].worker)]:
            right += 1
            del pending[caused[0]]
    wrong = [
        line["step"] for line, other in zip(struck.metrics, calm.metrics, strict=True) if line["loss"] != other["loss"]
    ]
    states = [worker for worker in struck.digests if struck.digests[worker] != calm.digests[worker]]
    named = sum(any("bit" in part for part in event.get("bits", ())) for event in found)
    how = "replayed" if is_replayed else "compared"
    print(
        f"{kind}, {hosts} hosts, {how} every {every}: {right} of {count} flips found within {every} iterations and"
        f" the right worker fenced ({named} with tensor, index and bit); {len(found) - right} other events;"
        f" {len(wrong)} of {steps} losses and {len(states)} of {len(struck.digests)} final states differ from the"
        " calm run's"
    )
    for fault in pending.values():
        print(f"  missed: {fault}")
    return right == count == len(found) and not wrong and not states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "flips", "clean"))
    parser.add_argument("--every", type=int)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--kind", default="gpt", choices=("gpt", "llama", "emulated"))
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--iterations", type=int, default=250)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--moves", action="store_true")
    given = parser.parse_args()
    if given.what == "cost":
        cost(given.every or 100, given.repeats, given.layers, given.hidden, given.micro_batches)
        return
    every = given.every or 3
    if given.what == "flips":
        is_right = flips(given.flips, given.kind, given.hosts, every, given.seed, given.replay)
    else:
        precision = "bf16" if given.bf16 else "fp32"
        how = (given.seed, given.replay, precision, given.moves)
        is_right = clean(given.iterations, given.kind, given.hosts, every, *how)
    if not is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
