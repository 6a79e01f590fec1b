"""When layers move: what saving is worth which pause, and what a worker that changes its stage becomes."""

from __future__ import annotations

from recycle import Worker
from recycle.exec.planning.layouts import copy_time, is_worth
from recycle.ir.check import check
from recycle.ir.simulate import simulate
from recycle.plans import Move
from recycle.plans.hosting import Hosts
from recycle.plans.plan import in_process_names
from recycle.solve.planner import plan
from tests.exec.runs import job


def test_moving_pays_when_its_saving_until_the_next_change_is_more_than_its_pause() -> None:
    assert is_worth(10.0, 9.0, pause=99.0, until_change=1000.0)
    assert not is_worth(10.0, 9.0, pause=100.0, until_change=1000.0)
    assert not is_worth(10.0, 10.0, pause=0.0, until_change=1000.0)
    assert not is_worth(10.0, 11.0, pause=-1e9, until_change=1000.0)


def test_sources_send_at_the_same_time_and_each_one_after_the_other() -> None:
    moves = (
        Move("1.0", "1.0", "0.1", 8.0, (2, 3), 3.0),
        Move("2.0", "2.0", "0.1", 8.0, (2, 3), 3.0),
        Move("0.0", "0.0", "2.1", 8.0, (2, 3), 5.0),
    )
    assert copy_time(moves) == 6.0
    assert copy_time(()) == 0.0


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
