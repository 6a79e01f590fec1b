"""Opens a job's data, including a user's, for training and evaluations; prepares batches ahead.

A user's function (`[data] provider`, or `data` of `recycle.exec.train` and `run`) takes the job. It returns a callable
of (iteration, global id of a micro-batch), or an object with a method `batch` of these. The result maps names to
tensors, including "tokens" and "labels", and must depend only on both numbers, because any worker may run any
micro-batch. A text attribute `digest` identifies the data for resumed runs.

A thread makes the batches of the worker's program ahead, for a GPU in pinned memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from recycle.errors import JobError, RunError, errors_as
from recycle.exec.data.batches import Batch, Batches, load_corpus
from recycle.exec.data.gpt_dataset import VALIDATION, GptDatasetBatches
from recycle.exec.data.indexed import IndexedRows
from recycle.job import Job

DataProvider = Callable[[Job], Any]


class ProvidedBatches(Batches):
    """Batches of a user's function. Raises JobError if the function's result cannot make batches."""

    def __init__(self, job: Job, provider: DataProvider) -> None:
        self._name = f"[data] provider: {job.data.provider or repr(provider)}"
        self._has_masks = job.data.reset_attention
        source = provider(job)
        self._source: Any = source
        self._make: Any = getattr(source, "batch", source)
        if not callable(self._make):
            raise JobError(
                f"{self._name} returned {type(source).__name__}; it must return a function of (iteration, micro-batch),"
                " or an object with a method `batch` of these"
            )

    @property
    def digest(self) -> str | None:
        digest = getattr(self._source, "digest", None)
        return None if digest is None else str(digest)

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """Call the user's function. Raises RunError if it does not return a mapping of names to tensors."""
        batch = self._make(iteration, micro_batch)
        if not isinstance(batch, Mapping) or not all(isinstance(part, torch.Tensor) for part in batch.values()):
            description = (
                f"a mapping of {', '.join(sorted({type(part).__name__ for part in batch.values()}))}"
                if isinstance(batch, Mapping)
                else type(batch).__name__
            )
            raise RunError(f"{self._name} returned {description} as a batch; it must map names to tensors")
        if ("attention_mask" in batch) != self._has_masks:
            stated, has = ("true", "no") if self._has_masks else ("false", "an")
            raise RunError(f"{self._name} returned {has} attention_mask, but [data] reset_attention is {stated}")
        return dict(batch)


DEPTH = 2
"""Batches made ahead: one is requested while the next is being made."""
BatchKey = tuple[int, int]
"""Iteration and global id of a micro-batch."""


class BatchesAhead:
    """Batches of one stage, made ahead by a thread, and pinned for copies to a GPU."""

    def __init__(self, batches: Batches, pinned: bool) -> None:
        self._batches, self._pinned = batches, pinned
        self._expected: deque[BatchKey] = deque()
        self._made: dict[BatchKey, Future[Batch]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def expect(self, keys: Iterable[BatchKey]) -> None:
        """Set the order of the next batches; discards previous expectations."""
        self._expected = deque(keys)
        wanted = set(self._expected)
        for key in self._made.keys() - wanted:
            self._made.pop(key).cancel()
        self._begin_next()

    def batch(self, iteration: int, micro_batch: int) -> Batch:
        """As `Batches.batch`."""
        key = iteration, micro_batch
        future = self._made.pop(key, None)
        with contextlib.suppress(ValueError):
            self._expected.remove(key)
        self._begin_next()
        return self._make(key) if future is None else future.result()

    def _begin_next(self) -> None:
        for key in list(self._expected)[:DEPTH]:
            if key not in self._made:
                self._thread = self._thread or ThreadPoolExecutor(1)
                self._made[key] = self._thread.submit(self._make, key)

    def _make(self, key: BatchKey) -> Batch:
        batch = self._batches.batch(*key)
        return {name: part.pin_memory() for name, part in batch.items()} if self._pinned else batch


def load_batches(job: Job, provider: DataProvider | None = None) -> Batches:
    """Open the data of `[data]`, or the provider's. Raises JobError if it is unreadable or unsuitable."""
    if provider is not None:
        return ProvidedBatches(job, provider)
    kinds: dict[str, Callable[[Job], Batches]] = {"megatron": IndexedRows, "gpt-dataset": GptDatasetBatches}
    return kinds.get(job.data.kind, load_corpus)(job)


def load_evaluation(job: Job, provider: DataProvider | None = None) -> Batches:
    """Open the data of `[eval]`, or the provider's, as `load_batches`; iteration b is its b-th batch."""
    whole = msgspec.structs.replace(job.train, rampup_batch_size=None)
    reads = msgspec.structs.replace(job, data=job.evaluation_data, train=whole)
    with errors_as(JobError, "[eval]"):
        if provider is None and reads.data.kind == "gpt-dataset":
            return GptDatasetBatches(reads, VALIDATION, job.evaluation.batches)
        return load_batches(reads, provider)
