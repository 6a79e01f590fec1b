"""torchft on recycle's stages, the peer of benchmarks/restart.py: three replicas, one is killed, the others continue.

torchft drops the work of the dead replica, so later losses differ. Its time to the next commit depends on how long its
lighthouse waits for a replica: one second here, and two seconds without a heartbeat.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

JOIN_MILLISECONDS, HEARTBEAT_MILLISECONDS = 1000, 2000


def torchft_run(job_text: str, steps: int) -> tuple[float, list[float]]:
    """(seconds from the kill of replica 1 to the next commit, losses). Raises ImportError without torchft."""
    if importlib.util.find_spec("torchft") is None:
        raise ImportError("no torchft")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(prefix="recycle-torchft-") as name:
        folder = Path(name)
        (folder / "job.toml").write_text(job_text)
        processes: list[subprocess.Popen[bytes]] = []
        with (folder / "log").open("wb") as log:

            def start(*arguments: str) -> subprocess.Popen[bytes]:
                command = [sys.executable, __file__, name, *arguments]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                return processes[-1]

            try:
                start("lighthouse")
                while not (folder / "address").exists():
                    time.sleep(0.05)
                replicas = [start(str(rank), str(steps)) for rank in range(3)]
                for place in (0, 2):
                    if replicas[place].wait(timeout=300):
                        sys.exit(f"torchft's replica {place} failed: {(folder / 'log').read_text()[-2000:]}")
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        killed = float((folder / "killed").read_text())
        lines = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    return next(line["time"] for line in lines if line["time"] > killed) - killed, [line["loss"] for line in lines]


def lighthouse(folder: Path) -> None:
    """Bring the replicas together until killed; in a separate process, because it logs without end."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=JOIN_MILLISECONDS,
        heartbeat_timeout_ms=HEARTBEAT_MILLISECONDS,
    )
    (folder / "new").write_text(server.address())
    (folder / "new").rename(folder / "address")
    time.sleep(3600.0)


def replica(folder: Path, rank: int, steps: int) -> None:
    """One replica of the whole model."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    from recycle import Job
    from recycle.exec.model.build import build_stages
    from recycle.exec.worker.iterations import report_of
    from recycle.job.shape import MicroBatch

    torch.set_num_threads(1)
    job = Job.load(folder / "job.toml")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stages = build_stages(job, [0])
    (stage,) = stages.values()

    def load(state: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, saved in zip(stage.state_tensors(), state, strict=True):
                tensor.copy_(saved)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=stage.state_tensors,
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=(folder / "address").read_text(),
        replica_id=f"replica{rank}",
        hostname="127.0.0.1",
        use_async_quorum=False,
    )
    while (step := manager.current_step()) < steps:
        manager.start_quorum()
        stage.begin_iteration(step)
        for index in range(job.shape.micro_batches):
            stage.forward(MicroBatch(rank, index), None)
            if rank == 1 and step == steps // 2:
                (folder / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            stage.backward(MicroBatch(rank, index), None)
        loss = torch.tensor([report_of(stages).loss], dtype=torch.float64) / job.shape.micro_batches
        for work in [manager.allreduce(buffer) for buffer in (*stage.gradient_buffers(), loss)]:
            work.wait()
        if not manager.should_commit():
            continue
        for buffer in stage.gradient_buffers():
            buffer.mul_(job.shape.pipelines)  # torchft has divided by the replicas; the stage divides by all
        stage.step(step, 1.0)
        if rank == 0:
            with (folder / "steps").open("a") as lines:
                lines.write(json.dumps({"step": step, "time": time.monotonic(), "loss": float(loss)}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still run


if __name__ == "__main__":
    if sys.argv[2] == "lighthouse":
        lighthouse(Path(sys.argv[1]))
    else:
        replica(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
