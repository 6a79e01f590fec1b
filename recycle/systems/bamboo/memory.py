"""What a worker has to hold under Bamboo: two stages' state, and buffers of activations.

Bamboo numbers its buffers by micro-batch, so that there are M of them for each stage whatever the order (GPipe's
memory); what 1F1B needs is S - s of them for stage s. Redundant forwards, one at a time before each backward, leave as
many more as there are buffers, unless those are parked on the host. A worker that has taken over runs both stages on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence


def buffers(stages: int, micro_batches: int, per_micro_batch: bool) -> list[int]:
    """Activations of each stage that its worker has room for."""
    return [micro_batches if per_micro_batch else min(stages - s, micro_batches) for s in range(stages)]


def needed(
    static: Sequence[float], activation: Sequence[float], held: Sequence[int], stash: int = 0
) -> list[tuple[float, float]]:
    """Bytes of the worker of each rank: (healthy, once it has taken over).

    Args:
        static, activation: bytes of each stage: whatever the schedule, and per micro-batch held.
        held: activations of each stage, as `buffers` gives them.
        stash: what redundant forwards leave on the device, in activations of the next stage.
    """
    stages = len(static)
    found = []
    for s in range(stages):
        after = (s + 1) % stages
        own = static[s] + held[s] * activation[s]
        if after == s:
            found.append((own, own))
            continue
        left = stash * activation[after] if after else 0.0
        found.append((own + static[after] + left, own + static[after] + held[after] * activation[after]))
    return found
