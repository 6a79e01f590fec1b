"""How long a checkpoint stalls training: written in the background, and written before training continues.

    python benchmarks/checkpoint.py [--rounds N]

The subject is the state of one GPT stage. Three durations of the worker's thread are compared: handing the state to the
writing thread, which includes the copy; writing it directly; and the bare copy into allocated memory, a lower bound.
The last figure is the slowdown of forwards and backwards that run while the thread writes. Rounds alternate; figures
are medians, and ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from recycle import Job
from recycle.exec.checkpoint.checkpoint import folder_of, write_stage
from recycle.exec.hooks.hook import Generation
from recycle.exec.hooks.saver import Saver
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.protocol import Commit, GenerationRecord
from recycle.job.shape import MicroBatch

JOB = """
[shape]
pipelines = 1
ranks = 1
micro_batches = 4
[model]
layers = {layers}
hidden = {hidden}
heads = 8
sequence = 64
[data]
micro_batch_size = 2
"""
RECORD = GenerationRecord(1, ["0.0"], {"0.0": "0.0"}, "")
SIZES = [(2, 256), (4, 512)]
"""Layers and hidden size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print("one stage, milliseconds, medians")
    print("  layers hidden     MB   bare copy    stall  stall/copy  blocking  stall/blocking  iteration  while writing")
    for layers, hidden in SIZES:
        compare(Job.from_toml(JOB.format(layers=layers, hidden=hidden)), arguments.rounds)


def compare(job: Job, rounds: int) -> None:
    """Print one line."""
    folder = Path(tempfile.mkdtemp(prefix="recycle-benchmark-"))
    stage = build_stages(job, [0], torch.device("cpu"))[0]
    saver = Saver(folder, "0.0", {0: stage}, lambda step: True, lambda saved: None)
    saver.begin_generation(cast(Generation, SimpleNamespace(hosts={0: ["0.0"]})))
    live = stage.state_tensors()
    copy = [torch.empty_like(tensor) for tensor in live]
    figures: dict[str, list[float]] = {name: [] for name in ("copy", "stall", "blocking", "iteration", "writing")}
    try:
        for step in range(rounds + 1):
            took: dict[str, float] = {}
            took["copy"] = seconds(lambda: [into.copy_(tensor) for into, tensor in zip(copy, live, strict=True)])
            took["blocking"] = seconds(partial(write, stage, folder_of(folder, 2 * step)))
            took["iteration"] = seconds(lambda at=step: iteration(stage, job, at))
            commit = Commit(2 * step + 1, 1.0, 1.0, 1.0, checkpoint=True)
            took["stall"] = seconds(lambda now=commit: saver.save(RECORD, now))
            took["writing"] = seconds(lambda at=step: iteration(stage, job, at))
            saver.close()
            for old in folder.iterdir():
                shutil.rmtree(old)
            if step:  # the first touches all memory for the first time
                for name, value in took.items():
                    figures[name].append(value)
    finally:
        shutil.rmtree(folder)
    size = sum(tensor.nbytes for tensor in live) / 1e6
    ms = {name: statistics.median(values) * 1000 for name, values in figures.items()}
    print(
        f"  {job.model.layers:>6} {job.model.hidden:>6} {size:>6.0f} {ms['copy']:>11.1f} {ms['stall']:>8.1f}"
        f" {ratio(figures, 'stall', 'copy'):>11.2f} {ms['blocking']:>9.1f} {ratio(figures, 'stall', 'blocking'):>15.3f}"
        f" {ms['iteration']:>10.1f} {ratio(figures, 'writing', 'iteration'):>13.2f}x",
        flush=True,
    )


def write(stage: Stage, folder: Path) -> None:
    """Write the live state before training continues."""
    write_stage(folder, stage.index, "0.0", stage.named_state(stage.state_tensors()))


def iteration(stage: Stage, job: Job, step: int) -> None:
    """Forward and backward of all micro-batches."""
    stage.begin_iteration(step)
    for index in range(job.shape.micro_batches):
        stage.forward(MicroBatch(0, index), None)
        stage.backward(MicroBatch(0, index), None)


def seconds(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def ratio(figures: dict[str, list[float]], above: str, below: str) -> float:
    """Median over rounds."""
    return statistics.median(a / b for a, b in zip(figures[above], figures[below], strict=True))


if __name__ == "__main__":
    main()
