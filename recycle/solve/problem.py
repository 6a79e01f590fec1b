"""The planning problem in numbers: times, caps and hosts of a job with some workers dead.

An operation is one F, I or W (F or B without a split) of one stage and micro-batch. Its number is `(kind * stages +
stage) * micro_batches + micro_batch`. An `Order` is a sequence of operations per worker; searches handle only orders,
which become a `Schedule` at the end.

Limits: a transfer takes as long as the slowest one over any stage boundary (in bounds: the fastest), or its lane's time
if links of peers differ. `simulate` gives the final figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import gcd, log10
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.errors import PlanError
from recycle.ir.columns import MOST_INSTRUCTIONS, Columns
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from recycle.ir.operations import operations_of
from recycle.ir.schedule import Optimizer, Schedule, placement_of
from recycle.job import PricedJob
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans import failure_vector, require_hosts
from recycle.solve.links import hops_between, link_times
from recycle.solve.problem_arrays import FORWARD, INPUT, WEIGHT, Operations, ProblemArrays, lane_between

Order = list[list[int]]
"""Operations of each worker in program order, by worker index; empty for a dead worker."""

_WHOLE: list[type[Instruction]] = [Forward, Backward]
_SPLIT: list[type[Instruction]] = [Forward, BackwardInput, BackwardWeight]
_OPERATIONS_OF_KIND: dict[int, tuple[int, ...]] = {
    Forward.kind: (FORWARD,),
    Backward.kind: (INPUT, WEIGHT),
    BackwardInput.kind: (INPUT,),
    BackwardWeight.kind: (WEIGHT,),
}
"""Operations that an instruction stands for; a whole B is an I directly followed by its W, if the problem splits it."""
_FACTORS = (1, 2, 4, 5, 10, 20, 100)
"""Denominators of times that count as whole in some unit."""
SHORTEST, LONGEST = 1e-6, 1e12
"""Range of times in seconds; beyond it, tolerances and sums lose accuracy."""
TOLERANCE = 1e-9
"""Difference up to which two times, or two numbers of activations, count as equal."""


def flatten(order: Order) -> tuple[Operations, Operations]:
    """Return (the concatenated programs, offset of each program and of the end)."""
    offsets = np.array([0, *accumulate(map(len, order))], dtype=np.int64)
    return np.fromiter(chain.from_iterable(order), np.int64, int(offsets[-1])), offsets


def programs_of(operations: Operations, worker: Operations, workers: int) -> Order:
    """Return the program of each worker, with its operations in the given sequence."""
    worker = worker.astype(np.min_scalar_type(workers))  # 16 bits sort by radix
    ends = np.cumsum(np.bincount(worker, minlength=workers))
    return [program.tolist() for program in np.split(operations[np.argsort(worker, kind="stable")], ends[:-1])]


@dataclass(frozen=True, eq=False)
class Problem:
    """One planning problem. Times are in seconds; workers are given by index.

    Attributes:
        forward, backward, weight: times per stage of F, of I (or of the whole B), and of W (0 without a split).
        update_seconds: times per stage of reduce and optimizer step.
        links: transfer times, ascending, over all pairs of live workers that may send to each other.
        speed: factor on each worker's compute times.
        cap: maximum activations of each worker, in chunks; infinite without a limit.
        stash: share of an activation that is held between I and W.
        split: the backward pass is split into I and W.
        staggered: each stage runs its optimizer step on its own; False for the barrier.
        reroute: a micro-batch may run on a peer of its home.
        reduce: times per stage of the reduce of a bucket.
        buckets: number per stage. `update_seconds` includes only the last bucket's reduce, which no W can hide.
        hops: transfer time of each lane, indexed by `lane_between`; empty if links of peers are alike.
    """

    shape: Shape
    dead: frozenset[Worker]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    update_seconds: tuple[float, ...]
    links: tuple[float, ...]
    speed: tuple[float, ...]
    cap: tuple[float, ...]
    stash: float
    split: bool
    staggered: bool
    reroute: bool = True
    reduce: tuple[float, ...] = ()
    buckets: int = 1
    hops: tuple[float, ...] = ()

    @classmethod
    def from_job(cls, job: PricedJob, dead: Iterable[Worker] = (), profile: Profile | None = None) -> Problem:
        """Create the problem of `job` without the workers in `dead`.

        Raises:
            PlanError: the problem is too large, a stage has no live worker, workers are dead and re-routing is off, a
                cap is too small for one micro-batch, an F or I takes no time, or a time is out of range.
            JobError: the profile does not fit the shape.
        """
        shape, planner, stages = job.shape, job.planner, job.shape.stages
        profile = profile or job.prices
        dead = frozenset(dead)
        _require_size(shape, planner.decoupled)
        require_hosts(shape, failure_vector(shape, dead))
        if dead and not planner.reroute:
            raise PlanError(
                f"[planner] reroute: is false, so no peer may run the micro-batches of {min(dead)} when it is dead;"
                f" set reroute = true"
            )
        profile.require(shape)
        limits = job.limits or [float("inf")] * shape.ranks
        for rank, limit in enumerate(limits):
            if limit < shape.chunks:
                raise PlanError(
                    f"[memory] limit: stage {rank} has memory for {max(0.0, limit):g} activations besides its"
                    f" static bytes, and one micro-batch needs {shape.chunks}; raise the limit"
                )
        speed = tuple(profile.speed_of(worker) for worker in shape.workers())
        links = link_times(shape, dead, profile)
        _require_times(profile, stages, speed, links, "profile:" if job.times.profile else "[times]")
        whole = np.array(profile.per_stage("backward_input", stages))
        weight = np.array(profile.per_stage("backward_weight", stages))
        if not planner.decoupled:
            whole, weight = whole + weight, np.zeros(stages)
        step, gather = (profile.per_stage(name, stages) for name in ("step", "gather"))
        if not job.train.sharded_optimizer:
            gather = [0.0] * stages
        buckets = job.train.reduce_buckets
        reduce = profile.bucket_seconds(buckets, stages)
        return cls(
            shape=shape,
            dead=dead,
            forward=tuple(profile.per_stage("forward", stages)),
            backward=tuple(whole.tolist()),
            weight=tuple(weight.tolist()),
            update_seconds=tuple(a + b + c for a, b, c in zip(reduce, step, gather, strict=True)),
            links=links,
            speed=speed,
            cap=tuple(limits[worker.rank] for worker in shape.workers()),
            stash=profile.weight_stash if planner.decoupled else 1.0,
            split=planner.decoupled,
            staggered=planner.staggered,
            reroute=planner.reroute,
            reduce=tuple(reduce),
            buckets=buckets,
            hops=hops_between(shape, dead, profile),
        )

    @cached_property
    def needs(self) -> Operations:
        """Dependency of each operation on another stage, or -1: `ir.dependencies` by number."""
        return self._needs(across=True)

    @cached_property
    def needs_here(self) -> Operations:
        """Dependency of each operation on its own stage, or -1."""
        return self._needs(across=False)

    @cached_property
    def feeds(self) -> Operations:
        """Operation of another stage that depends on each operation, or -1."""
        feeds = np.full(self.size, -1, dtype=np.int64)
        waiting = np.flatnonzero(self.needs >= 0)
        feeds[self.needs[waiting]] = waiting
        return feeds

    @cached_property
    def rank_of(self) -> Operations:
        """Rank that hosts each stage."""
        return np.array([self.shape.rank_of(s) for s in range(self.shape.stages)], dtype=np.int64)

    @cached_property
    def stage_of(self) -> Operations:
        return np.repeat(np.arange(self.shape.stages), self.micro_batches)

    @cached_property
    def wakes(self) -> Operations:
        """Dependent F or backward of each operation, or -1; after the last stage's F, the micro-batch's backward."""
        wakes, plane = self.feeds.copy(), self.shape.stages * self.micro_batches
        at_the_end = plane + np.flatnonzero(self.needs[plane : 2 * plane] < 0)
        wakes[self.needs_here[at_the_end]] = at_the_end
        return wakes

    def _needs(self, across: bool) -> Operations:
        stages, n = self.shape.stages, self.micro_batches
        codes = _SPLIT if self.split else _WHOLE
        makers = {value: code for code, cls in reversed([*enumerate(codes)]) for value in cls.row.produces}
        needs = np.full((len(codes), stages, n), -1, dtype=np.int64)
        for row, cls in enumerate(codes):
            wanted = [(makers[need.value], need.offset) for need in cls.row.needs if (need.offset != 0) == across]
            for stage in range(stages):
                inside = [(code, stage + offset) for code, offset in wanted if 0 <= stage + offset < stages]
                if inside:
                    needs[row, stage] = (inside[0][0] * stages + inside[0][1]) * n + np.arange(n)
        return needs.ravel()

    @property
    def link(self) -> float:
        """Time of the slowest transfer, which searches use for all transfers."""
        return self.links[-1]

    @property
    def lanes(self) -> int:
        """Size of the range of lane numbers; 0 if transfers never queue."""
        return 3 * self.shape.worker_count * self.shape.pipelines if self.may_queue else 0

    def hop_between(self, sender: int, receiver: int) -> float:
        """Return the transfer time between two workers, by index; 0 for a single worker."""
        if sender == receiver:
            return 0.0
        lane = lane_between(sender, receiver, self.shape.worker_count, self.shape.ranks)
        return self.hops[lane] if self.hops else self.link

    @cached_property
    def may_queue(self) -> bool:
        """Whether a transfer may find its lane busy with that worker's previous transfer."""
        shortest = min(*self.forward, *self.backward) * min(self.speed)
        return self.link > shortest + TOLERANCE

    @property
    def optimizer(self) -> Optimizer:
        return "staggered" if self.staggered else "barrier"

    @property
    def kinds(self) -> int:
        return 3 if self.split else 2

    @property
    def micro_batches(self) -> int:
        return self.shape.global_micro_batches

    @property
    def size(self) -> int:
        return self.kinds * self.shape.stages * self.micro_batches

    @cached_property
    def hosts(self) -> list[list[int]]:
        """Live workers of each stage, by worker index."""
        live = [worker not in self.dead for worker in self.shape.workers()]
        workers, ranks = range(self.shape.worker_count), self.shape.ranks
        return [[w for w in workers[rank::ranks] if live[w]] for rank in self.rank_of.tolist()]

    @cached_property
    def fastest(self) -> list[float]:
        """Speed factor of the fastest live worker of each stage."""
        return [min(self.speed[w] for w in hosts) for hosts in self.hosts]

    @cached_property
    def kinds_of_host(self) -> list[dict[int, int]]:
        """Per stage: one live worker of each speed and memory, and the number of workers like it."""
        kinds = []
        for hosts in self.hosts:
            alike: dict[tuple[float, float], list[int]] = {}
            for w in hosts:
                alike.setdefault((self.speed[w], self.cap[w]), []).append(w)
            kinds.append({workers[0]: len(workers) for workers in alike.values()})
        return kinds

    @cached_property
    def remaining_path(self) -> tuple[list[float], list[float]]:
        """(F, backward) times of a micro-batch from each stage to the last, on the fastest hosts; then 0."""
        sums_to_end: tuple[list[float], list[float]] = ([0.0], [0.0])
        for s in range(self.shape.stages - 1, -1, -1):
            for sums, times in zip(sums_to_end, (self.forward, self.backward), strict=True):
                sums.append(sums[-1] + times[s] * self.fastest[s])
        return sums_to_end[0][::-1], sums_to_end[1][::-1]

    @cached_property
    def return_path(self) -> list[float]:
        """Per stage: least time from the end of an F until its backward can start, through all later stages."""
        out, back = self.remaining_path
        stages = self.shape.stages
        return [out[s + 1] + back[s + 1] + 2 * self.remaining_hops[s] for s in range(stages)]

    @cached_property
    def hop_after(self) -> list[float]:
        """Per stage: time of the fastest transfer to the next stage; 0 on the same rank, and for the last stage."""
        ranks = self.rank_of.tolist()
        return [self.links[0] if here != there else 0.0 for here, there in pairwise([*ranks, ranks[-1]])]

    @cached_property
    def remaining_hops(self) -> list[float]:
        """Per stage: time of the fastest transfers from it to the last stage."""
        return list(accumulate(self.hop_after[::-1]))[::-1]

    @cached_property
    def peers_are_alike(self) -> bool:
        """Whether all live workers of a stage have the same speed, memory and links."""
        return not self.hops and all(len(kinds) == 1 for kinds in self.kinds_of_host)

    @cached_property
    def times(self) -> npt.NDArray[np.float64]:
        """Times of F, I (or B) and W of every stage, at speed 1."""
        return np.array([*self.forward, *self.backward, *self.weight], dtype=np.float64)

    @cached_property
    def seconds(self) -> list[float]:
        """Per stage: F, backward and W of a micro-batch at speed 1."""
        return [sum(times) for times in zip(self.forward, self.backward, self.weight, strict=True)]

    @cached_property
    def rank_update_seconds(self) -> tuple[float, ...]:
        """Per rank: reduce and step of all its stages, which its workers run in sequence at the end."""
        stages = map(self.shape.stages_of_rank, range(self.shape.ranks))
        return tuple(sum(self.update_seconds[s] for s in hosted) for hosted in stages)

    @cached_property
    def arrays(self) -> ProblemArrays:
        """The problem as input of the compiled loops."""
        return ProblemArrays(
            stages=self.shape.stages,
            micro_batches=self.micro_batches,
            ranks=self.shape.ranks,
            split=self.split,
            staggered=self.staggered,
            times=self.times,
            rank_of=self.rank_of,
            update_seconds=np.array(self.rank_update_seconds, dtype=np.float64),
            link=float(self.link),
            hops=np.array(self.hops, dtype=np.float64),
            speed=np.array(self.speed, dtype=np.float64),
            cap=np.array(self.cap, dtype=np.float64),
            stash=float(self.stash),
            needs=self.needs,
            feeds=self.feeds,
            wakes=self.wakes,
        )

    @cached_property
    def is_exact(self) -> bool:
        """Whether the timing of an order is exact.

        Timing takes unlike links for the slowest, and assumes that all reduces but the last bucket's are hidden. With
        the barrier it adds each rank's step to its own reduce, whereas `simulate` lets all steps wait for the last
        reduce.
        """
        steps_are_alike = self.staggered or len(set(self.rank_update_seconds)) == 1
        return len(self.links) == 1 and self.buckets == 1 and steps_are_alike

    @cached_property
    def grain(self) -> float:
        """Largest unit in which all times, and so every makespan, are whole; 0 if there is none."""
        times = [t * speed for t in self.times.tolist() for speed in set(self.speed)]
        times += [*self.update_seconds, *self.links]
        if self.buckets > 1:
            times += [t / self.buckets * speed for t in self.weight for speed in set(self.speed)]
            times += self.reduce
        for factor in _FACTORS:
            if all(abs(t * factor - round(t * factor)) < TOLERANCE for t in times):
                return (gcd(*(round(t * factor) for t in times)) or 1) / factor
        return 0.0

    @cached_property
    def bound_unit(self) -> float:
        """Unit of time in which bounds are computed: the grain; without one, a power of ten near a typical time."""
        return self.grain or 10.0 ** round(log10(self.unit))

    def in_bound_units(self) -> Problem:
        """Return the same problem with times in units of `bound_unit`."""

        names = ("forward", "backward", "weight", "update_seconds", "reduce", "links", "hops")
        counted: dict[str, Any] = {name: tuple(t / self.bound_unit for t in getattr(self, name)) for name in names}
        return replace(self, **counted)

    @property
    def is_integral(self) -> bool:
        """Whether every time is a whole number."""
        return self.grain >= 1 and self.grain == round(self.grain)

    @cached_property
    def is_even(self) -> bool:
        """Whether F, I and W take equally long on every stage, and links take no time."""
        return self.link == 0 and len({*self.forward, *self.backward, *(self.weight if self.split else ())}) == 1

    @cached_property
    def unit(self) -> float:
        """Typical operation time, the scale of small differences."""
        times = [t for t in (*self.forward, *self.backward, *self.weight) if t > 0]
        return sum(times) / len(times) if times else 1.0

    def is_within_caps(self, order: Order) -> bool:
        """Return whether no worker ever exceeds its cap of activations."""
        plane = self.shape.stages * self.micro_batches
        freed = (-1.0, 1 - self.stash, self.stash) if self.split else (-1.0, 1.0, 0.0)
        for program, cap in zip(order, self.cap, strict=True):
            held = 0.0
            for operation in program:
                held -= freed[operation // plane]
                if held > cap + 1e-9:
                    return False
        return True

    def operations_in(self, schedule: Schedule) -> tuple[Operations, Operations, Operations]:
        """Return (operation, row, worker) of each F, B, I and W of a schedule, by row."""
        pieces, stages, n = operations_of(schedule), self.shape.stages, self.micro_batches
        operations, pieces_of = [], []
        for kind, codes in _OPERATIONS_OF_KIND.items():
            chosen = np.flatnonzero(pieces.kind == kind)
            for code in codes[: self.kinds - codes[0]]:
                operations.append((code * stages + pieces.stage[chosen]) * n + pieces.micro_batch[chosen])
                pieces_of.append(chosen)
        operation, piece = np.concatenate(operations), np.concatenate(pieces_of)
        line = np.lexsort((operation, pieces.row[piece]))
        return operation[line], pieces.row[piece[line]], pieces.worker[piece[line]]

    def schedule(self, order: Order) -> Schedule:
        """Convert `order` into a compute-only schedule."""
        stages, m = self.shape.stages, self.shape.micro_batches
        operations, offsets = flatten(order)
        place, micro_batch = np.divmod(operations, self.micro_batches)
        kind, stage = np.divmod(place, stages)
        columns = Columns.from_arrays(
            offsets,
            kind=np.array([cls.kind for cls in (_SPLIT if self.split else _WHOLE)])[kind],
            stage=stage,
            pipeline=micro_batch // m,
            index=micro_batch % m,
        )
        return Schedule(self.shape, columns, placement_of(self.shape), self.dead, self.optimizer)


def _require_size(shape: Shape, split: bool) -> None:
    operations = (3 if split else 2) * shape.stages * shape.global_micro_batches
    if operations > MOST_INSTRUCTIONS:
        raise PlanError(
            f"[shape]: {shape} has {operations:,} operations, more than the {MOST_INSTRUCTIONS:,} that can be planned;"
            f" a first plan would need about {operations / 1e6:,.0f} GB of memory and {operations / 6e6:,.0f} minutes"
        )


def _require_times(
    profile: Profile, stages: int, speed: tuple[float, ...], links: tuple[float, ...], where: str
) -> None:
    for key in ("forward", "backward_input", "backward_weight", "reduce", "step"):
        must_last = key in ("forward", "backward_input")
        for stage, seconds in enumerate(profile.per_stage(key, stages)):
            if must_last and seconds <= 0:
                raise PlanError(f"{where} {key}: stage {stage} takes {seconds:g}; a plan needs a time above 0")
            if seconds * max(speed) > LONGEST or (must_last and seconds * min(speed) < SHORTEST):
                raise PlanError(
                    f"{where} {key}: stage {stage} takes {seconds:g}, on one of its workers less than {SHORTEST:g} or"
                    f" more than {LONGEST:g}; state all times in another unit, or price a larger job"
                )
    if links[-1] > LONGEST:
        raise PlanError(f"{where} link: a transfer takes {links[-1]:g}, more than {LONGEST:g}; check the bandwidths")
