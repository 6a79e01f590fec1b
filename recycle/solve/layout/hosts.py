"""Assign workers to positions of chains or to ranges of units, with few copies.

A worker that holds exactly a wanted range takes it; a linear program matches the rest with the fewest copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.plans import Move
from recycle.plans.hosting import without
from recycle.solve.layout.units import Parts, Units, count_shared, count_units
from recycle.solve.linear import LinearProgram


def home_pipelines(live: Sequence[Worker], chains: int) -> list[int]:
    """Return the home pipeline of each chain; first chains take the pipelines with the most live workers."""
    alive = Counter(worker.pipeline for worker in live)
    return sorted(alive, key=lambda k: (-alive[k], k))[:chains]


def assign(
    units: Units, live: Sequence[Worker], wanted: Sequence[Parts], homes: Sequence[int | None] | None = None
) -> list[Worker]:
    """Return the worker for each wanted range: exact matches first, then those with the fewest copied units.

    Args:
        homes: preferred pipeline of each range; None for no preference.
    """
    taken: dict[int, Worker] = {}

    def take(key_of: Callable[[Parts, int | None], Hashable]) -> None:
        waiting: dict[Hashable, list[Worker]] = {}
        for worker in sorted(set(live).difference(taken.values()), reverse=True):
            waiting.setdefault(key_of(units.present_parts(worker), worker.pipeline), []).append(worker)
        for i, (part, home) in enumerate(zip(wanted, homes or [None] * len(wanted), strict=True)):
            if i not in taken and (candidates := waiting.get(key_of(part, home))):
                taken[i] = candidates.pop()

    take(lambda part, home: (part, home))
    take(lambda part, _: part)
    unassigned = [i for i in range(len(wanted)) if i not in taken]
    spare = sorted(set(live).difference(taken.values()))
    matched = _matched([wanted[i] for i in unassigned], [units.present_parts(worker) for worker in spare])
    taken |= {i: spare[which] for i, which in zip(unassigned, matched, strict=True)}
    return [taken[i] for i in range(len(wanted))]


def _matched(wanted: Sequence[Parts], had: Sequence[Parts]) -> list[int]:
    program, kinds, holders = LinearProgram(), Counter(wanted), Counter(had)
    takes = {
        (want, has): program.variable(count_units(want) - count_shared(want, has)) for want in kinds for has in holders
    }
    for want, count in kinds.items():
        program.row([(takes[want, has], 1.0) for has in holders], count, count)
    for has, count in holders.items():
        program.row([(takes[want, has], 1.0) for want in kinds], 0.0, count)
    solution = program.solve() if takes else []  # the corners of such programs are integers
    assert solution is not None
    waiting: dict[Parts, list[int]] = {}
    for which in range(len(had) - 1, -1, -1):
        waiting.setdefault(had[which], []).append(which)
    givers = {
        want: [waiting[has].pop() for has in holders for _ in range(round(solution[takes[want, has]]))]
        for want in kinds
    }
    return [givers[want].pop(0) for want in wanted]


def plan_copies(
    units: Units, shape: Shape, live: Sequence[Worker], wanted: Mapping[Worker, Parts], profile: Profile
) -> tuple[Move, ...]:
    """Return the copies of each worker, with each source sending in sequence.

    Each run of missing units comes from the live holder that can send it first, in the order of `wanted`.
    """
    bytes_of = np.concatenate([[0.0], np.cumsum(units.static)]) if units.has_bytes else np.zeros(len(units) + 1)
    until = dict.fromkeys(live, 0.0)
    moves: list[Move] = []
    for worker, parts in wanted.items():
        for begin, end in without(parts, units.present_parts(worker)):
            while begin < end:
                holders = [
                    (peer, last) for peer in live for first, last in units.present_parts(peer) if first <= begin < last
                ]
                if not holders:  # workers that moved before may hold the units
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
    return tuple(moves)
