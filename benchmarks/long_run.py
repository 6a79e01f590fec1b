"""Memory and log sizes of a long emulated run, at every tenth of its steps.

    python benchmarks/long_run.py [--steps 100000] [--trace 1000] [--shape 2x2] [--agents]

Runs `recycle train`, or with `--agents` two `recycle agent` on a real etcd, with workers that compute nothing. Nothing
leaks if the last figures equal those of the first tenths. Memory is the memory that a process has allocated (its
anonymous pages, including those that it shares with the process that it was forked from).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.exec.etcd_server import ETCD, EtcdServer
from tests.exec.runs import job

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "from recycle.cli import main; main()"]


def family(pid: int) -> list[int]:
    """The process and all that it has started."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def megabytes(pid: int) -> tuple[str, float] | None:
    """What the process is, and how much memory it has allocated; None when it has ended."""
    try:
        said = Path(f"/proc/{pid}/smaps_rollup").read_text()
        output = os.readlink(f"/proc/{pid}/fd/1")
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return None
    found = re.search(r"^Anonymous: +(\d+) kB", said, re.MULTILINE)
    if found is None:
        return None
    worker = re.search(r"/logs/(\d+\.\d+)\.log", output)
    kind = "workers" if worker else "helpers" if "sys.stdin" in command else "launcher or agents"
    return kind, int(found[1]) / 1024


def sample(pids: list[int]) -> dict[str, float]:
    """Kind of process -> megabytes of the largest."""
    largest: dict[str, float] = defaultdict(float)
    for pid in (member for first in pids for member in family(first)):
        if (found := megabytes(pid)) is not None:
            largest[found[0]] = max(largest[found[0]], found[1])
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--trace", default="1000")
    parser.add_argument("--shape", default="2x2", help="pipelines x ranks; 2x1 is the quickest")
    parser.add_argument("--agents", action="store_true")
    options = parser.parse_args()
    if options.agents and ETCD is None:
        print("no etcd on this machine: nothing is measured (Debian's package is etcd-server)")
        return
    pipelines, ranks = map(int, options.shape.split("x"))
    trace = int(options.trace) if options.trace.isdigit() else options.trace
    print(f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}", flush=True)
    print(
        f"{options.steps:,} steps, {options.shape} workers, trace = {trace!r}, "
        f"{'two agents' if options.agents else 'one launcher'}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        server = EtcdServer(path) if options.agents else None
        of = job(
            pipelines,
            ranks,
            ranks,
            train={"trace": trace, "checkpoint_every": 0},
            membership={"lease": 60, "dead_after": 20.0},
            cluster={"workers_per_node": pipelines * ranks // 2},
        )
        (path / "job.toml").write_text(of.to_toml())
        given = ["job.toml", "--steps", str(options.steps), "--run", "run"]
        commands = [[*COMMAND, "train", *given]]
        if server is not None:
            shared = [*COMMAND, "agent", *given, "--store", server.url, "--id", "long", "--address", "127.0.0.1"]
            commands = [[*shared, "--node", str(node)] for node in range(2)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        running = [
            subprocess.Popen(command, cwd=path, env=environment, stdout=subprocess.DEVNULL) for command in commands
        ]
        try:
            watch([one.pid for one in running], running, path / "run", options.steps)
        finally:
            for one in running:
                one.kill()
                one.wait()
            if server is not None:
                server.end()


def watch(pids: list[int], running: list[subprocess.Popen[bytes]], run: Path, steps: int) -> None:
    """Print a line at every tenth, and one at the end."""
    print(f"{'step':>9} {'s':>7} {'launcher or agents':>20} {'workers':>9} {'helpers':>9} {'logs MB':>9}", flush=True)
    began, tenth, done, read = time.monotonic(), 1, 0, 0
    while any(one.poll() is None for one in running):
        time.sleep(0.2)
        metrics = run / "metrics.jsonl"
        if metrics.exists():
            with metrics.open("rb") as stream:
                stream.seek(read)
                fresh = stream.read()
            done, read = done + fresh.count(b"\n"), read + len(fresh)
        if done >= tenth * steps // 10 and done < steps:
            tenth = 10 * done // steps + 1
            logs = sum(log.stat().st_size for log in (run / "logs").glob("*.jsonl")) / 1e6
            held = sample(pids)
            figures = " ".join(
                f"{held[kind]:{width}.1f}"
                for kind, width in (("launcher or agents", 20), ("workers", 9), ("helpers", 9))
            )
            print(f"{done:9,} {time.monotonic() - began:7.0f} {figures} {logs:9.2f}", flush=True)
    merged = run / "trace.json"
    size = merged.stat().st_size / 1e6 if merged.exists() else 0.0
    print(f"ended with {[one.returncode for one in running]}, trace.json {size:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
