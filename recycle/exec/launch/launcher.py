"""The launcher: one run, from starting its processes to the merged trace.

It owns the store, the worker processes, the planner's children and the run directory, strikes the faults that were
asked for, and lets the coordinator tick. Whatever happens, no process of the run outlives it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.checkpoint.checkpoint import Checkpoint
from recycle.exec.checkpoint.checkpoint_manager import CheckpointManager
from recycle.exec.checkpoint.resume import Earlier, find_earlier
from recycle.exec.faults.faults import KINDS, Fault, check_faults
from recycle.exec.launch.metrics import metrics_line
from recycle.exec.launch.observer import Observer
from recycle.exec.launch.restart import where_to_go_back
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.membership.coordinator import Coordinator, GenerationPhase, StageLost
from recycle.exec.membership.members import joined_digests, members_of
from recycle.exec.membership.messages import Commit, GenerationRecord
from recycle.exec.membership.schema import ClosedKey, FinalKey, ReachedKey, ReadyKey, StruckKey, WarningKey
from recycle.exec.membership.store import Store
from recycle.exec.membership.stores import host_store
from recycle.exec.planning.placement import rank_of_stages, stages_by_rank
from recycle.exec.planning.planning import Planner, PlanService, require_valid
from recycle.exec.planning.replanning import Replanner
from recycle.exec.processes.processes import ForkServer, LocalProcesses
from recycle.exec.processes.waker import Waker
from recycle.exec.transport.connections import cut
from recycle.exec.transport.transports import transport_of
from recycle.exec.worker.specification import WorkerSpecification
from recycle.ir.schedule import Schedule
from recycle.job import Job, PricedJob, price
from recycle.plans import with_ties
from recycle.runs import merge_logs
from recycle.shape import Worker

LISTEN_SECONDS = 300.0
"""How long one call listens to what workers write; there is another behind it."""
STRIKE_SECONDS = 0.002
"""How precisely a fault that strikes after a delay is timed."""


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        metrics: a line per committed step, as in `metrics.jsonl`.
        events: as in `events.jsonl`.
        digests: worker -> stage -> sha256 of the stage's final state (parameters and optimizer), of all tensor ranks.
        directory: the run directory, None for a run that wrote none.
    """

    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    digests: dict[str, dict[int, str]] = field(default_factory=dict)
    directory: Path | None = None

    @property
    def losses(self) -> list[float]:
        """Loss of each step; floats that compare bit for bit."""
        return [line["loss"] for line in self.metrics]

    @property
    def modes(self) -> Counter[str]:
        """How many steps ran in each mode."""
        return Counter(line["mode"] for line in self.metrics)

    @property
    def period_error(self) -> float | None:
        """Median over the steps of (executed - planned period) / planned; None where the plan's unit is not known."""
        errors = [line["period_error"] for line in self.metrics if line.get("period_error") is not None]
        return statistics.median(errors) if errors else None

    @property
    def undone(self) -> list[int]:
        """The steps that some worker had taken already and took back, in order."""
        return [event["step"] for event in self.events if event["kind"] == "undone" and event["count"]]


def train(
    job: Job,
    directory: str | Path,
    *,
    steps: int | None = None,
    schedule: Schedule | None = None,
    faults: Sequence[Fault] = (),
    planner: Planner | None = None,
    observer: Observer | None = None,
    server: ForkServer | None = None,
    resume: bool = False,
) -> RunResult:
    """Train a job on this machine, through the faults that are asked for or happen.

    Each live worker is one process, or as many as the job's tensor parallelism.

    Args:
        job: what to train.
        directory: the run directory, fresh unless resumed.
        steps: iterations to run; the job's own number, which the learning rate follows, when left out.
        schedule: a schedule of one's own for as long as the workers that it leaves alive are the live ones.
        faults: to strike on purpose.
        planner: makes the schedule of any other set of live workers; a module-level function.
        observer: hears of commits and events.
        server: forks the workers; one of its own when left out. Several runs may share one, to import once.
        resume: go on from the newest complete checkpoint of the run directory, in this job's shape.

    Raises:
        JobError, ScheduleError: the request is impossible; no process was started.
        RunError: the run cannot go on.
    """
    job = price(job)
    steps = job.train.steps if steps is None else steps
    absent = schedule.failed if schedule is not None else frozenset()
    text_digest = check_request(job, steps, faults, absent)
    if schedule is not None:
        schedule = with_ties(schedule, job)
        require_valid(schedule, job)
        stages_by_rank(job.shape, schedule)
    if schedule is None and planner is None:
        raise JobError("nothing to run: give a schedule or a planner")
    transport = transport_of(job)
    transport.require_machine((job.shape.worker_count - len(absent)) * job.grid.tensor_parallel)
    earlier = find_earlier(Path(directory), job, steps, text_digest) if resume else None
    run_directory = RunDirectory(directory, job, earlier)
    checkpoints = 0 < job.train.checkpoint_every <= steps
    log = run_directory.logs / "forkserver.log"
    own = server or ForkServer(job.model.kind, job.train.threads, log, checkpoints, transport.environment)
    launcher = _Launcher(
        job, steps, run_directory, schedule, list(faults), planner, observer or Observer(), own, text_digest, earlier
    )
    try:
        return launcher.run()
    finally:
        launcher.close()
        if server is None:
            own.close()


def check_request(job: Job, steps: int, faults: Sequence[Fault], absent: frozenset[Worker]) -> str | None:
    """Refuse what cannot work before any process starts; returns sha256 of the text to train on. Raises JobError."""
    text_digest = None
    if steps < 1:
        raise JobError(f"steps must be at least 1, got {steps}")
    if job.model.kind == "gpt":
        from recycle.exec.data.batches import load_batches

        job.layers_per_stage()
        batches = load_batches(job)
        batches.require_vocabulary()
        text_digest = batches.digest
    transport_of(job)
    check_faults(faults, job.shape, steps, absent, job.grid.tensor_parallel)
    return text_digest


class StartUpFailed(RunError):
    """A worker's process ended before it was ready."""

    def __init__(self, worker: Worker, how: str, tail: str) -> None:
        super().__init__(f"worker {worker} {how} during start-up; its last lines: {tail}")
        self.worker, self.how = worker, how


class _Launcher:
    """The moving parts of one run."""

    def __init__(
        self,
        job: PricedJob,
        steps: int,
        directory: RunDirectory,
        schedule: Schedule | None,
        faults: list[Fault],
        planner: Planner | None,
        observer: Observer,
        server: ForkServer,
        text_digest: str | None,
        earlier: Earlier | None,
    ) -> None:
        self.job, self.directory, self.faults, self.observer = job, directory, faults, observer
        self.result = RunResult(directory=directory.path)
        self._stages = stages_by_rank(job.shape, schedule)
        directory.warn = self._warn
        self._earlier = earlier
        self._restored: Checkpoint | None = None
        self.store, self.url, self.name = host_store(job.membership)
        self.waker = Waker()
        self._closed = False
        self._hearing = threading.Thread(target=self._hear_posts, args=(self.store.clone(),), daemon=True)
        self._hearing.start()
        self._tensor_parallel = job.grid.tensor_parallel
        self.processes = LocalProcesses(server, self._specification, directory.logs, self.waker, self._tensor_parallel)
        self.plans = PlanService(job, planner, directory.plans, self.waker, schedule, self._warn)
        self.replanner = Replanner(job, self.plans, directory.profiles, self._event)
        self.checkpoints = CheckpointManager(
            job,
            directory.checkpoints,
            text_digest,
            self.store,
            self._event,
            self.waker.wake,
            time.monotonic,
            rank_of_stages(self._stages),
        )
        absent = schedule.failed if schedule is not None else frozenset()
        self.coordinator = Coordinator(
            job,
            steps,
            {worker for worker in job.shape.workers() if worker not in absent},
            self.store,
            self.processes,
            self.replanner,
            self._event,
            self._committed,
            time.monotonic,
            self.checkpoints.due,
        )
        self._reached: dict[int, float] = {}
        self._struck: set[int] = set()
        self._last_commit = 0.0
        self._last_generation = 0
        self._warned = False
        for fault in faults:
            if fault.kind == "rejoin":
                self.coordinator.expect_rejoin(fault.worker, fault.step)

    def run(self) -> RunResult:
        if self._earlier is not None:
            self._continue(self._earlier)
        self._start()
        while self.coordinator.phase is not GenerationPhase.FINISHED:
            self._strike()
            self.checkpoints.tick([str(worker) for worker in self.coordinator.live], self.coordinator.record.committed)
            try:
                self.coordinator.tick()
            except StageLost as lost:
                self._restore(lost)
            waits_to_strike = len(self._reached) > len(self._struck)
            self.processes.wait(STRIKE_SECONDS if waits_to_strike else self.job.membership.heartbeat / 2)
        self._finish()
        return self.result

    def _continue(self, earlier: Earlier) -> None:
        """Begin where an earlier part of this run left a checkpoint."""
        self.result.metrics.extend(earlier.metrics)
        self.result.events.extend(earlier.events)
        for warning in earlier.warnings:
            self._warn(warning)
        self.coordinator.record = msgspec.structs.replace(self.coordinator.record, generation=earlier.generation)
        self._go_back(earlier.checkpoint, self.coordinator.live)

    def _restore(self, lost: StageLost) -> None:
        """Begin again from the newest checkpoint, with as many processes as were left; with fewer if one fails then."""
        left = set(self.coordinator.live)
        while True:
            self.processes.end(patience=0.0)
            positions, checkpoint = where_to_go_back(
                self.job, self.checkpoints, lost, left, self.directory.path, self._warn
            )
            step = checkpoint.manifest.step
            self.result.metrics[:] = [line for line in self.result.metrics if line["step"] <= step]
            self.directory.rewind(len(self.result.metrics))
            self.checkpoints.start_over()
            self._go_back(checkpoint, set(positions))
            try:
                self._start()
                return
            except StartUpFailed as failed:
                self._event("detected", worker=str(failed.worker), step=step + 1, cause=f"{failed.how} during start-up")
                left = set(positions) - {failed.worker}

    def _go_back(self, checkpoint: Checkpoint, live: set[Worker]) -> None:
        step = checkpoint.manifest.step
        self.coordinator.start_over(live, step, checkpoint.manifest.commit)
        self._restored = checkpoint
        names = [str(worker) for worker in sorted(live)]
        self._event("restored", step=step + 1, checkpoint=checkpoint.folder.name, live=names)

    def _warn(self, message: str) -> None:
        """Say what does not work and training can do without."""
        self._event("warning", message=message)

    def _hear_posts(self, store: Store) -> None:
        """In a thread: wake the loop for whatever workers post, until the store is gone."""
        with contextlib.suppress(RunError):
            while not self._closed:
                store.wait_for_change(LISTEN_SECONDS)
                self.waker.wake()

    def _specification(self, worker: Worker, incarnation: int, tensor_rank: int) -> WorkerSpecification:
        strikes = [
            (number, str(fault))
            for number, fault in enumerate(self.faults)
            if KINDS[fault.kind].struck and (fault.worker, fault.tensor_rank) == (worker, tensor_rank)
        ]
        trace = self.directory.logs / f"{worker}.trace.jsonl"
        return WorkerSpecification(
            self.job.to_toml(),
            str(worker),
            list(self._stages[worker.rank]),
            incarnation,
            self.url,
            self.name,
            "127.0.0.1",
            strikes,
            str(trace) if tensor_rank == 0 else None,
            os.getpid(),
            self.directory.started,
            str(self.directory.checkpoints),
            self._earlier.generation if self._earlier is not None else 0,
            self._restored.manifest.step if self._restored is not None else None,
            tensor_rank,
            sorted(self.job.shape.workers()).index(worker) * self._tensor_parallel + tensor_rank,
        )

    def _start(self) -> None:
        """Start all workers; a run whose start-up fails ends with the last lines of whoever failed.

        They start from the checkpoint that was gone back to, if any; those that join later copy a peer's state.
        """
        live = sorted(self.coordinator.live)
        for worker in live:
            self.processes.start(worker)
        self.observer.waiting(f"{len(live)} workers to start")
        deadline = time.monotonic() + self.job.membership.start_deadline
        ready = {
            name: ReadyKey(name, self.processes.incarnation(worker))
            for worker in live
            for name in members_of([worker], self._tensor_parallel)
        }
        self._restored = None
        while not self.store.has_all(list(ready.values())):
            for worker, how in self.processes.gone().items():
                raise StartUpFailed(worker, how, self.processes.tail(worker))
            if time.monotonic() > deadline:
                slow = [name for name, key in ready.items() if not self.store.has_all([key])]
                limit = self.job.membership.start_deadline
                raise RunError(f"workers {' '.join(slow)} were not ready within {limit:g} s; see {self.directory.logs}")
            self.processes.wait(self.job.membership.heartbeat)
        self._last_commit = time.monotonic()

    def _strike(self) -> None:
        """Say which faults have struck; kill and cut, which a worker waits for at their point."""
        for number, fault in enumerate(self.faults):
            if not KINDS[fault.kind].struck or number in self._struck:
                continue
            if number not in self._reached and self.store.has_all([ReachedKey(number)]):
                self._reached[number] = time.monotonic()
            kill = fault.kind == "kill"
            delay = (fault.argument or 0.0) if kill else 0.0
            if number in self._reached and time.monotonic() >= self._reached[number] + delay:
                self._struck.add(number)
                if kill and not self.processes.running(fault.worker):
                    continue
                self._event("fault", worker=str(fault.worker), step=self.coordinator.next_step, fault=str(fault))
                if kill:
                    self.processes.kill(fault.worker, fault.tensor_rank)
                elif fault.other is not None:
                    if self.processes.running(fault.other):
                        for rank in range(self._tensor_parallel):
                            cut(self.processes.pid(fault.worker, rank), self.processes.pid(fault.other, rank))
                    self.store.set(StruckKey(number), True)

    def _event(self, kind: str, **details: Any) -> None:
        if kind != "fault":
            self._strike()  # what struck in the meantime is said before what followed from it
        event = self.directory.event(kind, **details)
        self.result.events.append(event)
        self.observer.event(event)

    def _committed(self, commit: Commit, record: GenerationRecord, period: float) -> None:
        now = time.monotonic()
        seconds = now - self._last_commit
        line = metrics_line(self.job, commit, record, period, self.directory.now(), seconds) | {
            "period_error": self._period_error(seconds, period, record.generation),
            "compute": self.replanner.compute,
        }
        self._last_commit, self._last_generation = now, record.generation
        self.result.metrics.append(line)
        self.directory.metric(line)
        self.checkpoints.committed(commit, record)
        self.observer.committed(line)
        self._pass_on_warning()

    def _pass_on_warning(self) -> None:
        """What a worker could not do and could do without."""
        if not self._warned and (message := self.store.read(WarningKey())) is not None:
            self._warned = True
            self._warn(message)

    def _period_error(self, seconds: float, period: float, generation: int) -> float | None:
        """(executed - planned period) / planned, from one commit to the next of a generation.

        None for a generation's first iteration, which begins from a standstill, and where the unit of the plan's times
        is not known.
        """
        unit = self.job.seconds_per_unit
        if unit is None or period <= 0 or generation != self._last_generation:
            return None
        return round(seconds / (period * unit) - 1, 6)

    def _finish(self) -> None:
        """Let the workers write the last checkpoint and end, each once its digest is there, and merge the trace."""
        for worker in self.job.shape.workers():
            if worker not in self.coordinator.live:
                self.processes.kill(worker)  # one that came back too late waits for a generation that never comes
        while not self.coordinator.ended() or self.checkpoints.busy:
            self._strike()
            left = [str(worker) for worker in sorted(self.coordinator.live) if self.processes.running(worker)]
            self.checkpoints.tick(left, self.coordinator.record.committed)
            self.processes.wait(self.job.membership.heartbeat / 2)
        self.processes.end(patience=self.job.membership.dead_after)
        self._pass_on_warning()
        for worker in sorted(self.coordinator.live):
            digests = self.store.read_all([FinalKey(name) for name in members_of([worker], self._tensor_parallel)])
            parts = [part for part in digests if part is not None]
            if len(parts) == self._tensor_parallel:
                self.result.digests[str(worker)] = joined_digests(parts)
        try:
            merge_logs(self.directory.path, self.job.shape)
        except RecycleError as error:
            self._warn(f"no trace.json: {error}")

    def close(self) -> None:
        """End every process of the run and close its files."""
        self._closed = True
        with contextlib.suppress(RunError):
            self.store.set(ClosedKey(), True)
        self._hearing.join()
        self.processes.end(patience=0.0)
        with contextlib.suppress(RunError):
            self.store.erase()
        self.store.close()
        self.plans.close()
        self.checkpoints.close()
        self.waker.close()
        self.directory.close()
