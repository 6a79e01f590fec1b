"""Run a schedule of one's own on the job's real stages: in this process, or with one process per worker."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from recycle.errors import JobError
from recycle.exec.launch.launcher import RunResult, check_request, train
from recycle.exec.membership.commit import decide, report_of
from recycle.exec.membership.messages import Commit
from recycle.exec.model.build import build_stages
from recycle.exec.planning.planning import require_valid
from recycle.exec.transport.base import tie_groups
from recycle.exec.transport.local import Exchange, LocalTransport
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.instruction import Instruction
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import event_graph
from recycle.job import Job, price
from recycle.plans import with_ties
from recycle.shape import Worker


def run(
    schedule: Schedule,
    job: Job,
    *,
    steps: int | None = None,
    transport: Literal["local", "gloo"] = "local",
    directory: str | Path | None = None,
) -> RunResult:
    """Train `job` on `schedule`, from step 0.

    Args:
        schedule: lowered or compute-only; it must pass `check` for the job.
        job: the model, the data and the optimizer.
        steps: iterations to run; the job's own number, which the learning rate follows, when left out.
        transport: "local" runs all workers in this process, one instruction at a time; "gloo" starts a process per
            worker and leaves a run directory.
        directory: of the run, for "gloo"; a temporary one when left out.

    Returns:
        Metrics, digests of the final state, and for "gloo" the run directory.

    Raises:
        RunError, JobError: the schedule does not pass `check` or does not fit the job.
    """
    if transport == "gloo":
        return train(job, directory or tempfile.mkdtemp(prefix="recycle-"), steps=steps, schedule=schedule)
    if job.grid.tensor_parallel != 1:
        raise JobError(
            f'[shape] tensor_parallel: {job.grid.tensor_parallel}, but transport = "local" has one process, which'
            ' cannot be several tensor ranks; run with transport = "gloo", or set it to 1'
        )
    job = price(job)
    schedule = with_ties(schedule, job)
    require_valid(schedule, job)
    steps = job.train.steps if steps is None else steps
    check_request(job, steps, (), schedule.failed)
    return LocalRun(with_barrier(schedule), job).run(steps)


class LocalRun:
    """All workers of a schedule in one process.

    Args:
        schedule: lowered, with the barrier; valid.
        job: what its stages are made from.

    Attributes:
        stages: worker -> stage index -> stage.
    """

    def __init__(self, schedule: Schedule, job: Job) -> None:
        self.schedule, self.job = schedule, job
        self.exchange = Exchange()
        self.stages = {worker: build_stages(job, schedule.stages_of(worker)) for worker in schedule.live}
        self.programs: dict[Worker, Sequence[Instruction]] = {w: schedule.program(w) for w in schedule.live}
        graph = event_graph(schedule)
        self.order = [schedule.position(row) for row in graph.order.tolist() if row < graph.dependencies.rows]
        self.commit: Commit | None = None
        self.interpreters = {
            worker: Interpreter(
                self.stages[worker],
                job.shape.stages,
                LocalTransport(worker, self.exchange),
                partial(self._step, worker),
                ties=schedule.ties,
            )
            for worker in schedule.live
        }

    def run(self, steps: int) -> RunResult:
        result = RunResult()
        for iteration in range(steps):
            self.iterate(iteration)
            assert self.commit is not None, "a checked schedule steps in every iteration"
            result.metrics.append(
                {
                    "step": iteration,
                    "loss": self.commit.loss,
                    "grad_norm": self.commit.grad_norm,
                    "mode": self.commit.mode,
                    "live_workers": len(self.schedule.live),
                }
            )
        for worker, stages in self.stages.items():
            result.digests[str(worker)] = {index: stage.state_digest() for index, stage in stages.items()}
        return result

    def iterate(self, iteration: int) -> None:
        """Run one iteration, its optimizer steps included."""
        self._iteration = iteration
        self.commit = None
        self.exchange.reduced.clear()
        for worker, interpreter in self.interpreters.items():
            interpreter.begin(self.programs[worker], iteration)
        self.exchange.sums.clear()
        for worker in self.schedule.live:
            for index, stage in self.stages[worker].items():
                self.exchange.sums.setdefault(index, []).append(stage.gradient_buffers())
            for group, tie in tie_groups(self.schedule).items():
                for index in self.schedule.stages_of(worker):
                    if index in tie:
                        # Tied stages of one worker have one sum.
                        self.exchange.sums.setdefault(group, []).append(self.stages[worker][index].tied_buffers())
                        break
        for worker, position in self.order:
            self.interpreters[worker].execute(self.programs[worker][position])

    def _step(self, worker: Worker, stage: int) -> None:
        """The first STEP decides for all: the barrier has put it behind every reduce."""
        if self.commit is None:
            reports = {str(host): report_of(stages) for host, stages in self.stages.items()}
            self.commit = decide(self.job, self._iteration, reports)
        if self.commit.clip_factor is not None:
            self.stages[worker][stage].step(self._iteration, self.commit.clip_factor)
