"""What only a GPU shows, on one card in about ten minutes: `make gpu`, or

    python -m benchmarks.gpu [--only SECTION ...] [--write FILE]

    split    gradients of I + W against B, bit for bit, and against the CPU, by family and precision
    stages   times of F, I, W, B and of exact sums, kernel launches and memory, for stages of published models
    nccl     NCCL groups of one rank formed, used and aborted up to a hundred times; two ranks on one card
    staged   four workers share the card ("staged" transport): kills and re-joins in every phase, against the calm run
    profile  `recycle profile` of a job, and a run of one worker over the transport "auto"

Each section runs in its own process and writes figures as JSON. The exit status is 1 if a section fails. Without a GPU
it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Job, MicroBatch
from recycle.errors import first_line
from recycle.exec.faults.faults import parse_fault
from recycle.exec.model.build import build_stages
from recycle.exec.model.providers import Providers
from recycle.exec.model.stage import Stage
from recycle.exec.transport.nccl import Nccl

ONE = MicroBatch(0, 0)
SECONDS = 480
"""Time limit of a section."""
NCCL_SECONDS = 40
"""Seconds after which NCCL groups are not formed again."""
FAMILIES = ("gpt", "llama", "mixtral")
SMALL = '[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[model]\nkind = "{kind}"\nlayers = 2\nhidden = 256\n'
STAGES = {
    "GPT-3 1.3B, 6 of 24 layers": ("gpt", 6, 2048, 16, 2048, ""),
    "Llama-3 8B, 4 of 32 layers": ("llama", 4, 4096, 32, 4096, "ffn = 14336\nconfig = {num_query_groups = 8}"),
}
"""Name -> family, layers, hidden size, heads, sequence length, more keys of [model]."""
PHASES = ("forward", "backward", "reduced", "commit", "step")
FOUR = """[shape]
pipelines = 2
ranks = 2
micro_batches = 4
[model]
kind = "gpt"
layers = 4
hidden = 256
heads = 4
sequence = 128
[train]
accumulation = "exact"
precision = "bf16"
warmup = 2
[planner]
seconds = 1.0
[membership]
transport = "staged"
drift = 0.0
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--write", type=Path, help="file for the figures")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: no GPU is visible here", file=sys.stderr)
        return 2
    if given.section:
        print(json.dumps(SECTIONS[given.section](torch.device("cuda", 0))))
        return 0
    results: dict[str, Any] = {"machine": machine()}
    print(json.dumps(results["machine"]), flush=True)
    failed = False
    for name in given.only:
        began = time.monotonic()
        results[name], section_failed = in_process(name)
        failed |= section_failed
        print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(results[name], indent=1)}", flush=True)
        if given.write is not None:
            given.write.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


def machine() -> dict[str, Any]:
    from recycle.megatron_versions import installed

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory GiB": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "megatron-core": str(installed()),
        "python": sys.version.split()[0],
    }


def in_process(name: str) -> tuple[Any, bool]:
    """Return the figures of a section, or its error, and whether it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--section", name]
    environment = os.environ | Nccl.environment | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        return {"error": f"no end after {SECONDS} s", "output": str(error.stderr or error.stdout)[-3000:]}, True
    lines = done.stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": f"exit code {done.returncode}", "output": (done.stdout + done.stderr)[-4000:]}, True
    return result, done.returncode != 0 or (isinstance(result, dict) and bool(result.get("failed")))


def stage_of(job: Job, device: torch.device) -> Stage:
    (stage,) = build_stages(job, [0], device, providers=Providers(data=_tokens)).values()
    stage.begin_iteration(0)
    return stage


def _tokens(job: Job) -> Any:
    tokens = torch.arange(job.model.sequence)[None] % 251
    return lambda iteration, micro_batch: {"tokens": tokens, "labels": (tokens + 1) % 251}


def split(device: torch.device) -> dict[str, Any]:
    figures: dict[str, Any] = {"failed": []}
    for kind in FAMILIES:
        for precision in ("fp32", "bf16"):
            for accumulation in ("fast", "exact"):
                name = f"{kind} {precision} {accumulation}"
                text = SMALL.format(kind=kind) + (
                    f'[train]\nprecision = "{precision}"\naccumulation = "{accumulation}"\n'
                )
                try:
                    halves, whole, again = (gradients(text, device, is_split) for is_split in (True, False, True))
                    cpu = gradients(text, torch.device("cpu"), True).double()
                except Exception as error:
                    figures[name] = {"error": f"{type(error).__name__}: {first_line(error)}"}
                    figures["failed"].append(name)
                    continue
                figures[name] = {
                    "I + W is B": bool(torch.equal(halves, whole)),
                    "twice the same": bool(torch.equal(halves, again)),
                    "from the CPU": float((halves.double().cpu() - cpu).norm() / cpu.norm()),
                }
                if not (figures[name]["I + W is B"] and figures[name]["twice the same"]):
                    figures["failed"].append(name)
    return figures


def gradients(text: str, device: torch.device, is_split: bool) -> torch.Tensor:
    stage = stage_of(Job.from_toml(text), device)
    stage.forward(ONE, None)
    if is_split:
        stage.backward_input(ONE, None)
        stage.backward_weight(ONE)
    else:
        stage.backward(ONE, None)
    return torch.cat([buffer.flatten().float() for buffer in stage.gradient_buffers()])


def stages(device: torch.device) -> dict[str, Any]:
    return {name: figures_of_stage(name, device) for name in STAGES}


def figures_of_stage(name: str, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each instruction, launches and peak memory, for fast and exact sums."""
    kind, layers, hidden, heads, sequence, more = STAGES[name]
    figures: dict[str, Any] = {}
    for accumulation in ("fast", "exact"):
        job = Job.from_toml(
            f"[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n"
            f'[model]\nkind = "{kind}"\nlayers = {layers}\nhidden = {hidden}\nheads = {heads}\nsequence = {sequence}\n'
            f'vocabulary = 32000\n{more}\n[train]\nprecision = "bf16"\naccumulation = "{accumulation}"\n'
        )
        torch.cuda.reset_peak_memory_stats()
        try:
            stage = stage_of(job, device)
            figures["parameters"] = sum(parameter.numel() for parameter in stage.parameters.values())
            figures[accumulation] = times_of(stage, device)
        except Exception as error:
            figures[accumulation] = {"error": f"{type(error).__name__}: {first_line(error)}"}
        figures[accumulation]["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        stage = None
        torch.cuda.empty_cache()
    return figures


def times_of(stage: Stage, device: torch.device) -> dict[str, Any]:
    def measure(repeats: int) -> dict[str, list[float]]:
        measured: dict[str, list[float]] = {}

        def timed(word: str, action: Callable[[], Any]) -> None:
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            measured.setdefault(f"{word} ms", []).append(1000 * (time.perf_counter() - began))
            measured.setdefault(f"{word} host ms", []).append(1000 * (issued - began))

        for _ in range(repeats):
            stage.begin_iteration(0)
            timed("F", lambda: stage.forward(ONE, None))
            timed("I", lambda: stage.backward_input(ONE, None))
            timed("W", lambda: stage.backward_weight(ONE))
            stage.begin_iteration(0)
            stage.forward(ONE, None)
            timed("B", lambda: stage.backward(ONE, None))
        return measured

    measure(3)
    result: dict[str, Any] = {word: round(statistics.median(values), 3) for word, values in measure(10).items()}
    from torch.profiler import ProfilerActivity, profile

    stage.begin_iteration(0)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        stage.forward(ONE, None)
        stage.backward_input(ONE, None)
        stage.backward_weight(ONE)
        torch.cuda.synchronize()
    result["launches"] = sum(event.count for event in trace.key_averages() if event.key.startswith("cudaLaunchKernel"))
    return result


def nccl(device: torch.device) -> dict[str, Any]:
    import torch.distributed as dist

    from recycle.megatron_versions import nccl_batch, nccl_group

    torch.cuda.set_device(device)
    store, forming, aborting, failed = dist.HashStore(), [], [], []
    first = time.perf_counter()
    for turn in range(100):
        began = time.perf_counter()
        if began - first > NCCL_SECONDS:
            break
        groups = [nccl_group(dist.PrefixStore(f"{turn}/{lane}", store), 0, 1, 30.0, device, 4) for lane in range(2)]
        for group in groups:
            tensor = torch.full((1024,), float(turn), device=device)
            group.allreduce([tensor]).wait()
            if float(tensor.sum()) != 1024.0 * turn:
                failed.append(f"sum of turn {turn}")
        formed = time.perf_counter()
        with nccl_batch(groups[0]):
            for group in groups:
                group.abort()
        forming.append(formed - began)
        aborting.append(time.perf_counter() - formed)
    two = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWO_RANKS], capture_output=True, text=True, timeout=90, check=False
    )
    return {
        "failed": failed,
        "turns": len(forming),
        "form two groups ms": round(1000 * statistics.median(forming), 2),
        "longest ms": round(1000 * max(forming), 2),
        "abort ms": round(1000 * statistics.median(aborting), 2),
        "GiB after": round((torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 2**30, 2),
        "two ranks on one card": (two.stdout + two.stderr).strip().splitlines()[-1:],
    }


TWO_RANKS = """
import os, sys
rank = 0 if os.fork() else 1
import torch, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore('127.0.0.1', 29517, 2, rank == 0, timedelta(seconds=40))
try:
    group = dist.ProcessGroupNCCL(store, rank, 2)
    tensor = torch.ones(4, device='cuda')
    group.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    text = f'works: {tensor.tolist()}'
except Exception as error:
    text = 'refused: ' + ' '.join(str(error).split())[-300:]
if rank == 0:
    print(text, flush=True)
    os.wait()
os._exit(0)
"""


def staged(device: torch.device) -> dict[str, Any]:
    from recycle.cli.planner import plan_for_training
    from recycle.exec.launch.launcher import train
    from recycle.exec.processes.forkserver import ForkServer

    figures: dict[str, Any] = {"failed": []}
    server = ForkServer("gpt")
    try:

        def run(*faults: str) -> Any:
            folder = Path(tempfile.mkdtemp(prefix="recycle-gpu-"))
            return train(
                Job.from_toml(FOUR),
                folder / "run",
                steps=7,
                faults=[parse_fault(fault) for fault in faults],
                planner=plan_for_training,
                server=server,
            )

        calm, again = run(), run()
        figures["calm runs are equal"] = losses_of(calm) == losses_of(again) and calm.digests == again.digests
        figures["losses"] = [line["loss"] for line in calm.metrics]
        if not figures["calm runs are equal"]:
            figures["failed"].append("calm")
        cases = [[f"kill:1.1@2.{phase}", "rejoin:1.1@5"] for phase in PHASES] + [["hang:0.1@2", "rejoin:0.1@5"]]
        for faults in [*cases, ["kill:0.0@2.forward", "kill:1.1@4.backward"]]:
            name = " ".join(faults)
            try:
                struck = run(*faults)
            except Exception as error:
                figures[name] = {"error": f"{type(error).__name__}: {first_line(error)}"}
                figures["failed"].append(name)
                continue
            recovered = [event["seconds"] for event in struck.events if event["kind"] == "recovered"]
            same = losses_of(struck) == losses_of(calm) and all(
                stages == calm.digests[worker] for worker, stages in struck.digests.items()
            )
            figures[name] = {"equal bits": same, "recovered s": recovered}
            if not same:
                figures["failed"].append(name)
    finally:
        server.close()
    return figures


def losses_of(result: Any) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in result.metrics]


def profile_section(device: torch.device) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="recycle-gpu-"))
    text = FOUR.replace('transport = "staged"\n', "")
    (folder / "job.toml").write_text(text)
    (folder / "one.toml").write_text(text.replace("pipelines = 2\nranks = 2", "pipelines = 1\nranks = 1"))
    figures: dict[str, Any] = {"failed": []}
    for name, arguments in (
        ("profile", ["profile", "job.toml", "-o", "measured.json", "--repeats", "5"]),
        ("one worker", ["train", "one.toml", "--steps", "5", "--run", "one"]),
        ("four workers", ["train", "job.toml", "--steps", "2", "--run", "four"]),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "recycle", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=90,
        )
        figures[name] = {"exit code": done.returncode, "output": (done.stdout + done.stderr)[-1500:].splitlines()}
        if done.returncode != (2 if name == "four workers" else 0):
            figures["failed"].append(name)
    return figures


SECTIONS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "split": split,
    "stages": stages,
    "nccl": nccl,
    "staged": staged,
    "profile": profile_section,
}

if __name__ == "__main__":
    sys.exit(main())
