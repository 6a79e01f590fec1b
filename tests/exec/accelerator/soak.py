"""Random kills on simulated accelerators on which communicators are scarce, slow and sometimes hang.

    python -m tests.exec.accelerator.soak --kills 500

Workers are killed at random instants and return two steps later. Only workers that were struck end, each by SIGKILL,
and losses, norms and states have the bits of a run over gloo without faults.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

import msgspec

from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from recycle.exec.processes.forkserver import ForkServer
from tests.exec.accelerator.struck import Hostile, over
from tests.exec.fault_matrix import JOB
from tests.exec.runs import Run, assert_same_training, calm_run, of_kind

APART = 4
"""Steps from one kill to the next."""
KILL_WITHIN = 0.05
"""Seconds from the beginning of a step in which a worker is killed."""
FORM_TIMEOUT = 8.0


def soak(kills: int, launch: Run, seed: int = 1) -> tuple[int, int]:
    """Train through random kills; returns the number of kills that struck, and of generations."""
    random = Random(seed)
    workers = [str(random.choice(list(JOB.shape.workers()))) for _ in range(kills)]
    faults = [
        text
        for step, worker in zip(range(1, APART * kills, APART), workers, strict=True)
        for text in (f"kill={random.uniform(0.0, KILL_WITHIN):.4f}:{worker}@{step}", f"rejoin:{worker}@{step + 2}")
    ]
    train_section = msgspec.structs.replace(JOB.train, checkpoint_every=20)  # all hosts of a stage may die at once
    hostile = over(Hostile, msgspec.structs.replace(JOB, train=train_section), form_timeout=FORM_TIMEOUT)
    run = launch(hostile, APART * kills, *faults)
    assert_same_training(run, calm_run(JOB, launch, APART * kills))
    struck = Counter(event["worker"] for event in of_kind(run, "fault"))
    deaths = of_kind(run, "detected")
    dead = Counter(event["worker"] for event in deaths)
    assert dead <= struck
    assert struck.total() - dead.total() <= 0.02 * kills + 1  # two kills of a worker may strike the same process
    assert {event["cause"] for event in deaths} == {"killed by SIGKILL"}
    assert struck.total() > 0.9 * kills - 1  # some workers are dead already
    return dead.total(), len(of_kind(run, "generation"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--per-run", type=int, default=50, help="kills in one run, each run with another seed")
    options = parser.parse_args()
    with closing(ForkServer(JOB.model.kind)) as server, tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["RECYCLE_CACHE"] = folder

        def launch(job, steps, *faults):
            directory = Path(tempfile.mkdtemp(dir=folder))
            parsed = [parse_fault(fault) for fault in faults]
            return train(job, directory, steps=steps, faults=parsed, planner=plan_for_training, server=server)

        done, began = 0, time.monotonic()
        for seed in range(1, 1 + -(-options.kills // options.per_run)):
            deaths, generations = soak(options.per_run, launch, seed)
            done += deaths
            seconds = time.monotonic() - began
            print(f"{done} kills, {generations} generations in the last run, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
