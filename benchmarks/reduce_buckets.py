"""What summing a stage's gradients in buckets saves: iterations with one bucket and with several, alternating.

    python -m benchmarks.reduce_buckets [--hosts D] [--buckets N,…] [--repeats R] [--layers L] [--hidden H]

The hosts of one stage, a process each, sum over gloo on this machine. Each runs F and I of two micro-batches, then both
W's, then the reduce. With N buckets the W's run in parts, and the sum of each part overlaps with the next part.
Iterations of all settings alternate; figures are medians.

- cpu: a GPT stage of L layers that computes on the CPU with one thread per process. Computing and summing share the
  cores; busy cores leave nothing to gain.
- device: a stage with as many gradients whose F, I and W take the same time on an emulated device (they sleep). The
  sums have the cores to themselves, as on a GPU the network.

The last column is the simulated time with the measured F, I and W, and with the reduce measured alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recycle import Job, Profile, Schedule, Shape, lower, simulate
from recycle.exec.emulation import EmulatedStage
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.transport.base import sum_groups
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.instruction import OptimizerStep
from recycle.job.sections import MembershipSection

JOB = """
[shape]
pipelines = {hosts}
ranks = 1
micro_batches = 2
[model]
layers = {layers}
hidden = {hidden}
heads = 8
sequence = 64
vocabulary = 512
[train]
accumulation = "exact"
"""
PROGRAM = "0F{k}.0 0I{k}.0 0F{k}.1 0I{k}.1 0W{k}.0 0W{k}.1"
WARM_UP = 2


class OnDevice(EmulatedStage):
    """A stage that sleeps for given times, with gradients of a given size."""

    def __init__(self, job: Job, profile: Profile, elements: int) -> None:
        super().__init__(job, 0, profile)
        self._gradients = torch.zeros(elements, dtype=torch.float64)

    def gradient_buffers(self) -> list[torch.Tensor]:
        return [self._gradients]

    def bucket_bounds(self, buckets: int) -> Sequence[int]:
        return [len(self._gradients) * bucket // buckets for bucket in range(buckets + 1)]


def schedule_of(hosts: int, buckets: int) -> Schedule:
    programs = {f"{k}.0": PROGRAM.format(k=k) for k in range(hosts)}
    return lower(Schedule.from_text(Shape(hosts, 1, 2), programs, buckets=buckets))


class Host:
    """One process: a stage, and an interpreter for each number of buckets."""

    def __init__(self, rank: int, hosts: int, port: int, text: str) -> None:
        torch.set_num_threads(1)
        self.job = Job.from_toml(text)
        self.hosts, self.rank = hosts, rank
        members = sorted(schedule_of(hosts, 1).live)
        self.role = members[rank]
        limits = MembershipSection(transport_timeout=600.0, form_timeout=60.0)
        plugin = Gloo(TransportSettings(TCPStore("127.0.0.1", port, is_master=False), limits=limits))
        groups = sum_groups(schedule_of(hosts, 1))
        message = ((1,), torch.float32)
        self.transport = plugin.open(GroupsOfGeneration("benchmark", self.role, members, groups, message))

    def measure(self, stage: Stage, settings: Sequence[int], repeats: int) -> dict[int, dict[str, float]]:
        """Setting -> medians of seconds: of an iteration ("iteration"), of each kind, and of a reduce alone."""
        seconds: dict[int, dict[str, list[float]]] = {n: {} for n in settings}
        for iteration in range((WARM_UP + repeats) * len(settings)):
            buckets = settings[iteration % len(settings)]
            program = schedule_of(self.hosts, buckets).program(self.role)
            interpreter = Interpreter({0: stage}, 1, self.transport, lambda _: None, buckets=buckets)
            interpreter.begin(program, iteration)
            self.transport.reduce(0, [torch.zeros(1)])  # all begin together
            began = time.perf_counter()
            for instruction in program:
                if not isinstance(instruction, OptimizerStep):
                    interpreter.execute(instruction)
            took = {"iteration": time.perf_counter() - began}
            for token in ("F", "I", "W"):
                took[token] = statistics.fmean(c.seconds / c.count for c in interpreter.compute if c.token == token)
            self.transport.reduce(0, [torch.zeros(1)])
            began = time.perf_counter()
            self.transport.reduce(0, stage.gradient_buffers())
            took["reduce"] = time.perf_counter() - began
            if iteration >= WARM_UP * len(settings):
                for name, value in took.items():
                    seconds[buckets].setdefault(name, []).append(value)
        return {n: {name: statistics.median(values) for name, values in of.items()} for n, of in seconds.items()}


def host(rank: int, hosts: int, port: int, text: str, settings: Sequence[int], repeats: int, pipe: Any) -> None:
    me = Host(rank, hosts, port, text)
    (stage,) = build_stages(me.job, [0]).values()
    elements = stage.gradient_buffers()[0].numel()
    on_cpu = me.measure(stage, settings, repeats)
    one = on_cpu[1]
    profile = Profile(one["F"], one["I"], one["W"], message=4)
    on_device = me.measure(OnDevice(me.job, profile, elements), settings, repeats)
    pipe.send((elements, on_cpu, on_device))
    pipe.recv()
    os._exit(0)  # gloo's threads still run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--buckets", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    arguments = parser.parse_args()
    settings = [1, *map(int, arguments.buckets.split(","))]
    text = JOB.format(hosts=arguments.hosts, layers=arguments.layers, hidden=arguments.hidden)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(arguments.hosts):
        mine, theirs = context.Pipe()
        given = (rank, arguments.hosts, store.port, text, settings, arguments.repeats, theirs)
        context.Process(target=host, args=given, daemon=True).start()
        pipes.append(mine)
    answers = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    elements = answers[0][0]
    print(
        f"{arguments.hosts} hosts of a stage, {8 * elements / 1e6:.0f} MB of gradients (exact), gloo on loopback,"
        f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {arguments.repeats}"
    )
    print(f"  {'where':<7} buckets  iteration ms   of one bucket's   simulated   F / I / W ms   reduce alone ms")
    for place, where in ((1, "cpu"), (2, "device")):
        slowest = {n: max((answer[place][n] for answer in answers), key=lambda of: of["iteration"]) for n in settings}
        one = slowest[1]
        profile = Profile(one["F"], one["I"], one["W"], reduce=one["reduce"])
        whole = simulate(schedule_of(arguments.hosts, 1), profile).makespan
        for n in settings:
            took, planned = slowest[n], simulate(schedule_of(arguments.hosts, n), profile).makespan
            times = " / ".join(f"{1000 * took[token]:.0f}" for token in ("F", "I", "W"))
            print(
                f"  {where:<7} {n:>7}  {1000 * took['iteration']:>12.0f}  {took['iteration'] / one['iteration']:>16.3f}"
                f"  {planned / whole:>10.3f}   {times:>12}  {1000 * took['reduce']:>16.0f}"
            )
    print(json.dumps({"elements": elements, "cpu": answers[0][1], "device": answers[0][2]}))


if __name__ == "__main__":
    main()
