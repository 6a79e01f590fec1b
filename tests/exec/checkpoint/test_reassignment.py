"""Who sits where when a whole stage is lost."""

from __future__ import annotations

from itertools import combinations

import pytest

from recycle import Shape, Worker
from recycle.exec.leader.membership import reassign


def named(*names: str) -> list[Worker]:
    return [Worker.parse(name) for name in names]


def test_the_hosts_of_a_lost_stage_come_from_where_there_are_most() -> None:
    assert reassign(Shape(3, 2, 4), named("0.0", "1.0", "2.0")) == named("0.0", "0.1", "1.0")
    assert reassign(Shape(3, 3, 4), named("0.0", "1.0", "2.0", "2.2")) == named("0.0", "0.1", "1.0", "2.2")
    assert reassign(Shape(2, 2, 2), named("0.1", "1.1")) == named("0.0", "0.1")


def test_too_few_for_a_pipeline_have_no_seats() -> None:
    assert reassign(Shape(3, 3, 4), named("0.0", "1.0")) is None


@pytest.mark.parametrize("shape", [Shape(3, 2, 4), Shape(2, 4, 4), Shape(3, 3, 1)], ids=str)
def test_whoever_is_left_all_have_a_seat_no_rank_has_two_more_than_another_and_nobody_moves_in_vain(
    shape: Shape,
) -> None:
    everyone = list(shape.workers())
    for count in range(shape.ranks, len(everyone) + 1):
        for live in combinations(everyone, count):
            found = reassign(shape, live)
            assert found is not None
            assert len(set(found)) == count
            hosts = [sum(worker.rank == rank for worker in found) for rank in range(shape.ranks)]
            assert min(hosts) >= 1
            assert max(hosts) - min(hosts) <= 1
            moved = set(found) - set(live)
            before = [sum(worker.rank == rank for worker in live) for rank in range(shape.ranks)]
            assert len(moved) == sum(max(0, after - old) for after, old in zip(hosts, before, strict=True))
