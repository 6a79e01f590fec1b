"""Oobleck's pipelines: reconfiguration after a change, placement of nodes, copies, and the iteration as a schedule.

(1) A damaged pipeline with at least n0 nodes takes the template for its number of nodes. (2) Otherwise it borrows nodes
of pipelines with more than n0. (3) Otherwise it is merged with another pipeline, the fullest damaged one first.

The iteration is one schedule of 1F1B pipelines with different depths. A stage of the schedule lies between neighboring
cuts of any pipeline. The shape has as many ranks as the deepest pipeline if its P * V stages allow that, else one rank
per stage. Positions that shallower pipelines leave empty count as failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Instruction
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker
from recycle.systems.joint_iteration import (
    assign_micro_batches,
    expand_program,
    hosted_stages,
    joint_schedule,
    smallest_shape,
)
from recycle.systems.scenario import LayerRange, Split, ranges

PipelineNodes = tuple[int, ...]
"""Nodes of one pipeline."""
_EVENTS = ("shrink", "borrow", "merge")


def reconfigure(
    pipelines: Sequence[PipelineNodes], dead: Collection[int], sizes: Collection[int]
) -> tuple[list[PipelineNodes], str] | None:
    """Return the pipelines without the dead nodes, and the last action of "shrink", "borrow", "merge".

    None if a merged pipeline would be too large; all pipelines are then instantiated again. `sizes` are the nodes of
    the templates; the least is n0.
    """
    event = "shrink"
    least = min(sizes)
    remaining = [[node for node in members if node not in dead] for members in pipelines]
    damaged = [place for place, members in enumerate(remaining) if len(members) not in sizes and members]
    for place in sorted(damaged, key=lambda place: -len(remaining[place])):
        members, others = remaining[place], remaining[:place] + remaining[place + 1 :]
        while len(members) < least and (
            givers := [other for other in others if len(other) in sizes and len(other) - 1 in sizes]
        ):
            members.append(max(givers, key=len).pop())
            event = max(event, "borrow", key=_EVENTS.index)
        if len(members) not in sizes:
            partners = [other for other in others if other and len(other) + len(members) in sizes]
            if not partners:
                return None
            min(partners, key=len).extend(members)
            members.clear()
            event = "merge"
    result = [tuple(members) for members in remaining if members]
    return (result, event) if result and all(len(members) in sizes for members in result) else None


def layers_per_node(split: Split, workers_per_node: int) -> list[LayerRange]:
    ends = [0, *accumulate(split)]
    return list(pairwise(ends[::workers_per_node]))


def assign_nodes(
    wanted: Sequence[LayerRange], nodes: Sequence[int], held: Mapping[int, LayerRange], weights: Sequence[float]
) -> list[int]:
    """Return the node of each place, given the layers that places want and nodes hold, and their weights.

    Pairs with most common layers are matched first.
    """
    ends = np.array([0.0, *accumulate(weights)])
    held_ranges = np.array([held.get(node, (0, 0)) for node in nodes], dtype=np.int64)
    wanted_ranges = np.array(wanted, dtype=np.int64)
    first, last = (
        np.maximum.outer(wanted_ranges[:, 0], held_ranges[:, 0]),
        np.minimum.outer(wanted_ranges[:, 1], held_ranges[:, 1]),
    )
    common = np.where(last > first, ends[last] - ends[np.minimum(first, last)], 0.0).ravel()
    pairs = np.flatnonzero(common > 0)
    taken: dict[int, int] = {}
    free = dict.fromkeys(range(len(nodes)))
    for pair in pairs[np.argsort(-common[pairs], kind="stable")].tolist():
        place, node = divmod(pair, len(nodes))
        if place not in taken and node in free:
            taken[place] = node
            del free[node]
    free_nodes = iter(free)
    return [nodes[taken[place] if place in taken else next(free_nodes)] for place in range(len(wanted))]


def copy_bytes(
    splits: Sequence[Split],
    pipelines: Sequence[Sequence[int]],
    held: Mapping[int, LayerRange],
    state: Sequence[float],
    workers_per_node: int,
) -> tuple[float, float]:
    """Return bytes copied between nodes: of the busiest worker, and in all.

    Workers receive the layers that they lack, in equal parts from all holders.

    Args:
        splits, pipelines: layers of each stage, and nodes, of each pipeline.
        held: node -> layers that it holds; every layer has at least one holder, or none has any.
        state: bytes of each layer.
    """
    lacking, holders = np.zeros(len(state)), np.zeros(len(state))
    for first, last in held.values():
        holders[first:last] += 1
    most = total = 0.0
    for split, members in zip(splits, pipelines, strict=True):
        for stage, (first, last) in enumerate(ranges(split)):
            begin, end = held.get(members[stage // workers_per_node], (0, 0))
            missing = [layer for layer in range(first, last) if not begin <= layer < end]
            lacking[missing] += 1
            received = sum(state[layer] for layer in missing)
            most, total = max(most, received), total + received
    sent = np.array([0.0, *np.cumsum(np.array(state) * lacking / np.maximum(holders, 1.0))])
    senders = [float(sent[last] - sent[first]) / workers_per_node for first, last in held.values()]
    return max([most, *senders]), total


def common_cut(splits: Sequence[Split]) -> tuple[Split, int]:
    """Return (layers of each of the schedule's stages, ranks), given the layers of each pipeline's stages."""
    layers, deepest = sum(splits[0]), max(map(len, splits))
    cuts = {cut for split in splits for cut in accumulate(split)}
    ranks = next((r for r in range(deepest, len(cuts) + 1) if -(-len(cuts) // r) * r <= layers), len(cuts))
    while len(cuts) % ranks:
        begin, end = max(pairwise([0, *sorted(cuts)]), key=lambda part: part[1] - part[0])
        cuts.add((begin + end) // 2)
    return tuple(b - a for a, b in pairwise([0, *sorted(cuts)])), ranks


def iteration_schedule(splits: Sequence[Split], shares: Sequence[int]) -> tuple[Schedule, Split]:
    """Return (one iteration with the barrier and without transfers, layers of each of its stages)."""
    common, ranks = common_cut(splits)
    shape = smallest_shape(len(splits), ranks, sum(shares), len(common) // ranks)
    programs: dict[Worker, Iterator[Instruction]] = {}
    placement: list[tuple[int, ...]] = [()] * shape.worker_count
    for k, (split, own) in enumerate(zip(splits, assign_micro_batches(shape, shares), strict=True)):
        plain = one_f_one_b(Shape(1, len(split), len(own)))
        for rank, stages in enumerate(hosted_stages(split, common)):
            worker = Worker(k, rank)
            placement[shape.worker_index(worker)] = stages
            programs[worker] = expand_program(plain.program(Worker(0, rank)), stages, own)
    metadata = {"system": "oobleck", "splits": [list(split) for split in splits]}
    return joint_schedule(shape, programs, tuple(placement), common, **metadata), common
