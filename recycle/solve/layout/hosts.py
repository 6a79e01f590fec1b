"""Who plays which position of which chain, or takes which range of units, so that little is copied.

A worker keeps the units that it has. First whoever has just what a position wants takes it, in the chain of its own
pipeline where that can be. What is left, positions and workers, are both brought into the order of their place in the
model and matched so that least is copied: a matching without crossings, as the shortest way through a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from recycle.plans import Move
from recycle.profile import Profile
from recycle.shape import Shape, Worker
from recycle.solve.layout.chains import Cut
from recycle.solve.layout.units import Units

Range = tuple[int, int]
"""Units from the first up to but without the last."""


def ranges_of(cut: Cut) -> list[Range]:
    """The units of each part of a chain."""
    return list(pairwise([0, *accumulate(cut)]))


def assign(units: Units, live: Sequence[Worker], cuts: Sequence[Cut]) -> tuple[list[list[Worker]], list[int]]:
    """(the worker of each position of each chain, the home pipeline of each of the first chains).

    Args:
        live: workers that host what fault-free stages have; as many as there are positions, or more.
    """
    had = ranges_of(units.whole)
    by_pipeline: dict[int, list[Worker]] = {}
    for worker in live:
        by_pipeline.setdefault(worker.pipeline, []).append(worker)
    # Chains that are longest take the pipelines with most live workers as homes.
    homes = sorted(by_pipeline, key=lambda k: (-len(by_pipeline[k]), k))[: len(cuts)]
    positions = [(k, r, part) for k, cut in enumerate(cuts) for r, part in enumerate(ranges_of(cut))]
    free = set(live)
    taken: dict[tuple[int, int], Worker] = {}

    def take(own: bool) -> None:
        waiting: dict[Range, list[Worker]] = {}
        for worker in sorted(free):
            waiting.setdefault(had[worker.rank], []).append(worker)
        for k, r, part in positions:
            if (k, r) in taken:
                continue
            mine = waiting.get(part, [])
            if own:
                mine = [worker for worker in mine if k < len(homes) and worker.pipeline == homes[k]]
            if mine:
                taken[k, r] = worker = mine[0]
                waiting[part].remove(worker)
                free.discard(worker)

    take(own=True)
    take(own=False)
    left = sorted(((part, k, r) for k, r, part in positions if (k, r) not in taken), key=lambda one: sum(one[0]))
    spare = sorted(free, key=lambda worker: (sum(had[worker.rank]), worker.pipeline))
    wanted = [part for part, _, _ in left]
    for (_, k, r), which in zip(left, _matched(wanted, [had[worker.rank] for worker in spare]), strict=True):
        taken[k, r] = spare[which]
    return [[taken[k, r] for r in range(len(cut))] for k, cut in enumerate(cuts)], homes


def assign_ranges(units: Units, live: Sequence[Worker], wanted: Sequence[Range]) -> list[Worker]:
    """The worker of each range: first those who have just what is wanted, then so that fewest units are copied.

    Args:
        live: workers that host what fault-free stages have; as many as there are ranges, or more.
    """
    had = ranges_of(units.whole)
    waiting: dict[Range, list[Worker]] = {}
    for worker in sorted(live, reverse=True):
        waiting.setdefault(had[worker.rank], []).append(worker)
    taken = {i: waiting[part].pop() for i, part in enumerate(wanted) if waiting.get(part)}
    left = sorted((i for i in range(len(wanted)) if i not in taken), key=lambda i: sum(wanted[i]))
    spare = [worker for workers in waiting.values() for worker in workers]
    spare.sort(key=lambda worker: (sum(had[worker.rank]), worker.pipeline))
    matched = _matched([wanted[i] for i in left], [had[worker.rank] for worker in spare])
    taken |= {i: spare[which] for i, which in zip(left, matched, strict=True)}
    return [taken[i] for i in range(len(wanted))]


def _matched(wanted: Sequence[Range], had: Sequence[Range]) -> list[int]:
    """For each wanted range who takes it, in order, so that fewest units are new to whoever takes them."""
    most = np.full(len(had) + 1, 0.0)
    kept: list[np.ndarray] = []
    starts, ends = (np.array([each[i] for each in had], dtype=np.int64) for i in (0, 1))
    for begin, end in wanted:
        new = (end - begin) - np.clip(np.minimum(ends, end) - np.maximum(starts, begin), 0, None)
        takes = most[:-1] + new
        best = np.full(len(had) + 1, np.inf)
        best[1:] = np.minimum.accumulate(takes) if len(had) else takes
        kept.append(takes)
        most = best
    found: list[int] = []
    upto = len(had)
    for takes in reversed(kept):
        upto = int(takes[:upto].argmin())
        found.append(upto)
    return found[::-1]


def moves_to(
    units: Units, shape: Shape, live: Sequence[Worker], wanted: Mapping[Worker, Range], profile: Profile
) -> tuple[tuple[Move, ...], float]:
    """(what each worker copies and from whom, seconds until all is there, each source sending one after the other).

    Each run of units that a worker has not comes from a live worker that had them: whoever can have sent it soonest.

    Args:
        wanted: the units of each worker, in the order in which copies are arranged.
    """
    had = ranges_of(units.whole)
    bytes_of = np.concatenate([[0.0], np.cumsum(units.static)]) if units.has_bytes else np.zeros(len(units) + 1)
    hosts = {rank: [worker for worker in live if worker.rank == rank] for rank in range(shape.ranks)}
    until = dict.fromkeys(live, 0.0)
    moves: list[Move] = []
    for worker, (begin, end) in wanted.items():
        for rank, (first, last) in enumerate(had):
            a, b = max(begin, first), min(end, last)
            if a >= b or rank == worker.rank:
                continue
            amount = float(bytes_of[b] - bytes_of[a])
            if not (peers := hosts[rank]):
                continue  # whoever has moved before has them
            times = profile.copy_seconds(
                shape,
                [shape.worker_index(peer) for peer in peers],
                [shape.worker_index(worker)] * len(peers),
                amount,
            )
            done, source = min((until[peer] + float(time), peer) for peer, time in zip(peers, times, strict=True))
            seconds = done - until[source]
            until[source] = done
            moves.append(Move(str(worker), str(worker), str(source), amount, (a, b), seconds))
    return tuple(moves), float(max(until.values(), default=0.0))
