"""Which pipelines a number of nodes is made into: the multiset of templates with the shortest iteration; their batch.

Oobleck enumerates every multiset of templates whose sizes add up to n, f + 1 pipelines at least, and takes the one
with the least max over i of w_i b_i plus what is seen of the all-reduce over the pipelines (to Oobleck, that of the
first layer: the others' run beside the backward; here all of it, as the iterations that are simulated do not overlap
them). That is done as long as there are few multisets. Beyond `ENUMERATED` dynamic programming finds, for each number
of pipelines, the one with most micro-batches per second, sum of 1 / w_i, and the best of these is taken.

A template's micro-batch costs w_i = T_i / N_b of it. The batch is divided so that the largest w_i b_i with sum b_i = B
is as small as can be, as later versions do; the paper's artifact minimises the variance. Pipelines of one template get
the same number from Oobleck, which not every B allows.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

ENUMERATED = 5_000
"""Multisets up to which all are tried."""


def instantiate(
    weights: Mapping[int, float],
    nodes: int,
    least: int,
    micro_batches: int,
    sync: Callable[[list[int]], float],
) -> list[int] | None:
    """Nodes of each pipeline, most first; None where no multiset adds up to `nodes`.

    Args:
        weights: nodes of a template -> seconds of a micro-batch.
        least: pipelines at least, f + 1.
        micro_batches: of the batch; pipelines at most.
        sync: seconds of the all-reduce over pipelines of so many nodes.
    """
    sizes = sorted(weights)
    if _count(sizes, nodes) > ENUMERATED:
        return _most_per_second(weights, nodes, least, micro_batches, sync)
    best: tuple[float, list[int]] | None = None
    for chosen in _multisets(sizes, nodes):
        if least <= len(chosen) <= micro_batches:
            each = [weights[size] for size in chosen]
            shares = distribute(each, micro_batches)
            seconds = max(w * b for w, b in zip(each, shares, strict=True)) + sync(chosen)
            if best is None or seconds < best[0]:
                best = seconds, chosen
    return None if best is None else best[1]


def _count(sizes: list[int], nodes: int) -> int:
    """How many multisets of sizes add up to `nodes`."""
    ways = Counter({0: 1})
    for size in sizes:
        for total in range(size, nodes + 1):
            ways[total] += ways[total - size]
    return ways[nodes]


def _multisets(sizes: list[int], nodes: int) -> Iterator[list[int]]:
    """Every multiset of sizes that adds up to `nodes`, largest first in each."""
    if not nodes:
        yield []
    for place in range(len(sizes) - 1, -1, -1):
        if sizes[place] <= nodes:
            for others in _multisets(sizes[: place + 1], nodes - sizes[place]):
                yield [sizes[place], *others]


def _most_per_second(
    weights: Mapping[int, float], nodes: int, least: int, most: int, sync: Callable[[list[int]], float]
) -> list[int] | None:
    """Of the multisets with the largest sum of 1 / w_i, one per number of pipelines from `least` to `most`, that with
    the shortest iteration of `most` micro-batches."""
    sizes = sorted(weights)
    rates = [np.full(nodes + 1, -np.inf)]
    rates[0][0] = 0.0
    chosen = [np.zeros(nodes + 1, dtype=np.int64)]
    for _ in range(min(most, nodes // sizes[0])):
        rate, last = np.full(nodes + 1, -np.inf), np.zeros(nodes + 1, dtype=np.int64)
        for size in sizes:
            made = rates[-1][: max(0, nodes + 1 - size)] + 1 / weights[size]
            better = made > rate[size:]
            rate[size:][better] = made[better]
            last[size:][better] = size
        rates.append(rate)
        chosen.append(last)
    best: tuple[float, list[int]] | None = None
    for count in range(least, len(rates)):
        if rates[count][nodes] == -np.inf:
            continue
        found, total = [], nodes
        for last in reversed(chosen[1 : count + 1]):
            found.append(int(last[total]))
            total -= found[-1]
        found.sort(reverse=True)
        seconds = most / float(rates[count][nodes]) + sync(found)
        if best is None or seconds < best[0]:
            best = seconds, found
    return None if best is None else best[1]


def distribute(weights: Sequence[float], micro_batches: int) -> list[int]:
    """Micro-batches of each pipeline, at least one, with the least largest w_i b_i: those of one template may differ by
    one.

    Args:
        weights: seconds of one micro-batch in each pipeline.

    Raises:
        ValueError: there are fewer micro-batches than pipelines.
    """
    if micro_batches < len(weights):
        raise ValueError(f"{micro_batches} micro-batch(es) for {len(weights)} pipelines")
    shares = [1] * len(weights)
    heap = [(2 * weight, place) for place, weight in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(micro_batches - len(weights)):
        place = heap[0][1]
        shares[place] += 1
        heapq.heapreplace(heap, ((shares[place] + 1) * weights[place], place))
    return shares
