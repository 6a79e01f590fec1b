"""How a batch is divided over pipelines of different speed, in whole micro-batches.

A template's micro-batch costs w_i = T_i / N_b of it. Both of Oobleck's rules balance w_i b_i over the pipelines with
sum b_i = B: the paper's artifact minimises the variance, later versions the largest one. Pipelines of one template may
differ by a micro-batch here; Oobleck gives all of them the same number, which not every B allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import permutations
from typing import Literal

Rule = Literal["longest", "variance"]


def distribute(weights: Sequence[float], micro_batches: int, rule: Rule = "longest") -> list[int]:
    """Micro-batches of each pipeline, at least one.

    Args:
        weights: seconds of one micro-batch in each pipeline.
        rule: what is least: "longest", the largest w_i b_i (exact), or "variance" of all w_i b_i (no move of a
            micro-batch from one pipeline to another makes it less).

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
    if rule == "variance":
        while _improve(weights, shares):
            pass
    return shares


def _improve(weights: Sequence[float], shares: list[int]) -> bool:
    """Move one micro-batch such that the variance falls most; False where no move makes it fall."""
    count, times = len(weights), [w * b for w, b in zip(weights, shares, strict=True)]
    total, squares = sum(times), sum(time * time for time in times)
    now = squares / count - (total / count) ** 2
    best, move = now * (1 - 1e-12), None
    first = {(weight, share): place for place, (weight, share) in enumerate(zip(weights, shares, strict=True))}
    for giver, taker in permutations(first.values(), 2):
        if shares[giver] == 1:
            continue
        less, more = times[giver] - weights[giver], times[taker] + weights[taker]
        moved = total + weights[taker] - weights[giver]
        squared = squares - times[giver] ** 2 - times[taker] ** 2 + less**2 + more**2
        variance = squared / count - (moved / count) ** 2
        if variance < best:
            best, move = variance, (giver, taker)
    if move is None:
        return False
    shares[move[0]] -= 1
    shares[move[1]] += 1
    return True
