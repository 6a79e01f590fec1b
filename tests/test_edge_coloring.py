"""Edge coloring: no two edges at one vertex share a color, and there are few colors."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from recycle.plans.edge_coloring import Edge, color_edges


def degree(edges: list[Edge]) -> int:
    return max(Counter(vertex for edge in edges for vertex in edge).values())


def colors(edges: list[Edge]) -> int:
    """How many colors there are; asserts that the coloring is one."""
    color = color_edges(edges)
    seen = Counter((vertex, color[place]) for place, edge in enumerate(edges) for vertex in edge)
    assert set(seen.values()) == {1}
    return len(set(color))


@pytest.mark.parametrize("seed", range(30))
def test_bipartite_graph_needs_as_many_colors_as_its_degree(seed: int) -> None:
    random = Random(seed)
    sides = random.randint(1, 12), random.randint(1, 12)
    edges = [(random.randrange(sides[0]), 100 + random.randrange(sides[1])) for _ in range(random.randint(1, 120))]
    assert colors(edges) == degree(edges)


@pytest.mark.parametrize("seed", range(30))
def test_any_graph_meets_vizings_bound(seed: int) -> None:
    random = Random(seed)
    vertices = range(random.randint(3, 12))
    edges = [tuple(random.sample(vertices, 2)) for _ in range(random.randint(1, 120))]
    assert colors(edges) <= degree(edges) + max(Counter(map(frozenset, edges)).values())  # as Vizing has proven
