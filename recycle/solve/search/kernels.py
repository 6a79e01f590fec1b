"""When a search loads the compiled kernels."""

from __future__ import annotations

from recycle.ir.compiled import is_cached, load
from recycle.solve.deadline import Deadline
from recycle.solve.problem import Problem
from recycle.solve.search.building_blocks import anneal_block
from recycle.solve.search.event_loop import list_schedule
from recycle.solve.search.order_kernels import anneal_order, time_from_idle

WORTH_COMPILING, WORTH_LOADING, WORTH_COMPILING_FOR = 5.0, 2.0, 200_000
"""Seconds that must be left for compiling to pay, and for loading what has been compiled before; and operations times
orders made for either."""
_KERNELS = (list_schedule, time_from_idle, anneal_order, anneal_block)


def load_if_worth_it(problem: Problem, orders: int, deadline: Deadline) -> None:
    """Load the compiled kernels if so many orders may be made and timed until the deadline that this pays."""
    enough = WORTH_LOADING if is_cached(*_KERNELS) else WORTH_COMPILING
    if deadline.left > enough and problem.size * orders > WORTH_COMPILING_FOR:
        load(*_KERNELS)
