"""Oobleck's pipelines: what a change makes of them, where nodes sit, what is copied, and their iteration as a schedule.

Of the nodes that a failure leaves Oobleck makes smaller templates, with nodes borrowed, or merged pipelines. (1) A
pipeline that still has n0 nodes takes the template of as many as it has. (2) Else it borrows nodes of pipelines that
have more than n0. (3) Else it is merged with another. Of a burst the fullest of the damaged is seen to first.

A node's place in a pipeline is a range of layers; what it holds of an earlier configuration is one too. Nodes sit so
that few layers have to be copied.

The iteration is a schedule: pipelines of different depth in one shape, each 1F1B.

The IR needs nothing new for it. A stage of the schedule is what lies between two neighbouring cuts of any pipeline; a
worker of a shallow pipeline hosts several of them in a row, and runs their forwards, or backwards, one behind the
other. So a micro-batch goes through its own pipeline's stages as it should: only their ends are sent, and the time is
the same. And the sync is right by itself: every layer is in one stage of the schedule, whose gradients are summed over
all its hosts, however the pipelines are cut.

The shape has as many ranks as the deepest pipeline, where its P * V stages allow that (further cuts are made until
they do), else one rank per stage. Positions that shallower pipelines leave empty count as failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Instruction
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker
from recycle.systems.joint_iteration import expanded, hosted, joint_schedule, micro_batches_of, shape_for
from recycle.systems.setting import LayerRange, Split, ranges

PipelineNodes = tuple[int, ...]
"""Nodes of one pipeline."""
_EVENTS = ("shrink", "borrow", "merge")


def reconfigure(
    pipelines: Sequence[PipelineNodes], dead: Collection[int], sizes: Collection[int]
) -> tuple[list[PipelineNodes], str] | None:
    """The pipelines without the dead nodes, and the last of "shrink", "borrow", "merge" that it took.

    None where their templates do not lead there (a merged pipeline would be too large for any), so that all nodes have
    to be put into pipelines again.

    Args:
        pipelines: as they were.
        sizes: nodes of each template; the least is n0.
    """
    event = "shrink"
    least = min(sizes)
    left = [[node for node in members if node not in dead] for members in pipelines]
    damaged = [place for place, members in enumerate(left) if len(members) not in sizes and members]
    for place in sorted(damaged, key=lambda place: -len(left[place])):
        mine = left[place]
        while len(mine) < least and (giver := _giver(left, place, sizes)) is not None:
            mine.append(left[giver].pop())
            event = max(event, "borrow", key=_EVENTS.index)
        if len(mine) not in sizes:
            other = _partner(left, place, sizes)
            if other is None:
                return None
            left[other] += mine
            left[place] = []
            event = "merge"
    made = [tuple(members) for members in left if members]
    return (made, event) if made and all(len(members) in sizes for members in made) else None


def _giver(left: Sequence[Sequence[int]], taker: int, sizes: Collection[int]) -> int | None:
    """The largest pipeline that can spare a node."""
    able = [p for p, members in enumerate(left) if p != taker and len(members) in sizes and len(members) - 1 in sizes]
    return max(able, key=lambda p: len(left[p]), default=None)


def _partner(left: Sequence[Sequence[int]], place: int, sizes: Collection[int]) -> int | None:
    """The smallest pipeline to merge with."""
    able = [p for p, members in enumerate(left) if p != place and members and len(members) + len(left[place]) in sizes]
    return min(able, key=lambda p: len(left[p]), default=None)


def places(split: Split, workers_per_node: int) -> list[LayerRange]:
    """The layers of each node of a pipeline."""
    ends = [0, *accumulate(split)]
    return list(pairwise(ends[::workers_per_node]))


def assign_nodes(
    wanted: Sequence[LayerRange], nodes: Sequence[int], held: Mapping[int, LayerRange], weights: Sequence[float]
) -> list[int]:
    """The node of each place, as many as there are places; the pair with most in common first.

    Args:
        wanted: layers of each place.
        nodes: to choose from; the first ones where they hold nothing that is wanted.
        held: node -> layers that it has.
        weights: of each layer.
    """
    ends = np.array([0.0, *accumulate(weights)])
    has = np.array([held.get(node, (0, 0)) for node in nodes], dtype=np.int64)
    want = np.array(wanted, dtype=np.int64)
    first, last = np.maximum.outer(want[:, 0], has[:, 0]), np.minimum.outer(want[:, 1], has[:, 1])
    common = np.where(last > first, ends[last] - ends[np.minimum(first, last)], 0.0).ravel()
    pairs = np.flatnonzero(common > 0)
    taken: dict[int, int] = {}
    free = dict.fromkeys(range(len(nodes)))
    for pair in pairs[np.argsort(-common[pairs], kind="stable")].tolist():
        place, node = divmod(pair, len(nodes))
        if place not in taken and node in free:
            taken[place] = node
            del free[node]
    rest = iter(free)
    return [nodes[taken[place] if place in taken else next(rest)] for place in range(len(wanted))]


def copied(
    splits: Sequence[Split],
    pipelines: Sequence[Sequence[int]],
    held: Mapping[int, LayerRange],
    state: Sequence[float],
    workers_per_node: int,
) -> tuple[float, float]:
    """Bytes that move between nodes: of the worker that sends or receives most, and in all.

    It is what the workers lack, sent by all that have it alike.

    Args:
        splits, pipelines: layers of each stage, and nodes, of each pipeline.
        held: node -> layers that it has; every layer is held by one at least, or none by anyone.
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
    """(layers of each of the schedule's stages, ranks).

    Args:
        splits: layers of each stage of each pipeline, which add up to the same.
    """
    layers, deepest = sum(splits[0]), max(map(len, splits))
    cuts = {cut for split in splits for cut in accumulate(split)}
    ranks = next((r for r in range(deepest, len(cuts) + 1) if -(-len(cuts) // r) * r <= layers), len(cuts))
    while len(cuts) % ranks:
        begin, end = max(pairwise([0, *sorted(cuts)]), key=lambda part: part[1] - part[0])
        cuts.add((begin + end) // 2)
    return tuple(b - a for a, b in pairwise([0, *sorted(cuts)])), ranks


def iteration(splits: Sequence[Split], shares: Sequence[int]) -> tuple[Schedule, Split]:
    """(one iteration without its transfers, with the barrier; layers of each of its stages).

    Args:
        splits: layers of each stage of each pipeline.
        shares: micro-batches that each pipeline runs.
    """
    common, ranks = common_cut(splits)
    shape = shape_for(len(splits), ranks, sum(shares), len(common) // ranks)
    programs: dict[Worker, Iterator[Instruction]] = {}
    placement: list[tuple[int, ...]] = [()] * shape.worker_count
    for k, (split, own) in enumerate(zip(splits, micro_batches_of(shape, shares), strict=True)):
        plain = one_f_one_b(Shape(1, len(split), len(own)))
        for rank, stages in enumerate(hosted(split, common)):
            worker = Worker(k, rank)
            placement[shape.worker_index(worker)] = stages
            programs[worker] = expanded(plain.program(Worker(0, rank)), stages, own)
    metadata = {"system": "oobleck", "splits": [list(split) for split in splits]}
    return joint_schedule(shape, programs, tuple(placement), common, **metadata), common
