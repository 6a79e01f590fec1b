"""A session's iteration against megatron-core's own loop, and its recovery from SIGKILL compared with `recycle train`.

    python -m benchmarks.own_loop [--rounds N] [--steps N] [--kills N] [--accumulation fast|exact]

Pairs of runs alternate: a script under torchrun with megatron-core's 1F1B, and the same script in a session. Model,
DDP, Megatron's optimizer, data and number of processes are the same. An iteration lasts from one call of the loop to
the next, on the slowest process; the first ones of each run do not count. The result is the median over pairs of the
ratios of medians. The machine's other work spoils wall time, but hardly CPU time: the table has the CPU seconds of an
iteration, in the processes that train and in the launcher's others (agent, leader, planner).

The second table kills a worker (SIGKILL) in a session and under `recycle train`, in turn, with a model of the same
size, and measures from the kill to the next committed step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from recycle import Job

WARM_UP = 4
"""Iterations of each run that do not count."""
LAUNCHER = "RECYCLE_BENCHMARK_PID"
"""Environment variable with the process that starts the runs."""
Seconds = tuple[float, float, float]
"""Of an iteration: wall time (median over iterations of the slowest process), CPU time of the processes that train, CPU
time of all others below the launcher."""
D, P, MICRO_BATCHES = 2, 2, 4
LAYERS, HIDDEN, HEADS, SEQUENCE, ROWS, VOCABULARY = 4, 256, 4, 128, 2, 256
JOB = f"""
[shape]
pipelines = {D}
ranks = {P}
micro_batches = {MICRO_BATCHES}
[model]
layers = {LAYERS}
hidden = {HIDDEN}
heads = {HEADS}
sequence = {SEQUENCE}
vocabulary = {VOCABULARY}
[data]
micro_batch_size = {ROWS}
[planner]
seconds = 2
ahead = 1
[train]
steps = 1000
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="iterations of a run")
    parser.add_argument("--kills", type=int, default=5, help="of each kind; 0 for none")
    parser.add_argument("--accumulation", choices=("fast", "exact"), default="fast")
    parser.add_argument("--train", choices=("own", "session"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.steps, given.folder)
        return
    os.environ[LAUNCHER] = str(os.getpid())
    job = JOB + f'accumulation = "{given.accumulation}"\n'
    print(f"D={D} P={P} m={MICRO_BATCHES}, {LAYERS} layers, hidden {HIDDEN}, {ROWS} x {SEQUENCE} tokens, {given}")
    pairs = [(own(given.steps), in_session(job, given.steps)[0]) for _ in range(given.rounds)]
    if pairs:
        print(f"  {'ms per iteration':<22} {'wall':>8} {'CPU':>8} {'CPU of launcher':>16}")
        for name, column in zip(("megatron-core's loop", "the session's"), zip(*pairs, strict=True), strict=True):
            wall, cpu, launcher = (1e3 * statistics.median(values) for values in zip(*column, strict=True))
            print(f"  {name:<22} {wall:8.1f} {cpu:8.1f} {launcher:16.1f}")
        for what, place in (("wall", 0), ("CPU", 1)):
            ratios = sorted(session[place] / other[place] for other, session in pairs)
            print(
                f"  ratio of {what:<4} {statistics.median(ratios):.3f} ({' '.join(f'{ratio:.3f}' for ratio in ratios)})"
            )
    runs: tuple[tuple[str, Callable[..., Any]], ...] = (("recycle train", trainer), ("the session", in_session))
    again: dict[str, list[float]] = {name: [] for name, _ in runs}
    for _ in range(given.kills):
        for name, run in runs:
            again[name].append(run(job, given.steps, kill=given.steps // 2)[1])
    for name, seconds in again.items() if given.kills else ():
        print(f"  {name:<14} SIGKILL to the next commit {statistics.median(seconds):6.2f} s ({max(seconds):.2f})")


def own(steps: int) -> Seconds:
    """An iteration under torchrun."""
    with tempfile.TemporaryDirectory(prefix="recycle-own-loop-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(D * P)]
        command += [__file__, "--train", "own", "--steps", str(steps), "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"torchrun ended with {done.returncode}: {done.stderr[-2000:]}")
        return seconds_in(Path(folder))


def in_session(job: str, steps: int, kill: int | None = None) -> tuple[Seconds, float]:
    """An iteration in a session, and the seconds from the kill in step `kill` to the next commit."""
    with tempfile.TemporaryDirectory(prefix="recycle-own-loop-") as folder:
        arguments = ["--train", "session", "--steps", str(steps), "--folder", folder]
        again = measured(job, steps, kill, command=[sys.executable, __file__, *arguments])
        return seconds_in(Path(folder)), again


def trainer(job: str, steps: int, kill: int | None = None) -> tuple[None, float]:
    return None, measured(job, steps, kill)


def measured(job: str, steps: int, kill: int | None, **options: Any) -> float:
    from recycle.cli.planner import plan_for_training
    from recycle.exec.faults.faults import parse_fault
    from recycle.exec.launch.launcher import train as run

    os.environ["PYTHONPATH"] = os.getcwd()
    faults = [] if kill is None else [parse_fault(f"kill:1.1@{kill}")]
    with tempfile.TemporaryDirectory(prefix="recycle-own-loop-") as folder:
        result = run(
            Job.from_toml(job), Path(folder) / "run", steps=steps, faults=faults, planner=plan_for_training, **options
        )
    struck = [event["time"] for event in result.events if event["kind"] == "fault"]
    return next(line["time"] - struck[0] for line in result.metrics if line["time"] > struck[0]) if struck else 0.0


def seconds_in(folder: Path) -> Seconds:
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*"))]
    wall = statistics.median(map(max, zip(*(rank["wall"] for rank in ranks), strict=True)))
    cpu = sum(rank["cpu"] for rank in ranks)
    return wall, cpu, ranks[0]["all"] - cpu


def train(kind: str, steps: int, folder: Path) -> None:
    """The script: one process's part of a run."""
    from recycle.megatron.without_gpu import without_gpu

    launcher, starts, used = int(os.environ[LAUNCHER]), list[float](), list[tuple[float, float]]()
    with without_gpu():
        for step, start in enumerate(in_own_session(steps) if kind == "session" else in_own_loop(steps)):
            starts.append(start)
            if step in (WARM_UP, steps - 1):
                used.append((time.process_time(), cpu_of_tree(launcher) if os.environ["RANK"] == "0" else 0.0))
    cpu, of_all = ((after - before) / (steps - 1 - WARM_UP) for before, after in zip(*used, strict=True))
    wall = [after - before for before, after in pairwise(starts)][WARM_UP:]
    (folder / f"rank{os.environ['RANK']}").write_text(json.dumps({"wall": wall, "cpu": cpu, "all": of_all}))


def cpu_of_tree(root: int) -> float:
    """CPU seconds of a process and its descendants that live now."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    tree = {root}
    while found := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= found
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def in_own_loop(steps: int) -> Iterator[float]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=P)
    chunks, optimizer, forward_step, batches = build()
    loop, replica = get_forward_backward_func(), parallel_state.get_data_parallel_rank()
    for step in range(steps):
        yield time.perf_counter()
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        loop(
            forward_step_func=forward_step,
            data_iterator=batches(replica, step),
            model=chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
        )
        optimizer.step()
    torch.distributed.barrier()


def in_own_session(steps: int) -> Iterator[float]:
    from megatron.core import parallel_state

    import recycle.megatron

    with recycle.megatron.session() as session:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=P)
        chunks, optimizer, forward_step, batches = build()
        session.attach(chunks, optimizer, data=lambda replica: batches(replica, session.step))
        for _ in session.steps():
            yield time.perf_counter()
            session.forward_backward(forward_step, seq_length=SEQUENCE, micro_batch_size=ROWS)
            session.optimizer_step()


def build(
    ranks: int = P, pipelines: int = D
) -> tuple[list[Any], Any, Callable[..., Any], Callable[[int, int], Iterator[Any]]]:
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.megatron import jobs

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS}
    case = jobs.Case(None, ranks, pipelines, micro_batches=MICRO_BATCHES, sequence=SEQUENCE, model=model)
    chunks, _ = jobs.build(case)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.01, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, chunks)
    return chunks, optimizer, jobs.forward_step(case), lambda k, step: jobs.batches(k, step, MICRO_BATCHES, SEQUENCE)


if __name__ == "__main__":
    main()
