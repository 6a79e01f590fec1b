"""Parts of workers that host one range each."""

from __future__ import annotations

import numpy as np

from recycle.solve.layout.units import Parts
from recycle.solve.problem_arrays import Operations


def spans(quotas: Operations) -> list[Parts]:
    """Of each worker the units from the first up to and with the last of which it runs micro-batches.

    Args:
        quotas: [workers, units].
    """
    at = [np.flatnonzero(mine) for mine in quotas]
    return [((int(mine[0]), int(mine[-1]) + 1),) if len(mine) else () for mine in at]
