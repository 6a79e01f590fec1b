"""Linear and integer programs, solved by HiGHS: deterministic, in one thread, without output."""

from __future__ import annotations

import numpy as np


class LinearProgram:
    """Program that minimizes the cost of nonnegative variables under rows with lower and upper bounds."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._most: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[list[tuple[int, float]]] = []
        self._bounds: list[tuple[float, float]] = []

    def variable(self, cost: float, most: float = np.inf, *, whole: bool = False) -> int:
        """Add a nonnegative variable and return its index."""
        self.cost.append(cost)
        self._most.append(most)
        self._whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], least: float, most: float) -> None:
        """Add bounds on the sum of the terms (variable, factor)."""
        self._rows.append(terms)
        self._bounds.append((least, most))

    def solve(self, nodes: int = 0) -> list[float] | None:
        """Return the variables' values; None without a solution within `nodes` branch-and-bound nodes (0: no limit)."""
        import highspy

        program = highspy.HighsLp()
        count = len(self.cost)
        program.num_col_, program.num_row_ = count, len(self._rows)
        program.col_cost_, program.col_lower_ = np.array(self.cost), np.zeros(count)
        program.col_upper_ = np.array(self._most)
        program.row_lower_, program.row_upper_ = (np.array([each[i] for each in self._bounds]) for i in (0, 1))
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row) for row in self._rows])])
        program.a_matrix_.index_ = np.array([column for row in self._rows for column, _ in row])
        program.a_matrix_.value_ = np.array([value for row in self._rows for _, value in row])
        if any(self._whole):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[whole] for whole in self._whole]
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
