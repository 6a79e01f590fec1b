"""Who plays which position of which chain, or takes which range of units, so that little is copied.

A worker keeps the units that it has. First whoever has just what a position wants takes it, in the chain of its own
pipeline where that can be. What is left, positions and workers, are both brought into the order of their place in the
model and matched so that least is copied: a matching without crossings, as the shortest way through a table. Workers
that have several ranges each have no place in the model; they are matched by a linear program over the kinds of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans import Move
from recycle.plans.hosting import UnitRange, without
from recycle.solve.layout.chains import Cut
from recycle.solve.layout.linear import LinearProgram
from recycle.solve.layout.units import Parts, Units, common, count_of, ranges_of


def assign(units: Units, live: Sequence[Worker], cuts: Sequence[Cut]) -> tuple[list[list[Worker]], list[int]]:
    """(the worker of each position of each chain, the home pipeline of each of the first chains).

    Args:
        live: workers, as many as there are positions, or more.
    """
    by_pipeline: dict[int, list[Worker]] = {}
    for worker in live:
        by_pipeline.setdefault(worker.pipeline, []).append(worker)
    # Chains that are longest take the pipelines with most live workers as homes.
    homes = sorted(by_pipeline, key=lambda k: (-len(by_pipeline[k]), k))[: len(cuts)]
    positions = [(k, r, (part,)) for k, cut in enumerate(cuts) for r, part in enumerate(ranges_of(cut))]
    free = set(live)
    taken: dict[tuple[int, int], Worker] = {}

    def take(own: bool) -> None:
        waiting: dict[Parts, list[Worker]] = {}
        for worker in sorted(free):
            waiting.setdefault(units.held_before(worker), []).append(worker)
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
    left = sorted(((part, k, r) for k, r, part in positions if (k, r) not in taken), key=lambda one: _place(one[0]))
    spare = sorted(free, key=lambda worker: (_place(units.held_before(worker)), worker.pipeline))
    wanted = [part for part, _, _ in left]
    for (_, k, r), which in zip(left, _matched(wanted, [units.held_before(worker) for worker in spare]), strict=True):
        taken[k, r] = spare[which]
    return [[taken[k, r] for r in range(len(cut))] for k, cut in enumerate(cuts)], homes


def assign_ranges(units: Units, live: Sequence[Worker], wanted: Sequence[Parts]) -> list[Worker]:
    """Who is to host each of what is wanted: first those who have just that, then so that fewest units are copied.

    Args:
        live: workers, as many as are wanted, or more.
    """
    waiting: dict[Parts, list[Worker]] = {}
    for worker in sorted(live, reverse=True):
        waiting.setdefault(units.held_before(worker), []).append(worker)
    taken = {i: waiting[part].pop() for i, part in enumerate(wanted) if waiting.get(part)}
    left = sorted((i for i in range(len(wanted)) if i not in taken), key=lambda i: _place(wanted[i]))
    spare = [worker for workers in waiting.values() for worker in workers]
    spare.sort(key=lambda worker: (_place(units.held_before(worker)), worker.pipeline))
    matched = _matched([wanted[i] for i in left], [units.held_before(worker) for worker in spare])
    taken |= {i: spare[which] for i, which in zip(left, matched, strict=True)}
    return [taken[i] for i in range(len(wanted))]


def _place(parts: Parts) -> tuple[int, Parts]:
    """Where in the model its middle is."""
    if not parts:
        return 0, parts
    return parts[0][0] + parts[-1][1], () if len(parts) == 1 else parts


def _matched(wanted: Sequence[Parts], had: Sequence[Parts]) -> list[int]:
    """For each of what is wanted who takes it, so that fewest units are new to whoever takes them; in order where all
    are single ranges."""
    if all(len(parts) == 1 for parts in (*wanted, *had)):
        return _matched_in_order([parts[0] for parts in wanted], [parts[0] for parts in had])
    program, kinds, holders = LinearProgram(), Counter(wanted), Counter(had)
    takes = {(want, has): program.variable(count_of(want) - common(want, has)) for want in kinds for has in holders}
    for want, count in kinds.items():
        program.row([(takes[want, has], 1.0) for has in holders], float(count), float(count))
    for has, count in holders.items():
        program.row([(takes[want, has], 1.0) for want in kinds], 0.0, float(count))
    solution = program.solve()  # such programs have whole numbers in their corners
    assert solution is not None
    waiting: dict[Parts, list[int]] = {}
    for which in range(len(had) - 1, -1, -1):
        waiting.setdefault(had[which], []).append(which)
    givers = {
        want: [waiting[has].pop() for has in holders for _ in range(round(solution[takes[want, has]]))]
        for want in kinds
    }
    return [givers[want].pop(0) for want in wanted]


def _matched_in_order(wanted: Sequence[UnitRange], had: Sequence[UnitRange]) -> list[int]:
    """As `_matched`: a matching without crossings."""
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
    units: Units, shape: Shape, live: Sequence[Worker], wanted: Mapping[Worker, Parts], profile: Profile
) -> tuple[tuple[Move, ...], float]:
    """(what each worker copies and from whom, seconds until all is there, each source sending one after the other).

    Each run of units that a worker has not comes from a live worker that had them: whoever can have sent it soonest.

    Args:
        wanted: the units of each worker, in the order in which copies are arranged.
    """
    bytes_of = np.concatenate([[0.0], np.cumsum(units.static)]) if units.has_bytes else np.zeros(len(units) + 1)
    until = dict.fromkeys(live, 0.0)
    moves: list[Move] = []
    for worker, parts in wanted.items():
        for begin, end in without(parts, units.held_before(worker)):
            while begin < end:
                holders = [
                    (peer, last) for peer in live for first, last in units.held_before(peer) if first <= begin < last
                ]
                if not holders:  # whoever has moved before has it
                    begin += 1
                    continue
                upto = min(end, *(last for _, last in holders))
                amount = float(bytes_of[upto] - bytes_of[begin])
                times = profile.copy_seconds(
                    shape,
                    [shape.worker_index(peer) for peer, _ in holders],
                    [shape.worker_index(worker)] * len(holders),
                    amount,
                )
                done, source = min(
                    (until[peer] + float(time), peer) for (peer, _), time in zip(holders, times, strict=True)
                )
                seconds = done - until[source]
                until[source] = done
                moves.append(Move(str(worker), str(worker), str(source), amount, (begin, upto), seconds))
                begin = upto
    return tuple(moves), float(max(until.values(), default=0.0))
