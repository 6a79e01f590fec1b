"""Where Bamboo's workers sit: who runs which stage of each pipeline, and who waits.

A slot is a place for one worker. Neighbours of a pipeline sit on different nodes where that can be, as a node that
takes two of them along is fatal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from recycle.systems.bamboo.iteration import Hosts, after_losing, copies, healthy


@dataclass(frozen=True)
class Pipeline:
    """One pipeline.

    Attributes:
        slots: of the worker of each rank, dead ones too.
        hosts: the rank that runs each stage.
    """

    slots: tuple[int, ...]
    hosts: Hosts

    @property
    def live(self) -> list[int]:
        """Slots of the ranks that run something."""
        return [self.slots[rank] for rank in sorted(set(self.hosts))]

    @property
    def overloaded(self) -> int:
        """Workers that run two stages."""
        return len(self.hosts) - len(set(self.hosts))

    def without(self, dead: Collection[int]) -> Pipeline | None:
        """The pipeline once these slots are dead, all at once; None where that is fatal."""
        hosts: Hosts | None = self.hosts
        for rank in sorted(set(self.hosts)):
            if hosts is not None and self.slots[rank] in dead:
                hosts = after_losing(hosts, rank)
        return None if hosts is None else Pipeline(self.slots, hosts)

    def holds(self) -> dict[int, set[int]]:
        """Live slot -> the stages whose state it has: its own and the next one's."""
        return {self.slots[rank]: set(copies(rank, len(self.hosts))) for rank in sorted(set(self.hosts))}


def arrange(
    slots: Iterable[int], node_of: Sequence[int], depth: int, pipelines: int, before: Iterable[Pipeline] = ()
) -> list[Pipeline]:
    """Healthy pipelines of these slots.

    Whoever is at its own rank in one of the pipelines `before` keeps it as far as it is wanted there; so its state need
    not be copied.
    """
    free = dict.fromkeys(_spread(slots, node_of))
    chosen: list[list[int | None]] = [[None] * depth for _ in range(pipelines)]
    old = [pipeline for pipeline in before if len(pipeline.hosts) == depth]
    old.sort(key=lambda pipeline: pipeline.overloaded)
    for mine, pipeline in zip(chosen, old, strict=False):
        for rank, slot in enumerate(pipeline.slots):
            if slot in free and pipeline.hosts[rank] == rank:
                mine[rank] = slot
                del free[slot]
    home = {pipeline.slots[rank]: rank for pipeline in old for rank in set(pipeline.hosts)}
    for mine in chosen:
        for rank in range(depth):
            if mine[rank] is None:
                mine[rank] = slot = _best(free, mine, rank, home, node_of)
                del free[slot]
    return [Pipeline(tuple(s for s in mine if s is not None), healthy(depth)) for mine in chosen]


def _best(
    free: Iterable[int], mine: Sequence[int | None], rank: int, home: dict[int, int], node_of: Sequence[int]
) -> int:
    """The first free slot, rather on another node than its neighbours, rather one that was at this rank."""
    beside = {node_of[s] for s in (mine[rank - 1], mine[(rank + 1) % len(mine)]) if s is not None}
    return min(free, key=lambda slot: (node_of[slot] in beside, home.get(slot) != rank))


def _spread(slots: Iterable[int], node_of: Sequence[int]) -> list[int]:
    """One slot of every node, then the second of every node, and so on."""
    count: dict[int, int] = {}
    places = []
    for slot in sorted(slots):
        turn = count[node_of[slot]] = count.get(node_of[slot], -1) + 1
        places.append((turn, slot))
    return [slot for _, slot in sorted(places)]
