"""The line of metrics of a committed step: all of it follows from the register, but for the times."""

from __future__ import annotations

from collections import deque
from typing import Any

from recycle.exec.leader.commit import finite_or_none
from recycle.exec.protocol import Commit, GenerationRecord
from recycle.job import PricedJob

WINDOW_SECONDS, WINDOW_STEPS = 10.0, 4
"""Tokens per second are the mean over the last steps that took so long together, and over as many steps at least:
commits come in bursts, and the time between two of them says little."""


class Throughput:
    """The mean time of a step over a window of the last ones."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no step counts yet."""
        return not self._steps

    def mean_after(self, seconds: float) -> float:
        """Seconds of a step on average, the last of which took so long."""
        self._steps.append(seconds)
        while len(self._steps) > WINDOW_STEPS and sum(self._steps) - self._steps[0] >= WINDOW_SECONDS:
            self._steps.popleft()
        return max(sum(self._steps) / len(self._steps), 1e-9)

    def start_over(self) -> None:
        """Forget all steps so far."""
        self._steps.clear()


class MetricsLines:
    """Makes the lines of a run.

    Args:
        job: what is trained.
        started: when the run started, on the leader's clock.
        now: time on that clock.
    """

    def __init__(self, job: PricedJob, started: float, now: float) -> None:
        self._job, self._started = job, started
        self._last_commit, self._last_generation = now, 0
        self._running_since: float | None = None
        self.throughput = Throughput()

    def starts(self, now: float) -> None:
        """The next iteration starts with an empty pipeline: all workers have started up, or evaluated."""
        self._last_commit, self._last_generation = now, 0

    def runs(self, now: float) -> None:
        """A generation begins to run."""
        self._running_since = now

    def line(
        self, now: float, commit: Commit, record: GenerationRecord, live: int, compute: dict[str, Any]
    ) -> dict[str, Any]:
        """A step's line, with the result of its evaluation if that is done.

        Args:
            live: workers.
            compute: what the line says of computing times.
        """
        seconds, is_first = now - self._last_commit, record.generation != self._last_generation
        self._last_commit, self._last_generation = now, record.generation
        job, unit, period = self._job, self._job.seconds_per_unit, record.periods.get(commit.mode, 0.0)
        tokens = job.shape.global_micro_batches * job.data.micro_batch_size * job.model.sequence
        # The first iteration of a generation starts with an empty pipeline, so its time says nothing about the plan.
        is_comparable = not is_first and period > 0
        running, self._running_since = self._running_since, None
        counted = now - running if running is not None and self.throughput.is_empty else seconds
        line: dict[str, Any] = {
            "step": commit.step,
            "time": round(now - self._started, 6),
            "loss": finite_or_none(commit.loss),
            "grad_norm": finite_or_none(commit.grad_norm),
            "mode": commit.mode,
            "tokens_per_second": round(tokens / self.throughput.mean_after(counted), 1),
            "live_workers": len(record.live) or live,
            "plan": record.plan,
            "period": period,
            "generation": record.generation,
            "period_error": round(seconds / (period * unit) - 1, 6) if unit is not None and is_comparable else None,
            **compute,
        }
        if running is not None:
            line["began"] = round(running - self._started, 6)
        if record.evaluated is not None and record.evaluated.step == commit.step:
            line["eval_loss"] = finite_or_none(record.evaluated.loss)
        return line

    def with_evaluation(self, line: dict[str, Any], now: float, loss: float) -> dict[str, Any]:
        """The line with the result of its evaluation."""
        seconds = round(now - self._started - line["time"], 6)
        return line | {"eval_loss": finite_or_none(loss), "eval_seconds": seconds}
