"""Linear and integer programs, solved by HiGHS: deterministic, in one thread, without output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def solver_of(
    cost: npt.ArrayLike,
    most: npt.ArrayLike,
    bounds: Sequence[npt.ArrayLike],
    entries: Sequence[npt.ArrayLike],
    *,
    whole: Sequence[bool] = (),
    **options: Any,
) -> Any:
    """Return the solver of a program: minimize cost of nonnegative variables of at most `most`, under rows.

    Args:
        bounds: least and most, of each row.
        entries: row, column and value of each entry of the matrix; entries of one place add up.
        whole: whether each variable is whole; empty for a linear program.
        options: of HiGHS, besides those that make it deterministic.
    """
    import highspy

    program = highspy.HighsLp()
    program.col_cost_, program.col_upper_ = np.asarray(cost, dtype=float), np.asarray(most, dtype=float)
    program.row_lower_, program.row_upper_ = (np.asarray(limits, dtype=float) for limits in bounds)
    program.num_col_, program.num_row_ = count, rows = len(program.col_cost_), len(program.row_upper_)
    program.col_lower_ = np.zeros(count)
    row, column, value = map(np.asarray, entries)
    places, entry = np.unique(column * rows + row, return_inverse=True)
    column, program.a_matrix_.index_ = np.divmod(places, rows)
    program.a_matrix_.start_ = np.searchsorted(column, np.arange(count + 1))
    program.a_matrix_.value_ = np.bincount(entry, weights=value).astype(float)
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    if any(whole):
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        program.integrality_ = [kinds[is_whole] for is_whole in whole]
    solver = highspy.Highs()
    solver.silent()
    for name, setting in ({"threads": 1, "parallel": "off"} | options).items():
        solver.setOptionValue(name, setting)
    solver.passModel(program)
    return solver


class LinearProgram:
    """Program that minimizes the cost of nonnegative variables under rows with lower and upper bounds."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._most: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[Sequence[tuple[int, float]]] = []
        self._bounds: list[tuple[float, float]] = []

    def variable(self, cost: float, most: float = np.inf, *, whole: bool = False) -> int:
        """Add a nonnegative variable and return its index."""
        self.cost.append(cost)
        self._most.append(most)
        self._whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], least: float, most: float) -> None:
        """Add bounds on the sum of the terms (variable, factor)."""
        self._rows.append(terms)
        self._bounds.append((least, most))

    def solve(self, nodes: int = 0) -> list[float] | None:
        """Return the variables' values; None without a solution within `nodes` branch-and-bound nodes (0: no limit)."""
        import highspy

        entries = [(row, *term) for row, terms in enumerate(self._rows) for term in terms]
        limit = {"mip_max_nodes": nodes} if nodes else {}
        solver = solver_of(
            self.cost,
            self._most,
            [*zip(*self._bounds, strict=True)],
            [*zip(*entries, strict=True)],
            whole=self._whole,
            random_seed=0,
            mip_rel_gap=0.05,
            **limit,
        )
        solver.run()
        known = highspy.HighsModelStatus
        if solver.getModelStatus() not in (known.kOptimal, known.kSolutionLimit, known.kIterationLimit):
            return None
        if solver.getInfo().primal_solution_status != 2:
            return None
        return list(solver.getSolution().col_value)
