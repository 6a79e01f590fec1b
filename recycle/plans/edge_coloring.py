"""Edge coloring: few colors such that edges with a common vertex have different colors.

If no color is free at both ends of an edge, let a be free at one end and b at the other; swapping a and b along the
alternating path from the other end frees a at both ends (Koenig 1916). In a bipartite graph the path never reaches the
first end, so the largest degree suffices. If every path reaches it, the edge gets a new color.
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
        for first, second in edges:
            degree[first] += 1
            degree[second] += 1
        self._colors = max(degree.values(), default=0)

    def add(self, edge: int) -> None:
        first, second = self._edges[edge]
        free_at_first, free_at_second = self._free(first), self._free(second)
        color = next((color for color in free_at_first if color not in self._at[second]), None)
        if color is None:
            color = self._free_color(first, second, free_at_first, free_at_second)
        self._paint(edge, color)

    def _free(self, vertex: int) -> list[int]:
        return [color for color in range(self._colors) if color not in self._at[vertex]]

    def _free_color(self, first: int, second: int, free_at_first: Sequence[int], free_at_second: Sequence[int]) -> int:
        for a in free_at_first:
            for b in free_at_second:
                path, end = self._path(second, a, b)
                if end != first:
                    self._swap(path, a, b)
                    return a
        self._colors += 1
        return self._colors - 1

    def _path(self, vertex: int, a: int, b: int) -> tuple[list[int], int]:
        """Return the edges colored a, b, a, ... from a vertex where b is free, and the last vertex."""
        path: list[int] = []
        while (edge := self._at[vertex].get(a)) is not None:
            path.append(edge)
            first, second = self._edges[edge]
            vertex, a, b = second if first == vertex else first, b, a
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
