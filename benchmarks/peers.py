"""A worker gets SIGKILL in the middle of a run: recycle, torchrun, NVRx's launcher and torchft.

    python -m benchmarks.peers [--only NAME ...] [--kills N] [--steps N] [--every N] [--megatron-lm FOLDER]

Four processes on this machine train the GPT of benchmarks/own_loop.py with megatron-core over gloo: two pipelines of
two ranks. torchft has no pipelines: there each process is a replica of the whole model, with half of the micro-batches
of a pipeline. All systems have the same micro-batches, and start a dead process again. The process of rank 3 kills
itself in a forward of iteration STEPS / 2.

torchrun and ft_launcher restart all processes, which load the checkpoint that they write every N iterations, to
memory-backed storage if available. torchft's lighthouse waits for missing replicas as long as torchft's documentation
says, and, in another row, one second, and two for a heartbeat.

Printed are, of a calm run, the seconds of an iteration; and of runs with a kill the seconds from the signal to the next
new step, committed iterations that were repeated, samples that no step used, the largest relative difference of a loss
from the calm run, and how many of the three other processes survived.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from benchmarks.own_loop import HEADS, HIDDEN, JOB, LAYERS, MICRO_BATCHES, ROWS, SEQUENCE, VOCABULARY, D, P, build

PROCESSES, VICTIM = D * P, D * P - 1
ALL = D * MICRO_BATCHES
"""Micro-batches of an iteration."""
DOCUMENTED, SHORT = (10_000, 5_000), (1_000, 2_000)
"""Milliseconds that torchft's lighthouse waits for a replica to join, and for its heartbeat."""


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Attributes:
        losses: mean of each committed step.
        times: at which each step was committed first.
        struck: time of the signal; None in a calm run.
        repeated: committed steps that ran again.
        dropped: samples that no committed step used.
        survivors: other processes that ran before the signal and at the end.
    """

    losses: Mapping[int, float]
    times: Sequence[float]
    struck: float | None
    repeated: int
    dropped: int
    survivors: int

    @property
    def seconds(self) -> float:
        """From the signal to the next new step."""
        return next(time for time in self.times if time > self.struck) - self.struck if self.struck else 0.0


@dataclass(frozen=True)
class Settings:
    steps: int
    every: int
    megatron_lm: Path | None


class Missing(Exception):
    """Why a system does not run here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--kills", type=int, default=3, help="runs of each with a kill")
    parser.add_argument("--steps", type=int, default=100, help="iterations of a run")
    parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints of torchrun, ft_launcher")
    parser.add_argument("--megatron-lm", type=Path, help="folder with pretrain_gpt.py")
    parser.add_argument("--train", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, Process(given.folder, given.steps, given.kill), given.every)
        return
    settings = Settings(given.steps, given.every, given.megatron_lm)
    print(f"D={D} P={P} m={MICRO_BATCHES}, {LAYERS} layers, hidden {HIDDEN}, {ROWS} x {SEQUENCE} tokens, {given}")
    print(f"  {'':<20} iteration   next new step (most)  repeated  dropped  losses       survivors")
    for name in given.only:
        try:
            print(f"  {name:<20} {row(SYSTEMS[name], settings, given.kills)}", flush=True)
        except Missing as missing:
            print(f"  {name:<20} did not run: {missing}", flush=True)


def row(run: Callable[[Settings, int | None], Run], settings: Settings, kills: int) -> str:
    calm = run(settings, None)
    struck = [run(settings, settings.steps // 2) for _ in range(kills)]
    gaps = [after - before for before, after in pairwise(calm.times)][settings.steps // 4 :]
    seconds = [each.seconds for each in struck]
    difference = max(abs(each.losses[step] / loss - 1) for each in struck for step, loss in calm.losses.items())
    repeated, dropped, survivors = (
        "/".join(sorted({str(getattr(each, name)) for each in struck})) for name in ("repeated", "dropped", "survivors")
    )
    losses = f"{difference:.0e}" if difference else "equal bits"
    return (
        f"{1e3 * statistics.median(gaps):6.0f} ms   {statistics.median(seconds):7.2f} s ({max(seconds):.2f})"
        f"  {repeated:>8}  {dropped:>7}  {losses:<11}  {survivors:>9}"
    )


# Systems.


def in_session(settings: Settings, kill: int | None) -> Run:
    with tempfile.TemporaryDirectory(prefix="recycle-peers-") as name:
        script = [sys.executable, __file__, *own_arguments("session", Path(name), settings, kill)]
        run_recycle("agent", Path(name), settings, "--", *script)
        return read_run(Path(name))


def in_trainer(settings: Settings, kill: int | None) -> Run:
    """recycle's own trainer, with a model of the same size."""
    return run_with_fault("train", settings, kill, [])


def megatron_lm(settings: Settings, kill: int | None) -> Run:
    """Megatron-LM's own script, with a model of the same size."""
    if settings.megatron_lm is None:
        raise Missing("--megatron-lm was not given")
    sizes = {
        **{"num-layers": LAYERS, "hidden-size": HIDDEN, "num-attention-heads": HEADS, "seq-length": SEQUENCE},
        **{"max-position-embeddings": SEQUENCE, "micro-batch-size": ROWS, "global-batch-size": ROWS * ALL},
        **{"train-iters": settings.steps, "pipeline-model-parallel-size": P, "vocab-size": VOCABULARY - 1},
        **{
            "lr": 1e-3,
            "num-workers": 0,
            "eval-interval": settings.steps,
            "eval-iters": 0,
            "transformer-impl": "local",
            "ckpt-format": "torch",
        },
        **{"tokenizer-type": "NullTokenizer", "distributed-backend": "gloo", "log-interval": 1},
    }
    switches = (
        "use-cpu-initialization no-persist-layer-norm no-gradient-accumulation-fusion no-masked-softmax-fusion"
        " no-bias-gelu-fusion no-bias-dropout-fusion untie-embeddings-and-output-weights mock-data"
    )
    script = ["-m", "recycle.megatron", str(settings.megatron_lm / "pretrain_gpt.py")]
    script += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    script += [f"--{name}" for name in switches.split()]
    return run_with_fault("agent", settings, kill, ["--", sys.executable, *script])


def run_with_fault(command: str, settings: Settings, kill: int | None, script: Sequence[str]) -> Run:
    """As the run directory says."""
    faults = [] if kill is None else ["--fault", f"kill:1.1@{kill}.forward"]
    with tempfile.TemporaryDirectory(prefix="recycle-peers-") as name:
        run_recycle(command, Path(name), settings, *faults, *script)
        metrics, events = (
            [json.loads(line) for line in (Path(name) / "run" / f"{log}.jsonl").read_text().splitlines()]
            for log in ("metrics", "events")
        )
    struck = next((event["time"] for event in events if event["kind"] == "fault"), None)
    losses = {line["step"]: line["loss"] for line in metrics}
    dead = {event["worker"] for event in events if event["kind"] == "detected"}
    repeated, dropped = len(metrics) - len(losses), (settings.steps - len(losses)) * ALL * ROWS
    return Run(losses, [line["time"] for line in metrics], struck, repeated, dropped, PROCESSES - len(dead))


def run_recycle(command: str, folder: Path, settings: Settings, *arguments: str) -> None:
    job = folder / "job.toml"
    job.write_text(JOB.replace("steps = 1000", f"steps = {settings.steps}"))
    call([sys.executable, "-m", "recycle", command, str(job), "--run", str(folder / "run"), *arguments])


def under_torchrun(settings: Settings, kill: int | None) -> Run:
    return restarted([sys.executable, "-m", "torch.distributed.run"], "checkpoints", settings, kill)


def under_nvrx(settings: Settings, kill: int | None) -> Run:
    require("nvidia_resiliency_ext")
    launcher = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    launcher += ["--ft-initial-rank-heartbeat-timeout=120", "--ft-rank-heartbeat-timeout=60"]
    return restarted(launcher, "nvrx", settings, kill)


def restarted(launcher: Sequence[str], trainer: str, settings: Settings, kill: int | None) -> Run:
    with tempfile.TemporaryDirectory(prefix="recycle-peers-", dir=memory_folder()) as name:
        launch = ["--standalone", "--nproc-per-node", str(PROCESSES), "--max-restarts", "3"]
        # Else restarted processes find addresses of dead ones in the store (pytorch issue 135712).
        call(
            [*launcher, *launch, __file__, *own_arguments(trainer, Path(name), settings, kill)],
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        return read_run(Path(name))


def with_torchft(milliseconds: tuple[int, int]) -> Callable[[Settings, int | None], Run]:
    def run(settings: Settings, kill: int | None) -> Run:
        require("torchft")
        with tempfile.TemporaryDirectory(prefix="recycle-peers-") as name:
            folder = Path(name)
            waits = json.dumps(dict(zip(("join_timeout_ms", "heartbeat_timeout_ms"), milliseconds, strict=True)))
            lighthouse = start([sys.executable, "-c", LIGHTHOUSE, waits, str(folder / "address")], folder)
            try:
                while not (folder / "address").exists():
                    time.sleep(0.05)
                launch = ["--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "3"]
                command = [sys.executable, "-m", "torch.distributed.run", *launch]
                replicas = [
                    start(
                        [*command, "--standalone", __file__, *own_arguments("torchft", folder, settings, kill)],
                        folder,
                        TORCHFT_LIGHTHOUSE=(folder / "address").read_text(),
                        REPLICA_GROUP_ID=str(number),
                    )
                    for number in range(PROCESSES)
                ]
                for replica in replicas:
                    replica.wait(timeout=600)
            finally:
                lighthouse.kill()
                lighthouse.wait()
            if any(replica.returncode for replica in replicas):
                raise Missing((folder / "log").read_text()[-2000:])
            return read_run(folder)

    return run


LIGHTHOUSE = """
import json, pathlib, sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=100, **json.loads(sys.argv[1]))
path = pathlib.Path(sys.argv[2])
path.with_suffix(".new").write_text(server.address())
path.with_suffix(".new").rename(path)
time.sleep(3600)
"""


def require(package: str) -> None:
    if find_spec(package) is None:
        raise Missing(f"{package} is not installed")


def memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def own_arguments(trainer: str, folder: Path, settings: Settings, kill: int | None) -> list[str]:
    options = ["--train", trainer, "--folder", str(folder), "--steps", str(settings.steps)]
    options += ["--every", str(settings.every)]
    return options if kill is None else [*options, "--kill", str(kill)]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path, **more}


def call(command: Sequence[str], **variables: str) -> None:
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def start(command: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment(**variables), stdout=log, stderr=log)


def read_run(folder: Path) -> Run:
    """From what the processes have written: a line for each step that they committed."""
    lines: dict[int, dict[int, dict[str, Any]]] = {}  # by step, then rank
    repeated, first = 0, dict[int, float]()
    mark = folder / "killed"
    struck = float(mark.read_text()) if mark.exists() else None
    before, after = set[int](), set[int]()
    for path in folder.glob("rank*.jsonl"):
        rank, steps = int(path.stem.removeprefix("rank")), set[int]()
        for line in map(json.loads, path.read_text().splitlines()):
            repeated += rank == 0 and line["step"] in steps
            first[line["step"]] = min(first.get(line["step"], line["time"]), line["time"])
            steps.add(line["step"])
            lines.setdefault(line["step"], {})[rank] = line
            (before if struck and line["time"] < struck else after).add(line["pid"])
    by_step = {step: [loss for line in lines[step].values() for loss in line["losses"]] for step in sorted(lines)}
    return Run(
        {step: math.fsum(losses) / len(losses) for step, losses in by_step.items()},
        [first[step] for step in by_step],
        struck,
        repeated,
        sum(ALL - len(losses) for losses in by_step.values()) * ROWS,
        len(before & after),
    )


# What each process does.


@dataclass(frozen=True)
class Process:
    folder: Path
    steps: int
    kill: int | None

    @property
    def rank(self) -> int:
        return int(os.environ.get("REPLICA_GROUP_ID", os.environ["RANK"]))

    def struck(self, forward_step: Callable[..., Any], step_of: Callable[[], int]) -> Callable[..., Any]:
        """The forward step, in whose second call of iteration `kill` the victim dies, once."""
        mark, calls = self.folder / "killed", itertools.count()

        def step(data: Any, model: Any) -> Any:
            if self.rank == VICTIM and step_of() == self.kill and not mark.exists() and next(calls):
                mark.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            return forward_step(data, model)

        return step

    def committed(self, step: int, results: Sequence[Mapping[str, Any]]) -> None:
        losses = [kept["loss"] / kept["tokens"] for kept in results]
        line = {"step": step, "time": time.monotonic(), "pid": os.getpid(), "losses": losses}
        with (self.folder / f"rank{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(kind: str, process: Process, every: int) -> None:
    from recycle.megatron.without_gpu import without_gpu

    with without_gpu():
        TRAINERS[kind](process, every)
    sys.stdout.flush()
    if kind != "session":
        os._exit(0)  # gloo's threads still run


def session(process: Process, every: int) -> None:
    from megatron.core import parallel_state

    import recycle.megatron

    with recycle.megatron.session() as current:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=P)
        chunks, optimizer, forward_step, batches = build()
        current.attach(chunks, optimizer, data=lambda replica: batches(replica, current.step))
        forward_step = process.struck(forward_step, lambda: current.step)
        for step in current.steps():
            results = current.forward_backward(forward_step, seq_length=SEQUENCE, micro_batch_size=ROWS)
            current.optimizer_step()
            process.committed(step, results)


def checkpoints(process: Process, every: int, beat: Callable[[], None] = lambda: None) -> None:
    """megatron-core's loop, from the newest checkpoint."""
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=P)
    chunks, optimizer, forward_step, batches = build()
    rank, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    newest, parts, first = process.folder / "newest", [*chunks, optimizer], 0
    if newest.exists():
        first = int(newest.read_text())
        states = torch.load(process.folder / f"{first}-rank{rank}.pt", weights_only=False)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    at = first
    forward_step = process.struck(forward_step, lambda: at)
    for step in range(first, process.steps):
        at = step
        results = iteration(chunks, optimizer, forward_step, batches(replica, step), MICRO_BATCHES)
        optimizer.step()
        process.committed(step, results)
        beat()
        if (step + 1) % every == 0:
            if replica == 0:
                torch.save([part.state_dict() for part in parts], process.folder / f"{step + 1}-rank{rank}.pt")
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                newest.with_suffix(".new").write_text(str(step + 1))
                newest.with_suffix(".new").rename(newest)


def nvrx(process: Process, every: int) -> None:
    """The same, with a heartbeat after each step."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    checkpoints(process, every, client.send_heartbeat)
    client.shutdown_workload_monitoring()


def torchft(process: Process, every: int) -> None:
    """A replica of the whole model; torchft averages the gradients over the live ones."""
    import torch
    from megatron.core import parallel_state
    from torchft import Manager, ProcessGroupGloo

    from recycle.megatron_versions import gradient_buffers

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    chunks, optimizer, forward_step, batches = build(1, 1)
    parts = {"model": chunks[0], "optimizer": optimizer}

    def load(states: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(states[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        replica_id=f"replica_{process.rank}",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
        use_async_quorum=False,
        init_sync=False,  # all start with the same weights
    )
    forward_step = process.struck(forward_step, manager.current_step)
    share = ALL // PROCESSES
    replica, place = divmod(process.rank * share, MICRO_BATCHES)
    ended = process.folder / "ended"  # before this process has returned
    while manager.current_step() < process.steps and not ended.exists():
        manager.start_quorum()
        step = manager.current_step()  # of a peer, in a process that has returned
        data = islice(batches(replica, step), place, place + share)
        results = iteration(chunks, optimizer, forward_step, data, share)
        for work in [manager.allreduce(buffer) for buffer in gradient_buffers(chunks[0])]:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            process.committed(step, results)
    ended.touch()
    manager.shutdown(wait=False)


def iteration(
    chunks: Sequence[Any], optimizer: Any, forward_step: Callable[..., Any], data: Iterator[Any], count: int
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks[0].zero_grad_buffer()
    optimizer.zero_grad()
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=chunks,
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=ROWS,
    )
    return results


SYSTEMS: dict[str, Callable[[Settings, int | None], Run]] = {
    "recycle-train": in_trainer,
    "recycle-session": in_session,
    "recycle-pretrain_gpt": megatron_lm,
    "torchrun": under_torchrun,
    "ft_launcher": under_nvrx,
    "torchft": with_torchft(DOCUMENTED),
    "torchft-short": with_torchft(SHORT),
}
TRAINERS: dict[str, Callable[[Process, int], None]] = {
    "session": session,
    "checkpoints": checkpoints,
    "nvrx": nvrx,
    "torchft": torchft,
}

if __name__ == "__main__":
    main()
