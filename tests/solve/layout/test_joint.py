"""Routes as one schedule: valid, every unit in one stage, and as fast as the order says."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from recycle.ir.check import check
from recycle.ir.lower import lower
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import simulate
from recycle.job.profile import Profile
from recycle.job.shape import Shape, Worker
from recycle.solve.effort import Deadline
from recycle.solve.layout.route_search import best_order, legs_of
from recycle.solve.layout.routes import joint_schedule, routes_of
from recycle.solve.layout.units import Units
from recycle.solve.problem_arrays import Operations
from tests.solve.layout.spans import spans

SHAPE = Shape(2, 3, 6)
UNITS = Units(
    (2, 2, 2),
    {name: np.ones(6) for name in ("forward", "backward_input", "backward_weight", "static", "activation")},
    False,
    4.0,
)
WORKERS = [Worker(0, 0), Worker(0, 1), Worker(0, 2), Worker(1, 0), Worker(1, 2)]
CHAINS = np.array([[7, 7, 0, 0, 0, 0], [0, 0, 7, 7, 0, 0], [0, 0, 0, 0, 7, 7], [5, 5, 5, 0, 0, 0], [0, 0, 0, 5, 5, 5]])
HELPED = np.array([[8, 6, 0, 0, 0, 0], [0, 3, 9, 3, 0, 0], [0, 0, 0, 2, 6, 7], [4, 3, 3, 0, 0, 0], [0, 0, 0, 7, 6, 5]])


def made(
    quotas: Operations, split: bool = True, cap: float = 6.0, optimizer: Literal["staggered", "barrier"] = "staggered"
) -> Schedule:
    routes = routes_of(WORKERS, quotas, [worker.pipeline for worker in WORKERS], spans(quotas))
    legs = legs_of(routes, UNITS, Profile(), SHAPE, [cap] * len(routes.workers), split=split, in_bytes=False)
    order = best_order(routes, legs, UNITS, Deadline(None))
    assert order is not None
    names = routes.names(SHAPE)
    return joint_schedule(SHAPE, routes, order.programs, names, [Worker(1, 1)], optimizer, split=split)


@pytest.mark.parametrize("optimizer", ["staggered", "barrier"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("quotas", [CHAINS, HELPED], ids=["chains", "helped"])
def test_it_is_valid_and_reads_back(
    quotas: Operations, split: bool, optimizer: Literal["staggered", "barrier"]
) -> None:
    schedule = made(quotas, split, optimizer=optimizer)
    assert check(lower(schedule), limits=[6.0] * 3) == []
    assert Schedule.loads(schedule.dumps()) == schedule
    assert schedule.shape.units == 6
    assert schedule.failed == {Worker(1, 1)}


def test_stages_lie_between_the_cuts_of_any_worker() -> None:
    schedule = made(CHAINS)
    assert schedule.shape.cut == (2, 1, 1, 2)
    assert [schedule.stages_of(worker) for worker in WORKERS] == [(0,), (1, 2), (3,), (0, 1), (2, 3)]
    assert schedule.hosts(1) == [Worker(0, 1), Worker(1, 0)]


def test_a_worker_runs_a_leg_downwards_and_back_upwards() -> None:
    schedule = made(CHAINS)
    program = [str(one) for one in schedule.program(Worker(1, 0))]
    first = program[0].split("F")[1]
    assert program[:2] == [f"0F{first}", f"1F{first}"]
    assert program.index(f"1I{first}") == program.index(f"0I{first}") - 1
    assert program[-4:] == ["0REDUCE_GRAD", "0STEP", "1REDUCE_GRAD", "1STEP"]


def test_activations_count_by_the_units_of_their_stage() -> None:
    """A fault-free stage has two units, and three micro-batches of three units count 4.5."""
    schedule = made(CHAINS, cap=4.5)
    assert max(peak for peak in simulate(schedule).peak_activations if peak) <= 4.5
