"""Windows: large neighbourhood search, where a part of an order is freed and an integer program re-orders it.

A window (`window`) frees the workers of a run of stages, or of a few pipelines, in a time slice around an operation
that makes somebody late. In half of the windows all operations of one kind follow the start's true order, which leaves
room for longer slices. Only the order is taken from the solution; it is timed again, and dropped unless it is within
the caps and better.

Between windows a due time moves where nobody gets later in sum by it: without that, windows soon have nothing left to
gain. They are drawn by the seed, and without a deadline solvers end at a number of nodes alone. Routes stay as they
are.

What it brings (one walk of 20 to 40 s on a busy machine, without -> with): stages of unlike weight gain most, as in
`uneven-d4p8` of benchmarks/planner.py, bound 5518: 5888 -> 5831, 5888 -> 5813, 5844 -> 5791, 5843 -> 5803 for seeds 1
to 4, but 5877 -> 5888 where two walks shared 24 s. Other unlike stages gain little (6, 8, 24: 13911 -> 13896) or none.
With equal times the policies leave a slot at most, and windows do not find it (D, P, m = 8, 8, 32 and 4, 4, 8 at cap P;
nor at measured times, 8, 8, 32: 12121). At 16, 16, 64 hardly any window could gain: beyond `search.WINDOWS_UP_TO`
operations none is tried.
"""

from __future__ import annotations

from math import isinf, sqrt
from random import Random
from types import TracebackType

import numpy as np

from recycle.solve import disjunctive
from recycle.solve.anneal import Annealed
from recycle.solve.child import Child
from recycle.solve.deadline import Deadline
from recycle.solve.engines import Solver
from recycle.solve.problem import Order, Problem
from recycle.solve.standing import Standing, stand
from recycle.solve.window import MOST_BINARIES, TooLarge, Window, gain, window

NODES = 50
"""Branch and bound nodes per window, at most."""
DRAWS = 100
"""Windows drawn for each one that is solved, at most; most could gain nothing."""
SECONDS, PATIENT_SECONDS, GRACE_SECONDS = 0.5, 60.0, 5.0
"""Per window against the clock, and without one; what the child may take on top before it is killed."""
_SLACK = 1e-9


class Windows:
    """Solves window after window in one child process, which ends with the `with` block."""

    def __init__(
        self,
        problem: Problem,
        *,
        solver: Solver = "HiGHS",
        most: int = MOST_BINARIES,
        nodes: int = NODES,
        often: bool = False,
    ) -> None:
        self.problem, self.solver, self.most, self.nodes, self.often = problem, solver, most, nodes, often
        self.child = Child(disjunctive.__name__)
        self.spans: dict[tuple[str, int, bool], float] = {}
        self.is_broken = False

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.child.kill()

    def better(
        self,
        order: Order,
        due: list[float],
        target: float,
        *,
        count: int,
        patience: int,
        seed: int,
        deadline: Deadline | None = None,
    ) -> Annealed:
        """The order after `count` windows, or after `patience` in a row that gain nothing; never later in sum.

        Returns:
            `steps` is the number of windows solved; `due` may have moved.
        """
        random, solved, idle, deadline = Random(seed), 0, 0, deadline or Deadline(None)
        standing = stand(self.problem, order, due, target, self.often)
        while solved < count and idle < patience and standing.cost > 0 and not deadline.is_over and not self.is_broken:
            due, standing = self._shifted(standing, due, target, random)
            if standing.cost == 0:
                break
            drawn = self._drawn(standing, random, deadline)
            if drawn is None:
                break
            before, solved = standing.cost, solved + 1
            standing = self._solved(standing, drawn, due, target, deadline)
            idle = idle + 1 if standing.cost == before else 0
        return Annealed(standing.order, due, standing.cost <= _SLACK, solved)

    def _shifted(
        self, standing: Standing, due: list[float], target: float, random: Random
    ) -> tuple[list[float], Standing]:
        """Due times moved one at a time where that makes nobody later in sum; a new place to draw windows from."""
        problem, ranks = self.problem, self.problem.shape.ranks
        quantum = max(problem.grain, problem.unit / 4)
        for _ in range(2 * ranks if problem.staggered else 0):
            rank = random.randrange(ranks)
            latest = float(standing.late[rank::ranks].max())
            shift = random.choice((-quantum, quantum, latest, -float(standing.late.max())))
            if shift:
                moved = [*due[:rank], due[rank] + shift, *due[rank + 1 :]]
                after = stand(problem, standing.order, moved, target, self.often)
                if after.cost <= standing.cost:
                    due, standing = moved, after
        return due, standing

    def _solved(
        self, standing: Standing, drawn: Window, due: list[float], target: float, deadline: Deadline
    ) -> Standing:
        seconds = PATIENT_SECONDS if isinf(deadline.left) else min(SECONDS, deadline.left)
        request = (drawn.model, self.solver, seconds, self.nodes, gain(self.problem))
        answers, ended = self.child.ask(request, seconds + GRACE_SECONDS, deadline)
        self.is_broken = ended == "solver failed"
        if not answers:
            return standing
        status, _, kept = answers[-1]
        if status not in ("optimal", "feasible"):
            return standing
        order = drawn.ordered(standing, kept)
        if order == standing.order or not self.problem.is_within_caps(order):
            return standing
        after = stand(self.problem, order, due, target, self.often)
        return after if after.cost < standing.cost - _SLACK else standing

    def _drawn(self, standing: Standing, random: Random, deadline: Deadline) -> Window | None:
        for _ in range(DRAWS):
            drawn = None if deadline.is_over else self._draw(standing, random)
            if drawn:
                return drawn
        return None

    def _draw(self, standing: Standing, random: Random) -> Window | None:
        """A window around an operation that makes somebody late; None if it could gain nothing."""
        shape = self.problem.shape
        slack = standing.latest(standing.deadline) - standing.begin
        critical = np.flatnonzero(slack < -_SLACK / 2)
        x = int(critical[random.randrange(len(critical))])
        in_turn, way = random.random() < 0.5, random.choice(("stages", "pipelines"))
        of = shape.ranks if way == "stages" else shape.pipelines
        width = 1 + random.randrange(of)
        first = max(0, min(of - width, int(standing.host[x]) % shape.ranks - random.randrange(width)))
        pipeline = int(standing.host[x]) // shape.ranks
        if way == "stages":
            freed = {w for w in range(shape.worker_count) if first <= w % shape.ranks < first + width}
        else:
            others = random.sample([k for k in range(of) if k != pipeline], width - 1)
            freed = {w for w in range(shape.worker_count) if w // shape.ranks in (pipeline, *others)}
        share, key = random.random(), (way, width, in_turn)
        span = self.spans.get(key, self.problem.unit * sqrt((6 if in_turn else 3) * self.most / len(freed)))
        middle = float(standing.begin[x])
        for _ in range(6):
            try:
                drawn = window(
                    standing, freed, middle - share * span, middle + (1 - share) * span, in_turn=in_turn, most=self.most
                )
            except TooLarge:
                span *= 0.75
                continue
            break
        else:
            drawn = None
        self.spans[key] = span * (1.5 if drawn and drawn.model.binaries < 0.7 * self.most else 1.0)
        return drawn
