"""The leader of a run: a state machine from the start of the workers to their final states.

`Leader.take` gets one message and the time, and returns the actions that follow. Messages of processes and agents are
only noted; what follows from them is decided at the next `Tick`. The leader does no input or output and reads no clock,
so that a test can drive it with any order of messages.

All that another leader needs to go on is in the register (`Persist`) and in what agents say again. Of what the leader
keeps in memory, the age of heartbeats, the number of attempts to form and the one retry of a step that was not finite,
or whose hosts disagreed, begin again there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.exit_description import REFUSED_THE_JOB, with_last_lines
from recycle.exec.leader.actions import (
    Action,
    AgentAbsent,
    Begin,
    CheckpointCompleted,
    CheckpointFound,
    DepartureAsked,
    EndEarly,
    Fail,
    FindCheckpoint,
    Finish,
    Outbox,
    Planned,
    PreparedPlan,
    Rewind,
    RuntimeMessage,
    StoredCheckpoint,
    Tell,
    Tick,
    Waiting,
)
from recycle.exec.leader.checkpoints import Checkpoints, folder_name
from recycle.exec.leader.commit import names_of_numbers
from recycle.exec.leader.detector import FailureDetector
from recycle.exec.leader.generations import GenerationPhase, Generations, StageLost
from recycle.exec.leader.metrics import MetricsLines
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.leader.plans import Plans
from recycle.exec.leader.reassignment import reassign
from recycle.exec.leader.worker_processes import WorkerProcesses
from recycle.exec.members import joined_digests, members_of, split_member
from recycle.exec.protocol import (
    Batch,
    Commit,
    CutEnds,
    Ended,
    FaultReached,
    FinalState,
    FromWorker,
    Hello,
    PeerEnds,
    SavedPart,
    Strike,
    Warned,
)
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts


class RunPhase(Enum):
    """Where a run stands."""

    STARTING = "its workers start"
    TRAINING = "generations follow each other"
    GOING_BACK = "all processes end, to go back to a checkpoint"
    OVER = "all workers have said what they end with, or the run has failed"


@dataclass(frozen=True)
class PlannedFault:
    """A fault to inject.

    Attributes:
        text: as users write it.
        worker, step: where it strikes; of one that strikes nobody, which worker returns and when.
        other: the second worker of a pair.
        strikes: a worker; else the fault brings one back.
    """

    text: str
    worker: Worker
    step: int
    other: Worker | None = None
    strikes: bool = True


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What the leader needs to know of a run.

    Attributes:
        job: what is trained.
        steps: iterations to train.
        initial: what processes host that start with the initial state.
        homes: the node of each position.
        absent: workers that the run starts without.
        faults: to inject, by their numbers.
        restarts: how often a worker that died is started again without being asked for.
        own: the user's own schedule, and the workers that it leaves out.
        can_search: whether the planner can be asked for better plans.
        started: when the run started, on the leader's clock.
        logs: folder of the logs, for messages.
        resume_command: that resumes the run, for messages.
    """

    job: PricedJob
    steps: int
    initial: Hosts
    homes: Mapping[Worker, int]
    absent: frozenset[Worker] = frozenset()
    faults: Sequence[PlannedFault] = ()
    restarts: int = 0
    own: tuple[frozenset[Worker], PreparedPlan] | None = None
    can_search: bool = True
    started: float = 0.0
    logs: str = "the logs"
    resume_command: str = "recycle train JOB --resume"


class Leader:
    """Leads one run. The first message is `Begin`.

    Args:
        run: what is trained.
        now: time on the leader's clock.

    Attributes:
        generations: the generations of the run.
        checkpoints: the checkpoints of the run.
        phase: of the run.
        ends_early: the run was told to end before its last iteration, unless it had come there.
    """

    def __init__(self, run: RunDescription, now: float) -> None:
        job = run.job
        self._run, self._job = run, job
        self._outbox = Outbox()
        self._outbox.now = now
        self._processes = WorkerProcesses(run.homes, job.membership, self._outbox)
        self._answers = PlanAnswers(job, self._outbox, run.own, run.can_search)
        plans = Plans(job, self._answers, self._outbox)
        self.checkpoints = Checkpoints(job, self._outbox)
        self._lines = MetricsLines(job, run.started, now)
        self._workers = [worker for worker in job.shape.workers() if worker not in run.absent]
        self.generations = Generations(
            job,
            run.steps,
            self._workers,
            self._processes,
            plans,
            self.checkpoints,
            self._lines,
            self._outbox,
            run.initial,
        )
        self.phase = RunPhase.STARTING
        self.ends_early = False
        self._can_go_back = self._is_cut_short = self._has_warned = False
        self._end_since = 0.0
        self._waits_for = ""
        self._warning = ""
        self._reached: dict[int, str] = {}
        self._final: dict[str, dict[int, str]] = {}
        self._lost: StageLost | None = None
        self._left: set[Worker] = set()
        self._deadline = 0.0
        self._found: CheckpointFound | None = None
        self._is_asked = False
        self._expect_starts()

    @property
    def processes(self) -> WorkerProcesses:
        """The workers' processes."""
        return self._processes

    def take(self, now: float, message: FromWorker | Batch | Ended | Hello | RuntimeMessage) -> list[Action]:
        """Take a message.

        Args:
            now: seconds, on a clock that does not go back.

        Returns:
            what follows from it, in order; `Fail` in the end where the run cannot go on.
        """
        self._outbox.now = now
        try:
            self._dispatch(message)
        except RecycleError as error:
            self._fail(error)
        return self._outbox.take()

    def _fail(self, error: RecycleError) -> None:
        self._outbox.put(Fail(error))
        self.phase = RunPhase.OVER

    def _dispatch(self, message: FromWorker | Batch | Ended | Hello | RuntimeMessage) -> None:
        match message:
            case Tick():
                if self.phase is not RunPhase.OVER:
                    self._tick(message.beats)
            case Batch():
                for said in self.generations.take_reports(message.said):
                    self._hear(said)
                for ended in message.ended:
                    self._processes.take(ended)
            case FromWorker():
                self._hear(message)
            case Ended():
                self._processes.take(message)
            case Hello():
                self._greet(message)
            case AgentAbsent():
                self._processes.part(message.node)
            case DepartureAsked():
                for worker in message.workers:
                    self.generations.departures.ask(worker, message.seconds)
            case Planned():
                self._answers.take(message)
            case CheckpointCompleted():
                self.checkpoints.completed(message)
            case CheckpointFound():
                self._found = message
            case EndEarly():
                self._end_early()
            case Begin():
                self._begin(message)

    def _hear(self, said: FromWorker) -> None:
        match said.message:
            case SavedPart() as part:
                self.checkpoints.take(split_member(said.member)[0], part)
            case FinalState(digests=digests):
                self._final[said.member] = digests
            case Warned(message=message):
                self._warning = self._warning or message
            case FaultReached(fault=fault):
                self._reached.setdefault(fault, said.member)
                if fault in self.generations.struck:
                    self._outbox.put(Tell(Strike(fault, self.generations.struck[fault])))
            case CutEnds():
                self._relay_ends(said.member, said.message)
            case _:
                self.generations.take(said)

    # The beginning.

    def _begin(self, begin: Begin) -> None:
        self.checkpoints.kept = set(begin.kept)
        if begin.record is not None:
            self._take_over(begin)
            return
        self._warn_of_settings()
        if begin.checkpoint is not None:
            checkpoint = begin.checkpoint
            commit = self._commit_of(checkpoint)
            self.generations.resume(begin.generation, commit)
            if checkpoint.commit.evaluate and not (checkpoint.has_metrics or commit.evaluate):
                self.generations.write_line()
            self._log_restored(checkpoint)
        self._expect_rejoins()

    def _take_over(self, begin: Begin) -> None:
        record = begin.record
        assert record is not None
        live = [Worker.parse(worker) for worker in record.live]
        self._processes.expect(live, record.incarnations, record.places, self._run.absent)
        step = record.committed
        if begin.cursor is not None and begin.cursor.generation == record.generation:
            step = begin.cursor.committed
        self._outbox.log("coordinator", node=begin.node, generation=record.generation, step=step + 1)
        failed = frozenset(self._job.shape.workers()) - {Worker.parse(worker) for worker in record.live}
        self._answers.adopt(failed, begin.plan, begin.hosts)
        self.generations.adopt(begin)
        self._expect_rejoins()
        self._can_go_back = True
        self.phase = RunPhase.TRAINING if record.plan else RunPhase.STARTING
        self._outbox.put(Rewind(self.generations.record.committed))  # the last leader may have gone back and died then

    def _greet(self, hello: Hello) -> None:
        """An agent has connected."""
        if self._processes.greet(hello.node, hello.session, hello.processes):
            started = {process.worker for process in hello.processes}
            here = self._processes.workers_of(hello.node)
            self.generations.departures.forget(worker for worker in here if str(worker) not in started)
            self.generations.adopt_rejoins()
        for said in hello.said:
            self._hear(said)

    def _warn_of_settings(self) -> None:
        if self._job.train.sharded_optimizer and self._job.train.optimizer_copies == 1:
            self._warn(
                "[train] optimizer_copies = 1: every death goes back to a checkpoint; with 2 any one of a stage may die"
            )
            if self._job.integrity.compares_states:
                self._warn(
                    "[integrity]: with [train] optimizer_copies = 1 no other worker holds the optimizer's state of a"
                    " shard, so only parameters are compared; with 2 the state is compared too"
                )

    def _warn(self, message: str) -> None:
        self._outbox.log("warning", message=message)

    def _expect_rejoins(self) -> None:
        """Wait for the workers that faults bring back from here on."""
        for fault in self._run.faults:
            if not fault.strikes and fault.step >= self.generations.next_step:
                self.generations.expect_rejoin(fault.worker, fault.step)

    def _commit_of(self, checkpoint: StoredCheckpoint) -> Commit:
        """The commit that training goes on from.

        The state is evaluated if that is still to be done, which it is as long as the step has no line of metrics.
        """
        commit = checkpoint.commit
        is_last = commit.step + 1 >= self._run.steps
        is_due = self._job.is_evaluated(commit.step, is_last) and not checkpoint.has_metrics
        return msgspec.structs.replace(commit, finished=is_last and is_due, evaluate=is_due)

    def _log_restored(self, checkpoint: StoredCheckpoint) -> None:
        names = [str(worker) for worker in sorted(self.generations.live)]
        folder = folder_name(checkpoint.step)
        self._outbox.log("restored", step=checkpoint.step + 1, checkpoint=folder, live=names)

    # What is due.

    def _tick(self, beats: Any) -> None:
        self._processes.tick()
        self._strike()
        if self.ends_early and self._end_without_iteration():
            return
        if self.phase is RunPhase.GOING_BACK:
            self._go_back()
            self._expect_starts()
        elif self.phase is RunPhase.STARTING:
            self._start(beats)
        elif not self.generations.is_finished:
            self._train(beats)
        if self.generations.is_finished and self.phase is RunPhase.TRAINING:
            self._finish(beats)

    def _train(self, beats: Any) -> None:
        generations = self.generations
        self._start_dead_workers(beats)
        if self.checkpoints.is_busy:
            writers = generations.live | generations.departures.leaving
            self.checkpoints.tick([str(worker) for worker in writers], generations.record.committed)
        try:
            generations.tick(beats)
        except StageLost as lost:
            self._begin_to_go_back(lost, generations.live)
        self._pass_on_warning()
        if generations.departures.everybody and not self.ends_early:
            self._end_early()

    def _strike(self) -> None:
        """Write the event of each fault that has reached its point, then have it strike."""
        for number in sorted(self._reached.keys() - self.generations.struck.keys()):
            fault = self._run.faults[number]
            self.generations.struck[number] = self._reached[number]
            step = self.generations.next_step
            self._outbox.log("fault", worker=str(fault.worker), step=step, fault=fault.text)
            if self.generations.record.generation:
                self.generations.persist()
            self._outbox.put(Tell(Strike(number, self._reached[number])))
            if fault.other is not None and not self._processes.is_running(fault.other):
                self._outbox.put(Tell(PeerEnds(number, str(fault.worker), "", [])))  # no process could tell them

    def _relay_ends(self, member: str, message: CutEnds) -> None:
        """Tell the other worker of a fault the ends of a process's connections."""
        fault = self._run.faults[message.fault]
        other = fault.other if split_member(member)[0] == str(fault.worker) else fault.worker
        self._outbox.put(Tell(PeerEnds(message.fault, str(other), member, message.ends)))

    # Starting workers.

    def _expect_starts(self) -> None:
        """Processes are about to be started: deadlines for that count from now."""
        limits = self._job.membership
        self._start_deadline = self._outbox.now + limits.start_deadline
        self._starting = FailureDetector(self._job, dead_after=max(limits.warm_up, limits.dead_after))

    def _start(self, beats: Any) -> None:
        """Start all workers once their nodes are present, from the checkpoint that was gone back to, if any; wait for
        them to be ready. Workers that join later copy a peer's state."""
        record, live, processes = self.generations.record, self.generations.live, self._processes
        missing = [str(node) for node in processes.missing_nodes(live)]
        processes.take_ended()
        for worker in sorted(live) if not missing else []:
            if processes.generation_before(worker) != record.generation:
                processes.start(worker, record.generation, record.committed if record.committed >= 0 else None)
            elif (how := processes.how_ended(worker)) is not None:
                self._fail_to_start(worker, how)
                return
        if self._can_go_back and missing and not processes.is_awaited(live):
            self._begin_to_go_back(StageLost(f"nodes {' '.join(missing)} are gone again"), live)
            return
        slow: list[Worker] = []
        if not missing:
            slow = [worker for worker in sorted(live) if not self.generations.is_ready(worker)]
            for worker, cause in self._starting.lost(slow, beats, self._outbox.now).items():
                processes.kill(worker)
                self._fail_to_start(worker, f"had {cause}")
                return
        if not missing and not slow:
            self.phase = RunPhase.TRAINING
            self._lines.starts(self._outbox.now)
            return
        agents = f"agents of nodes {' '.join(missing)}"
        if self._outbox.now > self._start_deadline:
            late, limit = " ".join(map(str, slow)), self._job.membership.start_deadline
            what = agents if missing else f"workers {late}"
            raise RunError(f"{what} were not ready within {limit:g} s; see {self._run.logs}")
        waits_for = f"{agents if missing else f'{len(live)} workers'} to start"
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self._outbox.put(Waiting(waits_for))

    def _fail_to_start(self, worker: Worker, how: str) -> None:
        """At the start of the run this is its end; on the way back to a checkpoint others may be started instead."""
        message, lines = f"worker {worker} {how} during start-up", self._processes.last_lines(worker)
        if not self._can_go_back:
            if how.endswith(REFUSED_THE_JOB):
                raise JobError(lines.rpartition(" ends: ")[2] or message)
            raise RunError(with_last_lines(message, lines))
        step = self.generations.next_step
        self._outbox.log("detected", worker=str(worker), step=step, cause=f"{how} during start-up")
        self._begin_to_go_back(StageLost(message), self.generations.live - {worker})

    def _start_dead_workers(self, beats: Any) -> None:
        """Start workers that died again, where the run does so by itself, and admit them when they are ready."""
        generations, processes = self.generations, self._processes
        if not self._run.restarts or generations.phase is not GenerationPhase.RUNNING:
            return
        taking_part = generations.live | generations.awaited | self._run.absent
        coming: list[Worker] = []
        for worker in self._job.shape.workers():
            if worker in taking_part or generations.departures.is_gone(worker):
                continue
            failures = processes.incarnation(worker) - generations.departures.released[str(worker)]
            if processes.is_running(worker):
                if generations.is_ready(worker):
                    generations.admit(worker)
                else:
                    coming.append(worker)
            elif failures < self._run.restarts and not processes.missing_nodes([worker]):
                processes.start(worker, generations.record.generation)
                self._starting.forget(worker)
        for worker, cause in self._starting.lost(coming, beats, self._outbox.now).items():
            processes.kill(worker)  # the next one is started when it has ended
            self._outbox.log("detected", worker=str(worker), step=generations.next_step, cause=f"{cause} in start-up")
            self._starting.forget(worker)

    # Going back to a checkpoint.

    def _begin_to_go_back(self, lost: StageLost, left: Collection[Worker]) -> None:
        """Training goes on from a checkpoint, with the workers that can be started.

        Args:
            left: the workers that were alive when the stage was lost.
        """
        self.phase, self._can_go_back, self._waits_for = RunPhase.GOING_BACK, True, ""
        self._lost, self._left = lost, set(left)
        self._found, self._is_asked = None, False
        self._deadline = self._outbox.now + self._job.membership.rejoin_deadline
        self._go_back()

    def _go_back(self) -> None:
        """End all processes, then assign positions to as many workers as can be started, and restore the checkpoint.

        A worker that had died before takes part if it may be started once more. Where too few are left, nodes that
        return are waited for, as long as for a worker that re-joins.
        """
        processes, lost = self._processes, self._lost
        is_late = self._outbox.now > self._deadline
        processes.take_ended()
        if running := [worker for worker in self._workers if processes.is_running(worker)]:
            if is_late:
                names = " ".join(map(str, running))
                raise RunError(f"{lost}, and workers {names} could not be ended to go back")
            for worker in running:
                processes.kill(worker)
            return
        allowed = [
            worker
            for worker in self._workers
            if (worker in self._left or processes.incarnation(worker) < self._run.restarts)
            and not self.generations.departures.is_gone(worker)
        ]
        startable = {worker for worker in allowed if not processes.missing_nodes([worker])}
        positions = reassign(self._job.shape, startable)
        if positions is None and len(startable) < len(allowed) and not is_late:
            return  # a node may come back
        self.checkpoints.tick((), max(self.generations.record.committed, 0) + 1)
        if self.checkpoints.is_finishing:
            return
        if not self._is_asked:
            self._is_asked = True
            self._outbox.put(FindCheckpoint(self.checkpoints.verified))
        if self._found is None:
            return
        checkpoint = self._found.checkpoint
        if checkpoint is None:
            every = self._job.train.checkpoint_every
            raise RunError(
                f"{lost}, and there is no complete checkpoint to go back to;"
                f" [train] checkpoint_every is {every}{'' if every else ', which is never'}: the state is kept every so"
                " many steps"
            )
        if positions is None:
            raise RunError(
                f"{lost}, and {len(startable)} live workers are too few for {self._job.shape.ranks} ranks; go on"
                f" from {folder_name(checkpoint.step)} with: {self._run.resume_command}"
            )
        processes.move(positions, startable)
        self.checkpoints.start_over()
        self.generations.restart(positions, self._commit_of(checkpoint), processes.places)
        self._outbox.put(Rewind(checkpoint.step))
        self.phase, self._lost = RunPhase.STARTING, None
        self._log_restored(checkpoint)

    # The end.

    def _end_early(self) -> None:
        """Have the run end with the present iteration, or the next if that has begun, and keep its state."""
        if not self.ends_early:
            self.ends_early, self._end_since = True, self._outbox.now
            self.checkpoints.keep_last()
            self.generations.end_early()

    def _end_without_iteration(self) -> bool:
        """End a run that is told to end and has not committed another step in time; whether it is over with that.

        The committed state goes to a checkpoint, unless it is in one, or no step was committed.
        """
        generations, is_training = self.generations, self.phase is RunPhase.TRAINING
        if generations.is_finished:
            return False
        if is_training and self._outbox.now - self._end_since <= generations.end_patience:
            return False
        step = generations.record.committed
        is_kept = self.checkpoints.folder(step) is not None  # to keep it again would begin with its removal
        if is_training and generations.record.commit is not None and not is_kept:
            self._is_cut_short = generations.record.is_evaluation_due
            generations.end_at_committed()
            return False
        self._outbox.log("stopped", step=step, checkpoint=self.checkpoints.folder(step))
        self.phase = RunPhase.OVER
        self._outbox.put(Finish({}, True, step, merge=False))
        return True

    def _finish(self, beats: Any) -> None:
        """After the last iteration: wait for the last checkpoint and the final states of all workers."""
        departures, processes = self.generations.departures, self._processes
        departures.watch()
        live = self.generations.live | departures.leaving
        for worker in self._job.shape.workers():
            if worker not in live:
                processes.kill(worker)  # it returned too late and waits for a generation that never comes
        left = [str(worker) for worker in sorted(live) if processes.is_running(worker)]
        self.checkpoints.tick(left, self.generations.record.committed)
        self.generations.release_after_last()
        digests = self._final_digests(beats)
        if digests is None or self.checkpoints.is_busy or departures.leaving:
            return
        self._pass_on_warning()
        self._compare_final_states(digests)
        step = self.generations.record.committed
        self.ends_early = step + 1 < self._run.steps or self._is_cut_short
        if self.ends_early:
            self._outbox.log("stopped", step=step, checkpoint=self.checkpoints.folder(step))
        self.phase = RunPhase.OVER
        self._outbox.put(Finish(digests, self.ends_early, step))

    def _final_digests(self, beats: Any) -> dict[str, dict[int, str]] | None:
        """Worker -> stage -> sha256 of the stage's final state, once every worker that still lives has left them; None
        before. A worker that dies or hangs meanwhile is detected as ever, without consequence."""
        live, ranks = self.generations.live, self._job.grid.tensor_parallel
        gone = self.generations.lost_while_finishing(beats, self._final)
        gone |= {worker: how for worker in live if (how := self._processes.how_ended(worker)) is not None}
        members = {worker: members_of([worker], ranks) for worker in sorted(live)}
        waits = {worker for worker, names in members.items() if not self._final.keys() >= set(names)}
        for worker in sorted(waits & gone.keys()):
            self._processes.kill(worker)
            live.discard(worker)
            step = self.generations.record.committed
            self._outbox.log("detected", worker=str(worker), step=step, cause=gone[worker], over=True)
        if waits - gone.keys():
            return None
        return {str(worker): joined_digests([self._final[name] for name in members[worker]]) for worker in sorted(live)}

    def _compare_final_states(self, digests: Mapping[str, Mapping[int, str]]) -> None:
        """Write which hosts end with another state than their peers. Where hosts compare their states, what was
        computed since they agreed is taken back and the run fails."""
        held_by: dict[int, dict[str, str]] = {}
        for worker, of_stages in digests.items():
            for number, digest in of_stages.items():
                held_by.setdefault(number, {})[worker] = digest
        unlike = {number: held for number, held in sorted(held_by.items()) if len(set(held.values())) > 1}
        if not unlike:
            return
        record, name = self.generations.record, names_of_numbers(self._job)
        what = "; ".join(
            f"workers {' and '.join(held)} end with different states of {name(n)}" for n, held in unlike.items()
        )
        self._outbox.log("corrupt", step=record.committed, workers=[], what=what, held=unlike)
        if self._job.integrity.compares_states and record.verified is not None:
            self.generations.rewind(record.verified.step)
            raise RunError(
                f"{what}; what came after step {record.verified.step}, where they agreed, is taken back; go on from a"
                f" checkpoint with: {self._run.resume_command}"
            )

    def _pass_on_warning(self) -> None:
        """Write the first warning of a worker as an event."""
        if self._warning and not self._has_warned:
            self._has_warned = True
            self._warn(self._warning)
