"""What a model trains on: batches of plain text or of Megatron's indexed datasets."""

from recycle.exec.data.batches import Batches, load_corpus
from recycle.exec.data.indexed import IndexedRows
from recycle.job import Job


def load_batches(job: Job) -> Batches:
    """The data that `[data]` names. Raises JobError when it cannot be read or does not fit the model."""
    return IndexedRows(job) if job.data.kind == "megatron" else load_corpus(job)
