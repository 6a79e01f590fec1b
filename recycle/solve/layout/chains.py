"""Chains: rows of live workers that each host a whole model, cut to minimize the slowest worker's work.

A chain whose slowest worker takes b seconds per micro-batch runs one every b seconds. For each number of chains, a
knapsack over their lengths maximizes the total rate. Micro-batches go to chains in proportion to their rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from recycle.solve.layout.units import Units
from recycle.solve.problem import TOLERANCE
from recycle.solve.problem_arrays import Floats

Cut = tuple[int, ...]
"""Units of each worker of a chain, first to last."""
_MOST_CELLS = 2**26
"""Maximum size of the knapsack's table: chains times live workers times lengths."""


@dataclass(frozen=True)
class Chains:
    """Chains that run an iteration together.

    Attributes:
        shares: micro-batches of each chain.
        seconds: compute time of the busiest worker.
    """

    cuts: tuple[Cut, ...]
    shares: tuple[int, ...]
    seconds: float


def best_cut(units: Units, workers: int) -> tuple[Cut, float] | None:
    """Return (the most even cut, seconds of its slowest worker); None if the workers cannot hold the model."""
    count = len(units)
    if workers > count:
        return None
    seconds, static = (np.concatenate([[0.0], np.cumsum(values)]) for values in (units.seconds, units.static))

    def ends(most: float) -> list[int]:
        at = [0]
        while at[-1] < count and len(at) <= workers:
            by_time = np.searchsorted(seconds, seconds[at[-1]] + most * (1 + TOLERANCE), "right") - 1
            by_room = np.searchsorted(static, static[at[-1]] + units.most_static, "right") - 1
            end = int(min(by_time, by_room))
            if end == at[-1]:
                break
            at.append(end)
        return at

    low, high = max(seconds[-1] / workers, float(units.seconds.max())), float(seconds[-1])
    if ends(high)[-1] < count:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == count else (middle, high)
    at = [count * w // workers for w in range(workers + 1)]
    if _largest(units.static, at) > units.most_static or _largest(units.seconds, at) > high * (1 + TOLERANCE):
        at = ends(high)
        while len(at) <= workers:  # split the largest part
            longest = max(pairwise(at), key=lambda part: part[1] - part[0])
            at = sorted([*at, sum(longest) // 2])
    return tuple(b - a for a, b in pairwise(at)), _largest(units.seconds, at)


def _largest(prices: Floats, at: Sequence[int]) -> float:
    return max(float(prices[a:b].sum()) for a, b in pairwise(at))


def share_micro_batches(seconds: Sequence[float], micro_batches: int) -> tuple[list[int], float]:
    """Return (micro-batches of each chain, seconds of the busiest worker), given seconds per micro-batch."""
    ideal = micro_batches / sum(1 / each for each in seconds)
    shares = [int(ideal / each) for each in seconds]
    waiting = [((share + 1) * each, k) for k, (share, each) in enumerate(zip(shares, seconds, strict=True))]
    heapq.heapify(waiting)
    for _ in range(micro_batches - sum(shares)):
        _, k = heapq.heappop(waiting)
        shares[k] += 1
        heapq.heappush(waiting, ((shares[k] + 1) * seconds[k], k))
    return shares, max(share * each for share, each in zip(shares, seconds, strict=True))


def candidates(units: Units, workers: int, micro_batches: int) -> list[Chains]:
    """Return the best chains of each number, the fastest first, ignoring warm-up and tail."""
    options: dict[int, tuple[Cut, float]] = {}
    for length in range(1, min(workers, len(units)) + 1):
        option = best_cut(units, length)
        if option is not None and all(option[1] < other[1] * (1 - TOLERANCE) for other in options.values()):
            options[length] = option
    if not options:
        return []
    lengths = np.array(list(options))
    pace = np.array([1 / seconds for _, seconds in options.values()])
    most = min(workers // int(lengths.min()), micro_batches, max(1, _MOST_CELLS // (workers * len(lengths))))
    best = np.full(workers + 1, -np.inf)
    best[0] = 0.0
    chosen: list[np.ndarray] = []
    best_chains = []
    for chains in range(1, most + 1):
        tries = np.full((len(lengths), workers + 1), -np.inf)
        for row, (length, gain) in enumerate(zip(lengths.tolist(), pace.tolist(), strict=True)):
            tries[row, length:] = best[: workers + 1 - length] + gain
        chosen.append(tries.argmax(axis=0))
        best = tries.max(axis=0)
        if not np.isfinite(best).any():
            break
        used, chosen_lengths = int(best.argmax()), []
        for turn in range(chains - 1, -1, -1):
            chosen_lengths.append(int(lengths[chosen[turn][used]]))
            used -= chosen_lengths[-1]
        chosen_lengths.sort(reverse=True)
        shares, seconds = share_micro_batches([options[n][1] for n in chosen_lengths], micro_batches)
        best_chains.append(Chains(tuple(options[n][0] for n in chosen_lengths), tuple(shares), seconds))
    return sorted(best_chains, key=lambda chains: (chains.seconds, -len(chains.cuts)))
