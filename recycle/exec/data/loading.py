"""Opens the data of a job, for training and for evaluations."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from recycle.errors import JobError, errors_as
from recycle.exec.data.batches import Batches, load_corpus
from recycle.exec.data.gpt_dataset import VALIDATION, GptDatasetBatches
from recycle.exec.data.indexed import IndexedRows
from recycle.exec.data.provided import DataProvider, ProvidedBatches
from recycle.job import Job


def load_batches(job: Job, provider: DataProvider | None = None) -> Batches:
    """The data that `[data]` names, or the provider's. Raises JobError when it cannot be read or does not fit."""
    if provider is not None:
        return ProvidedBatches(job, provider)
    kinds: dict[str, Callable[[Job], Batches]] = {"megatron": IndexedRows, "gpt-dataset": GptDatasetBatches}
    return kinds.get(job.data.kind, load_corpus)(job)


def load_evaluation(job: Job, provider: DataProvider | None = None) -> Batches:
    """The data that `[eval]` reads, or the provider's; iteration b of them is its b-th batch.

    Raises:
        JobError: as `load_batches` does.
    """
    reads = msgspec.structs.replace(job, data=job.evaluation_data)
    with errors_as(JobError, "[eval]"):
        if provider is None and reads.data.kind == "gpt-dataset":
            return GptDatasetBatches(reads, VALIDATION, job.evaluation.batches)
        return load_batches(reads, provider)
