"""Which workers share a node, and so its failures: the one mapping that agents, simulator and planner go by.

Workers are placed pipeline by pipeline in blocks that are as even as can be, so that a pipeline's neighbours share
a node where they may. There are never fewer than two nodes: with two pipelines or more, no block then holds all peers
of a stage. (An even block of n >= 2 holds at most ceil(D P / 2) consecutive workers, and the D peers of a stage span
(D - 1) P + 1 of them, which is more for every D >= 2.) So the death of one node leaves every stage a live host.
"""

from __future__ import annotations

from itertools import pairwise

from recycle.errors import JobError
from recycle.shape import Shape, Worker


def place_workers(shape: Shape, workers_per_node: int) -> tuple[tuple[Worker, ...], ...]:
    """The workers of each node; as few nodes as hold them, but at least two.

    Raises:
        JobError: there is no such placement, because a stage has no second host.
    """
    if shape.pipelines < 2:
        raise JobError(
            "[shape] pipelines: with a single pipeline a stage has no peer, so no placement on nodes survives the loss"
            " of one; take 2 pipelines or more"
        )
    workers = sorted(shape.workers())
    count = max(2, -(-len(workers) // workers_per_node))
    bounds = [len(workers) * node // count for node in range(count + 1)]
    return tuple(tuple(workers[start:end]) for start, end in pairwise(bounds))


def node_of(shape: Shape, workers_per_node: int) -> dict[Worker, int]:
    """The node of each worker. Raises JobError as `place_workers` does."""
    return {w: node for node, workers in enumerate(place_workers(shape, workers_per_node)) for w in workers}
