"""When the workers of a 1F1B pipeline have computed any number of micro-batches, from simulations of a few.

Behind its warm-up a pipeline takes one more slowest stage per micro-batch. Whether it has come to that is looked up in
the simulations themselves: from 5 S micro-batches on, if the last one and the last S of them took just that for every
worker. Where they did not (links that take longer than stages), all is simulated.
"""

from __future__ import annotations

from collections.abc import Callable

SETTLED = 5
TOLERANCE = 1e-9
"""Relative, of the time of the slowest stage."""


def ends(simulated: Callable[[int], list[float]], slowest: float, micro_batches: int) -> list[float]:
    """When each worker has computed.

    Args:
        simulated: the same for a number of micro-batches; one entry per stage.
        slowest: seconds of the slowest stage per micro-batch.
    """
    stages = len(simulated(1))
    known = SETTLED * stages
    if micro_batches <= known:
        return simulated(micro_batches)
    last = simulated(known)
    for back in (1, stages):
        steps = (now - before for now, before in zip(last, simulated(known - back), strict=True))
        if any(abs(step - back * slowest) > TOLERANCE * back * slowest for step in steps):
            return simulated(micro_batches)
    return [end + (micro_batches - known) * slowest for end in last]
