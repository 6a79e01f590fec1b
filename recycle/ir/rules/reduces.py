"""The order of reduces and gathers: workers that host the same stages reduce and gather them in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from recycle.ir.columns import Rows
from recycle.ir.instruction import GatherParameters, ReduceBucket, ReduceGradients
from recycle.ir.rules.optimizer import hosted_rows
from recycle.ir.rules.rule import Defect, Inspection, Rest, rule


@rule("reduce-order", "peers that reduce two stages in different orders")
def reduce_order(inspection: Inspection) -> Iterator[Defect | Rest]:
    """REDUCE_GRAD is collective: it ends when all live hosts of the stage have come to it. Two workers that host the
    same two stages must therefore reduce them in the same order, or each waits in a reduce that the other has not
    reached. So it is with the buckets of stages, which all hosts sum in one order, and with GATHER_PARAMS."""
    for row, other_row in conflicting_reduces(inspection):
        yield Defect(
            f"worker {inspection.schedule.position(other_row)[0]} reduces its stages in another order:"
            f" {inspection.at(other_row)} comes first there",
            "reduce what two workers share in one order on both, for example last stage and first bucket first",
            row,
            others=(other_row,),
        )


def conflicting_reduces(inspection: Inspection) -> list[tuple[int, int]]:
    """The pairs of `reduce_conflicts` among the sums and gathers that stand on a host of their stage."""
    buckets, numbers = inspection.schedule.buckets, inspection.schedule.columns.bucket
    found = [hosted_rows(inspection, cls) for cls in (ReduceGradients, ReduceBucket, GatherParameters)]
    rows, hosts = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(rows)
    rows, (workers, stages) = rows[order], np.divmod(hosts[order], inspection.schedule.shape.stages)
    # The last bucket, of which the columns say nothing, is summed by REDUCE_GRAD.
    bucket = np.where(numbers[rows] >= 0, numbers[rows], buckets - 1)
    numbers = stages * (buckets + 1) + bucket
    # A gather comes behind all buckets of its stage.
    gathers = inspection.schedule.columns.kind[rows] == GatherParameters.kind
    return reduce_conflicts(rows, workers, np.where(gathers, stages * (buckets + 1) + buckets, numbers))


def reduce_conflicts(rows: Rows, workers: Rows, stages: Rows) -> list[tuple[int, int]]:
    """Where workers reduce the same two stages, or buckets of stages, in unlike orders.

    Args:
        rows, workers, stages: of each reduce, with a number for the stage or bucket; of several reduces of one on one
            worker the first counts.

    Returns:
        (reduce that comes first here, reduce that comes first on an earlier worker with both stages), one per worker.
    """
    mine: dict[int, dict[int, int]] = {}
    for row, worker, stage in zip(rows.tolist(), workers.tolist(), stages.tolist(), strict=True):
        mine.setdefault(worker, {}).setdefault(stage, row)
    hosts = Counter(stage for order in mine.values() for stage in order)
    agreed: list[dict[int, int]] = []
    at_odds: dict[tuple[int, ...], tuple[int, int, dict[int, int]] | None] = {}
    conflicts = []
    for _, order in sorted(mine.items()):
        sequence = tuple(stage for stage in order if hosts[stage] > 1)
        if len(sequence) > 1 and sequence not in at_odds:
            found = [(*pair, other) for other in agreed if (pair := _first_swapped(sequence, other))]
            at_odds[sequence] = min(found, key=lambda one: one[:2], default=None)
            agreed += [] if found else [order]
        if conflict := at_odds.get(sequence):
            here, there, other = conflict
            conflicts.append((order[sequence[here]], other[sequence[there]]))
    return conflicts


def _first_swapped(sequence: tuple[int, ...], other: dict[int, int]) -> tuple[int, int] | None:
    """Places of the first two stages of `sequence` that `other` (stage -> row) has the other way round."""
    row = np.array([other.get(stage, -1) for stage in sequence])
    both = np.flatnonzero(row >= 0)
    row = row[both]
    least_behind = np.minimum.accumulate(row[::-1])[::-1]
    swapped = np.flatnonzero(least_behind < row)
    if not len(swapped):
        return None
    behind = swapped[0] + np.flatnonzero(row[swapped[0] :] < row[swapped[0]])[0]
    return int(both[swapped[0]]), int(both[behind])
