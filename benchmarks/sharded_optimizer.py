"""The end of an iteration with a sharded optimizer, against hosts that hold the whole state.

    python -m benchmarks.sharded_optimizer [--hosts D] [--copies K] [--repeats R] [--layers L] [--hidden H]

The hosts of one stage, a process each, reduce their gradient sums over gloo, compute norm and checksum of their share,
and step; with the sharded optimizer they also gather the parameters. Both variants alternate, and start together after
a sum of one number. Figures are medians of the slowest host, and the ratio of the medians. All processes share the
machine's cores and memory; the network is the loopback device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recycle import Job
from recycle.exec.model.build import build_stages
from recycle.exec.model.stage import Stage
from recycle.exec.model.state.layouts import Shards
from recycle.exec.transport.gloo import Gloo
from recycle.exec.transport.groups import GroupsOfGeneration, GroupTransport
from recycle.exec.transport.plugin import TransportSettings
from recycle.job.sections import MembershipSection
from recycle.job.shape import Worker
from recycle.plans.shards import owners_of

JOB = """
[shape]
pipelines = {hosts}
ranks = 1
micro_batches = 1
[model]
layers = {layers}
hidden = {hidden}
heads = 8
sequence = 32
vocabulary = 512
[train]
precision = "{precision}"
accumulation = "{accumulation}"
{sharded}
"""
SETTINGS = [("bf16", "exact"), ("fp32", "exact"), ("bf16", "fast")]
WARM_UP = 2


def job_of(given: argparse.Namespace, setting: tuple[str, str], is_sharded: bool) -> Job:
    precision, accumulation = setting
    return Job.from_toml(
        JOB.format(
            hosts=given.hosts,
            layers=given.layers,
            hidden=given.hidden,
            precision=precision,
            accumulation=accumulation,
            sharded=f"sharded_optimizer = true\noptimizer_copies = {given.copies}" if is_sharded else "",
        )
    )


def built(job: Job, place: int, copies: int) -> Stage:
    """The stage, which owns the shards of this host if there are any."""
    (stage,) = build_stages(job, [0], torch.device("cpu")).values()
    stage.begin_iteration(0)
    stage.gradient_buffers()[0][: 1 << 10] = 0.25
    if isinstance(stage.layout, Shards):
        hosts = [Worker(k, 0) for k in range(job.shape.pipelines)]
        mine = [number for number, of in enumerate(owners_of(hosts, hosts, copies)) if hosts[place] in of]
        stage.layout.own(mine)
        stage.layout.settled()
    return stage


def update(stage: Stage, transport: GroupTransport, iteration: int) -> dict[str, float]:
    """What ends an iteration; seconds of its parts and of all together."""
    marks = [time.perf_counter()]
    stage.layout.reduce(stage, transport, 0, 1)
    marks.append(time.perf_counter())
    for _ in stage.layout.reduced(stage):
        pass
    stage.step(iteration, 1.0)
    marks.append(time.perf_counter())
    if stage.layout.gathered():
        transport.gather(0, stage.layout.weights())
    marks.append(time.perf_counter())
    parts = [end - begin for begin, end in itertools.pairwise(marks)]
    return dict(zip(("reduce", "step", "gather"), parts, strict=True)) | {"together": marks[-1] - marks[0]}


def host(place: int, given: argparse.Namespace, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    hosts = [Worker(k, 0) for k in range(given.hosts)]
    limits = MembershipSection(transport_timeout=600.0, form_timeout=60.0)
    plugin = Gloo(TransportSettings(TCPStore("127.0.0.1", port, is_master=False), limits=limits))
    owners = {0: owners_of(hosts, hosts, given.copies)}
    groups = GroupsOfGeneration("benchmark", hosts[place], hosts, {0: hosts}, ((1,), torch.float32), owners=owners)
    transport = plugin.open(groups)
    answers = []
    for setting in SETTINGS:
        stages = [built(job_of(given, setting, each), place, given.copies) for each in (False, True)]
        found: list[list[dict[str, float]]] = [[], []]
        for iteration in range(WARM_UP + given.repeats):
            for which, stage in enumerate(stages):
                transport.reduce(0, [torch.zeros(1)])  # all begin together
                found[which].append(update(stage, transport, iteration))
        elements = stages[0].gradient_buffers()[0].numel()
        answers.append((elements, [of[WARM_UP:] for of in found]))
    transport.reduce(0, [torch.zeros(1)])
    pipe.send(answers)
    pipe.recv()
    os._exit(0)  # gloo's threads still run


def slowest(answers: list[Any], number: int, which: int, part: str) -> float:
    """Median over the repeats of the slowest host's seconds."""
    hosts = [answer[number][1][which] for answer in answers]
    return statistics.median(max(times[part] for times in at_once) for at_once in zip(*hosts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    given = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = []
    for place in range(given.hosts):
        mine, theirs = context.Pipe()
        context.Process(target=host, args=(place, given, store.port, theirs), daemon=True).start()
        pipes.append(mine)
    answers = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    print(
        f"{given.hosts} hosts of a stage, {given.copies} copies, {answers[0][0][0] / 1e6:.1f} million parameters, gloo"
        f" on loopback, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {given.repeats}, ms"
    )
    print(f"  {'setting':<12} {'':<11} {'reduce':>8} {'step':>8} {'gather':>8} {'together':>9}  sharded / replicated")
    for number, setting in enumerate(SETTINGS):
        times = [
            {part: 1000 * slowest(answers, number, which, part) for part in ("reduce", "step", "gather", "together")}
            for which in range(2)
        ]
        for name, of in zip(("replicated", "sharded"), times, strict=True):
            ratio = f"{of['together'] / times[0]['together']:.3f}" if name == "sharded" else ""
            print(
                f"  {' '.join(setting):<12} {name:<11} {of['reduce']:>8.1f} {of['step']:>8.1f} {of['gather']:>8.1f}"
                f" {of['together']:>9.1f}  {ratio}"
            )
        print(json.dumps({"setting": setting, "replicated": times[0], "sharded": times[1]}))


if __name__ == "__main__":
    main()
