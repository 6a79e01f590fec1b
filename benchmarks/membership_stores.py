"""Runs of one machine without etcd and with it, side by side: recovery from a kill, and requests per second.

    python benchmarks/membership_stores.py [--pipelines 8] [--ranks 8] [--steps 12] [--heartbeat 0.25]

Workers are emulated, so what is measured is the control plane and gloo, not training. Needs the `etcd` binary; requests are
those that etcd itself counted.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.launch.launcher import train
from recycle.exec.launch.observer import Observer
from tests.exec.etcd_server import EtcdServer
from tests.exec.runs import job

HANDLED = re.compile(r'grpc_server_(?:started|handled)_total\{.*grpc_method="(\w+)".*\} ([0-9.e+]+)')


def handled(server: EtcdServer) -> dict[str, float]:
    """Requests that the server has taken so far, by method."""
    counts: dict[str, float] = {}
    with urllib.request.urlopen(f"http://{server.address}:{server.port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            match = HANDLED.match(line)
            if match is not None and line.startswith("grpc_server_started"):
                counts[match[1]] = counts.get(match[1], 0.0) + float(match[2])
    return counts


class Clock(Observer):
    """Notes when steps were committed, and what the server had taken by then."""

    def __init__(self, server: EtcdServer | None) -> None:
        self.server, self.marks = server, list[tuple[int, float, dict[str, float]]]()

    def committed(self, line: dict) -> None:
        counts = handled(self.server) if self.server is not None else {}
        self.marks.append((line["step"], time.monotonic(), counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipelines", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--heartbeat", type=float, default=0.25)
    options = parser.parse_args()
    kill = options.steps - 4
    for name in ("launcher", "etcd"):
        with tempfile.TemporaryDirectory() as folder:
            server = EtcdServer(Path(folder)) if name == "etcd" else None
            membership = {"store": server.url if server is not None else name, "heartbeat": options.heartbeat}
            of = job(
                options.pipelines,
                options.ranks,
                options.ranks,
                model={"seconds_per_unit": 0.02},
                membership=membership,
                planner={"ahead": 1},
            )
            clock = Clock(server)
            result = train(
                of,
                Path(folder) / "run",
                steps=options.steps,
                faults=[parse_fault(f"kill:1.1@{kill}")],
                planner=plan_for_training,
                observer=clock,
            )
            (recovered,) = [event["seconds"] for event in result.events if event["kind"] == "recovered"]
            first, last = clock.marks[1], clock.marks[kill - 1]
            seconds = last[1] - first[1]
            per_step = seconds / (last[0] - first[0])
            rates = {m: (n - first[2].get(m, 0.0)) / seconds for m, n in last[2].items()}
            shown = ", ".join(f"{m} {rate:.0f}/s" for m, rate in sorted(rates.items()) if rate >= 0.5)
            print(f"{name:9} recovered in {recovered:.2f} s; {per_step:.2f} s per step; {shown}", flush=True)
            if server is not None:
                server.end()


if __name__ == "__main__":
    main()
