"""Scenario: nodes, costs of each layer, links, memory, batch and pauses, the same for all systems.

A job with only `[shape]`, `[times]` and `[memory]` has one layer per stage, one sample per micro-batch, and memory in
activations of 1 byte. With a sharded optimizer, the bytes of a layer depend on its number of hosts (`layers_over`), and
each system has the scenario in its usual mode (`with_copies`): redundant shards, plain ZeRO-1, or all state everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, sqrt
from typing import NamedTuple

from msgspec.structs import replace

from recycle.errors import JobError
from recycle.job import Job, PricedJob, analytic, price
from recycle.job.cut import balanced, units_of
from recycle.job.footprint import parameter_bytes, undone_bytes
from recycle.job.layers import Layer, stage_bytes, stage_profile, stage_sums
from recycle.job.pricing import byte_limit
from recycle.job.profile import Profile
from recycle.job.sections import ANALYTIC, ModelSection, PausesSection
from recycle.job.shape import Shape, Worker, node_of
from recycle.plans.shards import owners_of
from recycle.systems.system import Checkpoints, DoesNotFit, Nodes, Pause

_PRICES = ("forward", "backward_input", "backward_weight", "reduce", "step", "static", "activation", "message")
Split = tuple[int, ...]
"""Layers of each stage, first to last."""
LayerRange = tuple[int, int]
"""First layer, and end layer (exclusive)."""
FATAL_SHARE = 0.01
"""Assumed share of failures that need a checkpoint although peers hold state; sets only the checkpoint interval."""


def ranges(split: Iterable[int]) -> list[LayerRange]:
    return list(pairwise([0, *accumulate(split)]))


class FullestWorker(NamedTuple):
    """The worker of a pipeline that exceeds its memory most, or comes closest to it; in bytes."""

    excess: float
    needed: float
    rank: int
    cap: float

    @property
    def fits(self) -> bool:
        return self.excess <= 1e-9 * self.needed

    def does_not_fit(self, reason: str) -> DoesNotFit:
        return DoesNotFit(needed=self.needed, cap=self.cap, reason=reason)


@dataclass(frozen=True)
class Scenario:
    """Input that is the same for all systems.

    Attributes:
        job: source of the scenario; its shape is the preferred one.
        layers: first to last, with the hosts of the job's shape.
        node_of: node of each slot; slot i is the place of worker i of the job's shape.
        micro_batch: samples of one micro-batch.
        latency: seconds per transfer between two workers.
        bandwidth: bytes per second of a directed pair of workers, and of a ring through all hosts of a layer; None if
            only latency counts.
        weight_stash: share of an activation that is held between I and W.
        memory: maximum bytes on the worker of each of the job's ranks; None without a limit.
        pauses: the common model.
        failure_rate: failures per second of one node, for checkpoint intervals.
    """

    job: PricedJob
    layers: tuple[Layer, ...]
    node_of: tuple[int, ...]
    micro_batch: float = 1.0
    latency: float = 0.0
    bandwidth: float | None = None
    weight_stash: float = 1.0
    memory: tuple[float, ...] | None = None
    pauses: PausesSection = field(default_factory=PausesSection)
    failure_rate: float = 0.0

    @property
    def shape(self) -> Shape:
        return self.job.shape

    @property
    def micro_batches(self) -> int:
        """D * m of the job: micro-batches per iteration, with `micro_batch` samples each, for any system."""
        return self.shape.global_micro_batches

    @property
    def samples(self) -> float:
        return self.micro_batches * self.micro_batch

    @property
    def nodes(self) -> int:
        return self.node_of[-1] + 1

    @property
    def all_nodes(self) -> Nodes:
        return frozenset(range(self.nodes))

    @property
    def gpus(self) -> int:
        return len(self.node_of) * self.job.grid.tensor_parallel

    def slots(self, live: Iterable[int]) -> list[int]:
        live = frozenset(live)
        return [slot for slot, node in enumerate(self.node_of) if node in live]

    def with_shape(self, pipelines: int, ranks: int) -> Scenario:
        """Return the scenario in another shape, with the same workers, batch and layers.

        Raises:
            JobError: the profile is not analytic, or the shape does not divide the workers or the micro-batches.
        """
        micro_batches, remainder = divmod(self.micro_batches, pipelines)
        if self.job.times.profile != ANALYTIC or remainder or pipelines * ranks != len(self.node_of):
            raise JobError(f"{self.shape} cannot be run as {pipelines} pipelines of {ranks} ranks")
        grid = replace(
            self.job.grid, pipelines=pipelines, ranks=ranks, micro_batches=micro_batches, chunks=1, placement="loop"
        )
        model = replace(self.job.model, split=list(self.cut(ranks)))
        memory = None if self.memory is None else (min(self.memory),) * ranks
        return dataclasses.replace(self, job=self.job.with_sections(grid=grid, model=model), memory=memory)

    # ---- a sharded optimizer

    @property
    def copies(self) -> int:
        """Hosts of each part of a layer's optimizer state; 0 if every host has all of it."""
        return self.job.train.optimizer_copies if self.job.train.sharded_optimizer else 0

    def with_copies(self, copies: int) -> Scenario:
        """Return the scenario with `copies` hosts per part of a sharded optimizer's state; 0 for all of it on each."""
        train = self.job.train
        if not train.sharded_optimizer:
            return self
        copies = min(copies, self.shape.pipelines)
        if copies == train.optimizer_copies:
            return self
        default = type(train)().optimizer_copies
        job = self.job.with_sections(
            train=replace(train, sharded_optimizer=copies > 0, optimizer_copies=copies or default)
        )
        return dataclasses.replace(self, job=job, layers=analytic.layers(job))

    def layers_over(self, hosts: int) -> tuple[Layer, ...]:
        """Return the layers with `hosts` hosts each, which share the optimizer's state as the job says."""
        return analytic.layers(self._job_over(hosts)) if self.copies else self.layers

    def _job_over(self, hosts: int) -> Job:
        grid, train = self.job.grid, self.job.train
        train = replace(train, optimizer_copies=min(train.optimizer_copies, hosts))
        return replace(self.job, grid=replace(grid, pipelines=hosts), train=train)

    def loses_shard(self, hosts: Sequence[int | None], gone: Collection[int]) -> bool:
        """Return whether only dead hosts had a part of a stage's optimizer state.

        `hosts` are the slots of the stage's hosts, one per shard, None if dead before; `gone` are the slots that die.
        """
        places = [Worker(place, 0) for place in range(len(hosts))]
        live = [place for place, slot in zip(places, hosts, strict=True) if slot is not None]
        survivors = {place for place in live if hosts[place.pipeline] not in gone}
        if not self.copies or len(survivors) == len(live):
            return False
        own = len(self.node_of)  # hosts that were dead before count as on nodes that nothing else uses
        nodes = {p: own + p.pipeline if (s := hosts[p.pipeline]) is None else self.node_of[s] for p in places}
        return any(survivors.isdisjoint(owners) for owners in owners_of(places, live, self.copies, nodes))

    def owned_per_stage(self) -> list[float]:
        """Bytes of the shards that a host of each of the job's stages owns, to be copied after its death."""
        share = undone_bytes(self.job) / parameter_bytes(self.job).state if self.copies else 0.0
        return [share * state for state in self.state_per_stage()]

    # ---- cutting the model

    @property
    def split(self) -> Split:
        stated = units_of(self.job)
        fits = self.shape.chunks == 1 and sum(stated) == len(self.layers)
        return stated if fits else self._balanced(self.shape.ranks)

    def cut(self, stages: int) -> Split:
        """Return the job's own split if it has `stages` stages, otherwise the balanced one."""
        return self.split if stages == len(self.split) else self._balanced(stages)

    def _balanced(self, stages: int) -> Split:
        return balanced(tuple(layer.seconds for layer in self.layers), stages)

    def seconds_per_stage(self, stages: int) -> list[float]:
        return stage_sums(self.stages(self.cut(stages)), "seconds")

    def stages(self, split: Split, hosts: int | None = None) -> list[tuple[Layer, ...]]:
        """Return the layers of each stage with `hosts` hosts; None for the number of the job's pipelines."""
        if sum(split) != len(self.layers):
            raise JobError(f"split {split} has {sum(split)} layers, the model {len(self.layers)}")
        layers = self.layers if hosts is None else self.layers_over(hosts)
        return [layers[first:last] for first, last in ranges(split)]

    def state_per_stage(self, split: Split | None = None, hosts: int | None = None) -> list[float]:
        """Return the bytes that a new host of each stage copies; without a split, of the job's P * V stages."""
        return stage_sums(self.stages(split or units_of(self.job), hosts), "state")

    @cached_property
    def least_ranks(self) -> int:
        """Least ranks with which a pipeline with one micro-batch per worker fits into memory.

        The job's own number if static bytes are unknown; more than the layers if not even one layer fits.
        """
        if not any(layer.static for layer in self.layers):
            return self.shape.ranks
        for ranks in range(1, len(self.layers) + 1):
            if self.fullest_of_1f1b(self.cut(ranks), 1, max(1, len(self.node_of) // ranks)).fits:
                return ranks
        return len(self.layers) + 1

    def cap(self, rank: int, ranks: int) -> float:
        return inf if self.memory is None else self.memory[rank * len(self.memory) // ranks]

    def fullest(self, needed: Sequence[float]) -> FullestWorker:
        caps = [self.cap(rank, len(needed)) for rank in range(len(needed))]
        workers = (
            FullestWorker(held - cap, held, rank, cap)
            for rank, (held, cap) in enumerate(zip(needed, caps, strict=True))
        )
        return max(workers, key=lambda worker: worker[:2])

    def fullest_of_1f1b(
        self, split: Split, micro_batches: int, hosts: int | None = None, size: float = 1.0
    ) -> FullestWorker:
        """Return the fullest worker of 1F1B: stage s of S holds min(S - s, m) activations, scaled by `size`."""
        stages = enumerate(self.stages(split, hosts))
        return self.fullest([stage_bytes(stage, min(len(split) - s, micro_batches) * size) for s, stage in stages])

    # ---- prices

    def profile(self, split: Split, hosts: int) -> Profile:
        """Return seconds and bytes of each stage of `split`, with gradients reduced over `hosts` workers."""
        stages = self.stages(split, hosts)
        plain = stage_profile(
            stages,
            hosts,
            latency=self.latency,
            bandwidth=self.bandwidth,
            weight_stash=self.weight_stash,
        )
        if not self.copies:
            return plain
        return analytic.with_shards(self._job_over(hosts), plain, stage_sums(stages, "static"))

    def copy_seconds(self, amount: float) -> float:
        """Return the seconds to copy the bytes of the busiest worker; disjoint pairs copy in parallel."""
        return 0.0 if not amount else self.latency + (0.0 if self.bandwidth is None else amount / self.bandwidth)

    # ---- pauses

    def pause(self, copied: float = 0.0, *, detected: bool = True, plan: float | None = None) -> Pause:
        """Return the pause of a change without restarts: t_detect + t_plan + t_comm_rebuild + bytes / bandwidth.

        Args:
            copied: bytes that the busiest worker sends or receives.
            detected: a failure had to be detected first; joins are announced.
            plan: seconds of planning; None for the common model.
        """
        model = self.pauses
        return Pause(
            detect=model.detect if detected else 0.0,
            plan=model.plan if plan is None else plan,
            rebuild=model.rebuild,
            copy=self.copy_seconds(copied),
        )

    def restart(self, *, detected: bool = True) -> Pause:
        """Return the pause of a restart: start processes, form groups, and read the state from a checkpoint."""
        model = self.pauses
        restart = model.restart + self.storage_seconds
        return Pause(detect=model.detect if detected else 0.0, rebuild=model.rebuild, restart=restart)

    @property
    def storage_seconds(self) -> float:
        return self.state_per_worker / self.pauses.storage_bandwidth

    @cached_property
    def state(self) -> float:
        """Bytes of a checkpoint: the model's parameters and optimizer state."""
        return sum(layer.state for layer in self.with_copies(0).layers)

    @cached_property
    def state_per_worker(self) -> float:
        """Bytes of a checkpoint per worker of the preferred shape: its stages' state, or all its copies of shards."""
        shared = self.copies / self.shape.pipelines if self.copies else 1.0
        return self.state * shared / self.shape.ranks

    @property
    def fatal_share(self) -> float:
        """Share of failures for which systems that copy from peers write checkpoints."""
        return FATAL_SHARE if self.shape.pipelines > 1 and self.copies != 1 else 1.0

    @property
    def replayed(self) -> int:
        """Iterations in which each micro-batch is compared once, by `[integrity] every`; 0 for never."""
        every = self.job.integrity.every
        return 100 if every == "gaps" else every

    def checkpoints(self, nodes: int, fatal_share: float = FATAL_SHARE) -> Checkpoints | None:
        """Return the checkpoint policy if a share of the failures of `nodes` nodes needs one; None for no checkpoints.

        Training stops while workers copy their state to the host. Storage is written in the background, so the next
        checkpoint can begin only after that. The interval is Young's (CACM 17(9), 1974).
        """
        rate = self.failure_rate * nodes * fatal_share
        if not rate:
            return None
        stall = self.pauses.snapshot + self.state_per_worker / self.pauses.snapshot_bandwidth
        lag = self.storage_seconds
        return Checkpoints(max(sqrt(2 * stall / rate), lag), stall, lag)

    @classmethod
    def of(cls, job: Job) -> Scenario:
        """Create the scenario of a job: its profile's stages, divided into layers if the job has a `[model]`.

        Raises JobError if the profile does not fit the shape, or sharded optimizer state has no analytic bytes.
        """
        if job.train.sharded_optimizer and job.times.profile != ANALYTIC:
            raise JobError(
                "[train] sharded_optimizer: systems run other shapes, and only the analytic model knows what shards"
                ' weigh there; write [times] profile = "analytic", or set it to false'
            )
        job = price(job)
        shape, profile = job.shape, job.prices
        profile.require(shape)
        return cls(
            job,
            analytic.layers(job) if job.times.profile == ANALYTIC else _layers_of(job, profile),
            slot_nodes(shape, job.cluster.workers_per_node),
            micro_batch=1.0 if job.model == ModelSection() else float(job.data.micro_batch_size),
            latency=profile.latency,
            bandwidth=profile.bandwidth,
            weight_stash=profile.weight_stash,
            memory=_memory(job),
            pauses=job.pauses,
        )


def _layers_of(job: Job, profile: Profile) -> tuple[Layer, ...]:
    columns = {name: profile.per_stage(name, job.shape.stages) for name in _PRICES}
    layers: list[Layer] = []
    for stage, count in enumerate(units_of(job)):
        prices = {name: column[stage] for name, column in columns.items()}
        prices["step"] += prices.pop("reduce")
        message = prices.pop("message")
        per_layer = {name: total / count for name, total in prices.items()}
        layers += [Layer(**per_layer, state=per_layer["static"], message=message)] * count
    return tuple(layers)


def slot_nodes(shape: Shape, workers_per_node: int) -> tuple[int, ...]:
    """Return the node of each worker, by index: as `place_workers` does, in even blocks for a single pipeline."""
    if shape.pipelines > 1:
        return tuple(node_of(shape, workers_per_node).values())
    count = -(-shape.ranks // workers_per_node)
    return tuple(rank * count // shape.ranks for rank in range(shape.ranks))


def _memory(job: PricedJob) -> tuple[float, ...] | None:
    shape, prices = job.shape, job.prices
    if (stated := byte_limit(job, prices)) is not None:
        return (stated,) * shape.ranks
    if job.limits is None:
        return None
    activation = prices.per_stage("activation", shape.stages)
    limits = zip(map(shape.stages_of_rank, range(shape.ranks)), job.limits, strict=True)
    return tuple(
        prices.fixed_bytes(own, shape.stages) + limit * max(activation[s] for s in own) for own, limit in limits
    )
