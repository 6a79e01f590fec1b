"""Joint search: a few pipelines of a healthy job exchange micro-batches, and all others do as these do.

Without failures one pipeline can be planned and copied. Where memory is tight and workers host several chunks, that
may cost more than the memory asks for: a micro-batch that finds its own worker full or busy at one chunk is held
shorter when a peer runs that chunk. So two pipelines (or the least number above one that divides D) are annealed
together, beginning with the copy of the best single one; any live worker of a rank may run any micro-batch of theirs.
The others run copies of this group, and no worker outside a group is asked for anything, so that the period is the
group's.

Limits: groups are of equal size, since with the staggered optimizer unlike groups need not agree on when ranks begin.
"""

from __future__ import annotations

from dataclasses import replace

from recycle.solve.assignment import by_slots
from recycle.solve.effort import Effort, Incumbent
from recycle.solve.problem import Order, Problem
from recycle.solve.search.annealing import improve
from recycle.solve.search.timing import timed
from recycle.solve.template import copied_to_all

JOINT_SHARE = 0.5
"""Of the time, or of the steps, what pipelines that are planned together get."""
LARGEST = 500
"""Operations of a group up to which this is tried; on larger ones it gained nothing and cost time that others use."""


def joint_group(whole: Problem) -> Problem | None:
    """The problem of the pipelines that are worth planning together; None where a single one should be copied."""
    shape = whole.shape
    is_tight = min(whole.cap) < min(shape.ranks, shape.micro_batches) * shape.chunks
    is_healthy = not whole.dead and whole.peers_are_alike and not whole.may_spread
    if not (is_healthy and is_tight and whole.reroute and shape.chunks > 1 and min(shape.pipelines, shape.ranks) > 1):
        return None
    together = next(count for count in range(2, shape.pipelines + 1) if shape.pipelines % count == 0)
    workers = together * shape.ranks
    group = replace(
        whole, shape=replace(shape, pipelines=together), speed=whole.speed[:workers], cap=whole.cap[:workers]
    )
    return group if group.size <= LARGEST else None


def search_jointly(group: Problem, one: Problem, found: Incumbent, effort: Effort) -> Incumbent:
    """The best order of the group; its period is at most that of the single pipeline that it begins with.

    Args:
        one: the problem of a single pipeline.
        found: its best order.
        effort: its bound holds for pipelines that may exchange micro-batches.
    """
    return improve(group, timed(group, copied_to_all(group, by_slots(group), one, found.order)), effort, are_free=True)


def copied_to_groups(whole: Problem, group: Problem, order: Order) -> Order:
    """The order in which the pipelines of every group follow `order`, one of `group`."""
    mine, n = group.micro_batches, whole.micro_batches
    return [
        [operation // mine * n + first + operation % mine for operation in program]
        for first in range(0, n, mine)
        for program in order
    ]
