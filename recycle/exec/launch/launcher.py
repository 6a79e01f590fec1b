"""The launcher: one run on this machine, from starting its processes to the merged trace.

It is this machine's agent and hosts the leader, without etcd or a port. No process of the run outlives it.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.exec.checkpoint.resume import find_resume_point, find_script_part
from recycle.exec.faults.faults import Fault
from recycle.exec.launch.node import Node
from recycle.exec.launch.request import request_run
from recycle.exec.launch.run_address import LOCAL, remove_address, require_unused, write_address
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.launch.runtime import LeaderRuntime
from recycle.exec.launch.trackers import Observer
from recycle.exec.model.providers import ModelProvider, Providers
from recycle.exec.planning.planner_process import Planner
from recycle.exec.processes.forkserver import ForkServer
from recycle.exec.processes.processes import require_open_files
from recycle.ir.schedule import Schedule
from recycle.job import Job, price

if TYPE_CHECKING:  # both have torch, which this process lacks
    from recycle.exec.data.loading import DataProvider
    from recycle.exec.model.loss import LossFunction


@dataclass(frozen=True)
class RunResult:
    """The results of a run.

    Attributes:
        metrics: a line per committed step, as in `metrics.jsonl`.
        events: as in `events.jsonl`.
        digests: worker -> stage -> sha256 of the stage's final state (parameters and optimizer), of all tensor ranks.
        directory: the run directory, None for a run that wrote none.
        ended_early: the run was asked to end before its last iteration, and can be resumed.
    """

    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    digests: dict[str, dict[int, str]] = field(default_factory=dict)
    directory: Path | None = None
    ended_early: bool = False

    @property
    def losses(self) -> list[float]:
        """Loss of each step; floats that compare bit for bit."""
        return [line["loss"] for line in self.metrics]

    @property
    def evaluations(self) -> dict[int, float]:
        """Step -> loss of the evaluation after the step."""
        return {line["step"]: line["eval_loss"] for line in self.metrics if line.get("eval_loss") is not None}

    @property
    def modes(self) -> Counter[str]:
        """Number of steps in each mode."""
        return Counter(line["mode"] for line in self.metrics)

    @property
    def period_error(self) -> float | None:
        """Median over the steps of (executed - planned period) / planned; None if the plan's unit is unknown."""
        errors = [line["period_error"] for line in self.metrics if line.get("period_error") is not None]
        return statistics.median(errors) if errors else None

    @property
    def undone(self) -> list[int]:
        """The steps that some worker had taken and undid, in order."""
        return [event["step"] for event in self.events if event["kind"] == "undone" and event["count"]]


def train(
    job: Job,
    directory: str | Path | None = None,
    *,
    steps: int | None = None,
    schedule: Schedule | None = None,
    faults: Sequence[Fault] = (),
    planner: Planner | None = None,
    observer: Observer | None = None,
    server: ForkServer | None = None,
    resume: bool = False,
    model: ModelProvider | None = None,
    data: DataProvider | None = None,
    loss: LossFunction | None = None,
    evaluation: DataProvider | None = None,
    stop: threading.Event | None = None,
    command: Sequence[str] = (),
    script_restarts: int = 0,
) -> RunResult:
    """Train a job on this machine, through injected and real faults.

    Args:
        job: what to train.
        directory: the run directory, fresh unless resumed; None for a temporary one.
        steps: iterations to run; None for the job's own number, which the learning rate follows in any case.
        schedule: your own schedule, used while its live workers are the run's live workers.
        faults: faults to inject.
        planner: a module-level function that makes the schedule of any other set of live workers. Defaults to the
            planner of `recycle train` if neither a schedule nor a planner is given.
        observer: is called with commits and events.
        server: forks the workers; None for a new fork server. Several runs may share a server, to import once.
        resume: resume from the newest complete checkpoint of the run directory, in this job's shape; with `command`
            from the script's own, and from the beginning if there is no run.
        model, data, loss, evaluation: your own functions, at the top of a module, as `[model] provider`, `[data]
            provider`, `[train] loss` and `[eval] data.provider` name them (see docs/guides/models.md).
        stop: when set, the run ends with the present or next iteration, and a checkpoint of its state.
        command: your own Megatron script and its arguments, started once per worker instead of recycle's trainer (see
            docs/guides/own-loop.md).
        script_restarts: how often the script is started again, from its own checkpoint, after the loss of a stage.

    Raises:
        JobError, ScheduleError: the request is impossible; no process was started.
        RunError: the run cannot continue.
    """
    job = price(Providers(model, data, loss, evaluation).write_names(job))
    if resume and directory is not None:
        require_unused(Path(directory))
    if schedule is None and planner is None:
        planner = _usual_planner()
    directory = directory or tempfile.mkdtemp(prefix="recycle-")
    request = request_run(
        job.without_weights() if resume else job,
        steps=steps,
        schedule=schedule,
        planner=planner,
        faults=faults,
        observer=observer,
        command=command,
        script_restarts=script_restarts,
    )
    processes_here = (job.shape.worker_count - len(request.absent)) * job.grid.tensor_parallel
    with contextlib.ExitStack() as closing:
        forks = server or request.fork_server()
        if server is None:
            closing.callback(forks.close)
        request = request.checked_by(forks, processes_here)
        require_open_files(processes_here, processes_here)
        earlier = None
        if resume:
            path, digest = Path(directory), request.text_digest
            earlier = find_script_part(path) if command else find_resume_point(path, job, request.steps, digest)
        run_directory = RunDirectory(directory, job, earlier)
        closing.callback(run_directory.close)
        if server is None:
            forks.log_to(run_directory.logs / "forkserver.log")
        workers = sorted(job.shape.workers())
        node = Node(
            request,
            run_directory,
            forks,
            workers,
            address="127.0.0.1",
            drain=lambda link, message: runtime.drain(message, partial(node.hub.send, link)),
        )
        closing.callback(node.close)
        write_address(run_directory.path, f"{LOCAL}://{node.socket}", "")
        closing.callback(remove_address, run_directory.path)
        runtime = LeaderRuntime(
            request=request,
            register=lambda action: None,  # the leader and the register end with this process
            homes=dict.fromkeys(workers, 0),
            directory=run_directory,
            waker=node.waker,
        )
        closing.callback(runtime.close)
        runtime.start_run(earlier)
        runtime.connect_agent(node.agent.obey, node.agent.hello())
        while not runtime.over:
            if stop is not None and stop.is_set() and not runtime.ends_early:
                runtime.end_early()
            node.hub.dispatch()
            if (batch := node.agent.batch()) is not None:
                runtime.take(0, batch)
            runtime.tick()
            node.wait()
        node.processes.end(patience=job.membership.dead_after)
        metrics = run_directory.metrics
    digests = {worker: dict(of_stages) for worker, of_stages in runtime.digests.items()}
    return RunResult(metrics, run_directory.events, digests, run_directory.path, runtime.ends_early)


def _usual_planner() -> Planner:
    module, _, function = Job.planned_by.partition(":")
    planner: Planner = getattr(import_module(module), function)
    return planner
