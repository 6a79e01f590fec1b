"""Ranges: units of each live worker, and micro-batches of each unit.

For given hosts, a linear program minimizes the busiest worker's load, then the micro-batches that change workers. If
workers are alike, an integer program over the number of workers per range finds ranges with the fewest copies for a
given load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from recycle.plans.hosting import joined
from recycle.solve.constants import HAND_OVER, MOST_BLOCKS, MOST_NODES, MOST_REPAIRS
from recycle.solve.layout.units import Parts, Units, count_shared, count_units
from recycle.solve.linear import LinearProgram
from recycle.solve.problem_arrays import Floats, Operations


def balanced(
    units: Units, hosted: Sequence[Parts], speeds: Sequence[float], micro_batches: int, least: int = 0
) -> tuple[float, Operations] | None:
    """Return (seconds of the busiest worker, [workers, units] micro-batches) with the most even load.

    None if a unit has no host, or has too many to give each `least` micro-batches.
    """
    kinds = sorted(set(zip(hosted, speeds, strict=True)))
    members = [
        [w for w, kind in enumerate(zip(hosted, speeds, strict=True)) if kind == kind_here] for kind_here in kinds
    ]
    if {u for parts, _ in kinds for u in _units_in(parts)} < set(range(len(units))):
        return None
    program = _Program(len(units), [window for window, _ in kinds], micro_batches)
    busiest = program.variable(1.0)
    for row, (window, speed) in enumerate(kinds):
        terms = [(program.share(row, u), units.seconds[u] * speed) for u in _units_in(window)]
        program.row([*terms, (busiest, -len(members[row]))], -np.inf, 0.0)
        for share, _ in terms if least else ():
            program.row([(share, 1.0)], least * len(members[row]), np.inf)
    program.hand_overs(HAND_OVER * float(units.seconds.sum()) / len(units))
    solution = program.solve()
    if solution is None:
        return None
    shares = np.zeros((len(hosted), len(units)))
    for row, (window, _) in enumerate(kinds):
        for u in _units_in(window):
            shares[members[row], u] = max(0.0, solution[program.share(row, u)]) / len(members[row])
    order = sorted(range(len(hosted)), key=lambda w: (hosted[w], w))
    quotas = np.zeros_like(shares, dtype=np.int64)
    upto = np.cumsum(shares[order], axis=0)
    upto *= micro_batches / upto[-1]
    quotas[order] = np.diff(np.rint(upto).astype(np.int64), axis=0, prepend=0)
    _repair(units, hosted, np.array(speeds), quotas)
    loads = quotas @ units.seconds * np.array(speeds)
    return float(loads.max()), quotas


def _repair(units: Units, hosted: Sequence[Parts], speeds: Floats, quotas: Operations) -> None:
    loads = quotas @ units.seconds * speeds
    hosts_of: list[list[int]] = [[] for _ in range(len(units))]
    for w, parts in enumerate(hosted):
        for u in _units_in(parts):
            hosts_of[u].append(w)
    for _ in range(MOST_REPAIRS):
        most = int(loads.argmax())
        best: tuple[float, int, int] | None = None
        for u in _units_in(hosted[most]):
            if quotas[most, u] <= 1:
                continue
            hosts = np.array(hosts_of[u])
            after = loads[hosts] + units.seconds[u] * speeds[hosts]
            least = int(after.argmin())
            if hosts[least] != most and (best is None or after[least] < best[0]):
                best = float(after[least]), u, int(hosts[least])
        if best is None or best[0] >= loads[most] * (1 - 1e-9):
            return
        _, u, taker = best
        quotas[most, u] -= 1
        quotas[taker, u] += 1
        loads[most] -= units.seconds[u] * speeds[most]
        loads[taker] += units.seconds[u] * speeds[taker]


def cheapest_ranges(
    units: Units, had: Sequence[Parts], speeds: Sequence[float], micro_batches: int, load: float, hosts: Sequence[int]
) -> list[tuple[Parts, float]] | None:
    """Return (units, speed) of live workers with the fewest copies, such that no worker exceeds `load`.

    Workers host the units that a worker had, one range, or their own ranges with one of them extended. Ranges end at
    the ends of blocks of units (`MOST_BLOCKS`). None if no such ranges were found, or if the program is too large.

    Args:
        had: previous units of each live worker.
        speeds: factor on the compute times of each live worker.
        load: wanted seconds of the busiest worker, with micro-batches divisible.
        hosts: minimum number of hosts of each unit.
    """
    if len(units.cut) > MOST_BLOCKS:
        return None
    blocks, ends = units.in_blocks(MOST_BLOCKS, (end for parts in had for part in parts for end in part))
    number = {end: i for i, end in enumerate(ends)}
    before = [tuple((number[a], number[b]) for a, b in parts) for parts in had]
    each = np.maximum.reduceat(np.array(hosts), ends[:-1]).tolist()
    ranges = _cheapest(blocks, before, speeds, micro_batches, load, each)
    if ranges is None:
        return None
    return [(tuple((ends[a], ends[b]) for a, b in parts), speed) for parts, speed in ranges]


def _cheapest(
    units: Units, had: Sequence[Parts], speeds: Sequence[float], micro_batches: int, load: float, hosts: Sequence[int]
) -> list[tuple[Parts, float]] | None:
    before, of_speed = Counter(zip(had, speeds, strict=True)), Counter(speeds)
    static, most = units.static, units.most_static
    wide = {((a, a + max(1, fitting(static[a:], most))),) for a in range(len(units))}
    wide |= {((b - max(1, fitting(static[:b][::-1], most)), b),) for b in range(1, len(units) + 1)}
    windows = sorted(
        {*filter(None, had), *wide, *(more for parts in set(had) if len(parts) > 1 for more in _widened(units, parts))}
    )
    kinds = [(window, speed) for speed in sorted(of_speed) for window in windows]
    program = _Program(len(units), [window for window, _ in kinds], micro_batches)
    stay = [program.variable(0.0, before[kind], whole=True) for kind in kinds]
    come = [program.variable(_copied(window, had), of_speed[speed], whole=True) for window, speed in kinds]
    for row, (window, speed) in enumerate(kinds):
        terms = [(program.share(row, u), units.seconds[u] * speed) for u in _units_in(window)]
        program.row([*terms, (stay[row], -load), (come[row], -load)], -np.inf, 0.0)
    for speed, count in of_speed.items():
        rows = [row for row, kind in enumerate(kinds) if kind[1] == speed]
        program.row([(each[row], 1.0) for row in rows for each in (stay, come)], 0.0, count)
    for u in range(len(units)):
        rows = [row for row, (window, _) in enumerate(kinds) if count_shared(window, ((u, u + 1),))]
        program.row([(each[row], 1.0) for row in rows for each in (stay, come)], hosts[u], np.inf)
    program.hand_overs(1e-3 / micro_batches)
    solution = program.solve(MOST_NODES)
    if solution is None:
        return None
    counts = [round(solution[stay[row]] + solution[come[row]]) for row in range(len(kinds))]
    return [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]


def fitting(static: Floats, room: float) -> int:
    """Return the number of first units that fit into `room`."""
    return int(np.searchsorted(np.cumsum(static), room, "right"))


def _widened(units: Units, parts: Parts) -> Iterator[Parts]:
    room = units.most_static - units.static_of(parts)
    for begin, end in parts:
        yield joined([*parts, (end, end + fitting(units.static[end:], room))])
        yield joined([*parts, (begin - fitting(units.static[:begin][::-1], room), begin)])


def _copied(window: Parts, had: Sequence[Parts]) -> float:
    return count_units(window) - max(count_shared(window, parts) for parts in set(had)) + 0.01


class _Program(LinearProgram):
    def __init__(self, units: int, windows: Sequence[Parts], micro_batches: int) -> None:
        super().__init__()
        self.windows = windows
        self._shares = [{u: self.variable(0.0, micro_batches) for u in _units_in(window)} for window in windows]
        for u in range(units):
            terms = [(share[u], 1.0) for share in self._shares if u in share]
            self.row(terms, micro_batches, micro_batches)

    def share(self, row: int, unit: int) -> int:
        """Return the variable of the micro-batches of a unit that a window's workers run together."""
        return self._shares[row][unit]

    def hand_overs(self, cost: float) -> None:
        """Add the cost of micro-batches that reach a window's workers after the first unit of a range."""
        for row, window in enumerate(self.windows):
            for begin, end in window:
                for u in range(begin + 1, end):
                    comes = self.variable(cost)
                    self.row([(self.share(row, u), 1.0), (self.share(row, u - 1), -1.0), (comes, -1.0)], -np.inf, 0.0)
                self.cost[self.share(row, begin)] += cost


def _units_in(parts: Parts) -> list[int]:
    return [u for begin, end in parts for u in range(begin, end)]
