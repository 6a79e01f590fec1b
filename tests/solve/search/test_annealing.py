from dataclasses import replace

import pytest

from recycle import Worker, check, simulate
from recycle.ir.compiled import run
from recycle.solve.problem import Problem
from recycle.solve.search import annealing
from recycle.solve.search.annealing import anneal, relabel_by_index
from recycle.solve.search.list_scheduling import schedule_by_policy
from recycle.solve.search.order_kernels import NEVER, forward_pass, initial_state, time_order
from tests.solve.jobs import job

HOT = 20.0
"""Temperature at which nearly every move is accepted."""


def slow(problem, worker, factor):
    """The problem with one worker slower than its peers."""
    speed = list(problem.speed)
    speed[worker] = factor
    return replace(problem, speed=tuple(speed))


PROBLEMS = [
    Problem.from_job(job(3, 3, 4, 4), [Worker(1, 1)]),
    Problem.from_job(job(3, 3, 4, 3, link=2.0), [Worker(1, 1), Worker(2, 2)]),
    Problem.from_job(job(3, 3, 4, link=1.0, decoupled=False, staggered=False), [Worker(1, 1)]),
    Problem.from_job(job(2, 2, 4, 4, chunks=2, link=1.0), [Worker(1, 1)]),
    Problem.from_job(job(2, 1, 4, 4, chunks=2, link=1.0)),
    slow(Problem.from_job(job(3, 2, 4, 3, link=0.5)), 2, 3.0),
    Problem.from_job(job(1, 4, 8, 3, link=0.5)),
    Problem.from_job(job(1, 2, 6, 4, chunks=2, link=2.5)),
]


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_partial_timing_equals_a_full_pass_and_moves_keep_orders_valid(number, monkeypatch):
    """A step times only what may have changed; at the end all times must equal the times of a full pass."""
    problem, ends = PROBLEMS[number], []
    monkeypatch.setattr(annealing, "run", lambda *arguments: ends.append(run(*arguments)) or ends[-1])
    for seed in range(3):
        order = schedule_by_policy(problem)
        timing = time_order(problem, order)
        target = timing.period - 9
        result = anneal(problem, order, timing.due, target, steps=700, seed=seed, wide=seed == 1, hot=HOT, cold=HOT)
        assert result.order != order
        assert not result.met
        *_, stands, round_of = ends.pop()
        state = initial_state(problem, result.order)
        release = [round_of.due[w % problem.shape.ranks] - round_of.target for w in range(problem.shape.worker_count)]
        state.release[:] = release
        count, *_, state, _, _ = run(forward_pass, 0, problem.arrays, state, -NEVER, 0)
        assert count == problem.size
        assert list(state.new_begin) == list(stands.begin)
        assert list(state.new_end) == list(stands.end)
        sent = [x for x in range(problem.size) if (y := problem.feeds[x]) >= 0 and state.host[y] != state.host[x]]
        limits = [cap for cap in problem.cap[: problem.shape.ranks] if cap < float("inf")]
        assert check(problem.schedule(result.order), limits=limits or None) == []
        assert (problem.link == 0) or [state.new_arrival[x] for x in sent] == [stands.arrival[x] for x in sent]


def test_micro_batches_of_a_single_pipeline_stay_in_index_order():
    """The start exchanges two micro-batches of one stage; the result has each kind and stage in index order."""
    problem = Problem.from_job(job(1, 4, 8, 3))
    order = schedule_by_policy(problem)
    other = {x: y for kind in range(3) for x, y in [(kind * 32 + 16, kind * 32 + 17), (kind * 32 + 17, kind * 32 + 16)]}
    mixed = [[other.get(x, x) for x in program] for program in order]
    assert relabel_by_index(problem, mixed) == order != mixed
    timing = time_order(problem, order)
    for seed in range(4):
        result = anneal(problem, mixed, timing.due, timing.period - 9, steps=700, seed=seed, hot=HOT, cold=HOT)
        assert result.order != order
        assert relabel_by_index(problem, result.order) == result.order


def test_target_is_met_only_if_all_lanes_finish_within_it():
    """Each lane carries 18 transfers of 2.5 per iteration, so that no order is faster than 45."""
    priced = job(1, 2, 6, chunks=2, link=2.5)
    problem = Problem.from_job(priced)
    order = schedule_by_policy(problem)
    timing = time_order(problem, order)
    result = anneal(problem, order, timing.due, 44.0, steps=3000, seed=3, hot=0.3, cold=0.05)
    assert not result.met
    assert simulate(problem.schedule(result.order), priced.profile()).period >= 45
