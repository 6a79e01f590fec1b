"""Job files: sections, shape, validation rules and prices."""

from recycle.job.job import Job, PricedJob, is_stated, price

__all__ = ["Job", "PricedJob", "is_stated", "price"]
