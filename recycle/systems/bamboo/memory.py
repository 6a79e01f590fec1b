"""What a worker has to hold under Bamboo: two stages' state, and a buffer per micro-batch.

Buffers are numbered by micro-batch, so there are M of them whatever the order (GPipe's memory). What redundant
forwards leave is parked on the host, or takes M more. A worker that has taken over runs both stages on the device.
"""

from __future__ import annotations

from collections.abc import Sequence


def needed(
    static: Sequence[float], activation: Sequence[float], micro_batches: int, *, stashed: bool
) -> list[tuple[float, float]]:
    """Bytes of the worker of each rank: (healthy, once it has taken over).

    Args:
        static, activation: bytes of each stage: whatever the schedule, and per micro-batch held.
        micro_batches: M.
        stashed: redundant forwards leave their activations on the device.
    """
    stages = len(static)
    found = []
    for s in range(stages):
        after = (s + 1) % stages
        own = static[s] + micro_batches * activation[s]
        if after == s:
            found.append((own, own))
            continue
        both = own + static[after] + micro_batches * activation[after]
        keeps_stash = stashed and after != 0
        found.append((both if keeps_stash else own + static[after], both))
    return found
