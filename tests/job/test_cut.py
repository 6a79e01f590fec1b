"""A cut of the model has the prices of the fault-free stages that its units come from."""

import random
from itertools import accumulate, combinations, pairwise

import pytest

from recycle import Job, JobError, Profile, Shape
from recycle.job.cut import balanced, profile_of_cut, units_of
from recycle.plans.hosting import layers_of


def test_numbers_are_spread_evenly_over_units():
    cut = profile_of_cut(Profile(2.0, 4.0, 6.0, step=1.0, message=7.0, workspace=5.0), Shape(1, 2, 3, cut=(1, 4, 3)))
    assert cut.forward == [0.5, 2.0, 1.5]
    assert cut.backward_weight == [1.5, 6.0, 4.5]
    assert (cut.step, cut.activation) == ([0.25, 1.0, 0.75], [0.25, 1.0, 0.75])
    assert (cut.message, cut.workspace) == ([7.0] * 3, [5.0] * 3)


def test_lists_are_summed_over_their_units():
    """Of stages with 3 and 5 units, the second part has one unit of the first and three of the second."""
    prices = Profile([3.0, 10.0], [3.0, 10.0], [3.0, 10.0], message=[1.0, 2.0], workspace=[8.0, 9.0])
    cut = profile_of_cut(prices, Shape(1, 2, 1, cut=(2, 4, 2)), (3, 5))
    assert cut.forward == [2.0, 1.0 + 6.0, 4.0]
    assert cut.message == [1.0, 2.0, 2.0]
    assert cut.workspace == [8.0, 9.0, 9.0]


def test_lists_over_the_cut_are_kept():
    shape = Shape(1, 2, 1, cut=(1, 1, 2))
    once = profile_of_cut(Profile(2.0, 2.0, 2.0), shape)
    assert profile_of_cut(once, shape) == once
    assert profile_of_cut(Profile(3.0), Shape(1, 2, 1)) == Profile(3.0)


def test_units_that_do_not_add_up_are_refused():
    with pytest.raises(JobError, match="the cut has 4 units, the fault-free stages 5"):
        profile_of_cut(Profile(), Shape(1, 2, 1, cut=(2, 2)), (2, 3))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_lighter_heaviest_part(seed):
    chance = random.Random(seed)
    weights = tuple(chance.choice([1.0, 1.0, 2.5, 4.0]) for _ in range(chance.randint(3, 9)))
    parts = chance.randint(1, len(weights))
    sizes = balanced(weights, parts)
    assert len(sizes) == parts
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 1

    def heaviest(ends):
        return max(sum(weights[a:b]) for a, b in pairwise([0, *ends, len(weights)]))

    least = min(heaviest(ends) for ends in combinations(range(1, len(weights)), parts - 1))
    assert heaviest(tuple(accumulate(sizes))[:-1]) == pytest.approx(least)


def test_equal_layers_are_divided_evenly():
    assert balanced((1.0,) * 10, 4) == (2, 3, 2, 3)
    with pytest.raises(JobError, match=r"3 layer\(s\) cannot be cut into 4 stages"):
        balanced((1.0,) * 3, 4)


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("[shape]\npipelines = 2\nmicro_batches = 4\nranks = 2", (2, 2)),
        ("[shape]\npipelines = 2\nmicro_batches = 4\nranks = 8", (1,) * 8),
        ("[shape]\npipelines = 2\nmicro_batches = 4\nranks = 2\n[model]\nlayers = 6", (3, 3)),
        ('[shape]\npipelines = 2\nmicro_batches = 4\nranks = 3\n[model]\nkind = "emulated"', (1, 1, 1)),
    ],
)
def test_units_of_jobs(text, units):
    job = Job.from_toml(text)
    assert units_of(job) == units
    assert layers_of(job) == list(units)


def test_layers_of_a_real_model_that_do_not_divide_are_refused():
    with pytest.raises(JobError, match="layers"):
        units_of(Job.from_toml("[shape]\npipelines = 2\nmicro_batches = 4\nranks = 3\n[model]\nlayers = 8"))
