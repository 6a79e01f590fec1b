from recycle.job.profile import Profile
from recycle.job.shape import Worker
from recycle.solve.problem import Problem
from recycle.solve.search.race import without_slow
from tests.solve.jobs import job


def left_out(speed, **other):
    problem = Problem.of(job(4, 2, 4, **other), [Worker(3, 1)], Profile(speed=speed))
    return [set(one.dead - problem.dead) for one in without_slow(problem)]


def test_all_slow_workers_are_left_out_and_each_alone_the_slowest_first():
    a, b = Worker(0, 0), Worker(1, 1)
    assert left_out({"0.0": 1.5, "1.1": 2.0}) == [{a, b}, {b}, {a}]
    assert left_out({"0.0": 1.5}) == [{a}]


def test_what_is_slower_than_the_median_is_slow():
    assert left_out({"0.0": 0.5}) == []
    assert left_out({"0.0": 1.5, "1.0": 1.5, "2.0": 1.5, "3.0": 1.5}) == []


def test_nobody_is_left_out_where_all_are_alike_or_nothing_is_re_routed():
    assert left_out({}) == []
    problem = Problem.of(job(2, 2, 4, reroute=False), (), Profile(speed={"0.0": 2.0}))
    assert without_slow(problem) == []
