"""When layers move: what is copied, which saving is worth which pause, and what a worker that changes stage becomes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from recycle import Worker
from recycle.exec.leader.plans import copy_cost, is_worth
from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.plans.hosting import Hosts
from recycle.plans.plan import in_process_names
from recycle.solve.planner import plan
from tests.exec.runs import job


def test_moving_pays_when_its_saving_until_the_next_change_is_more_than_its_pause() -> None:
    assert is_worth(10.0, 9.0, pause=99.0, until_change=1000.0)
    assert not is_worth(10.0, 9.0, pause=100.0, until_change=1000.0)
    assert not is_worth(10.0, 10.0, pause=0.0, until_change=1000.0)
    assert not is_worth(10.0, 11.0, pause=-1e9, until_change=1000.0)


def test_a_worker_that_changes_its_stage_runs_its_new_program_under_its_own_name() -> None:
    of = job(4, 2, 8, planner={"move": True, "seconds": 0.5})
    made = plan(of, [Worker(1, 1), Worker(2, 1)], seconds=0.5)
    (move,) = made.moves
    schedule = in_process_names(made)
    mover = Worker.parse(move.worker)
    assert mover.rank == 0
    assert schedule.failed == {Worker(1, 1), Worker(2, 1)}
    assert schedule.stages_of(mover) == (1,)
    assert Hosts.of_schedule(of, schedule).units[mover] == Hosts.at_start(of, None).units[Worker(0, 1)]
    assert check(schedule) == []
    assert simulate(schedule, of.prices).period == made.period


def test_each_source_sends_what_others_lack_one_after_the_other_and_all_at_the_same_time() -> None:
    """Three pipelines, eight layers, a byte of state for each tenth of a layer, and five bytes in a unit of time."""
    of = job(3, 2, 4, model={"layers": 8})
    of = msgspec.structs.replace(of, prices=replace(of.prices, static=40.0, bandwidth=5.0))
    now = Hosts.of(of, {Worker(0, 0): (0,), Worker(0, 1): (1,), Worker(1, 0): (0,)})
    then = Hosts.of(of, {Worker(0, 0): (0,), Worker(0, 1): (1, 2), Worker(1, 0): (0, 1)}, (3, 2, 3))
    assert copy_cost(of, now, then) == (20.0, 2.0)  # layer 3 from 0.0 to 0.1, layer 4 from 0.1 to 1.0
    assert copy_cost(of, then, then) == (0.0, 0.0)
    more = Hosts.of(of, then.stages | {Worker(1, 0): (1, 2)}, (3, 2, 3))
    assert copy_cost(of, now, more) == (50.0, 8.0)  # layers 4 to 7 from 0.1
