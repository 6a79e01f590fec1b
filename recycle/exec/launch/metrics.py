"""A committed step's line of metrics, all of it from the register but for the time."""

from __future__ import annotations

import math
from typing import Any

from recycle.exec.membership.messages import Commit, GenerationRecord
from recycle.job import Job


def metrics_line(
    job: Job,
    commit: Commit,
    record: GenerationRecord,
    period: float,
    time: float,
    seconds: float,
    is_first: bool,
) -> dict[str, Any]:
    """The line of `commit`.

    Args:
        record: the register that holds the commit.
        period: of the plan, in the mode of the step.
        time: seconds since the start of the run.
        seconds: that the step took.
        is_first: whether it is the generation's first, which begins from a standstill.
    """
    tokens = job.shape.global_micro_batches * job.data.micro_batch_size * job.model.sequence
    return {
        "step": commit.step,
        "time": round(time, 6),
        "loss": commit.loss if math.isfinite(commit.loss) else None,
        "grad_norm": None if math.isnan(commit.grad_norm) else commit.grad_norm,
        "mode": commit.mode,
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "live_workers": len(record.live),
        "plan": record.plan,
        "period": period,
        "generation": record.generation,
        "period_error": None if is_first else _period_error(job, period, seconds),
    }


def _period_error(job: Job, period: float, seconds: float) -> float | None:
    """(executed - planned period) / planned; None where the unit of the plan's times is not known."""
    unit = job.seconds_per_unit
    return None if unit is None or period <= 0 else round(seconds / (period * unit) - 1, 6)
