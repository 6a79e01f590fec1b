import numpy as np

from recycle.solve.bounds import grids
from recycle.solve.problem import Problem
from tests.solve.jobs import job


def test_a_grid_that_is_fine_at_both_ends_holds_the_whole_window():
    problem = Problem.of(job(16, 16, 64, 16))
    times = grids.fine_at_ends(problem, 208.0)
    steps = np.diff(times)
    assert (times[0], times[-1], len(times)) == (0.0, 208.0, 3 * grids.POINTS - 2)
    assert set(steps[:39].round(9)) == set(steps[-39:].round(9)) == {1.0}
    assert 3 < steps[45] < 4
    assert not grids.is_exact(problem, 208.0)
    assert grids.is_exact(Problem.of(job(2, 2, 4)), 24.0)


def test_an_aligned_grid_has_even_steps_of_which_the_lags_are_whole_numbers():
    problem = Problem.of(job(2, 4, 8))
    times = grids.aligned(problem, 1000.0, 120, [47.0, 23.5])
    steps = np.diff(times)
    assert (times[0], times[-1]) == (0.0, 1000.0)
    assert 60 < len(times) <= 120
    assert np.ptp(steps[:-1]) < 1e-9
    lost = np.array([47.0, 23.5]) % steps[0]
    assert (np.minimum(lost, steps[0] - lost) < 0.1).all()
    assert grids.aligned(problem, 24.0, 120, [5.0]).tolist() == list(range(25))
