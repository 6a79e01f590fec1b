"""What Oobleck makes of the nodes that a failure leaves: smaller templates, borrowed nodes, merged pipelines.

(1) A pipeline that still has n0 nodes takes the template of as many as it has. (2) Else it borrows nodes of pipelines
that have more than n0. (3) Else it is merged with another. Of a burst the fullest of the damaged is seen to first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

Members = tuple[int, ...]
"""Nodes of one pipeline."""


class Reconfigured(NamedTuple):
    """The pipelines without the dead nodes, and the last of "shrink", "borrow", "merge" that it took."""

    pipelines: list[Members]
    event: str


def reconfigure(pipelines: Sequence[Members], dead: Collection[int], sizes: Collection[int]) -> Reconfigured | None:
    """What becomes of the pipelines; None where their templates do not lead there (a merged pipeline would be too
    large for any), so that all nodes have to be put into pipelines again.

    Args:
        pipelines: as they were.
        sizes: nodes of each template; the least is n0.
    """
    event = "shrink"
    least = min(sizes)
    left = [[node for node in members if node not in dead] for members in pipelines]
    damaged = [place for place, members in enumerate(left) if len(members) not in sizes and members]
    for place in sorted(damaged, key=lambda place: -len(left[place])):
        mine = left[place]
        while len(mine) < least and (giver := _giver(left, place, sizes)) is not None:
            mine.append(left[giver].pop())
            event = max(event, "borrow", key=_ORDER.index)
        if len(mine) not in sizes:
            other = _partner(left, place, sizes)
            if other is None:
                return None
            left[other] += mine
            left[place] = []
            event = "merge"
    made = [tuple(members) for members in left if members]
    return Reconfigured(made, event) if made and all(len(members) in sizes for members in made) else None


_ORDER = ("shrink", "borrow", "merge")


def _giver(left: Sequence[Sequence[int]], taker: int, sizes: Collection[int]) -> int | None:
    """The largest pipeline that can spare a node."""
    able = [p for p, members in enumerate(left) if p != taker and len(members) in sizes and len(members) - 1 in sizes]
    return max(able, key=lambda p: len(left[p]), default=None)


def _partner(left: Sequence[Sequence[int]], place: int, sizes: Collection[int]) -> int | None:
    """The smallest pipeline to merge with."""
    able = [p for p, members in enumerate(left) if p != place and members and len(members) + len(left[place]) in sizes]
    return min(able, key=lambda p: len(left[p]), default=None)
