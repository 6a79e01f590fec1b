"""Shrink, borrow, merge."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.systems.oobleck.reconfigure import Reconfigured, reconfigure

quick = settings(derandomize=True, max_examples=200, deadline=None, database=None)
SIZES = range(3, 13)


def test_a_pipeline_with_enough_nodes_takes_a_smaller_template() -> None:
    assert reconfigure([(0, 1, 2, 3), (4, 5, 6)], {2}, SIZES) == Reconfigured([(0, 1, 3), (4, 5, 6)], "shrink")


def test_one_with_too_few_borrows_of_the_largest() -> None:
    made = reconfigure([(0, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10, 11)], {1}, SIZES)
    assert made == Reconfigured([(0, 2, 11), (3, 4, 5, 6), (7, 8, 9, 10)], "borrow")


def test_where_nobody_can_spare_one_it_is_merged_with_the_smallest() -> None:
    made = reconfigure([(0, 1, 2), (3, 4, 5), (6, 7, 8)], {1}, SIZES)
    assert made == Reconfigured([(3, 4, 5, 0, 2), (6, 7, 8)], "merge")


def test_a_pipeline_that_is_gone_is_gone() -> None:
    assert reconfigure([(0, 1, 2), (3, 4, 5)], {0, 1, 2}, SIZES) == Reconfigured([(3, 4, 5)], "shrink")


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
    assert sorted(n for members in made.pipelines for n in members) == sorted(set(range(node)) - dead)
    assert all(len(members) in SIZES for members in made.pipelines)
    if len(dead) == 1 and node - 1 >= 6:
        assert len(made.pipelines) >= 2
    if made.event != "merge" and not any(set(members) <= dead for members in pipelines):
        assert len(made.pipelines) == len(pipelines)
