"""What every family owes for every shape: a refusal by name, or a schedule in which the checker finds nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES
from tests.ir.families.chunks import chunks_of


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Shape]:
    """A family and a shape, mostly with a number of chunks that the family takes."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    chunks = draw(st.sampled_from([chunks_of(family)] * 4 + [1, 2, 3]))
    return family, Shape(draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 14)), chunks)


def built(family: str, shape: Shape) -> Schedule | str:
    """The schedule, or the message with which the family refuses the shape."""
    try:
        return FAMILIES[family](shape)
    except ScheduleError as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_shape_is_refused_in_one_line_or_gives_a_valid_schedule(
    case: tuple[str, Shape],
) -> None:
    family, shape = case
    schedule = built(family, shape)
    if isinstance(schedule, str):
        assert schedule.startswith(f"{family}: needs ")
        assert "\n" not in schedule
        return
    assert schedule.metadata["family"] == family
    assert check(schedule) == []
    lowered = lower(schedule)
    assert check(lowered, about_to_run=True) == []


@settings(max_examples=40, deadline=None)
@given(cases())
def test_d_pipelines_give_the_figures_of_one(case: tuple[str, Shape]) -> None:
    family, shape = case
    one, many = built(family, Shape(1, shape.ranks, shape.micro_batches, shape.chunks)), built(family, shape)
    if isinstance(one, str) or isinstance(many, str):
        assert one == many
        return
    alone, together = simulate(one), simulate(many)
    assert (together.makespan, together.period) == (alone.makespan, alone.period)
    assert together.inner_bubble == alone.inner_bubble * shape.pipelines
    assert together.peak_activations == alone.peak_activations * shape.pipelines


@settings(max_examples=30, deadline=None)
@given(cases())
def test_the_same_shape_gives_the_same_order_whatever_the_optimizer(case: tuple[str, Shape]) -> None:
    family, shape = case
    first, second = built(family, shape), built(family, shape)
    assert first == second
    if isinstance(first, Schedule):
        barrier = FAMILIES[family](shape, optimizer="barrier")
        assert (barrier.optimizer, first.optimizer) == ("barrier", "staggered")
        assert barrier.columns == first.columns


def test_every_family_takes_a_shape_with_its_chunks() -> None:
    for family in FAMILIES:
        assert isinstance(built(family, Shape(2, 3, 6, chunks_of(family))), Schedule)
