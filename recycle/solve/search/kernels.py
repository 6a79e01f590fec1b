"""When a search loads the compiled kernels."""

from __future__ import annotations

from recycle.ir.compiled import load
from recycle.solve.deadline import Deadline
from recycle.solve.problem import Problem
from recycle.solve.search.event_loop import list_schedule
from recycle.solve.search.order_kernels import anneal_order, time_from_idle

WORTH_COMPILING, WORTH_COMPILING_FOR = 5.0, 200_000
"""Seconds that must be left, and operations times orders made, for compiling to pay even when no code is cached."""


def load_if_worth_it(problem: Problem, orders: int, deadline: Deadline) -> None:
    """Load the compiled kernels if so many orders may be made and timed until the deadline that this pays."""
    if deadline.left > WORTH_COMPILING and problem.size * orders > WORTH_COMPILING_FOR:
        load(list_schedule, time_from_idle, anneal_order)
