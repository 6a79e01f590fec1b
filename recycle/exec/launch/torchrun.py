"""`torchrun --nproc-per-node N -m recycle.exec.worker JOB`: runs a schedule the way Megatron jobs are launched.

There is no membership: every process derives the same commit from all reports, through torchrun's store, and stages
step with the barrier. torchrun ends all workers when one dies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.device import copy_stream_of
from recycle.exec.hooks.evaluation import Evaluation, evaluation_schedule
from recycle.exec.hooks.hook import Generation, IterationHook
from recycle.exec.hooks.integrity import StateComparison
from recycle.exec.launch.checks import check_request
from recycle.exec.launch.request import request_run
from recycle.exec.leader.commit import commit_of, evaluate, only_generation
from recycle.exec.leader.metrics import finite_or_none
from recycle.exec.model.build import build_stages
from recycle.exec.protocol import Commit, Evaluated, EvaluationReport, Report
from recycle.exec.transport.base import sum_groups
from recycle.exec.transport.groups import GroupsOfGeneration
from recycle.exec.transport.plugin import TransportSettings, transport_of
from recycle.exec.worker.iterations import Iterations
from recycle.exec.worker.local_stages import own_initial_shards
from recycle.exec.worker.step_state import StepState
from recycle.ir.communicators import lanes_of
from recycle.ir.formats import named_schedule
from recycle.ir.lower import with_barrier
from recycle.ir.plugins import load_plugins
from recycle.job import Job
from recycle.job.shape import Worker
from recycle.plans.plan import programs_of

_Report = TypeVar("_Report")
REPORT_SECONDS = 600.0
"""Seconds to wait for the others' reports; torchrun ends the process much earlier if another dies."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit with 2 on an impossible request, after one line on standard error."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m recycle.exec.worker",
        description="Train a job on a schedule without faults, one process per worker, launched by torchrun.",
        epilog="example: torchrun --nproc-per-node 2 -m recycle.exec.worker job.toml --schedule zb-h1 --steps 10",
    )
    parser.add_argument("job", help="job file (TOML)")
    parser.add_argument("--schedule", default="1f1b", help="a family, or a schedule file; 1f1b when left out")
    parser.add_argument("--steps", type=int, help="iterations; else the job's own number")
    parser.add_argument("--metrics", type=Path, help="file for a JSON line per step")
    given = parser.parse_args(arguments)
    first = os.environ.get("RANK", "0") == "0"
    try:
        _train(given, first)
    except RecycleError as error:
        if first:
            print(f"error: {error} [{error.code}]", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, RunError) else 2)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the transport still run


def _train(given: argparse.Namespace, first: bool) -> None:
    if "RANK" not in os.environ:
        raise JobError("RANK is not set: start this with torchrun, or train with: recycle train")
    load_plugins()
    described = Job.load(given.job)
    own = named_schedule(given.schedule, described.shape)
    request = request_run(described, steps=given.steps, schedule=own)
    check_request(request.job, request.steps, (), request.absent)
    assert request.schedule is not None
    job, steps, schedule = request.job, request.steps, with_barrier(request.schedule)
    if job.grid.tensor_parallel != 1:
        raise JobError(
            f"[shape] tensor_parallel: {job.grid.tensor_parallel}, but under torchrun a worker is one process; train"
            " with: recycle train"
        )
    workers = sorted(schedule.live)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != len(workers):
        raise JobError(f"the schedule has {len(workers)} live workers, torchrun started {size} processes")
    role = workers[rank]
    torch.set_num_threads(job.train.threads)
    store: Any = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
    plugin = transport_of(job)
    os.environ.update(plugin.environment)  # torchrun sets a variable that NCCL's transport refuses
    device = plugin.device(int(os.environ.get("LOCAL_RANK", "0")))
    stages = build_stages(job, schedule.stages_of(role), device, cut=schedule.shape.cut)
    owners = own_initial_shards(job, schedule, {role: stages}) if job.train.sharded_optimizer else {}
    is_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size
    address = os.environ.get("RECYCLE_ADDRESS", "127.0.0.1" if is_one_machine else os.uname().nodename)
    rotation = programs_of(schedule, job)
    transport = plugin(TransportSettings(store, device, address, limits=job.membership)).open(
        GroupsOfGeneration(
            f"torchrun{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            role,
            workers,
            sum_groups(schedule),
            next((stage.message_spec() for stage in stages.values()), ((0,), torch.float32)),
            lanes_of(rotation.whole),
            owners=owners,
        )
    )
    commits = _TorchrunCommits(job, steps, store, workers, rank, given.metrics if first else None)
    updates, hooks = StepState(stages, stream=copy_stream_of(device)), list[IterationHook]()
    if job.integrity.compares_states:
        hooks.append(StateComparison(job, stages, updates))
    if job.evaluation.every:
        hooks.append(Evaluation(job=job, stages=stages))
    generation = Generation(
        record=msgspec.structs.replace(only_generation(workers), rounds=rotation.rounds),
        role=role,
        schedule=schedule,
        rotation=rotation,
        transport=transport,
        commits=commits,
        evaluated_by=evaluation_schedule(schedule, job),
    )
    Iterations(generation=generation, stages=stages, updates=updates, hooks=hooks).run()


class _TorchrunCommits:
    """Computes commits from the reports in torchrun's store; the first process prints each."""

    def __init__(
        self, job: Job, steps: int, store: Any, workers: Sequence[Worker], rank: int, metrics: Path | None
    ) -> None:
        self._job, self._steps, self._store, self._rank = job, steps, store, rank
        self._names = [str(worker) for worker in workers]
        self._metrics = metrics.open("w") if metrics is not None else None
        self._line: dict[str, Any] = {}

    def report(self, step: int, report: Report) -> None:
        self._leave("report", step, report, step - 2)

    def report_evaluation(self, step: int, report: EvaluationReport) -> None:
        self._leave("evaluation", step, report, step - self._job.evaluation.every)

    def _leave(self, kind: str, step: int, report: Report | EvaluationReport, read: int) -> None:
        name = self._names[self._rank]
        self._store.set(f"{kind}/{step}/{name}", msgspec.msgpack.encode(report))
        if read >= 0:
            self._store.delete_key(f"{kind}/{read}/{name}")

    def _gather(self, what: str, step: int, kind: type[_Report]) -> dict[str, _Report]:
        keys = {name: f"{what}/{step}/{name}" for name in self._names}
        self._store.wait(list(keys.values()), timedelta(seconds=REPORT_SECONDS))
        return {name: msgspec.msgpack.decode(self._store.get(key), type=kind) for name, key in keys.items()}

    def evaluated(self, step: int) -> Evaluated:
        result = evaluate(step, self._gather("evaluation", step, EvaluationReport))
        if self._rank == 0:
            print(f"step {step}/{self._steps - 1}  evaluation loss {result.loss:.6f}", flush=True)
        self._write(self._line | {"eval_loss": finite_or_none(result.loss)})
        return result

    def decision(self, step: int) -> Commit:
        reports = self._gather("report", step, Report)
        commit = commit_of(self._job, step, self._steps, reports)
        if commit.clip_factor is None and self._job.train.non_finite == "fatal":
            raise RunError(f"step {step}: a gradient is not finite ([train] non_finite = 'fatal')")
        if self._rank == 0:
            print(f"step {step}/{self._steps - 1}  loss {commit.loss:.6f}", flush=True)
        self._line = {"step": step, "loss": commit.loss, "grad_norm": commit.grad_norm, "mode": commit.mode}
        if not commit.evaluate:
            self._write(self._line)
        return commit

    def _write(self, line: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()
