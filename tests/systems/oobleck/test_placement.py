"""Shrink, borrow, merge; who sits where, and what is copied."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.systems.oobleck.placement import assign_nodes, copied, places, reconfigure

quick = settings(derandomize=True, max_examples=200, deadline=None, database=None)
SIZES = range(3, 13)


@pytest.mark.parametrize(
    ("pipelines", "dead", "made"),
    [
        ("0123 456", {2}, "013 456, shrink"),
        # One with too few borrows of the largest; where nobody can spare one it is merged with the smallest.
        ("012 3456 789ab", {1}, "02b 3456 789a, borrow"),
        ("012 345 678", {1}, "34502 678, merge"),
        ("012 345", {0, 1, 2}, "345, shrink"),
    ],
)
def test_pipelines_are_made_of_what_is_left(pipelines: str, dead: set[int], made: str) -> None:
    found = reconfigure([tuple(int(node, 16) for node in each) for each in pipelines.split()], dead, SIZES)
    assert found is not None
    assert f"{' '.join(''.join(f'{node:x}' for node in each) for each in found[0])}, {found[1]}" == made


def test_templates_that_do_not_lead_there() -> None:
    assert reconfigure([(0, 1, 2), (3, 4, 5)], {0}, [3]) is None


@quick
@given(st.lists(st.integers(3, 7), min_size=2, max_size=5), st.data())
def test_nobody_is_lost_and_every_pipeline_has_a_template(sizes: list[int], data: st.DataObject) -> None:
    """With (f + 1) n0 nodes left there are f + 1 pipelines."""
    pipelines, node = [], 0
    for size in sizes:
        pipelines.append(tuple(range(node, node + size)))
        node += size
    dead = data.draw(st.sets(st.integers(0, node - 1), max_size=4))
    made = reconfigure(pipelines, dead, SIZES)
    if made is None:
        return
    after, event = made
    assert sorted(n for members in after for n in members) == sorted(set(range(node)) - dead)
    assert all(len(members) in SIZES for members in after)
    if len(dead) == 1 and node - 1 >= 6:
        assert len(after) >= 2
    if event != "merge" and not any(set(members) <= dead for members in pipelines):
        assert len(after) == len(pipelines)


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
    busiest, total = copied([(3, 3), (3, 3)], [(0, 2), (3, 4)], held, STATE, 1)
    assert total == 4 + 8
    assert busiest == 8


def test_replicas_share_the_sending() -> None:
    """Two newcomers take all layers of stage 0, 3 bytes; one holder sends 6, two of them 3 each."""
    one = copied([(2, 4)] * 3, [(0, 9), (1, 9), (2, 9)], {2: (0, 2), 9: (2, 6)}, STATE, 1)
    assert one == (6, 6)
    two = copied([(2, 4)] * 4, [(0, 9), (1, 9), (2, 9), (3, 9)], {2: (0, 2), 3: (0, 2), 9: (2, 6)}, STATE, 1)
    assert two == (3, 6)


def test_what_another_worker_of_the_node_has_is_not_copied() -> None:
    assert copied([(1, 2, 2, 1)], [(5, 6)], {5: (0, 3), 6: (2, 6)}, STATE, 2)[1] == 0
