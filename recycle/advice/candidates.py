"""Candidates: all ways to cut a job's model and global batch for a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import inf
from typing import Literal, NamedTuple

from msgspec.structs import replace

from recycle.errors import JobError
from recycle.job import Job, PricedJob
from recycle.job.analytic import GPUS
from recycle.job.architecture import Architecture
from recycle.job.cut import balanced
from recycle.job.footprint import parameter_bytes, usable_bytes
from recycle.job.pricing import layer_seconds
from recycle.job.rules import require_possible
from recycle.job.sections import ANALYTIC, AUTO
from recycle.job.shape import Placing

MOST_RANKS = 64
"""Pipelines deeper than this are not considered."""
MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences of a micro-batch that are considered."""
LEAST_USED = 0.5
"""Share of the GPUs that a configuration must use, besides spares."""
_CHUNKS: tuple[tuple[int, Placing], ...] = ((1, "loop"), (2, "loop"), (2, "v"))


Recompute = Literal["none", "full"]


class Candidate(NamedTuple):
    """A configuration; `recompute` is `[model] recompute`, `sharded` is `[train] sharded_optimizer`."""

    tensor_parallel: int
    ranks: int
    pipelines: int
    micro_batch: int
    chunks: int
    placement: Placing
    recompute: Recompute
    sharded: bool

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.ranks * self.pipelines


def sequences(job: Job) -> int:
    """Return the sequences of a global batch."""
    return job.shape.global_micro_batches * job.data.micro_batch_size


def candidates(job: Job, gpus: int, per_node: int) -> Iterator[Candidate]:
    """Yield the candidates for a job on `gpus` GPUs in nodes of `per_node`, for the job's global batch.

    For each depth the most pipelines that divide the batch, and the next smaller number, which leaves spares. Left out
    are those whose parameters alone exceed the memory.
    """
    batch, layers = sequences(job), job.model.layers
    divisors = [d for d in range(min(batch, gpus), 0, -1) if not batch % d]
    architecture = Architecture.of(job.model)
    parameters = layers * architecture.layer + 2 * job.model.vocabulary * job.model.hidden
    least = replace(job, planner=replace(job.planner, staggered=False))
    room = usable_bytes(GPUS[job.analytic.gpu].memory)
    for tensor in (2**power for power in range(per_node.bit_length())):
        workers = gpus // tensor
        for ranks in range(1, min(layers, workers, MOST_RANKS) + 1):
            for micro_batch in MICRO_BATCHES:
                whole = [d for d in divisors if d <= workers // ranks and not batch % (d * micro_batch)][:2]
                for pipelines in (d for d in whole if d * ranks * tensor >= LEAST_USED * gpus):
                    for sharded in (False, True)[: 1 + (pipelines > 2)]:
                        train = replace(job.train, sharded_optimizer=sharded)
                        grid = replace(job.grid, pipelines=pipelines, ranks=1, chunks=1, micro_batches=1)
                        weigh = parameter_bytes(replace(least, train=train, grid=grid))
                        if parameters * (weigh.state + weigh.gradient) > room * ranks * tensor:
                            continue
                        for chunks, placement in _CHUNKS if ranks > 1 and layers >= 2 * ranks else _CHUNKS[:1]:
                            for recompute in ("none", "full"):
                                yield Candidate(
                                    tensor, ranks, pipelines, micro_batch, chunks, placement, recompute, sharded
                                )


def most_samples(job: Job) -> Callable[[Candidate], float]:
    """Return an upper bound on samples per second: the layers' F, I and W, spread evenly over all ranks."""

    @cache
    def work(tensor_parallel: int, micro_batch: int, recompute: Recompute) -> float:
        grid = replace(job.grid, tensor_parallel=tensor_parallel)
        data, model = replace(job.data, micro_batch_size=micro_batch), replace(job.model, recompute=recompute)
        times = replace(job.times, profile=ANALYTIC)
        return sum(layer_seconds(replace(job, grid=grid, data=data, model=model, times=times)))

    return lambda candidate: (
        candidate.pipelines
        * candidate.ranks
        * candidate.micro_batch
        / work(candidate.tensor_parallel, candidate.micro_batch, candidate.recompute)
    )


def job_of(job: Job, candidate: Candidate, per_node: int) -> PricedJob | None:
    """Return the job in a candidate's configuration, with prices; None if it is impossible or does not fit.

    By `least_period` the fastest of these: staggered with the undo on the device or the host, or not staggered, each
    with all activations on the device, then with copies of them on the host.
    """
    best, least = None, inf
    offloads = candidate.recompute == "none" and job.planner.layout == "fixed"
    for staggered, undo in ((True, "device"), (True, "host"), (False, "device")):
        shaped = replace(
            job,
            grid=replace(
                job.grid,
                pipelines=candidate.pipelines,
                ranks=candidate.ranks,
                micro_batches=sequences(job) // (candidate.pipelines * candidate.micro_batch),
                chunks=candidate.chunks,
                placement=candidate.placement,
                tensor_parallel=candidate.tensor_parallel,
            ),
            times=replace(job.times, profile=ANALYTIC),
            memory=replace(job.memory, limit=AUTO, activation=None, static=None, offload="off"),
            data=replace(job.data, micro_batch_size=candidate.micro_batch),
            model=replace(job.model, recompute=candidate.recompute, split=None),
            train=replace(job.train, sharded_optimizer=candidate.sharded, undo=undo),
            planner=replace(job.planner, staggered=staggered),
            cluster=replace(job.cluster, workers_per_node=max(1, per_node // candidate.tensor_parallel)),
        )
        try:
            seconds = layer_seconds(shaped)
            relative = tuple(
                round(each / seconds[len(seconds) // 2], 6) for each in seconds
            )  # alike for any micro-batch
            cut = balanced(relative, shaped.shape.stages)
            shaped = replace(shaped, model=replace(shaped.model, split=list(cut)))
            require_possible(shaped)
            priced = PricedJob(
                **{name: getattr(shaped, name) for name in Job.__struct_fields__}, prices=shaped.profile()
            )
        except JobError:
            return None
        offloaded = replace(priced, memory=replace(priced.memory, offload=AUTO))
        for way in (priced, offloaded)[: 1 + offloads]:
            period, is_free = least_period(way)
            if period < least:
                best, least = way, period
            if is_free:
                return best
    return best


def least_period(job: PricedJob) -> tuple[float, bool]:
    """Return a lower bound of the fault-free period in seconds, and whether memory does not raise it.

    A worker computes all its micro-batches, sums and steps. A stage runs every I and W after the first micro-batch has
    passed the later stages and returned. A micro-batch occupies memory at a stage from the start of its F there to the
    end of its I, which is at least the time there and back. One that is on the host meanwhile occupies memory for its
    F, its I and two copies; the copies to the host follow each other. Infinite if not even one micro-batch fits.
    """
    shape, prices, limits = job.shape, job.prices, job.limits
    stages, count = shape.stages, shape.micro_batches
    forward, backward, weight, copy, *once = (
        prices.per_stage(name, stages)
        for name in ("forward", "backward_input", "backward_weight", "host_copy", "reduce", "step", "gather")
    )
    there_and_back = [sum(forward[s:]) + sum(backward[s:]) for s in range(stages)]
    busy = kept = 0.0
    for rank in range(shape.ranks):
        own, load = shape.stages_of_rank(rank), 0.0
        for s in own:
            later = count * (backward[s] + weight[s]) + sum(each[s] for each in once)
            load += count * forward[s] + later
            busy = max(busy, load, there_and_back[s] - backward[s] + later)
        if limits is None:
            continue
        if limits[rank] < len(own):
            return inf, False
        room, held = limits[rank], sum(there_and_back[s] for s in own)
        if job.memory.offload == AUTO:
            away = {s: max(0.0, there_and_back[s] - forward[s] - backward[s] - 2 * copy[s]) for s in own}
            kept = max(kept, count * (held - sum(away.values())) / room)
            room += max(away[s] / copy[s] for s in own)
        kept = max(kept, count * held / room)
    return max(busy, kept), kept <= busy
