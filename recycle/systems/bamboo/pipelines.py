"""Bamboo's pipelines: hosts of stages, placement of workers, and the iteration as a schedule.

Neighbors in a pipeline are on different nodes if possible, because the loss of two neighbors is fatal. Every worker
hosts its stage and a copy of the next, so both reduce and step on both workers.

The iteration is 1F1B in DeepSpeed's order. Forward m of stage s belongs to step 2 m + s, its backward to step 2 m + 2 S
- 1 - s. A worker with two stages merges both lists by step, backward first, as Bamboo does. Redundant forward m
directly precedes the worker's own backward m. The last stage has no redundant forward; its copy of stage 0 runs the
forward again when needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from recycle.ir.instruction import Backward, Compute, Forward, Instruction, RedundantForward
from recycle.ir.schedule import Schedule
from recycle.job.shape import MicroBatch, Worker
from recycle.systems.joint_iteration import assign_micro_batches, joint_schedule, smallest_shape

StageRanks = tuple[int, ...]
"""Rank that runs each stage of a pipeline: its own, or the one before."""


def healthy_hosts(stages: int) -> StageRanks:
    """Return hosts with every stage on its own rank."""
    return tuple(range(stages))


def hosts_after_loss(hosts: StageRanks, rank: int) -> StageRanks | None:
    """Return the hosts after the worker of a rank has died; None if that is fatal.

    The rank before must be alive and run only its own stage.
    """
    stages = len(hosts)
    before = (rank - 1) % stages
    runs = [stage for stage, host in enumerate(hosts) if host == rank]
    if stages == 1 or runs != [rank] or hosts[before] != before:
        return None
    return tuple(before if stage == rank else host for stage, host in enumerate(hosts))


def copies(rank: int, stages: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((rank, (rank + 1) % stages)))


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: the slot of each rank's worker, including dead ones, and the rank that runs each stage."""

    slots: tuple[int, ...]
    hosts: StageRanks

    @property
    def live(self) -> list[int]:
        return [self.slots[rank] for rank in sorted(set(self.hosts))]

    @property
    def overloaded(self) -> int:
        return len(self.hosts) - len(set(self.hosts))

    def without(self, dead: Collection[int]) -> Pipeline | None:
        """Return the pipeline after the simultaneous death of these slots; None if that is fatal."""
        hosts: StageRanks | None = self.hosts
        for rank in sorted(set(self.hosts)):
            if hosts is not None and self.slots[rank] in dead:
                hosts = hosts_after_loss(hosts, rank)
        return None if hosts is None else Pipeline(self.slots, hosts)

    def holds(self) -> dict[int, set[int]]:
        """Return the stages whose state each live slot has: its own and the next."""
        return {self.slots[rank]: set(copies(rank, len(self.hosts))) for rank in sorted(set(self.hosts))}


def arrange(
    slots: Iterable[int], node_of: Sequence[int], depth: int, pipelines: int, before: Iterable[Pipeline] = ()
) -> list[Pipeline]:
    """Return healthy pipelines of these slots, in which workers keep their rank of `before` if needed."""
    free = dict.fromkeys(_node_by_node(slots, node_of))
    chosen: list[list[int | None]] = [[None] * depth for _ in range(pipelines)]
    old = [pipeline for pipeline in before if len(pipeline.hosts) == depth]
    old.sort(key=lambda pipeline: pipeline.overloaded)
    for row, pipeline in zip(chosen, old, strict=False):
        for rank, slot in enumerate(pipeline.slots):
            if slot in free and pipeline.hosts[rank] == rank:
                row[rank] = slot
                del free[slot]
    home = {pipeline.slots[rank]: rank for pipeline in old for rank in set(pipeline.hosts)}
    for row in chosen:
        for rank in range(depth):
            if row[rank] is None:
                neighbors = row[rank - 1], row[(rank + 1) % depth]
                nodes = {node_of[slot] for slot in neighbors if slot is not None}
                row[rank] = best = min(free, key=lambda slot: (node_of[slot] in nodes, home.get(slot) != rank))
                del free[best]
    return [Pipeline(tuple(s for s in row if s is not None), healthy_hosts(depth)) for row in chosen]


def _node_by_node(slots: Iterable[int], node_of: Sequence[int]) -> list[int]:
    on_node: Counter[int] = Counter()
    turn: dict[int, int] = {}
    for slot in sorted(slots):
        turn[slot] = on_node[node_of[slot]]
        on_node[node_of[slot]] += 1
    return sorted(turn, key=turn.__getitem__)


def iteration_schedule(pipelines: Sequence[StageRanks], shares: Sequence[int]) -> Schedule:
    """Return one iteration with the barrier, without transfers, of pipelines with these hosts and shares."""
    stages = len(pipelines[0])
    shape = smallest_shape(len(pipelines), stages, sum(shares))
    programs = {
        Worker(k, rank): _program(hosts, rank, own)
        for k, (hosts, own) in enumerate(zip(pipelines, assign_micro_batches(shape, shares), strict=True))
        for rank in sorted(set(hosts))
    }
    placement = tuple(copies(worker.rank, stages) for worker in shape.workers())
    return joint_schedule(shape, programs, placement, [1.0] * stages, system="bamboo")


def _program(hosts: StageRanks, rank: int, micro_batches: Sequence[MicroBatch]) -> list[Instruction]:
    stages = len(hosts)
    steps: list[tuple[int, bool, Compute]] = []
    for stage in (stage for stage, host in enumerate(hosts) if host == rank):
        for m, micro_batch in enumerate(micro_batches):
            steps.append((2 * m + stage, True, Forward(stage, micro_batch)))
            steps.append((2 * m + 2 * stages - 1 - stage, False, Backward(stage, micro_batch)))
    steps.sort(key=lambda step: step[:2])
    doubles = rank < stages - 1 and hosts[rank + 1] == rank + 1
    program: list[Instruction] = []
    for _, is_forward, work in steps:
        if doubles and not is_forward:
            program.append(RedundantForward(rank + 1, work.micro_batch))
        program.append(work)
    return program
