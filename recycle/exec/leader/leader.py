"""The leader of a run: a state machine from the start of the workers to their final states.

`Leader.take` takes one message and the time, and returns the resulting actions. Messages of processes and agents are
only noted; the next `Tick` decides. The leader does no input or output and reads no clock, so that tests can drive it
with any order of messages. Another leader continues from the register (`Persist`) and from what agents send again.

The leader is one class in layers. Read in this order: state.py (the state), membership.py (workers and agents),
forming.py (start of a generation), generations.py (commits), and this file (start, checkpoint restore, end).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from recycle.errors import JobError, RecycleError, RunError
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
    Persist,
    Planned,
    Rewind,
    RuntimeMessage,
    StoredCheckpoint,
    Tick,
    Waiting,
)
from recycle.exec.leader.checkpoints import folder_name
from recycle.exec.leader.commit import names_of_numbers
from recycle.exec.leader.forming import StageLost, StatesDiffer
from recycle.exec.leader.generations import Generations
from recycle.exec.leader.membership import END_SECONDS, reassign
from recycle.exec.leader.state import Phase, RunDescription
from recycle.exec.members import joined_digests, parse_workers, worker_names
from recycle.exec.protocol import (
    LINE_SEPARATOR,
    REFUSED_THE_JOB,
    STAGE_LOST,
    Batch,
    Commit,
    EndAsked,
    Ended,
    FaultReached,
    FinalState,
    FromWorker,
    GenerationRecord,
    Hello,
    Leave,
    Leaving,
    Ready,
    SavedPart,
    StateTensors,
    Strike,
    Warned,
    as_clause,
    with_last_lines,
)
from recycle.job.shape import Worker


@dataclass
class _Restore:
    """A checkpoint restore: reason, workers alive before, deadline for nodes and processes, and the checkpoint.

    Processes end by themselves until `killed_at`.
    """

    lost: StageLost
    alive: Collection[Worker]
    deadline: float
    killed_at: float
    answer: CheckpointFound | Literal["asked for"] | None = None


class Leader(Generations):
    """Leads one run. The first message is `Begin`."""

    def __init__(self, run: RunDescription, now: float) -> None:
        super().__init__(run, now)
        self._has_warned = False
        self._can_restore = False
        """If workers fail to start, other workers may be started from a checkpoint."""
        self._restore: _Restore | None = None
        self._waits_for = ""
        self._ends_since = 0.0
        self._is_cut_short = False
        self._final: dict[str, dict[int, str]] = {}
        self._handlers: dict[type, Callable[[Any], object]] = {
            Tick: self._tick,
            Batch: self._take_batch,
            FromWorker: self._take_process_message,
            Ended: self.take_end,
            Hello: self._take_hello,
            AgentAbsent: self.lose_agent,
            DepartureAsked: self.ask_to_leave,
            Planned: self.plans.take,
            CheckpointCompleted: self.checkpoints.completed,
            CheckpointFound: self._take_checkpoint,
            EndEarly: self._end_early,
            Begin: self._take_begin,
        }
        self._process_handlers: dict[type, Callable[[str, Any], object]] = {
            Ready: self.take_ready,
            Leaving: self.take_leaving,
            SavedPart: self.checkpoints.take,
            StateTensors: self.take_tensors,
            FinalState: self._take_final_state,
            Warned: self._take_warning,
            FaultReached: self._take_fault,
            EndAsked: self._end_early,
        }

    def take(self, now: float, message: FromWorker | Batch | Ended | Hello | RuntimeMessage) -> list[Action]:
        """Take a message at `now` (monotonic seconds) and return the resulting actions; the last may be `Fail`."""
        self.now = now
        try:
            self._handlers[type(message)](message)
        except RecycleError as error:
            self.put(Fail(error))
            self.enter(Phase.OVER)
        return self.take_actions()

    def _take_batch(self, batch: Batch) -> None:
        for message in batch.said:
            self._take_process_message(message)
        for ended in batch.ended:
            self.take_end(ended)
        self.detector.take(batch.beats)

    def _take_process_message(self, message: FromWorker) -> None:
        handler = self._process_handlers.get(type(message.message))
        if handler is None:
            self.received.take(message)
        else:
            handler(message.member, message.message)

    def _take_hello(self, hello: Hello) -> None:
        self.register_agent(hello)
        for message in hello.said:
            self._take_process_message(message)

    def _take_begin(self, begin: Begin) -> None:
        train = self.job.train
        self.checkpoints.kept = set(begin.kept)
        if begin.record is not None:
            self.adopt(begin, begin.record)
            self._can_restore = True
            if not (begin.record.plan or self.run.is_script):  # also if the last leader died while workers started
                self._log_restored(self.record.committed, folder_name(self.record.committed))
        elif begin.checkpoint is not None:
            self._resume(begin.checkpoint, begin.generation)
        else:
            self.record = GenerationRecord(begin.generation, [], {}, "", committed=begin.committed)
        self.expect_rejoins()
        if begin.record is None and train.sharded_optimizer and train.optimizer_copies == 1:
            self._warn_of_single_copies()

    def _warn_of_single_copies(self) -> None:
        self.log(
            "warning",
            message="[train] optimizer_copies = 1: every death restores a checkpoint; with 2, one worker of each stage"
            " may die",
        )
        if self.job.integrity.compares_states:
            self.log(
                "warning",
                message="[integrity]: with [train] optimizer_copies = 1 no other worker holds the optimizer's state of"
                " a shard, so only parameters are compared; with 2 the state is compared too",
            )

    def _take_warning(self, member: str, warned: Warned) -> None:
        if not self._has_warned:
            self._has_warned = True
            self.log("warning", message=warned.message)

    def _take_fault(self, member: str, reached: FaultReached) -> None:
        number, fault = reached.fault, self.run.faults[reached.fault]
        if number in self.struck:
            return
        self.struck[number] = member
        self.log("fault", worker=str(fault.worker), step=self.next_step, fault=fault.text)
        if self.record.generation:
            self.persist()
        self.tell(Strike(number, member))

    def _tick(self, tick: Tick) -> None:
        if self.phase is Phase.OVER:
            return
        self.detector.are_due, self.is_reached = tick.judges_beats, tick.is_reached
        if not self.is_reached or self.now - self._ticked > self.limits.dead_after / 2:  # it was cut off
            self._judges_cuts_from = max(self._judges_cuts_from, self.now)
        self.count_time()
        if self._end_without_iteration():
            return
        match self.phase:
            case Phase.RESTORING:
                self._continue_restore()
            case Phase.STARTING:
                self._start()
            case Phase.BETWEEN | Phase.PROPOSED | Phase.FORMING | Phase.RUNNING:
                self._train()
        if self.phase is Phase.FINISHED:
            self._finish()

    def _train(self) -> None:
        self.restart_workers()
        if self.checkpoints.pending:
            self.checkpoints.tick(worker_names(self.live_or_leaving), self.record)
        try:
            self.advance()
        except StageLost as lost:
            self._start_restore(lost, self.live)
        if self.all_leave:
            self._end_early()

    # The start of the workers.

    def _start(self) -> None:
        record, live = self.record, self.live
        self.take_fresh_ends()
        missing = self.missing_nodes(live)
        running = [worker for worker in live if self.processes[worker].is_running]
        if self.are_asked_to_leave(running) and not (missing and self.waited < self.limits.lease):
            self._end_early()  # all agents had time to connect
            return
        if missing:
            nodes = " ".join(map(str, missing))
            if self._can_restore and not self.is_awaited(live):
                self._start_restore(StageLost(f"nodes {nodes} have left again"), live)
                return
            late = waits_for = f"agents of nodes {nodes}"
        else:
            for worker in sorted(live):
                process = self.processes[worker]
                if process.generation != record.generation:
                    has_state = record.committed >= 0 or self._may_load
                    self.start_process(worker, record.committed if has_state else None)
                elif process.how is not None:
                    self._fail_to_start(worker, process.how)
                    return
            slow = [worker for worker in sorted(live) if not self.is_ready(worker)]
            for worker, cause in self.detector.lost(slow, self.now, is_starting=True).items():
                self.kill(worker)
                self._fail_to_start(worker, f"had {cause}")
                return
            if not slow:
                self._begin_after_loaded()
                self.detector.forget(live)
                self.enter(Phase.BETWEEN)
                self.lines.start_pipeline(self.now)
                return
            late, waits_for = f"workers {' '.join(map(str, slow))}", f"{len(live)} workers"
        if self.now > self.start_deadline:
            limit = f"{self.limits.start_deadline:g} s ([membership] start_deadline)"
            raise RunError(f"{late} were not ready within {limit}; see {self.run.logs}")
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self.put(Waiting(f"{waits_for} to start"))

    @property
    def _may_load(self) -> bool:
        """Whether the run continues from what the user's script loads."""
        return self.run.is_script and self.record.generation > 0

    def _begin_after_loaded(self) -> None:
        """Begin after the iteration of the states that the user's scripts have loaded, if they have loaded one."""
        steps = {worker: self.processes[worker].at for worker in sorted(self.live)}
        first, at = next(iter(steps.items()))
        for worker, other in steps.items():
            if other != at:
                starts = f"workers {first} and {worker} begin with steps {at + 1} and {other + 1}"
                raise RunError(f"{starts}; load one checkpoint in all processes")
        if self._may_load:
            self.put(Rewind(at))
            self._log_restored(at, "the script's checkpoint" if at >= 0 else "the script's initial state")
        elif at < 0:
            return
        self.record = msgspec.structs.replace(self.record, committed=at)

    def _fail_to_start(self, worker: Worker, cause: str) -> None:
        """Ends the run at its start; during a restore other workers may start instead."""
        message, lines = f"worker {worker} {as_clause(cause)} during start-up", self.processes[worker].lines
        if self.run.is_script and cause.endswith(" exit code 0"):
            message += ": its script has called no session.attach (docs/guides/own-loop.md)"
        has_refused = cause.endswith(REFUSED_THE_JOB)
        if not self._can_restore or (self.run.is_script and has_refused):  # a script would refuse again
            if has_refused:
                end = " ends: " if " ends: " in lines else LINE_SEPARATOR
                raise JobError(lines.rpartition(end)[2] or message)
            raise RunError(with_last_lines(message, lines))
        self.log_detected(worker, f"{cause} during start-up")
        self._start_restore(StageLost(message), self.live - {worker})

    # The way back to a checkpoint.

    def _start_restore(self, lost: StageLost, alive: Collection[Worker]) -> None:
        self._can_restore, self._waits_for = True, ""
        is_script, seconds = self.run.is_script, self.limits.rejoin_deadline
        killed_at = self.now + min(END_SECONDS, seconds / 2) if is_script else self.now
        self._restore = _Restore(lost, set(alive), self.now + seconds, killed_at)
        for worker in sorted(alive) if is_script else ():
            self.tell(Leave(str(worker), self.processes[worker].incarnation, str(lost)))
        self.enter(Phase.RESTORING)
        self._continue_restore()

    def _take_checkpoint(self, checkpoint: CheckpointFound) -> None:
        if self._restore is not None:
            self._restore.answer = checkpoint

    def _continue_restore(self) -> None:
        """Dead workers that may be restarted take part. With too few workers, wait for returning nodes."""
        job, run, restore = self.job, self.run, self._restore
        assert restore is not None
        is_late = self.now > restore.deadline
        self.take_fresh_ends()
        if running := [worker for worker in sorted(self.positions) if self.processes[worker].is_running]:
            if is_late:
                workers = " ".join(map(str, running))
                raise restore.lost.without_restore(f"workers {workers} could not be ended for the restore")
            for worker in running:
                if worker not in restore.alive or self.now >= restore.killed_at:
                    self.kill(worker)
            return
        is_script = run.is_script
        if is_script and self.record.script_starts >= (run.script_restarts or 0):
            remedy = f"continue from the script's checkpoint with: {run.resume_command}"
            if fails_alike := self._fails_alike:
                remedy = f"the script would fail again: mend it, see {run.logs}"
            lost = type(restore.lost)(f"{restore.lost}; {remedy}")
            lost.exit_code = lost.exit_code if fails_alike else STAGE_LOST
            raise lost
        allowed = {
            worker
            for worker in self.positions - run.absent
            if (is_script or worker in restore.alive or self.may_restart(worker)) and not self.has_left(worker)
        }
        startable = {worker for worker in allowed if not self.missing_nodes([worker])}
        assigned = reassign(job.shape, startable)
        if assigned is None and startable < allowed and not is_late:
            return  # a node may come back
        if is_script:
            self._start_script_again(restore.lost, assigned, startable)
            return
        self.checkpoints.tick((), self.record)
        if self.checkpoints.is_finishing:
            return
        if restore.answer is None:
            restore.answer = "asked for"
            self.put(FindCheckpoint(self.record.verified_step))
        if not isinstance(restore.answer, CheckpointFound):
            return
        checkpoint = restore.answer.checkpoint
        if checkpoint is None:
            every, step = job.train.checkpoint_every, self.record.verified_step
            agreed = "" if step is None else f" up to step {step}, after which the states were not compared"
            raise restore.lost.without_restore(
                f"the run has no complete checkpoint{agreed};"
                f" [train] checkpoint_every = {every} sets their interval{'' if every else ' (0: never)'}"
            )
        if assigned is None:
            raise restore.lost.without_restore(
                f"{len(startable)} live workers are too few for {job.shape.ranks} ranks;"
                f" resume from {folder_name(checkpoint.step)} with: {run.resume_command}"
            )
        self._start_over_at(assigned, startable, self._record_of(self._commit_of(checkpoint), self.record.generation))
        self.put(Rewind(checkpoint.step))
        self._log_restored(checkpoint.step, folder_name(checkpoint.step))

    @property
    def _fails_alike(self) -> bool:
        """Whether several processes of a script have ended with one error, before they committed an iteration."""
        ended = [(worker, process.how, process.at) for worker, process in self.processes.items() if process.how]
        ends = [self.with_reason(worker, how) for worker, how, _ in ended if not how.endswith(f" {STAGE_LOST}")]
        is_first = {at for *_, at in ended} == {self.record.committed}
        return is_first and len(ends) > 1 and len(set(ends)) == 1 and ends[0].startswith("ended")

    def _start_script_again(
        self, lost: StageLost, assigned: Collection[Worker] | None, startable: Collection[Worker]
    ) -> None:
        """Keep the committed iteration until the processes tell which one they have loaded."""
        record = self.record
        if assigned is None:
            raise lost.without_restore(f"{len(startable)} live workers are too few for {self.job.shape.ranks} ranks")
        starts = record.script_starts + 1
        self.log("warning", message=f"{lost}; the script starts again, {starts} of {self.run.script_restarts}")
        before = GenerationRecord(record.generation, [], {}, "", committed=record.committed, script_starts=starts)
        self._start_over_at(assigned, startable, before)

    def _start_over_at(
        self, assigned: Collection[Worker], startable: Collection[Worker], record: GenerationRecord
    ) -> None:
        self.exchange_places(assigned, startable)
        places = {str(worker): str(place) for worker, place in self.places.items()}
        self.start_over(assigned, record)
        self.announce("abandoned", places=places)  # for another leader
        self._restore = None

    def _resume(self, checkpoint: StoredCheckpoint, generation: int) -> None:
        commit = self._commit_of(checkpoint)
        self.start_over(self.live, self._record_of(commit, generation))
        if checkpoint.commit.evaluate and not (checkpoint.has_metrics or commit.evaluate):
            self.write_line()
        self._log_restored(checkpoint.step, folder_name(checkpoint.step))

    def _record_of(self, commit: Commit, generation: int) -> GenerationRecord:
        return GenerationRecord(generation, [], {}, "", committed=commit.step, commit=commit)

    def _commit_of(self, checkpoint: StoredCheckpoint) -> Commit:
        """A step without a metrics line was not evaluated yet."""
        commit = checkpoint.commit
        is_last = commit.step + 1 >= self.run.steps
        is_due = self.job.is_evaluated(commit.step, is_last) and not checkpoint.has_metrics
        return msgspec.structs.replace(commit, finished=is_last and is_due, evaluate=is_due)

    def _log_restored(self, step: int, checkpoint: str) -> None:
        self.log("restored", step=step + 1, checkpoint=checkpoint, live=worker_names(self.live))

    # The end of the run.

    def _end_early(self, *_: object) -> None:
        if not self.ends_early:
            self._ends_since = self.now
            self.ends_early, self.checkpoints.keeps_last = True, not self.run.is_script

    def _end_without_iteration(self) -> bool:
        """The committed state is saved to a checkpoint, unless it is in a checkpoint or no step was committed."""
        record = self.record
        if not self.ends_early or self.phase is Phase.FINISHED or self.script_ends:
            return False
        is_training = self.phase not in (Phase.STARTING, Phase.RESTORING)
        if is_training and self.now - self._ends_since <= self.end_patience:
            return False
        is_kept = record.committed in self.checkpoints.kept  # saving it again would begin with its removal
        if is_training and record.commit is not None and self.run.is_script:
            self.fence_stuck()
            return False
        self._is_cut_short = record.is_evaluation_due
        if is_training and record.commit is not None and not is_kept:
            self.end_at_committed()
            return False
        self._end_run(Finish({}, True, record.committed, merge=False))
        return True

    def _end_run(self, finish: Finish) -> None:
        if finish.ended_early:
            if finish.step >= 0 and not (self.checkpoints.kept or self.run.is_script):
                unsaved = StageLost(f"the run was asked to end, the state after step {finish.step} was not saved")
                lost = unsaved if self._restore is None else self._restore.lost
                raise lost.without_restore("the run has no complete checkpoint")
            self.log("stopped", step=finish.step, checkpoint=self.checkpoints.folder(finish.step))
        self.ends_early = finish.ended_early
        self.enter(Phase.OVER)
        self.put(finish)

    def register_to_resume(self) -> Persist | None:
        """Return the register from which the run continues at its last commit; None if no checkpoint has it.

        The workers of the last generation start, including workers that have died since.
        """
        if self.record.committed not in self.checkpoints.kept:
            return None
        commit, is_due = self.commit, self._is_cut_short
        is_last = commit.step + 1 >= self.run.steps
        commit = msgspec.structs.replace(commit, last=None, finished=is_due and is_last, evaluate=is_due)
        self.released.update({str(worker): process.incarnation + 1 for worker, process in self.processes.items()})
        live = parse_workers(self.record.live)
        self._start_over_at(live, live, self._record_of(commit, self.record.generation))
        (register,) = (action for action in self.take_actions() if isinstance(action, Persist))
        return register

    def _take_final_state(self, member: str, final: FinalState) -> None:
        self._final[member] = final.digests

    def _finish(self) -> None:
        self.check_leavers()
        live = self.live_or_leaving
        for worker in sorted(self.positions - live):
            self.kill(worker)  # it returned too late and waits for a generation that never comes
        running = [worker for worker in live if self.processes[worker].is_running]
        self.checkpoints.tick(worker_names(running), self.record)
        self.release_after_last()
        digests = self._final_digests()
        if digests is None or self.checkpoints.pending or self._leaving:
            return
        self._compare_final_states(digests)
        step = self.record.committed
        self._end_run(Finish(digests, step + 1 < self.run.steps or self._is_cut_short, step))

    def _final_digests(self) -> dict[str, dict[int, str]] | None:
        """None while digests are missing. A worker that dies or hangs meanwhile does not affect the run."""
        lost = self.silent_workers(self._final)
        waits = {worker for worker in self.live if not self._final.keys() >= set(self.members(worker))}
        for worker in sorted(waits):
            if (cause := self.processes[worker].how or lost.get(worker)) is not None:
                self.kill(worker)
                self.live.discard(worker)
                cause = self.with_reason(worker, cause)
                self.log_detected(worker, cause, step=self.record.committed, over=True)
                if self.run.is_script and not self.live:
                    raise RunError(f"after the last step the script has failed in all workers: worker {worker} {cause}")
        if waits & self.live:
            return None
        return {
            name: joined_digests([self._final[member] for member in self.members(name)])
            for name in worker_names(self.live)
        }

    def _compare_final_states(self, digests: Mapping[str, Mapping[int, str]]) -> None:
        """If hosts compare their states, roll back to the last agreement and fail the run."""
        held_by: dict[int, dict[str, str]] = {}
        for worker, stages in digests.items():
            for number, digest in stages.items():
                held_by.setdefault(number, {})[worker] = digest
        unlike = {number: held for number, held in sorted(held_by.items()) if len(set(held.values())) > 1}
        if not unlike:
            return
        name, verified = names_of_numbers(self.job), self.record.verified
        difference = "; ".join(
            f"workers {' and '.join(held)} end with different states of {name(n)}" for n, held in unlike.items()
        )
        self.log("corrupt", step=self.record.committed, workers=[], what=difference, held=unlike)
        if self.job.integrity.compares_states and verified is not None:
            self.rewind(verified.step)
            raise StatesDiffer(
                f"{difference}; the steps after step {verified.step}, where they agreed, are discarded; resume from"
                f" a checkpoint with: {self.run.resume_command}"
            )
