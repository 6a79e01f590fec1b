"""Ranges: which units each live worker hosts, and how many micro-batches of each unit it runs.

Given the ranges, a linear program over them gives the least load of the busiest worker, and among these shares those
whose micro-batches change workers least. Which ranges reach a wanted load with least copied is an integer program over
numbers of workers with each range, where workers are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from recycle.solve.layout.hosts import Range
from recycle.solve.layout.units import Units
from recycle.solve.problem import Floats, Operations

_HAND_OVER = 1e-4
"""What all micro-batches changing workers once counts beside the load of the busiest worker."""
_REPAIRS = 4_000
"""Single micro-batches of a unit that may change hands after rounding."""
MOST_NODES, MOST_BLOCKS = 30, 32
"""Of the branch-and-bound tree of the integer program; and parts of the model that it looks at."""


def balanced(
    units: Units, ranges: Sequence[Range], speeds: Sequence[float], micro_batches: int, least: int = 0
) -> tuple[float, Operations] | None:
    """(seconds of the busiest worker, [workers, units] micro-batches of each), with the load as even as can be.

    None where a unit is in no range, or in more than can have `least`. The least load is that of the linear program;
    whole micro-batches come near it.

    Args:
        least: micro-batches that each worker runs of each of its units.
    """
    kinds = sorted(set(zip(ranges, speeds, strict=True)))
    members = [[w for w, kind in enumerate(zip(ranges, speeds, strict=True)) if kind == one] for one in kinds]
    covered = np.zeros(len(units), dtype=bool)
    for begin, end in ranges:
        covered[begin:end] = True
    if not covered.all():
        return None
    program = _Program(len(units), [window for window, _ in kinds], micro_batches)
    busiest = program.variable(1.0)
    for row, ((begin, end), speed) in enumerate(kinds):
        terms = [(program.share(row, u), float(units.seconds[u]) * speed) for u in range(begin, end)]
        program.row([*terms, (busiest, -float(len(members[row])))], -np.inf, 0.0)
        for share, _ in terms if least else ():
            program.row([(share, 1.0)], float(least * len(members[row])), np.inf)
    program.hand_overs(_HAND_OVER * float(units.seconds.sum()) / len(units))
    solution = program.solve()
    if solution is None:
        return None
    shares = np.zeros((len(ranges), len(units)))
    for row, ((begin, end), _) in enumerate(kinds):
        for u in range(begin, end):
            shares[members[row], u] = max(0.0, solution[program.share(row, u)]) / len(members[row])
    order = sorted(range(len(ranges)), key=lambda w: (ranges[w], w))
    quotas = np.zeros_like(shares, dtype=np.int64)
    upto = np.cumsum(shares[order], axis=0)
    upto *= micro_batches / upto[-1]
    quotas[order] = np.diff(np.rint(upto).astype(np.int64), axis=0, prepend=0)
    _repair(units, ranges, np.array(speeds), quotas)
    loads = quotas @ units.seconds * np.array(speeds)
    return float(loads.max()), quotas


def _repair(units: Units, ranges: Sequence[Range], speeds: Floats, quotas: Operations) -> None:
    """Single micro-batches of a unit change hands as long as the busiest worker gets less to do."""
    loads = quotas @ units.seconds * speeds
    begin, end = (np.array([each[i] for each in ranges]) for i in (0, 1))
    for _ in range(_REPAIRS):
        most = int(loads.argmax())
        best: tuple[float, int, int] | None = None
        for u in range(*ranges[most]):
            if quotas[most, u] <= 1:
                continue
            hosts = np.flatnonzero((begin <= u) & (u < end))
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
    units: Units, had: Sequence[Range], speeds: Sequence[float], micro_batches: int, load: float, hosts: int
) -> list[tuple[Range, float]] | None:
    """(range, speed) of live workers, such that nobody need do more than `load` and least is copied.

    Ranges begin and end at the ends of blocks of units (`MOST_BLOCKS`). None where there are no such ranges, where none
    was found, or where a model of so many stages makes too large a program.

    Args:
        had: of each live worker, as before.
        speeds: of each live worker, the factor on its compute times.
        load: seconds of the busiest worker that are wanted, with micro-batches divided as finely as need be.
        hosts: workers that each unit is to have at least.
    """
    if len(units.whole) > MOST_BLOCKS:
        return None
    blocks, ends = units.in_blocks(MOST_BLOCKS)
    number = {end: i for i, end in enumerate(ends)}
    found = _cheapest(blocks, [(number[a], number[b]) for a, b in had], speeds, micro_batches, load, hosts)
    return None if found is None else [((ends[a], ends[b]), speed) for (a, b), speed in found]


def _cheapest(
    units: Units, had: Sequence[Range], speeds: Sequence[float], micro_batches: int, load: float, hosts: int
) -> list[tuple[Range, float]] | None:
    before, of_speed = Counter(zip(had, speeds, strict=True)), Counter(speeds)
    wide = {(a, _widest(units, a)) for a in range(len(units))}
    ranges = sorted({*had, *wide, *((_widest_back(units, b), b) for b in range(1, len(units) + 1))})
    kinds = [(window, speed) for speed in sorted(of_speed) for window in ranges]
    program = _Program(len(units), [window for window, _ in kinds], micro_batches)
    stay = [program.variable(0.0, before[kind], whole=True) for kind in kinds]
    come = [program.variable(_copied(window, had), of_speed[speed], whole=True) for window, speed in kinds]
    for row, ((begin, end), speed) in enumerate(kinds):
        terms = [(program.share(row, u), float(units.seconds[u]) * speed) for u in range(begin, end)]
        program.row([*terms, (stay[row], -load), (come[row], -load)], -np.inf, 0.0)
    for speed, count in of_speed.items():
        mine = [row for row, kind in enumerate(kinds) if kind[1] == speed]
        program.row([(each[row], 1.0) for row in mine for each in (stay, come)], 0.0, float(count))
    for u in range(len(units)):
        mine = [row for row, ((begin, end), _) in enumerate(kinds) if begin <= u < end]
        program.row([(each[row], 1.0) for row in mine for each in (stay, come)], float(hosts), np.inf)
    program.hand_overs(1e-3 / micro_batches)
    solution = program.solve(MOST_NODES)
    if solution is None:
        return None
    counts = [round(solution[stay[row]] + solution[come[row]]) for row in range(len(kinds))]
    return [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]


def _widest(units: Units, begin: int) -> int:
    upto = np.cumsum(units.static[begin:])
    return begin + max(1, int(np.searchsorted(upto, units.most_static, "right")))


def _widest_back(units: Units, end: int) -> int:
    upto = np.cumsum(units.static[:end][::-1])
    return end - max(1, int(np.searchsorted(upto, units.most_static, "right")))


def _copied(window: Range, had: Sequence[Range]) -> float:
    """Units that are new to whoever takes the window."""
    begin, end = window
    return end - begin - max(max(0, min(end, b) - max(begin, a)) for a, b in set(had)) + 0.01


class _Program:
    """A linear or integer program over the micro-batches of each unit that the workers of each range run, for HiGHS."""

    def __init__(self, units: int, windows: Sequence[Range], micro_batches: int) -> None:
        self.windows = windows
        self.cost: list[float] = []
        self.most: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[list[tuple[int, float]]] = []
        self.bounds: list[tuple[float, float]] = []
        self._first: list[int] = []
        for begin, end in windows:
            self._first.append(len(self.cost) - begin)
            for _ in range(begin, end):
                self.variable(0.0, float(micro_batches))
        for u in range(units):
            mine = [(self.share(row, u), 1.0) for row, (begin, end) in enumerate(windows) if begin <= u < end]
            self.row(mine, float(micro_batches), float(micro_batches))

    def share(self, row: int, unit: int) -> int:
        """The variable of how many micro-batches of the unit the workers of a range run together."""
        return self._first[row] + unit

    def variable(self, cost: float, most: float = np.inf, *, whole: bool = False) -> int:
        """A variable from 0 on."""
        self.cost.append(cost)
        self.most.append(most)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], least: float, most: float) -> None:
        """The sum of the terms lies between these."""
        self.rows.append(terms)
        self.bounds.append((least, most))

    def hand_overs(self, cost: float) -> None:
        """What it costs when a micro-batch comes to a range's workers behind their first unit."""
        for row, (begin, end) in enumerate(self.windows):
            for u in range(begin + 1, end):
                comes = self.variable(cost)
                self.row([(self.share(row, u), 1.0), (self.share(row, u - 1), -1.0), (comes, -1.0)], -np.inf, 0.0)
            self.cost[self.share(row, begin)] += cost

    def solve(self, nodes: int = 0) -> list[float] | None:
        """Values of the variables, deterministic; None where none were found."""
        import highspy

        program = highspy.HighsLp()
        count = len(self.cost)
        program.num_col_, program.num_row_ = count, len(self.rows)
        program.col_cost_, program.col_lower_ = np.array(self.cost), np.zeros(count)
        program.col_upper_ = np.array(self.most)
        program.row_lower_, program.row_upper_ = (np.array([each[i] for each in self.bounds]) for i in (0, 1))
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row) for row in self.rows])])
        program.a_matrix_.index_ = np.array([column for row in self.rows for column, _ in row])
        program.a_matrix_.value_ = np.array([value for row in self.rows for _, value in row])
        if any(self.whole):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[whole] for whole in self.whole]
        solver = highspy.Highs()
        solver.silent()
        for name, value in (("threads", 1), ("parallel", "off"), ("random_seed", 0), ("mip_rel_gap", 0.05)):
            solver.setOptionValue(name, value)
        if nodes:
            solver.setOptionValue("mip_max_nodes", nodes)
        solver.passModel(program)
        solver.run()
        known = highspy.HighsModelStatus
        if solver.getModelStatus() not in (known.kOptimal, known.kSolutionLimit, known.kIterationLimit):
            return None
        if solver.getInfo().primal_solution_status != 2:
            return None
        return list(solver.getSolution().col_value)
