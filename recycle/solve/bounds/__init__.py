"""Lower bounds on the period for any assignment to live hosts and any order, so that a plan can report its gap.

closed_forms  load, memory and paths through the ranks
fluid         a linear program over a few stages, which raises the closed forms

`RisingBound` computes the bound in a thread during a search and ends the search once the bound is met.

Whole times make whole bounds. Each bound is about E_s - S_s of one stage, or about the makespan. Starts counted from
S_s and rounded down are still a schedule. So the smallest value is whole, and a proven bound may be rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from threading import Thread
from types import TracebackType

from recycle.solve.bounds import closed_forms, fluid
from recycle.solve.bounds.bound import Bound
from recycle.solve.constants import ALL_STAGES
from recycle.solve.effort import Deadline, is_met
from recycle.solve.problem import Problem


def lower_bound(problem: Problem, deadline: Deadline | None = None) -> Bound:
    """Return the best proven bound (with the barrier: on the makespan) from what is solved by the deadline."""
    return max(rising_bounds(problem, deadline))


def rising_bounds(problem: Problem, deadline: Deadline | None = None) -> Iterator[Bound]:
    """Yield proven lower bounds as they are found, ascending, the closed form first."""
    counted = problem.in_bound_units()
    bound = max(closed_forms.loads_and_detours(counted), closed_forms.lanes(counted))
    for higher in fluid.rising_bounds(counted, bound, _chains(counted), deadline or Deadline(None)):
        yield higher.in_units(problem.bound_unit)


def closed_form(problem: Problem) -> Bound:
    """Return the bound without linear programs: weaker, in a hundredth of the time.

    If workers are alike, the bound for dead workers on several ranks is the maximum of the bounds of each rank alone.
    """
    return closed_forms.loads_and_detours(problem.in_bound_units()).in_units(problem.bound_unit)


def even_load(problem: Problem) -> float:
    """Return the work of the busiest rank, spread evenly over its hosts: a weaker bound, which takes microseconds."""
    return max(closed_forms.work(problem, r) + update for r, update in enumerate(problem.rank_update_seconds))


def _chains(problem: Problem) -> list[tuple[int, ...]]:
    shape, ranks = problem.shape, range(problem.shape.ranks)
    detours = closed_forms.detours(problem)
    if shape.stages <= ALL_STAGES:
        chains = [tuple(ranks), max(detours)[1:]]
    else:
        _, _, longest = max(detour for detour in detours if detour[1] == 0)
        loaded = max(ranks, key=lambda r: closed_forms.work(problem, r))
        held = max(ranks, key=lambda r: closed_forms.slot_time(problem, r))
        chains = [(0, longest), (0, loaded), (0, held), max(detours)[1:], (held,)]
        chains = chains if shape.chunks == 1 else chains[::-1]
    return [
        tuple(s for s in range(shape.stages) if shape.rank_of(s) in chosen)
        for chosen in dict.fromkeys(map(frozenset, chains))
    ]


class RisingBound:
    """The best proven bound `value` so far; a `Stop` that is set once the best period meets it."""

    def __init__(self, problem: Problem, deadline: Deadline, *, is_first: bool = False) -> None:
        """Prepare the thread, which `__enter__` starts.

        Args:
            deadline: limit of the linear programs; its `stop` also ends the search.
            is_first: compute the bound at once, without a thread.
        """
        self.value: Bound = lower_bound(problem, deadline) if is_first else closed_form(problem)
        self._problem, self._deadline = problem, deadline
        self._best = inf
        self._is_over = is_first
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._raise, name="bound", daemon=True)

    def __enter__(self) -> RisingBound:
        if not self._is_over:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the current linear program, and raise an error of the thread."""
        self._is_over = True
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def report_period(self, period: float) -> None:
        self._best = min(self._best, period)

    def is_set(self) -> bool:
        stop = self._deadline.stop
        return is_met(self._problem, self._best, self.value) or (stop is not None and stop.is_set())

    def until(self, deadline: Deadline) -> Deadline:
        """Return the deadline, which also ends when the bound is met."""
        return Deadline(deadline.seconds_left, self)

    def _raise(self) -> None:
        try:
            for bound in rising_bounds(self._problem, self.until(self._deadline)):
                self.value = max(self.value, bound)
                if self._is_over:
                    break
        except BaseException as failure:
            self._failure = failure
