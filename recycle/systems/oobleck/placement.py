"""What becomes of nodes at a change: the pipelines that they are in, where each of them sits, and what is copied.

Of the nodes that a failure leaves Oobleck makes smaller templates, with nodes borrowed, or merged pipelines. (1) A
pipeline that still has n0 nodes takes the template of as many as it has. (2) Else it borrows nodes of pipelines that
have more than n0. (3) Else it is merged with another. Of a burst the fullest of the damaged is seen to first.

A node's place in a pipeline is a range of layers; what it holds of an earlier configuration is one too. Nodes sit so
that few layers have to be copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

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
