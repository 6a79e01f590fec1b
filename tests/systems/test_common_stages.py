"""Pipelines of unlike cuts in the stages of one schedule, and who runs which micro-batches."""

from __future__ import annotations

from recycle.shape import Shape
from recycle.systems.common_stages import hosted, micro_batches_of


def test_parts_consist_of_the_stages_between_the_cuts_of_any_pipeline() -> None:
    assert list(hosted((3, 3), (2, 1, 1, 2))) == [(0, 1), (2, 3)]
    assert list(hosted((2, 2, 2), (2, 1, 1, 2))) == [(0,), (1, 2), (3,)]


def test_every_micro_batch_is_dealt_once_and_first_to_its_home() -> None:
    dealt = micro_batches_of(Shape(4, 2, 4), [7, 6, 3], range(3))
    assert [" ".join(map(str, mine)) for mine in dealt] == [
        "0.0 0.1 0.2 0.3 2.3 3.0 3.1",
        "1.0 1.1 1.2 1.3 3.2 3.3",
        "2.0 2.1 2.2",
    ]
    elsewhere = micro_batches_of(Shape(3, 2, 2), [3, 2, 1], [2, 0])
    assert [" ".join(map(str, mine)) for mine in elsewhere] == ["2.0 2.1 1.0", "0.0 0.1", "1.1"]
