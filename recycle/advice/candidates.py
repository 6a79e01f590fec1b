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

    The optimizer's mode is the fastest one by `least_period`: staggered with the undo on the device or the host, or
    not staggered.
    """
    best, least = None, inf
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
            memory=replace(job.memory, limit=AUTO, activation=None, static=None),
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
        period, is_free = least_period(priced)
        if period < least:
            best, least = priced, period
        if is_free:
            break
    return best


def least_period(job: PricedJob) -> tuple[float, bool]:
    """Return a lower bound of the fault-free period in seconds, and whether memory does not raise it.

    A worker computes all its micro-batches, sums and steps. A micro-batch occupies memory at a stage from the start of
    its F there to the end of its I, at least the time through all later stages and back. Infinite if not even one
    micro-batch fits.
    """
    shape, prices = job.shape, job.prices
    stages, limits = shape.stages, job.limits
    forward, backward = prices.per_stage("forward", stages), prices.per_stage("backward_input", stages)
    weight = prices.per_stage("backward_weight", stages)
    once = [
        sum(each) for each in zip(*(prices.per_stage(n, stages) for n in ("reduce", "step", "gather")), strict=True)
    ]
    busy = kept = 0.0
    for rank in range(shape.ranks):
        own = shape.stages_of_rank(rank)
        busy = max(busy, sum(shape.micro_batches * (forward[s] + backward[s] + weight[s]) + once[s] for s in own))
        if limits is not None:
            if limits[rank] < len(own):
                return inf, False
            held = sum(sum(forward[s:]) + sum(backward[s:]) for s in own)
            kept = max(kept, shape.micro_batches * held / limits[rank])
    return max(busy, kept), kept <= busy
