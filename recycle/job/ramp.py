"""Ramp-up of the batch: Megatron's `--rampup-batch-size`."""

from __future__ import annotations

from functools import cache
from itertools import accumulate


@cache
def sequences_before(start: int, increment: int, samples: int, whole: int) -> list[int]:
    """Return the sequences before each iteration, up to and including the first of the whole batch.

    The batch of an iteration is `start`, plus `increment` for each full share of `samples` before it, where all
    increments have equal shares; as `RampupBatchsizeNumMicroBatchesCalculator` of megatron-core.
    """
    share, batches, consumed = samples / max((whole - start) // increment, 1), list[int](), 0
    while (batch := start + int(consumed / share) * increment) < whole:
        batches.append(batch)
        consumed += batch
    return list(accumulate(batches, initial=0))
