"""All that a job file says, and what follows from it: shape, sections, rules, prices."""

from recycle.job.job import Job, PricedJob, is_stated, price

__all__ = ["Job", "PricedJob", "is_stated", "price"]
