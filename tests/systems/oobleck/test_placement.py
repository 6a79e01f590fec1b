"""Who sits where, and what is copied."""

from __future__ import annotations

from recycle.systems.oobleck.placement import assign_nodes, copied, places

STATE = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def test_places_of_one_and_of_several_workers_per_node() -> None:
    assert places((2, 1, 3), 1) == [(0, 2), (2, 3), (3, 6)]
    assert places((2, 1, 2, 1), 2) == [(0, 3), (3, 6)]


def test_everybody_sits_where_most_of_what_it_holds_is_wanted() -> None:
    held = {7: (4, 6), 8: (0, 3), 9: (2, 4)}
    assert assign_nodes([(0, 2), (2, 4), (4, 6)], [7, 8, 9], held, STATE) == [8, 9, 7]
    assert assign_nodes([(0, 3), (3, 6)], [7, 8, 9], held, STATE) == [8, 7]
    assert assign_nodes([(0, 3), (3, 6)], [1, 2], {}, STATE) == [1, 2]


def test_only_what_is_missing_is_copied() -> None:
    """Node 0 had layers 0 to 1 and takes 2 too; node 2 had 4 to 5 and takes 3; node 1, which had both, is gone, and
    pipeline 1 has all."""
    held = {0: (0, 2), 2: (4, 6), 3: (0, 3), 4: (3, 6)}
    found = copied([(3, 3), (3, 3)], [(0, 2), (3, 4)], held, STATE, 1)
    assert found.total == 4 + 8
    assert found.busiest == 8


def test_replicas_share_the_sending() -> None:
    """Two newcomers take all layers of stage 0, 3 bytes; one holder sends 6, two of them 3 each."""
    one = copied([(2, 4)] * 3, [(0, 9), (1, 9), (2, 9)], {2: (0, 2), 9: (2, 6)}, STATE, 1)
    assert (one.busiest, one.total) == (6, 6)
    two = copied([(2, 4)] * 4, [(0, 9), (1, 9), (2, 9), (3, 9)], {2: (0, 2), 3: (0, 2), 9: (2, 6)}, STATE, 1)
    assert (two.busiest, two.total) == (3, 6)


def test_what_another_worker_of_the_node_has_is_not_copied() -> None:
    assert copied([(1, 2, 2, 1)], [(5, 6)], {5: (0, 3), 6: (2, 6)}, STATE, 2).total == 0
