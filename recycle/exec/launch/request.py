"""The request for a run, checked as a whole before any worker starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from recycle.errors import JobError, RunError
from recycle.exec.checkpoint.resume import ResumePoint, find_optional_resume_point, find_script_part
from recycle.exec.faults.faults import Fault, check_faults
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.launch.trackers import Observer, require_packages
from recycle.exec.leader.detector import profiled_seconds
from recycle.exec.planning.planner_process import Planner
from recycle.exec.planning.run_checks import require_valid
from recycle.exec.processes.forkserver import ForkServer, describe_exit
from recycle.exec.protocol import LINE_SEPARATOR, as_clause, with_last_lines
from recycle.exec.worker.specification import REFUSED, RunSpecification
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.job.architecture import Architecture
from recycle.job.manifest import require_model_of_weights
from recycle.job.shape import Worker
from recycle.plans import with_updates_of
from recycle.plans.hosting import Hosts

FAILED = 3
"""Exit code of a check that found an error of the run rather than of the job; see also `REFUSED`."""


class Findings(msgspec.Struct, frozen=True):
    """Facts about this machine, found while checking a request.

    Attributes:
        text_digest: sha256 of the training text; None without a text.
        environment: variables that workers need for their transport.
        gpu: name of the first GPU, if the job asks for the model's share of its peak.
        gpus, transport: as of `RunSpecification`.
    """

    text_digest: str | None = None
    environment: Mapping[str, str] = {}
    gpu: str = ""
    gpus: Sequence[str] = ()
    transport: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run that can be started, made by `request_run`; most attributes are as for `launcher.train`.

    Attributes:
        command: the user's script and its arguments, which trains in a session; empty for recycle's own trainer.
        script_restarts: how often the script is started again after the loss of a stage.
    """

    job: PricedJob
    steps: int
    schedule: Schedule | None
    planner: Planner | None
    faults: Sequence[Fault]
    observer: Observer
    findings: Findings = Findings()  # noqa: RUF009  (immutable)
    command: Sequence[str] = ()
    script_restarts: int = 0

    @property
    def text_digest(self) -> str | None:
        """sha256 of the training text; None without a text."""
        return self.findings.text_digest

    @property
    def absent(self) -> frozenset[Worker]:
        return self.schedule.failed if self.schedule is not None else frozenset()

    @property
    def hosts(self) -> Hosts:
        return Hosts.at_start(self.job, self.schedule)

    def earlier_part(self, path: Path) -> ResumePoint | None:
        """What a run directory holds of this run; None for a run that begins. Raises JobError."""
        if self.command:
            return find_script_part(path)
        return find_optional_resume_point(path, self.job, self.steps, self.text_digest)

    def fork_server(self) -> ForkServer:
        """Start a server that forks this run's workers."""
        job = self.job
        return ForkServer(
            "script" if self.command else job.model.kind,
            job.train.threads,
            modules=list(dict.fromkeys(name.partition(":")[0] for name in job.named_functions().values())),
            folders=job.model.import_from or (),
        )

    def checked_by(self, server: ForkServer, processes: int) -> RunRequest:
        """Return the request with the findings of a forked process with torch. Raises JobError, RunError."""
        asked = self.job.to_toml(), self.steps, list(map(str, self.faults)), list(map(str, self.absent)), processes
        code, output = server.call("recycle.exec.launch.checks:main", msgspec.json.encode(asked).decode())
        *before, last = output.splitlines() or [""]
        if code in (REFUSED, FAILED):
            raise (JobError if code == REFUSED else RunError)(last)
        if code:
            ending = with_last_lines(as_clause(describe_exit(code)), LINE_SEPARATOR.join([*before, last][-8:]))
            raise RunError(f"the process that checks the job {ending}")
        return replace(self, findings=msgspec.json.decode(last, type=Findings))

    def specification(self, directory: RunDirectory, *, agent: str, address: str) -> RunSpecification:
        """Return the specification for one machine's worker processes; `agent` is the agent's socket name."""
        own = self.hosts if self.schedule is not None else None
        return RunSpecification(
            job=self.job.to_toml(),
            cut=[] if own is None else list(own.cut),
            stages={} if own is None else {str(worker): list(stages) for worker, stages in own.stages.items()},
            faults=[str(fault) for fault in self.faults],
            agent=agent,
            address=address,
            started=directory.started,
            directory=str(directory.path),
            environment=dict(self.findings.environment),
            gpus=list(self.findings.gpus),
            transport=self.findings.transport,
            command=list(self.command),
        )


def request_run(
    job: Job,
    *,
    steps: int | None = None,
    schedule: Schedule | None = None,
    planner: Planner | None = None,
    faults: Sequence[Fault] = (),
    observer: Observer | None = None,
    command: Sequence[str] = (),
    script_restarts: int = 0,
) -> RunRequest:
    """Return the request for a run, after all checks that need no torch.

    `steps` is None for the job's own number. Raises JobError, ScheduleError.
    """
    steps = job.train.steps if steps is None else steps
    job = price(job)
    if command:
        job = job_of_script(job, steps)
    check_without_torch(job, steps, faults, schedule.failed if schedule is not None else frozenset())
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
        command=tuple(command),
        script_restarts=script_restarts,
    )


def job_of_script(job: PricedJob, steps: int) -> PricedJob:
    """Return the job of a run in which the user's script has the model, the data, the optimizer and the checkpoints.

    Raises JobError for what a script cannot have.
    """
    defaults, change = Job(grid=job.grid), msgspec.structs.replace
    for key, is_set, remedy in (
        ("[train] sharded_optimizer", job.train.sharded_optimizer, "set it to false"),
        ("[shape] placement", job.grid.placement != "loop", 'write "loop"'),
        ("[planner] layout", job.planner.layout == "elastic", 'write "fixed"'),
        ("[eval] every", job.evaluation.every > 0, "evaluate in the script"),
    ):
        if is_set:
            raise JobError(f"{key}: is not supported for your own script; {remedy}")
    stated = {key: getattr(job.model, key) for key in ("layers", "split", "tied", "seed")}
    model = change(defaults.model, kind="emulated", **stated)
    kept = ("trace", "threads", "accumulation", "gradient_exponent", "non_finite")
    train = change(defaults.train, steps=steps, checkpoint_every=0, **{key: getattr(job.train, key) for key in kept})
    membership = job.membership
    if membership.transport == "auto":
        membership = change(membership, transport="gloo")
    return change(
        job,
        model=model,
        data=defaults.data,
        train=train,
        membership=membership,
        integrity=defaults.integrity,
        planner=change(job.planner, staggered=False, move=False),
    )


LONGEST_SECONDS = 1e6
"""Most seconds that an operation may take."""


def check_without_torch(job: Job, steps: int, faults: Sequence[Fault], absent: frozenset[Worker]) -> None:
    """Run the checks that need no torch. Raises JobError."""
    check_settings(job, steps)
    if job.model.kind != "emulated" and job.model.provider is None:
        _require_memory(job)
    require_packages(job)
    check_faults(faults, job, steps, absent)


def check_settings(job: Job, steps: int) -> None:
    """Raise JobError, with the key, for settings that cannot work with any data, functions or machine."""
    if steps < 1:
        raise JobError(f"steps must be at least 1, got {steps}")
    longest = profiled_seconds(price(job))
    if longest > LONGEST_SECONDS:
        key = "seconds_per_unit" if job.model.kind == "emulated" else "profile"
        raise JobError(f"[model] {key}: an operation takes {longest:.3g} s, at most {LONGEST_SECONDS:g} s can be run")
    if job.model.kind != "emulated":
        job.layers_per_stage()
        require_model_of_weights(job.model)


def _require_memory(job: Job) -> None:
    model, machine = job.model, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    built = Architecture.of(model)
    for key, rows in (("vocabulary", built.vocabulary), ("ffn", built.ffn), ("sequence", built.positions)):
        weight = 4 * rows * model.hidden // (1 if key == "sequence" else job.grid.tensor_parallel)
        if weight > machine:
            raise JobError(
                f"[model] {key}: {rows} rows of hidden = {model.hidden} weigh {weight:,} bytes, and this machine has"
                f" {machine:,}; make it smaller"
            )


def schedule_for(schedule: Schedule, job: PricedJob) -> Schedule:
    """Return the schedule with the updates that the job requires. Raises ScheduleError if it is invalid."""
    schedule = with_updates_of(schedule, job)
    require_valid(schedule, job)
    return schedule
