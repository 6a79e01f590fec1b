"""Evaluations on a worker: forwards of its stages on other data, between two iterations.

An evaluation begins after its step is committed. Each worker reports its sums of losses and waits for the combined
result. If the generation ends before, the next one repeats the whole evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recycle.exec.device import DeviceProgress, HostClock, Progress
from recycle.exec.hooks.hook import Generation, IterationHook, overridden
from recycle.exec.leader.commit import evaluation_report
from recycle.exec.model.stage import Stage
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.lower import forward_only, lower
from recycle.ir.schedule import Schedule
from recycle.job import Job


@dataclass(kw_only=True)
class Evaluation(IterationHook):
    """The evaluations of one worker, including hooks that also run in evaluations."""

    job: Job
    stages: Mapping[int, Stage]
    hooks: Sequence[IterationHook] = ()
    progress: Progress = field(default_factory=Progress)
    device: DeviceProgress = field(default_factory=lambda: DeviceProgress(HostClock()))

    def begin_generation(self, generation: Generation) -> None:
        schedule = generation.evaluated_by
        assert schedule is not None, "the job has [eval]"
        self._generation, self.program = generation, schedule.program(generation.role)
        self._interpreter = Interpreter(
            self.stages,
            schedule.shape.stages,
            generation.transport,
            _step,
            overridden(self.hooks, IterationHook.computed),
            device=self.device,
        )
        self._losses: list[tuple[float, float]] = []
        middle = self.job.evaluation.batches // 2, len(self.program) // 2
        self._struck_at = middle if self.program else (0, -1)

    def after_iteration(self, iteration: int, is_last: bool) -> None:
        may_follow = is_last or self.job.is_evaluated(iteration, is_last=False)
        if may_follow and self._generation.committed(iteration).evaluate:
            self._run(iteration)

    def _run(self, step: int) -> None:
        for batch in range(self.job.evaluation.batches):
            whole = False
            try:
                self.begin_batch(step, batch)
                for position in range(len(self.program)):
                    self.execute(position)
                whole = True
            finally:
                for hook in self.hooks:
                    hook.end_iteration(step, self._interpreter.executed, whole, batch)
            self.end_batch()
        self.report_losses(step)
        self._generation.commits.evaluated(step)

    def begin_batch(self, step: int, batch: int) -> None:
        self.progress.begin_operation("evaluation")
        if not batch:
            self._losses = []
        self._step, self._batch = step, batch
        # Consecutive numbers, as for iterations, because transfers of two batches may be in flight at once.
        self._interpreter.begin(self.program, step + 1 + batch, batch)
        self.progress.end_operation()

    def execute(self, position: int) -> None:
        instruction = self.program[position]
        self.progress.begin_operation(f"evaluation:{instruction.token}")
        if (self._batch, position) == self._struck_at:
            for hook in self.hooks:
                hook.reach("evaluation", self._step)
        self._interpreter.execute(instruction)
        self.progress.end_operation()

    def end_batch(self) -> None:
        self._losses += [pair for stage in self.stages.values() for pair in stage.evaluated()]

    def report_losses(self, step: int) -> None:
        self._generation.commits.report_evaluation(step, evaluation_report(self._losses))


def evaluation_schedule(schedule: Schedule, job: Job) -> Schedule | None:
    """The lowered schedule of evaluations for a training schedule; None for a job without evaluations."""
    return lower(forward_only(schedule)) if job.evaluation.every else None


def _step(stage: int) -> None:
    raise AssertionError("a forward-only program has no step")
