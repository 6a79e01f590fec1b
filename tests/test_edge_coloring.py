"""Edge coloring: no two edges at one vertex share a color, and there are few colors."""

from collections import Counter
from random import Random

import pytest

from recycle.plans.edge_coloring import color_edges


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("is_bipartite", [True, False])
def test_colors_are_few_and_differ_at_each_vertex(seed, is_bipartite):
    random = Random(seed)
    left, right = range(random.randint(3, 12)), range(100, 100 + random.randint(1, 12))
    edges = []
    for _ in range(random.randint(1, 120)):
        first, second = (random.choice(left), random.choice(right)) if is_bipartite else random.sample(left, 2)
        edges.append((first, second))
    color = color_edges(edges)
    seen = Counter((vertex, color[place]) for place, edge in enumerate(edges) for vertex in edge)
    degree = max(Counter(vertex for edge in edges for vertex in edge).values())
    parallel = 0 if is_bipartite else max(Counter(map(frozenset, edges)).values())
    assert set(seen.values()) == {1}
    assert len(set(color)) <= degree + parallel  # as König and Vizing have proven
