"""Runs your own schedule on the job's real stages: in this process, or with one process per worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from recycle.errors import JobError
from recycle.exec.data.loading import DataProvider
from recycle.exec.hooks.evaluation import Evaluation, evaluation_schedule
from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.hooks.integrity import StateComparison
from recycle.exec.launch.checks import check_request
from recycle.exec.launch.launcher import RunResult, train
from recycle.exec.launch.request import request_run
from recycle.exec.leader.commit import commit_of, evaluate, only_generation
from recycle.exec.leader.metrics import finite_or_none
from recycle.exec.model.build import build_stages
from recycle.exec.model.loss import LossFunction
from recycle.exec.model.providers import ModelProvider, Providers
from recycle.exec.model.stage import bucket_key
from recycle.exec.protocol import Commit, Evaluated, EvaluationReport, Report
from recycle.exec.transport.base import tie_groups
from recycle.exec.transport.local import Exchange, LocalTransport
from recycle.exec.worker.iterations import Iterations
from recycle.exec.worker.local_stages import own_initial_shards
from recycle.exec.worker.step_state import StepState
from recycle.ir.event_graph import event_graph
from recycle.ir.lower import with_barrier
from recycle.ir.replays import IterationKey
from recycle.ir.schedule import Schedule
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.plans.plan import programs_of


def run(
    schedule: Schedule,
    job: Job,
    *,
    steps: int | None = None,
    transport: Literal["local", "gloo"] = "local",
    directory: str | Path | None = None,
    model: ModelProvider | None = None,
    data: DataProvider | None = None,
    loss: LossFunction | None = None,
    evaluation: DataProvider | None = None,
) -> RunResult:
    """Train `job` on `schedule`, from step 0.

    Args:
        schedule: lowered or compute-only; it must pass `check` for the job.
        job: the model, the data and the optimizer.
        steps: iterations to run; None for the job's own number, which the learning rate follows in any case.
        transport: "local" runs all workers in this process; "gloo" starts a process per worker.
        directory: run directory for "gloo"; None for a temporary one.
        model, data, loss, evaluation: your own functions, as `[model] provider`, `[data] provider`, `[train] loss` and
            `[eval] data.provider` name them (see docs/guides/models.md); for "gloo" at the top of a module.

    Returns:
        Metrics, digests of the final state, and for "gloo" the run directory.

    Raises:
        RunError, JobError: the schedule does not pass `check` or does not fit the job.
    """
    if transport == "gloo":
        return train(
            job,
            directory,
            steps=steps,
            schedule=schedule,
            model=model,
            data=data,
            loss=loss,
            evaluation=evaluation,
        )
    if job.grid.tensor_parallel != 1:
        raise JobError(
            f'[shape] tensor_parallel: {job.grid.tensor_parallel}, but transport = "local" has one process, which'
            ' cannot be several tensor ranks; run with transport = "gloo", or set it to 1'
        )
    providers = Providers(model, data, loss, evaluation).merged_with(job)
    request = request_run(job, steps=steps, schedule=schedule)
    check_request(request.job, request.steps, (), request.absent, providers)
    assert request.schedule is not None
    return LocalRun(with_barrier(request.schedule), request.job, providers).run(request.steps)


class LocalRun:
    """All workers of a valid, lowered schedule in one process; `stages` is worker -> stage index -> stage."""

    def __init__(self, schedule: Schedule, job: Job, providers: Providers | None = None) -> None:
        self.schedule, self.job = schedule, job
        self.exchange = Exchange()
        self.stages = {
            worker: build_stages(job, schedule.stages_of(worker), providers=providers, cut=schedule.shape.cut)
            for worker in schedule.live
        }
        if job.train.sharded_optimizer:
            self._own_shards()
        self.rotation = programs_of(schedule, job)
        self._orders: dict[IterationKey, list[tuple[Worker, int]]] = {}
        self.evaluated_by = evaluation_schedule(schedule, job)

    def _own_shards(self) -> None:
        self.exchange.owners = own_initial_shards(self.job, self.schedule, self.stages)
        for worker, stages in self.stages.items():
            for index, stage in stages.items():
                self.exchange.weights.setdefault(index, {})[worker] = stage.layout.weights()

    def run(self, steps: int) -> RunResult:
        result = RunResult()
        for iteration in range(steps):
            commit = self.iterate(iteration)
            line: dict[str, Any] = {
                "step": iteration,
                "loss": commit.loss,
                "grad_norm": commit.grad_norm,
                "mode": commit.mode,
                "live_workers": len(self.schedule.live),
            }
            if self.job.is_evaluated(iteration, iteration == steps - 1):
                line["eval_loss"] = finite_or_none(self.evaluate(iteration).loss)
            result.metrics.append(line)
        for worker, stages in self.stages.items():
            result.digests[str(worker)] = {
                number: text for stage in stages.values() for number, text in stage.digests().items()
            }
        return result

    def iterate(self, iteration: int) -> Commit:
        reports: dict[str, Report] = {}
        every = self.job.compared_every(self.rotation.rounds)
        running: dict[Worker, Iterations] = {}
        for worker, stages in self.stages.items():
            updates, hooks = StepState(stages, iteration - 1), list[IterationHook]()
            if every and iteration % every == 0:
                hooks.append(StateComparison(self.job, stages, updates))
            generation = self._generation(worker, iteration - 1, _LocalCommits(self.job, str(worker), reports))
            running[worker] = Iterations(generation=generation, stages=stages, updates=updates, hooks=hooks)
        for iterations in running.values():
            iterations.begin()
        self._share_sums()
        for worker, position in self._order(iteration):
            if running[worker].execute(position):
                running[worker].report()
        for iterations in running.values():
            iterations.step()
        for iterations in running.values():
            iterations.end()
        return commit_of(self.job, iteration, iteration + 1, reports)

    def _generation(self, worker: Worker, before: int, commits: _LocalCommits) -> Generation:
        return Generation(
            record=only_generation(sorted(self.schedule.live), before),
            role=worker,
            schedule=self.schedule,
            rotation=self.rotation,
            transport=LocalTransport(worker, self.exchange),
            commits=commits,
            evaluated_by=self.evaluated_by,
        )

    def _order(self, iteration: int) -> list[tuple[Worker, int]]:
        key = self.rotation.key_of(iteration)
        if key not in self._orders:
            self._orders[key] = _global_order(self.rotation.schedule(iteration))
        return self._orders[key]

    def evaluate(self, step: int) -> Evaluated:
        assert self.evaluated_by is not None, "the job has [eval]"
        reports: dict[str, EvaluationReport] = {}
        running: dict[Worker, Evaluation] = {}
        for worker, stages in self.stages.items():
            commits = _LocalCommits(self.job, str(worker), reports)
            running[worker] = Evaluation(job=self.job, stages=stages)
            running[worker].begin_generation(self._generation(worker, step, commits))
        order = _global_order(self.evaluated_by)
        for batch in range(self.job.evaluation.batches):
            for evaluation in running.values():
                evaluation.begin_batch(step, batch)
            for worker, position in order:
                running[worker].execute(position)
            for evaluation in running.values():
                evaluation.end_batch()
        for evaluation in running.values():
            evaluation.report_losses(step)
        return evaluate(step, reports)

    def _share_sums(self) -> None:
        self.exchange.reduced.clear()
        self.exchange.sums.clear()
        self.exchange.gathered.clear()
        buckets = self.schedule.buckets
        for worker in self.schedule.live:
            for index, stage in self.stages[worker].items():
                for bucket in range(buckets):
                    parts = stage.layout.bucket(stage, bucket, buckets)
                    self.exchange.sums.setdefault((index, bucket_key(bucket, buckets)), {})[worker] = parts
            for group, tie in tie_groups(self.schedule).items():
                for index in self.schedule.stages_of(worker):
                    if index in tie:
                        # Tied stages of one worker share one sum.
                        tied = self.stages[worker][index].tied_buffers()
                        self.exchange.sums.setdefault((group, None), {})[worker] = [[buffer] for buffer in tied]
                        break


def _global_order(schedule: Schedule) -> list[tuple[Worker, int]]:
    graph = event_graph(schedule)
    return [schedule.position(row) for row in graph.order.tolist() if row < graph.dependencies.rows]


class _LocalCommits:
    """Computes commits from the reports of all workers of this process, which the barrier orders first."""

    def __init__(self, job: Job, worker: str, reports: dict[str, Any]) -> None:
        self._job, self._worker, self._reports = job, worker, reports

    def report(self, step: int, report: Report | EvaluationReport) -> None:
        self._reports[self._worker] = report

    report_evaluation = report

    def decision(self, step: int) -> Commit:
        return commit_of(self._job, step, step + 1, self._reports)

    def evaluated(self, step: int) -> Evaluated:
        return evaluate(step, self._reports)
