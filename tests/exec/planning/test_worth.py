"""When layers move: what is copied, which saving is worth which pause, and what a worker that changes stage becomes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from recycle import Worker
from recycle.exec.leader.worth import copy_time, is_worth, moves_between
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


def test_what_is_copied_is_what_a_worker_has_not_yet_from_whoever_has_it() -> None:
    """Two pipelines of two stages, eight layers, a byte of state and of bandwidth for each of a stage's four layers."""
    of = job(2, 2, 4, model={"layers": 8})
    of = msgspec.structs.replace(of, prices=replace(of.prices, static=40.0, bandwidth=5.0))
    now = Hosts.of(of, {Worker(0, 0): (0,), Worker(0, 1): (1,), Worker(1, 0): (0,)})
    cut = (3, 2, 3)
    then = Hosts.of(of, {Worker(0, 0): (0,), Worker(0, 1): (1, 2), Worker(1, 0): (0, 1)}, cut)
    moves = moves_between(of, now, then)
    assert [(m.worker, m.source, m.units, m.bytes) for m in moves] == [
        ("0.1", "0.0", (3, 4), 10.0),
        ("1.0", "0.1", (4, 5), 10.0),
    ]
    assert [m.seconds for m in moves] == [2.0, 2.0]
    assert copy_time(moves) == 2.0
    assert moves_between(of, then, then) == ()
