"""What only a GPU shows, on one card in about 20 minutes (--seconds 1200), the most uncertain in ten: `make gpu`, or

    python -m benchmarks.gpu [--only SECTION ...] [--seconds N] [--write FILE] [--dry-run]

    deaths   as "staged" below, over NCCL, whose ranks claim to be on different machines
    session  examples/megatron_loop/survive.py under `recycle agent`, with a kill and a return, against a calm run;
             over "staged" and over NCCL
    step     one worker of Megatron-LM's pretrain_gpt.py (of $RECYCLE_MEGATRON_LM): a session's step beside torchrun's
    stages   times of F, I, W, B, kernel launches and memory, for stages of published models, by kind of sum
    split    gradients of I + W against B, bit for bit, and against the CPU, by family and precision
    sums     exact sums by one Triton kernel: bits against the CPU, time and launches, with and without Triton
    staged   four workers share the card (transport "staged"): kills in all phases, a hang, two deaths; equal bits
    pretrain four workers of pretrain_gpt.py in sessions, with a kill and a return
    engine   layers of Transformer Engine: I + W against B; FP8 refused or equal
    nccl     NCCL groups of one rank formed, used and aborted up to a hundred times; two ranks on one card
    identity UUIDs, and what NVML says of health and near processors
    profile  `recycle profile` of a job, and a run of one worker over the transport "auto"

What has not run comes first. Each section runs in its own process, and writes figures as JSON, with what it did not
measure. Those that do not fit into --seconds are named as not measured. The exit status is 1 if a section fails.
Without a GPU it says so and exits with 2; --dry-run then runs what a CPU can, with small shapes, to try the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Job, JobError, MicroBatch
from recycle.errors import first_line
from recycle.exec.faults.faults import parse_fault
from recycle.exec.gpus import GpuHealth, nvml, stay_near
from recycle.exec.model.build import build_module, build_stages
from recycle.exec.model.providers import Providers
from recycle.exec.model.stage import Stage
from recycle.exec.model.state import accumulate
from recycle.exec.model.state.accumulate import ExactSum, FlatLayout
from recycle.exec.model.tensor_ranks import ensure_parallel_state
from recycle.exec.transport.nccl import Nccl
from recycle.exec.transport.plugin import TransportSettings, visible_gpus

ONE = MicroBatch(0, 0)
CPU = torch.device("cpu")
LEAST_SECONDS = 15
"""Seconds below which no section is begun."""
SECONDS = 300
"""Time limit of a section."""
NCCL_SECONDS = 30
"""Seconds after which NCCL groups are not formed again."""
FAMILIES = ("gpt", "llama", "mixtral")
SMALL = '[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n[model]\nkind = "{kind}"\nlayers = 2\nhidden = 256\n'
STAGES = {
    "GPT-3 1.3B, 6 of 24 layers": ("gpt", 6, 2048, 16, 2048, ""),
    "Llama-3 8B, 4 of 32 layers": ("llama", 4, 4096, 32, 4096, "ffn = 14336\nconfig = {num_query_groups = 8}"),
}
"""Name -> family, layers, hidden size, heads, sequence length, more keys of [model]."""
ADDENDS = 32
FAULTS = (
    *("kill:1.1@2.forward", "kill:0.0@3.backward", "rejoin:1.1@6", "rejoin:0.0@6"),
    *("kill:1.1@8.reduce", "kill:0.0@9.step", "rejoin:1.1@12", "rejoin:0.0@12"),
    *("hang:0.1@14", "kill:1.0@15.commit", "rejoin:0.1@18", "rejoin:1.0@18"),
)
"""All faults in one run, because a worker takes 20 s to start on a GPU; twice two workers are dead at a time."""
STEPS = 20
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
    parser.add_argument("--seconds", type=float, default=600.0, help="for all sections")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small shapes")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not (torch.cuda.is_available() or given.dry_run):
        print("gpu: no GPU is visible here", file=sys.stderr)
        return 2
    if given.section:
        print(json.dumps(SECTIONS[given.section](CPU if given.dry_run else torch.device("cuda", 0))))
        return 0
    results: dict[str, Any] = {"machine": {"dry run": True} if given.dry_run else machine()}
    print(json.dumps(results["machine"]), flush=True)
    failed, first = False, time.monotonic()
    for name in given.only:
        began = time.monotonic()
        if (left := given.seconds - (began - first)) < LEAST_SECONDS:
            results[name], section_failed = {"not measured": ["anything: no time was left"]}, False
        else:
            results[name], section_failed = in_process(name, min(SECONDS, left), given.dry_run)
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


def in_process(name: str, seconds: float, is_dry: bool) -> tuple[Any, bool]:
    """Return the figures of a section, or its error, and whether it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--section", name]
    command += ["--dry-run"] if is_dry else []
    environment = os.environ | Nccl.environment | {"OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if is_dry else {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired as error:
        return {"error": f"no end after {seconds:.0f} s", "output": str(error.stderr or error.stdout)[-3000:]}, True
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
                    cpu = gradients(text, CPU, True).double()
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
    figures["not measured"] = ["tensor parallelism, recomputation, layers of Transformer Engine (section engine)"]
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


def stage_job(name: str, device: torch.device, precision: str = "bf16", accumulation: str = "exact") -> Job:
    kind, layers, hidden, heads, sequence, more = STAGES[name]
    vocabulary = 32000
    if device.type == "cpu":
        layers, hidden, heads, sequence, vocabulary, more = 1, 32, 4, 32, 256, ""
    return Job.from_toml(
        f"[shape]\npipelines = 1\nranks = 1\nmicro_batches = 1\n"
        f'[model]\nkind = "{kind}"\nlayers = {layers}\nhidden = {hidden}\nheads = {heads}\nsequence = {sequence}\n'
        f"vocabulary = {vocabulary}\n{more}\n"
        f'[train]\nprecision = "{precision}"\naccumulation = "{accumulation}"\n'
    )


def sums(device: torch.device) -> dict[str, Any]:
    """Exact sums of all gradients of a stage, with and without the kernel, and their bits against the CPU's."""
    kernel = kernel_for(device)
    figures: dict[str, Any] = {"failed": [], "not measured": ["gradients of more than 2^30 elements"]}
    if kernel is None:
        figures["not measured"].append("the kernel: Triton is missing or cannot compile")
    for name in STAGES:
        ensure_parallel_state(None)
        with torch.device("meta"):
            part = build_module(stage_job(name, device), 0, 0, Providers(), is_filled=False)
        layout = FlatLayout([parameter.shape for parameter in part.parameters()])
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator(device).manual_seed(0)
            gradient = torch.empty(max(map(torch.Size.numel, layout.shapes)), dtype=dtype, device=device)
            gradient.normal_(generator=generator)
            row = figures[f"{name}, {str(dtype).removeprefix('torch.')}"] = {"parameters": layout.size}
            expected = None
            for path, fused in (("Triton", kernel), ("without", None)):
                if path == "Triton" and kernel is None:
                    continue
                total = ExactSum(layout, ADDENDS, 6, device)
                total._fused = fused  # this one only

                add = partial(add_all, total, gradient)
                add()
                seconds, launches = timed(add, device), launches_of(add, device)
                row[path] = {
                    "ms": round(1000 * seconds, 3),
                    "GB/s": round(layout.size * (16 + dtype.itemsize) / seconds / 1e9),
                    "launches": launches,
                    "launches per 10^9 parameters": round(1e9 * launches / layout.size),
                }
                expected, other = total.buffer, expected
                if other is not None:
                    row["equal bits"] = bool(torch.equal(other, expected))
                    if not row["equal bits"]:
                        figures["failed"].append(f"{name} {dtype}")
                del other, total
            del expected, gradient
    figures["special values have the bits of the CPU"] = has_bits_of_cpu(device, kernel)
    if not figures["special values have the bits of the CPU"]:
        figures["failed"].append("special values")
    return figures


def add_all(total: ExactSum, gradient: torch.Tensor) -> None:
    for position, shape in enumerate(total.layout.shapes):
        total.add(position, gradient[: shape.numel()])


def kernel_for(device: torch.device) -> Any:
    """The kernel, on a CPU in Triton's interpreter; None where Triton is missing."""
    if device.type == "cuda" or importlib.util.find_spec("triton") is None:
        return accumulate.fused_add(device)
    from recycle.exec.model.state.fused_sums import compiled_for

    return compiled_for(device)


def has_bits_of_cpu(device: torch.device, kernel: Any) -> bool:
    """Whether random words read as fp32 and bf16, so subnormals, infinities and NaN too, add up as on the CPU."""
    words = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for values in (words.view(torch.float32), words.view(torch.bfloat16)):
        results = []
        for where, fused in ((device, kernel), (CPU, None)):
            total = ExactSum(FlatLayout([values.shape]), ADDENDS, 6, where)
            total._fused = fused
            for _ in range(2):
                total.add(0, values.to(where))
            results.append((torch.nan_to_num(total.buffer.cpu(), 1.5, 2.5, 3.5), total.is_within_bounds()))
        if not (torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]):
            return False
    return True


def timed(action: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Median seconds, with the device idle before and after."""
    measured = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        measured.append(time.perf_counter() - began)
    return statistics.median(measured)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def launches_of(action: Callable[[], Any], device: torch.device) -> int:
    """Kernels that an action launches on a GPU, by torch's profiler; Triton launches by the driver's call."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as trace:
        action()
        synchronize(device)
    calls = ("cudaLaunchKernel", "cuLaunchKernel")
    return sum(event.count for event in trace.key_averages() if event.key.startswith(calls))


def stages(device: torch.device) -> dict[str, Any]:
    """Milliseconds of each instruction, launches and peak memory, by precision and kind of sum."""
    figures: dict[str, Any] = {"not measured": ["layers of Transformer Engine", "exact without Triton in fp32"]}
    fused = accumulate.fused_add
    for name in STAGES:
        for row, precision, accumulation, with_kernel in (
            ("bf16 fast", "bf16", "fast", True),
            ("bf16 exact", "bf16", "exact", True),
            ("bf16 exact without Triton", "bf16", "exact", False),
            ("fp32 fast", "fp32", "fast", True),
            ("fp32 exact", "fp32", "exact", True),
        ):
            accumulate.fused_add = fused if with_kernel else lambda device: None  # type: ignore[assignment]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                stage = stage_of(stage_job(name, device, precision, accumulation), device)
                figures.setdefault(name, {"parameters": sum(map(torch.Tensor.numel, stage.parameters.values()))})
                figures[name][row] = times_of(stage, device)
            except Exception as error:
                figures.setdefault(name, {})[row] = {"error": f"{type(error).__name__}: {first_line(error)}"}
            if device.type == "cuda":
                figures[name][row]["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            stage = None
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return figures


def times_of(stage: Stage, device: torch.device) -> dict[str, Any]:
    def measure(repeats: int) -> dict[str, list[float]]:
        measured: dict[str, list[float]] = {}

        def timed(word: str, action: Callable[[], Any]) -> None:
            synchronize(device)
            began = time.perf_counter()
            action()
            issued = time.perf_counter()
            synchronize(device)
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
    stage.begin_iteration(0)

    def halves() -> None:
        stage.forward(ONE, None)
        stage.backward_input(ONE, None)
        stage.backward_weight(ONE)

    result["launches"] = launches_of(halves, device)
    return result


def nccl_groups(device: torch.device) -> dict[str, Any]:
    import torch.distributed as dist

    from recycle.megatron_versions import nccl_batch, nccl_group

    if device.type == "cpu":
        return {"not measured": ["anything: NCCL needs a GPU"]}
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
        "not measured": [
            "groups of several ranks, and deaths over NCCL: one card",
            *([f"{100 - len(forming)} of 100 turns: no time was left"] if len(forming) < 100 else []),
        ],
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


class SharedNccl(Nccl):
    """NCCL between processes that share a GPU: each claims to be another machine, so NCCL connects them by sockets."""

    def __init__(self, settings: TransportSettings) -> None:
        os.environ |= {"NCCL_HOSTID": f"process {os.getpid()}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        super().__init__(settings)

    @classmethod
    def require_machine(cls, processes: int) -> None:
        return


SHARED = "benchmarks.gpu:SharedNccl"


def staged(device: torch.device) -> dict[str, Any]:
    return struck_runs(FOUR)


def deaths(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"not measured": ["anything: NCCL needs a GPU"]}
    return struck_runs(FOUR.replace('"staged"', f'"{SHARED}"\nhung_after = 15.0'))


def struck_runs(job: str) -> dict[str, Any]:
    from recycle.cli.planner import plan_for_training
    from recycle.exec.launch.launcher import train
    from recycle.exec.processes.forkserver import ForkServer

    figures: dict[str, Any] = {"failed": []}
    server = ForkServer("gpt")
    try:

        def run(*faults: str) -> Any:
            folder = Path(tempfile.mkdtemp(prefix="recycle-gpu-"))
            return train(
                Job.from_toml(job),
                folder / "run",
                steps=STEPS,
                faults=[parse_fault(fault) for fault in faults],
                planner=plan_for_training,
                server=server,
            )

        calm, struck = run(), run(*FAULTS)
    finally:
        server.close()
    figures["faults"], figures["losses"] = list(FAULTS), calm.losses
    for kind in ("fault", "detected", "recovered", "rejoined"):
        events = [event for event in struck.events if event["kind"] == kind]
        figures[kind] = [{key: event[key] for key in REPORTED if key in event} for event in events]
    other = [step for step, lines in enumerate(zip(calm.metrics, struck.metrics, strict=True)) if differ(*lines)]
    figures["steps with other bits"] = other
    figures["equal final states"] = struck.digests == calm.digests
    returns = sum(fault.startswith("rejoin") for fault in FAULTS)
    figures["not measured"] = [f"{returns - len(figures['rejoined'])} returns: too late"] * (
        len(figures["rejoined"]) < returns
    )
    if other or not figures["equal final states"] or figures["not measured"]:
        figures["failed"].append("bits, or a return")
    return figures


REPORTED = ("worker", "step", "cause", "seconds", "bytes")
"""Keys of events that are kept."""


def differ(calm: dict[str, Any], struck: dict[str, Any]) -> bool:
    return any(calm[key] != struck[key] for key in ("step", "loss", "grad_norm"))


def session(device: torch.device) -> dict[str, Any]:
    """A Megatron script in a session: its losses through a kill and a return, against the calm run's."""
    folder, example = Path(tempfile.mkdtemp(prefix="recycle-gpu-")), Path("examples/megatron_loop").absolute()
    figures: dict[str, Any] = {"failed": [], "not measured": ["chunks, sharded optimizers, tensor parallelism"]}
    losses, faults = [], ["--fault", "kill:1.1@3", "--fault", "rejoin:1.1@6"]
    runs = (("calm", "staged", []), ("struck", "staged", faults), ("struck, NCCL", SHARED, faults))
    for name, transport, struck in runs[: 2 if device.type == "cpu" else 3]:
        text = (example / "job.toml").read_text() + 'accumulation = "exact"\n'
        text += f'[membership]\ntransport = "{transport}"\nhung_after = 15.0\n'
        (folder / "job.toml").write_text(text)
        command = ["-m", "recycle", "agent", "job.toml", "--run", name, *struck, "--", sys.executable]
        done = run_python(folder, [*command, str(example / "survive.py"), "--evaluate", "4"], 120)
        lines = (folder / name / "metrics.jsonl").read_text().splitlines() if done.returncode == 0 else []
        losses.append([json.loads(line)["loss"] for line in lines])
        figures[name] = {"exit code": done.returncode, "losses": losses[-1]}
        if done.returncode == 0:
            events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
            figures[name] |= {kind: sum(event["kind"] == kind for event in events) for kind in ("detected", "rejoined")}
        if done.returncode:
            figures[name]["output"] = (done.stdout + done.stderr)[-1500:].splitlines()
            logs = sorted((folder / name / "logs").glob("*.log")) if (folder / name).exists() else []
            figures[name]["logs"] = {log.name: log.read_text()[-500:].splitlines() for log in logs}
    figures["equal bits"] = all(row == losses[0] != [] for row in losses)
    if not figures["equal bits"] or figures["struck"].get("rejoined") != 1:
        figures["failed"].append("session")
    return figures


def pretrain(device: torch.device) -> dict[str, Any]:
    """Megatron-LM's own script in sessions of four workers, with a kill and a return, against a calm run."""
    kills = ["--fault", "kill:1.1@3.backward", "--fault", "rejoin:1.1@6"]
    folder, losses, figures = Path(tempfile.mkdtemp(prefix="recycle-gpu-")), [], dict[str, Any](layers=te_or_local())
    for name, faults in (("calm", []), ("struck", kills)):
        if (done := run_pretrain(folder, name, FOUR_SCRIPTED, device, faults)) is None:
            return {"not measured": [NO_MEGATRON_LM]}
        figures[name], lines = done, folder / name / "metrics.jsonl"
        losses.append([json.loads(line)["loss"] for line in lines.read_text().splitlines()] if lines.exists() else [])
        figures[name]["losses"] = losses[-1]
    figures["equal bits"] = losses[0] == losses[1] != []
    figures["failed"] = [] if figures["equal bits"] else ["pretrain"]
    figures["not measured"] = ["tensor parallelism, experts, FP8, several cards"]
    return figures


def step(device: torch.device) -> dict[str, Any]:
    """Megatron-LM's own script with one worker: a session's step beside torchrun's."""
    folder, figures = Path(tempfile.mkdtemp(prefix="recycle-gpu-")), dict[str, Any](failed=[], layers=te_or_local())
    for way in ("session",) if device.type == "cpu" else ("torchrun", "session"):
        done = run_pretrain(folder, way, ONE_SCRIPTED, device, [], way)
        if done is None:
            return {"not measured": [NO_MEGATRON_LM]}
        figures[way] = done
        figures["failed"] += [way] * bool(done["exit code"])
    figures["not measured"] = ["several workers: torchrun's need a card each"]
    return figures


def te_or_local() -> str:
    return "transformer_engine" if importlib.util.find_spec("transformer_engine") else "local"


NO_MEGATRON_LM = "anything: set RECYCLE_MEGATRON_LM to a checkout of Megatron-LM"
FOUR_SCRIPTED = (2, 2, 4, 8, "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024")
"""Pipelines, ranks, micro-batches, steps and the model."""
ONE_SCRIPTED = (1, 1, 8, 40, "--num-layers 12 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048")
SMALL_SCRIPTED = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


def run_pretrain(
    folder: Path, name: str, setting: Any, device: torch.device, faults: list[str], way: str = "session"
) -> dict[str, Any] | None:
    """The exit code and the milliseconds of a step of a run, or its output; None without Megatron-LM."""
    script = Path(os.environ.get("RECYCLE_MEGATRON_LM", "")) / "pretrain_gpt.py"
    if not script.is_file():
        return None
    pipelines, ranks, micro_batches, steps, model = setting
    is_dry = device.type == "cpu"
    options = (
        f"{SMALL_SCRIPTED if is_dry else model} --max-position-embeddings 2048 --micro-batch-size 1"
        f" --global-batch-size {pipelines * micro_batches} --train-iters {steps} --lr 1e-4 --lr-warmup-iters 2"
        f" --pipeline-model-parallel-size {ranks} --transformer-impl {te_or_local()} --no-persist-layer-norm"
        " --no-gradient-accumulation-fusion --no-masked-softmax-fusion --tokenizer-type NullTokenizer"
        " --vocab-size 31999 --mock-data --num-workers 0 --log-interval 1 --eval-interval 1000 --eval-iters 1"
        " --ckpt-format torch" + (" --use-cpu-initialization --distributed-backend gloo" if is_dry else " --bf16")
    ).split()
    if way == "torchrun":
        own = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        done = run_python(folder, [*own, str(script), *options], 150)
        text = done.stdout
    else:
        sums, transport = ("exact", "staged") if pipelines > 1 else ("fast", "auto")
        (folder / f"{name}.toml").write_text(
            f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
            f'[model]\ntied = true\n[train]\nsteps = {steps}\naccumulation = "{sums}"\n'
            f'[planner]\nseconds = 2\nsteps = 1\n[membership]\ntransport = "{transport}"\n'
        )
        own = ["--", sys.executable, "-m", "recycle.megatron", str(script), *options]
        done = run_python(folder, ["-m", "recycle", "agent", f"{name}.toml", "--run", name, *faults, *own], 150)
        text = "".join(log.read_text() for log in sorted((folder / name).glob("logs/*.log")))
    if done.returncode:
        output = (done.stdout + done.stderr)[-1500:].splitlines()
        return {"exit code": done.returncode, "output": output, "logs": text[-4000:].splitlines()}
    times = [float(time) for time in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)][4:]
    return {"exit code": 0, "ms per step": statistics.median(times)}


def engine(device: torch.device) -> dict[str, Any]:
    """Transformer Engine's layers: the bits of I and W against B, the distance from megatron-core's layers; and FP8."""
    if device.type == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        return {"not measured": ["anything: Transformer Engine is not installed, or there is no GPU"]}
    figures: dict[str, Any] = {"failed": [], "not measured": ["Transformer Engine with tensor parallelism"]}
    for kind in FAMILIES:
        for precision in ("fp32", "bf16"):
            train = f'[train]\nprecision = "{precision}"\n'
            halves, whole, own = (
                gradients(f'{SMALL.format(kind=kind)}config.transformer_impl = "{layers}"\n{train}', device, is_split)
                for layers, is_split in (("transformer_engine", True), ("transformer_engine", False), ("local", True))
            )
            distance = float((halves - own).norm() / own.norm())
            figures[f"{kind} {precision}"] = {"I + W is B": torch.equal(halves, whole), "distance": distance}
    text = SMALL.format(kind="llama") + 'config = {transformer_impl = "transformer_engine", fp8 = "hybrid"}\n'
    text += '[train]\nprecision = "bf16"\n'
    try:
        halves, whole = (gradients(text, device, is_split) for is_split in (True, False))
        figures["fp8"] = "I + W is B" if torch.equal(halves, whole) else "I + W is not B"
        if figures["fp8"] != "I + W is B":
            figures["failed"].append("fp8")
    except JobError as error:
        figures["fp8"] = f"refused: {first_line(error)}"
    return figures


def identity(device: torch.device) -> dict[str, Any]:
    """What this machine tells of its GPUs, by UUID."""
    uuids, library = visible_gpus(), nvml()
    figures: dict[str, Any] = {"UUIDs": uuids, "not measured": ["a GPU that is lost or defective"]}
    if library is None:
        figures["not measured"].append("health and near processors: nvidia-ml-py is not installed, or has no driver")
        return figures
    health = GpuHealth(uuids, library)
    figures["readings"] = {uuid: health.readings(uuid) for uuid in uuids}
    figures["defects"] = health.defects()
    before = len(os.sched_getaffinity(0))
    stay_near(uuids, 0)
    figures["processors"] = {"allowed": before, "near": len(os.sched_getaffinity(0))}
    figures["failed"] = ["readings"] * (not all(figures["readings"].values())) + list(figures["defects"])
    return figures


def run_python(folder: Path, arguments: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    path = f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


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
        done = run_python(folder, ["-m", "recycle", *arguments], 90)
        figures[name] = {"exit code": done.returncode, "output": (done.stdout + done.stderr)[-1500:].splitlines()}
        if done.returncode != (2 if name == "four workers" and device.type == "cuda" else 0):
            figures["failed"].append(name)
        if name == "profile" and done.returncode == 0:
            figures["links over"] = json.loads((folder / "measured.json").read_text())["measured"]["links"]
    figures["not measured"] = ["links over NCCL: they need two cards"]
    return figures


SECTIONS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "deaths": deaths,
    "session": session,
    "step": step,
    "stages": stages,
    "split": split,
    "sums": sums,
    "staged": staged,
    "pretrain": pretrain,
    "engine": engine,
    "nccl": nccl_groups,
    "identity": identity,
    "profile": profile_section,
}

if __name__ == "__main__":
    sys.exit(main())
