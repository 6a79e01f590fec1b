"""Edge coloring: few colors such that edges with a common vertex have different colors.

Edges are colored one after the other. If no color is free at both ends, let a be free at one end and b at the other
end; swapping a and b along the alternating path from the other end frees a at both ends (Koenig 1916). In a bipartite
graph the path never reaches the first end, so the largest degree suffices, also with parallel edges. If every path
reaches it, which requires an odd cycle, the edge gets a new color.
"""

from __future__ import annotations

from collections.abc import Sequence

Edge = tuple[int, int]


def color_edges(edges: Sequence[Edge]) -> list[int]:
    """Color the edges, from 0; deterministic. Edges must not be loops."""
    coloring = _Coloring(edges)
    for edge in range(len(edges)):
        coloring.add(edge)
    return coloring.color


class _Coloring:
    def __init__(self, edges: Sequence[Edge]) -> None:
        self._edges = edges
        self.color = [-1] * len(edges)
        # vertex -> color -> edge
        self._at: dict[int, dict[int, int]] = {vertex: {} for edge in edges for vertex in edge}
        degree = dict.fromkeys(self._at, 0)
        for one, other in edges:
            degree[one] += 1
            degree[other] += 1
        self._colors = max(degree.values(), default=0)

    def add(self, edge: int) -> None:
        one, other = self._edges[edge]
        free_at_one, free_at_other = self._free(one), self._free(other)
        color = next((color for color in free_at_one if color not in self._at[other]), None)
        if color is None:
            color = self._made_free(one, other, free_at_one, free_at_other)
        self._paint(edge, color)

    def _free(self, vertex: int) -> list[int]:
        return [color for color in range(self._colors) if color not in self._at[vertex]]

    def _made_free(self, one: int, other: int, free_at_one: Sequence[int], free_at_other: Sequence[int]) -> int:
        for a in free_at_one:
            for b in free_at_other:
                path, end = self._path(other, a, b)
                if end != one:
                    self._swap(path, a, b)
                    return a
        self._colors += 1
        return self._colors - 1

    def _path(self, vertex: int, a: int, b: int) -> tuple[list[int], int]:
        """Return the edges colored a, b, a, ... from a vertex where b is free, and the last vertex."""
        path: list[int] = []
        while (edge := self._at[vertex].get(a)) is not None:
            path.append(edge)
            one, other = self._edges[edge]
            vertex, a, b = other if one == vertex else one, b, a
        return path, vertex

    def _swap(self, path: Sequence[int], a: int, b: int) -> None:
        for edge in path:
            for vertex in self._edges[edge]:
                del self._at[vertex][self.color[edge]]
        for edge in path:
            self._paint(edge, b if self.color[edge] == a else a)

    def _paint(self, edge: int, color: int) -> None:
        self.color[edge] = color
        for vertex in self._edges[edge]:
            self._at[vertex][color] = edge
