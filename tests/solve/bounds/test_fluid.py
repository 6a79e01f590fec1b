import itertools

import pytest
from hypothesis import given, settings

from recycle.errors import ScheduleError
from recycle.ir.simulate import simulate
from recycle.job.shape import Worker
from recycle.solve.bounds import closed_form, fluid, lower_bound
from recycle.solve.problem import Problem
from recycle.solve.search.list_scheduling import portfolio, schedule_by_policy
from recycle.solve.search.timing import time_order
from tests.solve.exhaustive import every_order
from tests.solve.jobs import DEAD, job, small_jobs, worked_example


def raised(problem, bound, chains):
    """The bound that the fluid through these chains of stages proves, `bound` at least."""
    return max(fluid.rising_bounds(problem, bound, chains))


def window(problem, order, rank):
    """E - S of all stages of a rank; with the barrier, of all together."""
    started = time_order(problem, order).latest_starts.tolist()
    host = {x: w for w, program in enumerate(order) for x in program}
    n, stages = problem.micro_batches, problem.shape.stages
    places = [(x, x // n // stages, x // n % stages) for x in range(problem.size)]
    mine = [place for place in places if place[2] % problem.shape.ranks == rank or not problem.staggered]
    ends = (started[x] + problem.duration(kind, s, host[x]) + problem.update_seconds[s] for x, kind, s in mine)
    return max(ends) - min(started[x] for x, _, _ in mine)


@pytest.mark.search
@settings(max_examples=15, deadline=None)
@given(small_jobs())
def test_every_schedule_fits_through_the_fluid_of_its_own_window(case):
    problem = Problem.of(*case)
    ranks, stages = problem.shape.ranks, problem.shape.stages
    chains = {(0,), tuple(range(stages)), tuple(sorted({0, stages - 1})), tuple(range(0, stages, ranks))}
    if problem.staggered:
        chains |= {tuple(range(ranks // 2, stages)), tuple(range(ranks - 1, stages, ranks))}
    for policy in itertools.islice(portfolio(problem), 3):
        order = schedule_by_policy(problem, policy)
        if time_order(problem, order).period == float("inf"):
            continue  # with several chunks some orders wait for themselves
        for chain in chains:
            for points in (None, 30):
                through = fluid.through(problem, window(problem, order, chain[0]), chain, points)
                assert through >= problem.micro_batches - 1e-6


@pytest.mark.parametrize(("limit", "bound"), [([4, 3, 2, 1], 32), (4, 29), (5, 28), (6, 27)])
def test_two_stages_of_the_worked_example_prove_its_optimum(limit, bound):
    problem = Problem.of(worked_example(limit), [DEAD])
    assert raised(problem, 20.0, [(0, 2)]) == bound
    assert raised(problem, 20.0, [(0, 1, 2, 3)]) == bound
    assert raised(problem, 40.0, [(0, 2)]) == 40.0


def test_one_stage_alone_is_as_good_as_its_load():
    problem = Problem.of(job(1, 1, 5))
    assert fluid.through(problem, 15.0, (0,)) == pytest.approx(5)
    assert fluid.through(problem, 9.0, (0,)) == pytest.approx(3)
    assert raised(problem, 3.0, [(0,)]) == 15.0


def test_the_most_loaded_of_the_peers_has_a_whole_number_of_micro_batches():
    problem = Problem.of(job(3, 1, 2), [Worker(0, 0)])
    assert raised(problem, 1.0, [(0,)]) == 9.0  # 6 for 2 live workers
    assert raised(Problem.of(job(3, 1, 3), [Worker(0, 0)]), 1.0, [(0,)]) == 15.0  # 9 for 2: one has 5


def test_a_program_that_presolve_spoils_is_solved_without():
    times = {"forward": [16, 8, 9], "backward_input": [10, 8, 9], "backward_weight": [14, 11, 7]}
    problem = Problem.of(job(1, 3, 5, 2, **times))
    assert fluid.through(problem, 222.0, (0,)) == pytest.approx(4.85)
    assert raised(problem, 222.0, [(0,)]) == 228


@pytest.mark.parametrize(
    ("shape", "limit", "closed", "bound"),
    [((1, 2, 4), 2, 29, 33), ((1, 4, 8), 2, 105, 108), ((1, 4, 8), 4, 55, 62), ((2, 4, 8), 3, 71, 78)],
)
def test_chunks_of_a_rank_share_its_memory(shape, limit, closed, bound):
    problem, ranks = Problem.of(job(*shape, limit, chunks=2)), shape[1]
    assert closed_form(problem) == closed
    assert raised(problem, closed, [(0, ranks)]) == bound
    assert raised(problem, closed, [(0,)]) == closed


@pytest.mark.search
def test_on_an_aligned_grid_memory_that_is_short_counts_in_full():
    """Of 72 slots a third has nothing to hold until the first micro-batch is at the second chunk, and again at the end;
    the unaligned grid rounds away more of how long activations are held than that."""
    problem = Problem.of(job(8, 11, 14, 3, chunks=2, link=0.05)).in_grains()
    closed = closed_form(problem)
    assert closed == pytest.approx(333.3 * 20)
    assert fluid.through(problem, 345 * 20, (0, 11)) == pytest.approx(112)
    assert fluid.through(problem, 345 * 20, (0, 11), 400) < 111.9


def test_nothing_starts_before_it_can_come_nor_ends_too_late_for_what_follows():
    problem = Problem.of(job(1, 2, 1, forward=[3.0, 1.0], backward_input=[5.0, 1.0], backward_weight=2.0))
    assert raised(problem, 3.0, [(0, 1)]) == 3 + 1 + 1 + 5 + 2


@pytest.mark.parametrize(
    ("shape", "chunks", "link", "bound"),
    [
        ((1, 2, 4), 1, 3, 1 + 4 * 3 + 2 + 3 + 2),  # the fourth activation waits for the lane; F, I; the gradient; I, W
        ((1, 2, 4), 1, 5, 30),
        ((2, 2, 4), 1, 12, 1 + 2 * 12 + 2 + 12 + 2),  # eight over four lanes
        ((1, 2, 2), 2, 3, 30),  # the lane to rank 1 carries activations of stages 0 and 2, and gradients of stage 1
        ((1, 1, 4), 2, 5, 24),  # a worker that hosts all stages transfers nothing
    ],
)
def test_transfers_queue_for_the_lanes_of_their_pairs_of_hosts(shape, chunks, link, bound):
    assert lower_bound(Problem.of(job(*shape, chunks=chunks, link=link))) == bound


@pytest.mark.search
@pytest.mark.parametrize(
    ("shape", "keys", "optimum"),
    [((1, 2, 2), {"link": 3}, 14), ((1, 2, 1), {"chunks": 2, "link": 2}, 21)],
)
def test_no_bound_of_lanes_is_above_the_optimum_of_an_exhaustive_search(shape, keys, optimum):
    made = job(*shape, **keys)
    problem = Problem.of(made)
    best = min(simulated(problem.schedule(order), made.prices) for order in every_order(problem))
    assert lower_bound(problem) <= best == optimum


def simulated(schedule, prices):
    """The period; infinite when the schedule can never finish."""
    try:
        return simulate(schedule, prices).period
    except ScheduleError:
        return float("inf")


def test_with_the_barrier_only_chains_from_stage_0_on_count():
    assert raised(Problem.of(job(1, 2, 2, staggered=False)), 3.0, [(1,)]) == 3.0
