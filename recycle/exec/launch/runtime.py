"""The coordinator's runtime: all that one coordinator needs, from starting the workers to the merged trace.

The launcher has one for the processes of its machine; on a cluster the agent that holds the coordinator's role has one
for the processes of all nodes. All that it knows of a run is in the store, so that another agent's runtime can go on at
any moment. Of what it keeps in memory, the age of heartbeats, the number of attempts to form and the one retry of a
step that was not finite, or whose hosts disagreed, begin again there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.checkpoint.checkpoint_manager import CheckpointManager
from recycle.exec.checkpoint.resume import Earlier, find_earlier_part
from recycle.exec.exit_description import with_last_lines
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.contact import resume_command
from recycle.exec.launch.dials import Dials
from recycle.exec.launch.observer import Observer
from recycle.exec.launch.request import RunRequest
from recycle.exec.launch.restart import Restart
from recycle.exec.launch.run_directory import RunDirectory
from recycle.exec.leader.commit import finite_or_none, names_of_numbers
from recycle.exec.leader.detector import FailureDetector
from recycle.exec.members import members_of
from recycle.exec.membership.coordinator import Coordinator, GenerationPhase, StageLost
from recycle.exec.membership.heartbeats import HeartbeatReader
from recycle.exec.membership.interfaces import Processes
from recycle.exec.membership.schema import CutEndsKey, ReachedKey, RegisterKey, StrikeKey, WarningKey
from recycle.exec.membership.store import RunStore
from recycle.exec.planning.layouts import Layouts
from recycle.exec.planning.planning import PlanService
from recycle.exec.planning.replanning import Replanner
from recycle.exec.processes.processes import REFUSED_THE_JOB
from recycle.exec.processes.waker import Waker
from recycle.exec.protocol import Commit, GenerationRecord
from recycle.runs import merge_logs
from recycle.shape import Worker

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
        """What follows has nothing to do with the steps so far."""
        self._steps.clear()


class CoordinatorRuntime:
    """One coordinator of one run; `tick` it twice per heartbeat and whenever something happens, until it is `over`.

    Args:
        request: what to train.
        store: of the run.
        processes: the workers' processes.
        directory: takes metrics, events, plans and checkpoints.
        waker: is woken when a plan or a checkpoint is there.
        restarts: how often a worker that died is started again without being asked for.

    Attributes:
        ends_early: the run was told to end before its last iteration, unless it had come there.
        over: the run has ended, and the workers have left their digests.
        digests: worker -> stage -> sha256 of the stage's final state, once the run is over.
    """

    def __init__(
        self,
        *,
        request: RunRequest,
        store: RunStore,
        processes: Processes,
        directory: RunDirectory,
        waker: Waker,
        restarts: int = 0,
    ) -> None:
        job = request.job
        self._request, self._job, self._store, self._processes = request, job, store, processes
        self._directory, self._restarts = directory, restarts
        self._workers = frozenset(job.shape.workers())
        self._struck: set[int] = set()
        self._last_commit, self._last_generation = time.monotonic(), 0
        self._throughput = Throughput()
        self._has_warned = self._can_go_back = self._is_started = False
        self._announced = ""
        self._line: dict[str, Any] = {}
        self._end_since = 0.0
        self._is_cut_short = False
        self._observers: list[Observer] = [request.observer]
        self.over = self.ends_early = False
        self.digests: dict[str, dict[int, str]] = {}
        directory.warn = self._warn
        self._plans = PlanService(job, request.planner, directory.plans, waker, request.schedule, self._warn)
        self._replanner = Replanner(job, self._plans, directory.profiles, self._event)
        members = members_of(job.shape.workers(), job.grid.tensor_parallel)
        self._heartbeats = HeartbeatReader(store.clone(), members, job.membership.heartbeat / 2)
        self._checkpoints = CheckpointManager(
            job=job,
            root=directory.checkpoints,
            text_digest=request.text_digest,
            store=store,
            log=self._event,
            wake=waker.wake,
            now=time.monotonic,
        )
        self.coordinator = Coordinator(
            job=job,
            steps=request.steps,
            live={worker for worker in job.shape.workers() if worker not in request.absent},
            store=store,
            processes=processes,
            plans=Layouts(job, self._plans, self._replanner, self._event),
            log=self._event,
            committed=self._committed,
            evaluated=self._evaluated,
            now=time.monotonic,
            keeps=self._checkpoints.due,
            went_back=self._went_back,
            heartbeats=self._heartbeats.reading(),
            initial=request.hosts,
        )
        self._restart = Restart(request, self.coordinator, self._checkpoints, directory, restarts)
        self._expect_starts()

    def _expect_starts(self) -> None:
        """Processes are about to be started: deadlines for that count from now."""
        limits = self._job.membership
        self._beats_of_starting = self._heartbeats.reading()
        self._start_deadline = time.monotonic() + limits.start_deadline
        self._starting = FailureDetector(self._job, dead_after=max(limits.warm_up, limits.dead_after))

    def begin(self, earlier: Earlier | None = None) -> None:
        """Begin the run, or go on from the checkpoint that an earlier part of it left; before the first tick."""
        if self._job.train.sharded_optimizer and self._job.train.optimizer_copies == 1:
            self._warn(
                "[train] optimizer_copies = 1: every death goes back to a checkpoint; with 2 any one of a stage may die"
            )
            if self._job.integrity.compares_states:
                self._warn(
                    "[integrity]: with [train] optimizer_copies = 1 no other worker holds the optimizer's state of a"
                    " shard, so only parameters are compared; with 2 the state is compared too"
                )
        if earlier is not None:
            for warning in earlier.warnings:
                self._warn(warning)
            coordinator, commit = self.coordinator, self._restart.commit_of(earlier.checkpoint)
            coordinator.record = msgspec.structs.replace(coordinator.record, generation=earlier.generation)
            coordinator.start_over(coordinator.live, commit.step, commit)
            is_written = self._directory.has_metrics_of(commit.step)
            if earlier.checkpoint.manifest.commit.evaluate and not (is_written or commit.evaluate):
                self._write(self._line_of(commit, coordinator.record))  # its evaluation is no longer asked for
            self._restart.log_restored(earlier.checkpoint)
        self._expect_rejoins()
        self._show_dials()

    def _show_dials(self) -> None:
        self._observers.append(Dials(self._job, self._directory.path, self.coordinator.next_step, self._warn))

    def take_over(self, node: int) -> None:
        """Go on from the register that another agent's coordinator left, or begin the run; before the first tick.

        Args:
            node: of this agent.
        """
        record = self._store.read(RegisterKey())
        if record is None:
            asked = self._directory.path, self._job, self._request.steps, self._request.text_digest
            self.begin(find_earlier_part(*asked) if self._directory.resumes else None)
            return
        self._struck = {n for n in range(len(self._request.faults)) if self._store.has_all([StrikeKey(n)])}
        self._event("coordinator", node=node, generation=record.generation, step=record.committed + 1)
        live = {Worker.parse(worker) for worker in record.live}
        if record.plan:
            self._plans.adopt(frozenset(self._job.shape.workers()) - live, record.plan)
        self.coordinator.take_over(record)
        self._show_dials()
        self._expect_rejoins()
        self._can_go_back, self._is_started = True, bool(record.plan)
        self._directory.rewind(record.committed)  # it may have gone back, and its coordinator have died then

    def _expect_rejoins(self) -> None:
        """Have the coordinator wait for the workers that faults bring back from here on."""
        returning = [fault for fault in self._request.faults if not KINDS[fault.kind].struck]
        step = self.coordinator.next_step
        self.coordinator.expect_rejoins((fault.worker, fault.step) for fault in returning if fault.step >= step)

    def tick(self) -> None:
        """Look at everything once and do what is due.

        Raises:
            RunError: the run cannot go on. RoleLost, a RunError: another agent coordinates it by now.
        """
        self._record_strikes()
        self._plans.look()
        if self.ends_early and self._end_without_iteration():
            return
        if self._restart.under_way:
            self._restart.tick()
            self._expect_starts()
        elif not self._is_started:
            self._start()
        elif self.coordinator.phase is not GenerationPhase.FINISHED:
            self._start_dead_workers()
            writers = self.coordinator.live | self.coordinator.departures.leaving
            self._checkpoints.tick([str(worker) for worker in writers], self.coordinator.record.committed)
            try:
                self.coordinator.tick()
            except StageLost as lost:
                self._go_back(lost, self.coordinator.live)
            if self.coordinator.departures.everybody and not self.ends_early:
                self.end_early()
        if self.coordinator.phase is GenerationPhase.FINISHED:
            self._finish()

    def end_early(self) -> None:
        """Have the run end with the iteration at hand, or the next if that has begun, and keep its state."""
        self.ends_early, self._end_since = True, time.monotonic()
        self._checkpoints.keep_last()
        self.coordinator.end_early()

    def _end_without_iteration(self) -> bool:
        """End a run that is told to end and has not committed another step in time; whether it is over with that.

        The committed state goes to a checkpoint, unless it is in one, or no step was committed.
        """
        record, is_started = self.coordinator.record, self._is_started and not self._restart.under_way
        if self.coordinator.phase is GenerationPhase.FINISHED:
            return False
        if is_started and time.monotonic() - self._end_since <= self.coordinator.end_patience:
            return False
        step = record.committed
        is_kept = self._checkpoints.folder_of(step) is not None  # to keep it again would begin with its removal
        if is_started and record.commit is not None and not is_kept:
            self._is_cut_short = record.is_evaluation_due
            if self.coordinator.end_at_committed():
                hosts, ended = self.coordinator.hosts, self.coordinator.record
                commit = msgspec.structs.replace(record.commit, checkpoint=True)
                self._checkpoints.committed(commit, ended, hosts)
            return False
        self._event("stopped", step=step, checkpoint=self._checkpoints.folder_of(step))
        self.over = True
        return True

    def _start(self) -> None:
        """Start all workers once their nodes are there, from the checkpoint that was gone back to, if any; wait for
        them to be ready. Workers that join later copy a peer's state."""
        record, live = self.coordinator.record, sorted(self.coordinator.live)
        missing = [str(node) for node in self._processes.missing_nodes(live)]
        self._processes.gone()
        for worker in live if not missing else []:
            if self._processes.started_in(worker) != record.generation:
                restored = record.committed if record.committed >= 0 else None
                self._processes.start(worker, record.generation, restored)
            elif (how := self._processes.ended(worker)) is not None:
                self._fail_to_start(worker, how)
                return
        if self._can_go_back and missing:
            self._go_back(StageLost(f"nodes {' '.join(missing)} are gone again"), live)
            return
        slow = [worker for worker in live if not self.coordinator.is_ready(worker)]
        if not missing:
            silent = self._starting.lost(slow, self._beats_of_starting(), time.monotonic())
            for worker, cause in silent.items():
                self._processes.kill(worker)
                self._fail_to_start(worker, f"had {cause}")
                return
        if not missing and not slow:
            self._is_started, self._last_commit = True, time.monotonic()
            return
        agents = f"agents of nodes {' '.join(missing)}"
        if time.monotonic() > self._start_deadline:
            late, limit = " ".join(map(str, slow)), self._job.membership.start_deadline
            whoever = agents if missing else f"workers {late}"
            raise RunError(f"{whoever} were not ready within {limit:g} s; see {self._directory.logs}")
        waited_for = agents if missing else f"{len(live)} workers"
        if waited_for != self._announced:
            self._announced = waited_for
            self._request.observer.waiting(f"{waited_for} to start")

    def _fail_to_start(self, worker: Worker, how: str) -> None:
        """At the start of the run this is its end; on the way back from a lost stage others may be started instead."""
        message = f"worker {worker} {how} during start-up"
        if not self._can_go_back:
            tail = self._processes.tail(worker)
            if how.endswith(REFUSED_THE_JOB):
                raise JobError(tail.rpartition(" ends: ")[2] or message)
            raise RunError(with_last_lines(message, tail))
        self._event("detected", worker=str(worker), step=self.coordinator.next_step, cause=f"{how} during start-up")
        self._go_back(StageLost(message), self.coordinator.live - {worker})

    def _go_back(self, lost: StageLost, left: Collection[Worker]) -> None:
        """Training goes on from a checkpoint, with whoever can be started."""
        self._is_started, self._can_go_back, self._announced = False, True, ""
        self._restart.begin(lost, left)

    def _start_dead_workers(self) -> None:
        """Start workers that died again, where the run does so by itself, and admit them when they are ready."""
        if not self._restarts or self.coordinator.phase is not GenerationPhase.RUNNING:
            return
        taking_part = self.coordinator.live | self.coordinator.awaited | self._request.absent
        coming: list[Worker] = []
        for worker in sorted(self._workers - taking_part):
            if self.coordinator.departures.is_gone(worker):
                continue
            if self._processes.running(worker):
                if self.coordinator.is_ready(worker):
                    self.coordinator.admit(worker)
                else:
                    coming.append(worker)
            elif self._failures(worker) < self._restarts and not self._processes.missing_nodes([worker]):
                self._processes.start(worker, self.coordinator.record.generation)
                self._starting.forget(worker)
        for worker, cause in self._starting.lost(coming, self._beats_of_starting(), time.monotonic()).items():
            self._processes.kill(worker)  # a next one is started when it has ended
            self._event("detected", worker=str(worker), step=self.coordinator.next_step, cause=f"{cause} in start-up")
            self._starting.forget(worker)

    def _failures(self, worker: Worker) -> int:
        """How often a process of the worker, which has none now, was started again after it had failed."""
        return self._processes.incarnation(worker) - self.coordinator.departures.left(worker)

    def _finish(self) -> None:
        """After the last iteration: wait for the last checkpoint and all workers' digests, then merge the trace."""
        departures = self.coordinator.departures
        departures.watch()
        live = self.coordinator.live | departures.leaving
        for worker in self._job.shape.workers():
            if worker not in live and self._processes.running(worker):
                self._processes.kill(worker)  # it came back too late and waits for a generation that never comes
        left = [str(worker) for worker in sorted(live) if self._processes.running(worker)]
        self._checkpoints.tick(left, self.coordinator.record.committed)
        digests = self.coordinator.final_digests()
        if digests is None or self._checkpoints.busy or departures.leaving:
            return
        self.digests = digests
        self._pass_on_warning()
        self._compare_final_states()
        self.ends_early = self.coordinator.next_step < self._request.steps or self._is_cut_short
        if self.ends_early:
            step = self.coordinator.record.committed
            self._event("stopped", step=step, checkpoint=self._checkpoints.folder_of(step))
        self._merge_traces()
        self.over = True

    def _compare_final_states(self) -> None:
        """Say which hosts end with another state than their peers. Where hosts compare their states, what was computed
        since they agreed is taken back and the run ends with a RunError."""
        held_by: dict[int, dict[str, str]] = {}
        for worker, digests in self.digests.items():
            for number, digest in digests.items():
                held_by.setdefault(number, {})[worker] = digest
        unlike = {number: held for number, held in sorted(held_by.items()) if len(set(held.values())) > 1}
        if not unlike:
            return
        step = self.coordinator.record.committed
        named = names_of_numbers(self._job)
        what = "; ".join(
            f"workers {' and '.join(held)} end with different states of {named(n)}" for n, held in unlike.items()
        )
        self._event("corrupt", step=step, workers=[], what=what, held=unlike)
        verified = self.coordinator.record.verified
        if self._job.integrity.compares_states and verified is not None:
            self._went_back(verified.step)
            raise RunError(
                f"{what}; what came after step {verified.step}, where they agreed, is taken back; go on from a"
                f" checkpoint with: {resume_command(self._directory.path)}"
            )

    def _merge_traces(self) -> None:
        """Write `trace.json`; a run that has ended well does not fail for it, whatever happens."""
        if self._job.train.trace == "off":
            return
        try:
            every = merge_logs(self._directory.path, self._job.shape)
        except Exception as error:
            self._warn(f"no trace.json: {error if isinstance(error, RecycleError) else repr(error)}")
            return
        if every > 1:
            self._warn(f"trace.json has every {every}th iteration; logs/ has them all")

    def _record_strikes(self) -> None:
        """Write the event of each fault that has struck, and have the other worker of a pair struck, too."""
        for number, fault in enumerate(self._request.faults):
            if number in self._struck or fault.step > self.coordinator.next_step + 1:
                continue  # no worker is further ahead than this
            if not KINDS[fault.kind].struck or not self._store.has_all([ReachedKey(number)]):
                continue
            self._struck.add(number)
            self._event("fault", worker=str(fault.worker), step=self.coordinator.next_step, fault=str(fault))
            self._store.set(StrikeKey(number), True)
            if fault.other is not None and not self._processes.running(fault.other):
                for name in members_of([fault.other], self._job.grid.tensor_parallel):
                    self._store.set(CutEndsKey(number, name), [])  # nobody is there to tell them

    def _event(self, kind: str, **details: Any) -> None:
        if kind != "fault":
            self._record_strikes()  # what struck in the meantime is written before what followed from it
        event = self._directory.event(kind, **details)
        for observer in self._observers:
            observer.event(event)

    def _warn(self, message: str) -> None:
        """Report something that fails and that training can do without."""
        self._event("warning", message=message)

    def _committed(self, commit: Commit, record: GenerationRecord) -> None:
        """Write the step's line of metrics: all of it from the register but for the times."""
        line = self._line_of(commit, record)
        self._checkpoints.committed(commit, record, self.coordinator.hosts)
        if record.is_evaluation_due:  # the line waits for that
            self._line = line
            self._request.observer.waiting(f"the evaluation after step {commit.step}")
        else:
            self._write(line)
        self._pass_on_warning()

    def _went_back(self, step: int) -> None:
        """Training goes on behind `step`: what was written of later iterations may be wrong."""
        self._directory.rewind(step)
        self._checkpoints.rewind(step)
        self._throughput.start_over()

    def _evaluated(self, record: GenerationRecord) -> None:
        """The evaluation of the committed state is done: write the step's line."""
        commit, result = record.commit, record.evaluated
        assert commit is not None
        assert result is not None
        # Of a step that training has gone back to there is none.
        line = self._line if self._line.get("step") == commit.step else self._line_of(commit, record)
        seconds = round(self._directory.now() - line["time"], 6)
        self._write(line | {"eval_loss": finite_or_none(result.loss), "eval_seconds": seconds})
        # The next iteration begins from a standstill, as the first one of a generation does.
        self._last_commit, self._last_generation = time.monotonic(), 0

    def _line_of(self, commit: Commit, record: GenerationRecord) -> dict[str, Any]:
        """A step's line of metrics, with the result of its evaluation if that is done."""
        now = time.monotonic()
        seconds, is_first = now - self._last_commit, record.generation != self._last_generation
        self._last_commit, self._last_generation = now, record.generation
        job, unit, period = self._job, self._job.seconds_per_unit, record.periods.get(commit.mode, 0.0)
        tokens = job.shape.global_micro_batches * job.data.micro_batch_size * job.model.sequence
        # The first iteration of a generation begins from a standstill, so its time says nothing about the plan.
        is_comparable = not is_first and period > 0
        running = self.coordinator.running_since
        counted = now - running if running is not None and self._throughput.is_empty else seconds
        line: dict[str, Any] = {
            "step": commit.step,
            "time": round(self._directory.now(), 6),
            "loss": commit.loss if math.isfinite(commit.loss) else None,
            "grad_norm": None if math.isnan(commit.grad_norm) else commit.grad_norm,
            "mode": commit.mode,
            "tokens_per_second": round(tokens / self._throughput.mean_after(counted), 1),
            "live_workers": len(record.live) or len(self.coordinator.live),
            "plan": record.plan,
            "period": period,
            "generation": record.generation,
            "period_error": round(seconds / (period * unit) - 1, 6) if unit is not None and is_comparable else None,
            **self._replanner.compute,
        }
        if self.coordinator.running_since is not None:
            line["began"] = round(self._directory.now() - (now - self.coordinator.running_since), 6)
            self.coordinator.running_since = None
        if record.evaluated is not None and record.evaluated.step == commit.step:
            line["eval_loss"] = finite_or_none(record.evaluated.loss)
        return line

    def _write(self, line: dict[str, Any]) -> None:
        if self._directory.metric(line):
            for observer in self._observers:
                observer.committed(line)

    def _pass_on_warning(self) -> None:
        """Report what a worker could not do and could do without."""
        if not self._has_warned and (message := self._store.read(WarningKey())) is not None:
            self._has_warned = True
            self._warn(message)

    def close(self) -> None:
        """End the planners, the dials, and the threads that read heartbeats and complete checkpoints."""
        for dials in self._observers[1:]:
            dials.close()
        self._heartbeats.close()
        self._plans.close()
        self._checkpoints.close()
