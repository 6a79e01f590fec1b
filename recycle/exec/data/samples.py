"""Number of samples that determines the order of a GPTDataset. Imports no torch, for processes that resume a run."""

from __future__ import annotations

from recycle.errors import JobError
from recycle.job import Job


def samples_of(job: Job, iterations: int | None = None) -> int:
    """The number of samples that determines the order: `[data] samples`, or the samples of all iterations."""
    return job.data.samples or job.sequences_before(iterations or job.train.steps)


def require_samples(job: Job, steps: int) -> None:
    """Raise JobError if so many steps need more samples than the order has."""
    needed = job.sequences_before(steps)
    if job.data.kind == "gpt-dataset" and needed > samples_of(job):
        raise JobError(
            f"[data] samples: {steps} steps need {needed} samples, but the order has {samples_of(job)}; give enough"
            " for all steps when a run starts"
        )
