"""Data that a user's function gives: `[data] provider`, or the `data` of `recycle.exec.train` and `run`.

The function takes the job, once in each process that reads data, and returns what makes batches: a callable of
(iteration, global id of a micro-batch), or an object with a method `batch` of these. Its result maps names to tensors,
"tokens" and "labels" among them; it must follow from the two numbers alone, since any worker may run any micro-batch.
An attribute `digest`, a text, lets a resumed run tell whether it trains on the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from recycle.errors import JobError, RunError
from recycle.exec.data.batches import Batch, Batches
from recycle.job import Job

DataProvider = Callable[[Job], Any]


class ProvidedBatches(Batches):
    """Batches of a user's function.

    Args:
        job: that it is given.
        provider: the function.

    Raises:
        JobError: what it returns makes no batches.
    """

    def __init__(self, job: Job, provider: DataProvider) -> None:
        self._name = f"[data] provider: {job.data.provider or repr(provider)}"
        made = provider(job)
        self._source: Any = made
        self._make: Any = getattr(made, "batch", made)
        if not callable(self._make):
            raise JobError(
                f"{self._name} returned {type(made).__name__}; it must return a function of (iteration, micro-batch),"
                " or an object with a method `batch` of these"
            )

    @property
    def digest(self) -> str | None:
        found = getattr(self._source, "digest", None)
        return None if found is None else str(found)

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """What the user's function gives. Raises RunError when that is no mapping of names to tensors."""
        batch = self._make(iteration, micro_batch)
        if not isinstance(batch, Mapping) or not all(isinstance(part, torch.Tensor) for part in batch.values()):
            found = (
                f"a mapping of {', '.join(sorted({type(part).__name__ for part in batch.values()}))}"
                if isinstance(batch, Mapping)
                else type(batch).__name__
            )
            raise RunError(f"{self._name} gave {found} as a batch; it must map names to tensors")
        return dict(batch)
