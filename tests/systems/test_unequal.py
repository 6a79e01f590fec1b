"""Unequal shares of the batch in one shape."""

from __future__ import annotations

import pytest

from recycle import JobError, Shape
from recycle.systems.unequal import assign_micro_batches, even_shares, shape_for


def test_the_shape_has_room_for_all_and_exactly_the_batch() -> None:
    assert shape_for(3, 4, 18) == Shape(3, 4, 6)
    assert shape_for(7, 4, 32) == Shape(8, 4, 4)
    assert shape_for(3, 4, 7, chunks=2) == Shape(7, 4, 1, 2)
    with pytest.raises(JobError):
        shape_for(5, 4, 4)


def test_every_micro_batch_is_dealt_once_and_first_to_its_home() -> None:
    assigned = assign_micro_batches(shape_for(3, 2, 16), [7, 6, 3])
    assert [" ".join(map(str, mine)) for mine in assigned] == [
        "0.0 0.1 0.2 0.3 2.3 3.0 3.1",
        "1.0 1.1 1.2 1.3 3.2 3.3",
        "2.0 2.1 2.2",
    ]


def test_even_shares() -> None:
    assert even_shares(32, 3) == [11, 11, 10]
    assert even_shares(32, 4) == [8, 8, 8, 8]
