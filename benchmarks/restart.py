"""The same tiny GPT through a killed worker: recycle, torchrun with a checkpoint at every step, and torchft.

    python benchmarks/restart.py [--steps N] [--kills N]

Three replicas of the whole model on this machine over gloo, with recycle's stages, data and exact sums on both sides;
worker 1.0 gets SIGKILL in the middle of an iteration. torchrun (`--max-restarts`) ends all workers, starts them again,
and each reads the checkpoint that the first one wrote after the last step, to memory-backed storage if available.
Measured is the time from the signal to the next committed step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from recycle import Job
from recycle.job.shape import MicroBatch

JOB = """
[shape]
pipelines = 3
ranks = 1
micro_batches = 2
[planner]
seconds = 1
[model]
layers = 4
hidden = 64
heads = 4
sequence = 64
[data]
micro_batch_size = 2
[train]
clip = 1e9
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=3, help="runs of each, with one kill")
    parser.add_argument("--replica", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica is not None:
        replica(arguments.replica, arguments.steps)
        return
    print(f"D=3 P=1 m=2, 4 layers of 64: seconds from SIGKILL to the next committed step, {arguments.kills} kills each")
    calm = ours(arguments.steps, kill=False)[1]
    peers = {"recycle": ours, "torchrun, checkpoint of every step": restarted, "torchft": dropped}
    for name, runs in peers.items():
        try:
            rows = [runs(arguments.steps) for _ in range(arguments.kills)]
        except ImportError as error:
            print(f"  {name:<36} left out: {error}; pip install -e '.[bench]'")
            continue
        seconds = [row[0] for row in rows]
        same = "identical" if all(row[1] == calm for row in rows) else "differ"
        print(f"  {name:<36} {statistics.median(seconds):7.2f} ({max(seconds):.2f})  losses {same}", flush=True)


def ours(steps: int, kill: bool = True) -> tuple[float, list[float]]:
    """(seconds to the next commit, losses) under recycle."""
    from recycle.cli.planner import plan_for_training
    from recycle.exec.faults.faults import parse_fault
    from recycle.exec.launch.launcher import train
    from recycle.exec.processes.forkserver import ForkServer

    faults = [parse_fault(f"kill:1.0@{steps // 2}")] if kill else []
    server = ForkServer("gpt")
    try:
        with tempfile.TemporaryDirectory(prefix="recycle-restart-") as folder:
            result = train(
                Job.from_toml(JOB),
                Path(folder) / "run",
                steps=steps,
                faults=faults,
                planner=plan_for_training,
                server=server,
            )
    finally:
        server.close()
    struck = [event["time"] for event in result.events if event["kind"] == "fault"]
    after = [line["time"] - struck[0] for line in result.metrics if line["step"] >= steps // 2] if struck else [0.0]
    return after[0], result.losses


def restarted(steps: int) -> tuple[float, list[float]]:
    """(seconds to the next commit, losses) under torchrun."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="recycle-restart-", dir=memory) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        command += ["--max-restarts", "3", __file__, "--replica", folder, "--steps", str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"torchrun ended with {done.returncode}: {done.stderr[-2000:]}")
        killed = float((Path(folder) / "killed").read_text())
        lines = [json.loads(line) for line in (Path(folder) / "steps").read_text().splitlines()]
    return next(line["time"] for line in lines if line["step"] >= steps // 2) - killed, [line["loss"] for line in lines]


def dropped(steps: int) -> tuple[float, list[float]]:
    """(seconds to the next commit, losses) under torchft, which drops what the dead replica had to compute."""
    from torchft_peer import torchft_run

    return torchft_run(JOB, steps)


def replica(folder: Path, steps: int) -> None:
    """One rank under torchrun: from the checkpoint, if there is one, to the last step."""
    import msgspec
    import torch
    from torch.distributed import TCPStore

    from recycle.exec.leader.commit import ReportColumns, decide
    from recycle.exec.model.build import build_stages
    from recycle.exec.transport.gloo import form_group
    from recycle.exec.transport.plugin import TransportSettings
    from recycle.exec.worker.iterations import report_of

    torch.set_num_threads(1)
    job, rank, attempt = Job.from_toml(JOB), int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    group = form_group(TransportSettings(store), f"attempt{attempt}", rank, 3, threading.Event())
    stages = build_stages(job, [0])
    (stage,) = stages.values()
    checkpoint, first = folder / "checkpoint", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"] + 1
        with torch.no_grad():
            for tensor, saved in zip(stage.state_tensors(), state["tensors"], strict=True):
                tensor.copy_(saved)
    for step in range(first, steps):
        stage.begin_iteration(step)
        for index in range(job.shape.micro_batches):
            stage.forward(MicroBatch(rank, index), None)
            if rank == 1 and step == steps // 2 and attempt == "0":
                (folder / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            stage.backward(MicroBatch(rank, index), None)
        for buffer in stage.gradient_buffers():
            group.allreduce([buffer]).wait()
        mine = report_of(stages)
        losses = torch.zeros(3, dtype=torch.float64)
        losses[rank] = mine.loss
        group.allreduce([losses]).wait()
        reports = {f"{k}.0": msgspec.structs.replace(mine, loss=loss) for k, loss in enumerate(losses.tolist())}
        commit = decide(job, step, ReportColumns.from_reports(reports))
        assert commit.clip_factor is not None
        stage.step(step, commit.clip_factor)
        if rank == 0:
            torch.save({"step": step, "tensors": stage.state_tensors()}, folder / "new")
            (folder / "new").rename(checkpoint)
            with (folder / "steps").open("a") as lines:
                lines.write(json.dumps({"step": step, "time": time.monotonic(), "loss": commit.loss}) + "\n")
    os._exit(0)  # gloo's threads still run


if __name__ == "__main__":
    main()
