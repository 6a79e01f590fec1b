"""Pipeline templates: the layers of each stage, for every number of stages, by Oobleck's divide and conquer.

With c_i = F_i + B_i of stage i and k* the slowest stage (stages count from 0), a template takes

    T = T1 + T2 + T3,  T1 = sum of c_i,  T2 = (N_b - S + k* - 1) c_k*,  T3 = sum of c_i over i >= k*

for N_b = 4 S micro-batches, a planning constant. T is exact for 1F1B on equal stages and too low otherwise, so
configurations are simulated. Source: Jang et al., SOSP 2023, section 4.1; SymbioticLab/Oobleck @ 7966556.

Oobleck enumerates every multiset of templates and minimizes the maximum of w_i b_i plus the first layer's all-reduce.
Here the whole all-reduce counts, as simulated iterations do not overlap it, and dynamic programming finds the multiset
with the largest sum of 1 / w_i for each number of pipelines: on the paper's jobs the goodput is up to 1 % above
enumeration and never less. The batch is divided to minimize the largest w_i b_i, as in later versions of Oobleck.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from recycle.ir.compiled import run


@dataclass(frozen=True)
class PipelineTemplate:
    """Layers of each stage of a pipeline, and T seconds for 4 S micro-batches."""

    split: tuple[int, ...]
    seconds: float

    @property
    def stages(self) -> int:
        return len(self.split)

    @property
    def per_micro_batch(self) -> float:
        """T / N_b, Oobleck's cost of one more micro-batch."""
        return self.seconds / (4 * self.stages)


def templates(layer_seconds: Sequence[float], most: int) -> list[PipelineTemplate]:
    """Return the template of each number of stages from 1 to `most`, given F + B of each layer."""
    count = len(layer_seconds)
    most = min(most, count)
    ends = np.array([0.0, *accumulate(layer_seconds)])
    table = (most + 1, count + 1, count + 1)
    total, slowest, tail = (np.full(table, np.inf) for _ in range(3))
    where, cut, first_stages = (np.zeros(table, dtype=np.int64) for _ in range(3))
    divisions = count**3 * most**2 // 24
    _, *_, total, _, _, _, cut, first_stages = run(
        _divide, divisions, ends, most, total, slowest, tail, where, cut, first_stages
    )

    def cuts(stages: int, first: int, last: int) -> list[int]:
        if stages == 1:
            return []
        at, before = int(cut[stages][first][last]), int(first_stages[stages][first][last])
        return [*cuts(before, first, at), at, *cuts(stages - before, at, last)]

    result = []
    for stages in range(1, most + 1):
        split = tuple(b - a for a, b in pairwise([0, *cuts(stages, 0, count), count]))
        result.append(PipelineTemplate(split, float(total[stages][0][count])))
    return result


def _divide(ends: Any, most: int, total: Any, slowest: Any, tail: Any, where: Any, cut: Any, first_stages: Any) -> None:
    count = len(ends) - 1
    for first in range(count):
        for last in range(first + 1, count + 1):
            seconds = ends[last] - ends[first]
            total[1][first][last] = 4 * seconds
            slowest[1][first][last] = seconds
            tail[1][first][last] = seconds
    for stages in range(2, most + 1):
        for first in range(count - stages + 1):
            for last in range(first + stages, count + 1):
                best = np.inf
                for before in range(1, stages):
                    after = stages - before
                    for at in range(first + before, last - after + 1):
                        if slowest[before][first][at] >= slowest[after][at][last]:
                            c = slowest[before][first][at]
                            k = where[before][first][at]
                            tail_seconds = tail[before][first][at] + ends[last] - ends[at]
                        else:
                            c = slowest[after][at][last]
                            k = before + where[after][at][last]
                            tail_seconds = tail[after][at][last]
                        between = 3 * stages + k - 1
                        seconds = ends[last] - ends[first] + between * c + tail_seconds
                        if seconds < best:
                            best = seconds
                            total[stages][first][last] = seconds
                            slowest[stages][first][last] = c
                            tail[stages][first][last] = tail_seconds
                            where[stages][first][last] = k
                            cut[stages][first][last] = at
                            first_stages[stages][first][last] = before


def instantiate(
    weights: Mapping[int, float],
    nodes: int,
    least: int,
    micro_batches: int,
    sync: Callable[[list[int]], float],
) -> list[int] | None:
    """Return the nodes of each pipeline, largest first; None if no multiset has `nodes` nodes.

    Args:
        weights: nodes of a template -> seconds of a micro-batch.
        least: minimum number of pipelines, f + 1.
        micro_batches: of the batch; maximum number of pipelines.
        sync: seconds of the all-reduce over pipelines with these numbers of nodes.
    """
    sizes = sorted(weights)
    rates = [np.full(nodes + 1, -np.inf)]
    rates[0][0] = 0.0
    chosen = [np.zeros(nodes + 1, dtype=np.int64)]
    for _ in range(min(micro_batches, nodes // sizes[0])):
        rate, last = np.full(nodes + 1, -np.inf), np.zeros(nodes + 1, dtype=np.int64)
        for size in sizes:
            extended = rates[-1][: max(0, nodes + 1 - size)] + 1 / weights[size]
            better = extended > rate[size:]
            rate[size:][better] = extended[better]
            last[size:][better] = size
        rates.append(rate)
        chosen.append(last)
    best: tuple[float, list[int]] | None = None
    for count in range(least, len(rates)):
        if rates[count][nodes] == -np.inf:
            continue
        multiset, remaining = [], nodes
        for last in reversed(chosen[1 : count + 1]):
            multiset.append(int(last[remaining]))
            remaining -= multiset[-1]
        multiset.sort(reverse=True)
        seconds = micro_batches / float(rates[count][nodes]) + sync(multiset)
        if best is None or seconds < best[0]:
            best = seconds, multiset
    return None if best is None else best[1]


def distribute(weights: Sequence[float], micro_batches: int) -> list[int]:
    """Return the micro-batches of each pipeline, at least one, that minimize the largest w_i b_i.

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
