"""Units: which of them a stage is made of, and which each worker of a schedule hosts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle import JobError, Schedule, Shape, Worker
from recycle.ir.families import one_f_one_b, zb_v
from recycle.plans.hosting import Hosts, UnitRange, joined, layers_in, layers_of, stage_units, stages_by_rank, without
from tests.exec.runs import job

CUT = Shape(2, 2, 1, cut=(1, 2, 1))
CHAIN = {"0.0": [0], "1.0": [1], "0.1": [2]}


def units(ranges: tuple[UnitRange, ...]) -> set[int]:
    return {unit for begin, end in ranges for unit in range(begin, end)}


def test_the_embedding_goes_with_the_first_stage_and_the_head_with_the_last() -> None:
    assert stage_units([2, 2]) == [(0, 3), (3, 6)]
    assert stage_units([3]) == [(0, 5)]
    assert stage_units([0, 2, 0, 1]) == [(0, 1), (1, 3), (3, 3), (3, 5)]
    assert [layers_in(of, 6) for of in stage_units([2, 2])] == [(0, 2), (2, 4)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_every_unit_is_in_one_stage(layers: list[int]) -> None:
    found = [unit for begin, end in stage_units(layers) for unit in range(begin, end)]
    assert found == list(range(sum(layers) + 2))


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6).map(joined)


@given(RANGES, RANGES)
def test_ranges_are_sets_of_units_in_as_few_pieces_as_can_be(
    one: tuple[UnitRange, ...], other: tuple[UnitRange, ...]
) -> None:
    left = without(one, other)
    assert units(left) == units(one) - units(other)
    assert units(joined([*one, *other])) == units(one) | units(other)
    assert all(first[1] < second[0] for first, second in pairwise(left))


def test_neighbouring_stages_of_a_worker_are_one_range() -> None:
    of = job(2, 2, 1, model={"layers": 4})
    schedule = Schedule.from_text(CUT, {}, placement={"0.0": [0, 1], "0.1": [2], "1.0": [0], "1.1": [1, 2]})
    assert Hosts.of_schedule(of, schedule).units == {
        Worker(0, 0): ((0, 4),),
        Worker(0, 1): ((4, 6),),
        Worker(1, 0): ((0, 2),),
        Worker(1, 1): ((2, 6),),
    }
    assert [schedule.unit_runs(worker) for worker in schedule.live] == [((0, 3),), ((3, 4),), ((0, 1),), ((1, 4),)]


def test_chunks_of_a_worker_are_ranges_of_their_own() -> None:
    of = job(1, 2, 2, shape={"chunks": 2}, model={"layers": 4})
    assert Hosts.at_start(of, None).units == {Worker(0, 0): ((0, 2), (3, 4)), Worker(0, 1): ((2, 3), (4, 6))}


def test_who_a_schedule_leaves_out_starts_with_what_its_peers_host_or_with_nothing() -> None:
    of = job(2, 2, 1, model={"layers": 4})
    usual = one_f_one_b(of.shape)
    assert Hosts.at_start(of, usual) == Hosts.at_start(of, None)
    chain = Schedule.from_text(CUT, {}, placement=CHAIN, failed=["1.1"])
    assert Hosts.at_start(of, chain).stages == {Worker(0, 0): (0,), Worker(0, 1): (2,), Worker(1, 0): (1,)}
    vee = zb_v(job(2, 2, 4, shape={"chunks": 2}).shape)
    assert stages_by_rank(vee) == {0: (0, 3), 1: (1, 2)}
    assert stages_by_rank(chain) is None
    unlike = Schedule.from_text(of.shape, {}, placement={"1.1": [0, 1]})
    assert stages_by_rank(unlike) is None


def test_layers_that_do_not_divide_are_an_error_but_for_emulated_stages() -> None:
    assert layers_of(job(1, 3, 3, model={"layers": 4})) == [1, 1, 1]
    with pytest.raises(JobError, match="do not divide"):
        layers_of(job(1, 3, 3, "gpt", model={"layers": 4}))
    assert layers_of(job(1, 3, 3, "gpt", model={"layers": 4}), (1, 3)) == [1, 3]
