"""Reassignment: which positions the remaining workers take when a whole stage is lost, over all ranks of the grid.

The grid keeps its shape, and with it the micro-batches, the batch and every plan; an empty position counts as a failed
worker, which peers stand in for. So every worker that is left has work, and any number from P on
will do, where a smaller grid D' x P would leave those idle that do not fill a pipeline and needs a D' that divides D*m.
The fewest hosts of a rank are never fewer than D' would be.
"""

from __future__ import annotations

from collections.abc import Collection

from recycle.job.shape import Shape, Worker


def reassign(shape: Shape, live: Collection[Worker]) -> list[Worker] | None:
    """Positions for as many processes as are live, as even over the ranks as can be; None if a rank would stay empty.

    Ranks with more live hosts keep the odd ones. A live position is kept where its rank has room.

    Limits: stages count alike, however long they take.
    """
    if len(live) < shape.ranks:
        return None
    hosts = [sorted(worker for worker in live if worker.rank == rank) for rank in range(shape.ranks)]
    share, odd = divmod(len(live), shape.ranks)
    fullest = sorted(range(shape.ranks), key=lambda rank: (-len(hosts[rank]), rank))[:odd]
    found: list[Worker] = []
    for rank in range(shape.ranks):
        free = [position for k in range(shape.pipelines) if (position := Worker(k, rank)) not in live]
        found += (hosts[rank] + free)[: share + (rank in fullest)]
    return sorted(found)
