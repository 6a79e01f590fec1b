"""What is to be trained: checked as a whole before any process starts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recycle.architecture import Architecture
from recycle.errors import JobError
from recycle.exec.checkpoint.checkpoint import verify_files
from recycle.exec.faults.faults import Fault, check_faults_of_job
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.dials import require_packages
from recycle.exec.launch.observer import Observer
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.leader.detector import profiled_seconds
from recycle.exec.model.providers import Providers
from recycle.exec.planning.planner_process import Planner
from recycle.exec.planning.run_checks import require_valid
from recycle.exec.processes.forkserver import ForkServer
from recycle.exec.transport.transports import transport_named, transport_of
from recycle.exec.worker.specification import RunSpecification
from recycle.initial_weights import require_model_of_weights
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.plans import with_updates_of
from recycle.plans.hosting import Hosts
from recycle.shape import Worker


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run that can be started; made by `request_run`.

    Attributes:
        job: what to train, with the times that plans are made for.
        steps, schedule, planner, faults, observer: as for `launcher.train`.
        text_digest: sha256 of the text to train on; None where there is none.
    """

    job: PricedJob
    steps: int
    schedule: Schedule | None
    planner: Planner | None
    faults: Sequence[Fault]
    observer: Observer
    text_digest: str | None

    @property
    def absent(self) -> frozenset[Worker]:
        """The workers that the run starts without."""
        return self.schedule.failed if self.schedule is not None else frozenset()

    @property
    def hosts(self) -> Hosts:
        """What the workers host when they start."""
        return Hosts.at_start(self.job, self.schedule)

    def fork_server(self, log: Path) -> ForkServer:
        """A server that forks this run's workers, and imports what checkpoints need if the run is long enough for one.

        Args:
            log: file for what the server itself prints.
        """
        keeps_checkpoints = 0 < self.job.train.checkpoint_every <= self.steps
        environment = transport_of(self.job).environment
        others = self.job.evaluation.data
        named = (
            *(self.job.model.provider, self.job.data.provider, self.job.train.loss),
            None if others is None else others.provider,
        )
        return ForkServer(
            self.job.model.kind,
            self.job.train.threads,
            log,
            keeps_checkpoints,
            environment,
            list(dict.fromkeys(name.partition(":")[0] for name in named if name is not None)),
            self.job.model.import_from or (),
        )

    def specification(self, directory: RunDirectory, *, agent: str, address: str) -> RunSpecification:
        """What the worker processes of one machine are started with.

        Args:
            agent: name of the agent's socket.
            address: of the machine.
        """
        own = self.hosts if self.schedule is not None else None
        return RunSpecification(
            job=self.job.to_toml(),
            cut=[] if own is None else list(own.cut),
            stages={} if own is None else {str(worker): list(of) for worker, of in own.stages.items()},
            faults=[str(fault) for fault in self.faults],
            agent=agent,
            address=address,
            started=directory.started,
            directory=str(directory.path),
        )


def request_run(
    job: Job,
    *,
    steps: int | None = None,
    schedule: Schedule | None = None,
    planner: Planner | None = None,
    faults: Sequence[Fault] = (),
    observer: Observer | None = None,
    providers: Providers | None = None,
) -> RunRequest:
    """The request for a run, checked; its steps are the job's own when left out.

    Args:
        providers: functions for the model, the data and the loss; those that the job names when left out.

    Raises:
        JobError, ScheduleError: the request is impossible.
    """
    steps = job.train.steps if steps is None else steps
    job = price(job)
    text_digest = check_request(job, steps, faults, schedule.failed if schedule is not None else frozenset(), providers)
    if schedule is not None:
        schedule = schedule_for(schedule, job)
    elif planner is None:
        raise JobError("nothing to run: give a schedule or a planner")
    return RunRequest(
        job=job,
        steps=steps,
        schedule=schedule,
        planner=planner,
        faults=tuple(faults),
        observer=observer or Observer(),
        text_digest=text_digest,
    )


def schedule_for(schedule: Schedule, job: PricedJob) -> Schedule:
    """The schedule with the updates that the job asks for. Raises ScheduleError where it cannot be trained with."""
    schedule = with_updates_of(schedule, job)
    require_valid(schedule, job)
    return schedule


LONGEST_SECONDS = 1e6
"""That an operation may take."""


def check_request(
    job: Job, steps: int, faults: Sequence[Fault], absent: frozenset[Worker], providers: Providers | None = None
) -> str | None:
    """Refuse what cannot work before any process starts; returns sha256 of the text to train on. Raises JobError."""
    text_digest = None
    check_settings(job, steps)
    if job.model.kind != "emulated":
        from recycle.exec.data import load_batches, load_evaluation
        from recycle.exec.data.gpt_dataset import require_samples

        if job.model.provider is None:
            _require_memory(job)
        if job.model.weights is not None:
            verify_files(Path(job.model.weights))
        providers = providers or Providers.of(job)
        if providers.data is None:
            require_samples(job, steps)
        batches = load_batches(job, providers.data)
        batches.require_vocabulary()
        if job.evaluation.every:
            load_evaluation(job, providers.of_evaluation(job)).require_vocabulary()
        text_digest = batches.digest
    paces_links = transport_of(job).paces_links
    for fault in faults:
        if KINDS[fault.kind].of_link and not paces_links:
            raise JobError(
                f'fault {fault}: this transport does not hold messages back; set [membership] transport = "gloo"'
            )
    require_packages(job)
    check_faults_of_job(faults, job, steps, absent)
    return text_digest


def check_settings(job: Job, steps: int) -> None:
    """Refuse a job whose settings cannot be trained with, whatever its data, its functions and this machine are.

    Raises:
        JobError: names the key.
    """
    if steps < 1:
        raise JobError(f"steps must be at least 1, got {steps}")
    longest = profiled_seconds(price(job))
    if longest > LONGEST_SECONDS:
        key = "seconds_per_unit" if job.model.kind == "emulated" else "profile"
        raise JobError(f"[model] {key}: an operation takes {longest:.3g} s, at most {LONGEST_SECONDS:g} s can be run")
    transport = job.membership.transport
    if transport != "auto" and ":" not in transport:
        transport_named(transport)
    if job.model.kind == "emulated":
        return
    job.layers_per_stage()
    require_model_of_weights(job.model)
    if job.model.config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core, whose import takes seconds, tells of missing packages
            from recycle.exec.model.config import transformer_config
        transformer_config(job)


def _require_memory(job: Job) -> None:
    """Raise JobError for a weight that the memory of this machine could not hold."""
    model, machine = job.model, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    built = Architecture.of(model)
    for key, rows in (("vocabulary", built.vocabulary), ("ffn", built.ffn), ("sequence", built.positions)):
        weight = 4 * rows * model.hidden // (1 if key == "sequence" else job.grid.tensor_parallel)
        if weight > machine:
            raise JobError(
                f"[model] {key}: {rows} rows of hidden = {model.hidden} weigh {weight:,} bytes, and this machine has"
                f" {machine:,}; make it smaller"
            )
