"""A bound that a thread raises while its problem is searched, and that ends the search once it is met.

The linear programs of a bound take as long as a good part of a search, and the solver as well as the compiled searches
run without the interpreter's lock, so that both get the whole time on two cores. On one they share it.
"""

from __future__ import annotations

from math import inf
from threading import Thread
from types import TracebackType

from recycle.solve.bounds import closed_form, lower_bound, rising_bounds
from recycle.solve.deadline import Deadline
from recycle.solve.effort import is_met
from recycle.solve.problem import Problem


class RisingBound:
    """The best bound so far; a `Stop` that is set once the best period so far meets it.

    Attributes:
        value: a proven lower bound on the period.
    """

    def __init__(self, problem: Problem, deadline: Deadline, *, is_first: bool = False) -> None:
        """
        Args:
            deadline: for the linear programs, and whoever stops it stops the search as well.
            is_first: the bound is worked out at once and does not rise any more.
        """
        self.value = lower_bound(problem, deadline) if is_first else closed_form(problem)
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
        """Wait for the linear program that is being solved.

        Raises:
            BaseException: what went wrong in the thread.
        """
        self._is_over = True
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def found(self, period: float) -> None:
        """Tell that an order has this period."""
        self._best = min(self._best, period)

    def is_set(self) -> bool:
        stop = self._deadline.stop
        return is_met(self._problem, self._best, self.value) or (stop is not None and stop.is_set())

    def until(self, deadline: Deadline) -> Deadline:
        """The deadline, which ends as well when the bound is met."""
        return Deadline(None if deadline.end is None else deadline.left, self)

    def _raise(self) -> None:
        try:
            for bound in rising_bounds(self._problem, self.until(self._deadline)):
                self.value = max(self.value, bound)
                if self._is_over:
                    break
        except BaseException as failure:
            self._failure = failure
