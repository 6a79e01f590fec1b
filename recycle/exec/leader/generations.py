"""The generations of a run: who is alive, what runs next, what is committed.

Every change takes the same path: end the generation (what is undecided is void, survivors wake up), get a plan for the
workers that are left, propose the next generation, let all acknowledge it, let all form their groups, let them run. A
death on the way begins the path again with the next number. The leader alone decides what a silence means. A generation
in which all workers wait, and none makes progress, for much longer than an iteration takes ends as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.checksums import StateTensor, described
from recycle.exec.exit_description import LINE_SEPARATOR
from recycle.exec.leader.actions import Begin, Outbox, Persist, Rewind, Tell, Waiting
from recycle.exec.leader.actions import Line as MetricsLine
from recycle.exec.leader.checkpoints import Checkpoints
from recycle.exec.leader.commit import evaluate
from recycle.exec.leader.departures import Departures
from recycle.exec.leader.detector import FailureDetector
from recycle.exec.leader.disagreement import Bit
from recycle.exec.leader.forming import AllAcknowledged, Forming, RetryFormation
from recycle.exec.leader.heard import Heard
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.metrics import MetricsLines
from recycle.exec.leader.plans import Plans
from recycle.exec.leader.records import next_record, rollback_record, started_record
from recycle.exec.leader.rejoins import Rejoins
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.leader.shard_holdings import ShardHoldings
from recycle.exec.leader.verdict import Fence, GoBack, Judge, Repeat
from recycle.exec.leader.verdict import Rewind as RewindVerdict
from recycle.exec.leader.verified_states import verified_after
from recycle.exec.leader.worker_processes import WorkerProcesses
from recycle.exec.members import members_of, split_member
from recycle.exec.protocol import (
    Commit,
    Committed,
    Copied,
    Cursor,
    EvaluationResult,
    FromWorker,
    GenerationRecord,
    Leaving,
    Permit,
    Propose,
    Ready,
    StateTensors,
    Stop,
    Strike,
)
from recycle.exec.protocol import GenerationPhase as PersistedPhase
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts

ATTEMPTS = 5
"""Times that the same live set may fail to form or run before the run is given up."""
PLAN_SECONDS = 3600.0
"""How long a plan that is needed now may take; most have shorter deadlines (planner_process.py)."""
END_SECONDS, END_ITERATIONS = 5.0, 3.0
"""A run that is told to end waits so long, and so many times its longest iteration, for the next commit."""


class GenerationPhase(Enum):
    """Where a generation stands."""

    BETWEEN = "between generations"
    PROPOSED = "proposed"
    FORMING = "forming"
    RUNNING = "running"
    FINISHED = "finished"


class StageLost(RunError):
    """A stage's state is lost, and only a checkpoint can bring it back: it has no live host left, or its hosts hold
    different states and the wrong one cannot be told."""


class Generations:
    """Drives the generations of one run.

    Args:
        job: the job; its `[membership]` section holds every deadline.
        steps: iterations to train.
        live: the workers that are started.
        processes, plans, checkpoints, lines: of the run.
        outbox: takes the actions, and has the time.
        initial: what processes host that start with the initial state, or with a checkpoint's.

    Attributes:
        record: the register's record, as of the last commit.
        phase: of the generation.
        struck: number of a fault that has struck -> the process that it struck first.
    """

    def __init__(
        self,
        job: PricedJob,
        steps: int,
        live: Collection[Worker],
        processes: WorkerProcesses,
        plans: Plans,
        checkpoints: Checkpoints,
        lines: MetricsLines,
        outbox: Outbox,
        initial: Hosts,
    ) -> None:
        self.job, self.live = job, set(live)
        self._processes, self._plans, self._checkpoints, self._lines = processes, plans, checkpoints, lines
        self._outbox = outbox
        self._everybody = frozenset(job.shape.workers())
        self._tensor_parallel = job.grid.tensor_parallel
        self.record = GenerationRecord(0, [], {}, "")
        self.phase = GenerationPhase.BETWEEN
        self._persisted_phase: PersistedPhase = "abandoned"
        self.struck: dict[int, str] = {}
        self._earlier: Commit | None = None
        self._holdings = (
            ShardHoldings(job, initial, self._everybody) if job.train.sharded_optimizer else Holdings(initial)
        )
        self._detector = FailureDetector(job)
        self._heard = Heard(self._tensor_parallel)
        self._judge = Judge(job, steps, outbox.log, checkpoints.due, self._holdings, self._name_bits)
        self._forming = Forming(self._heard, job.membership, outbox, self._holdings)
        self._rejoins = Rejoins(processes, self.is_ready, outbox, job.membership.rejoin_deadline)
        self.departures = Departures(job.shape, processes, plans, self._holdings, outbox)
        self._ready: dict[str, int] = {}
        self._tensors: dict[tuple[int, int, str], Sequence[tuple[str, int, int, int]]] = {}
        self._joined: set[Worker] = set()
        self._attempts = 0
        self._ticked = self._waited = 0.0
        self._repeated: str | None = None
        self._disputed: list[tuple[int, int, int]] = []
        self._lost_since: float | None = None
        self._is_ending = False
        self._longest = self._iteration_since = 0.0
        self._wanted: Hosts | None = None
        self._spare: dict[int, int] = {}
        self._line: dict[str, Any] = {}

    # What processes say.

    def take(self, said: FromWorker) -> None:
        """Take a message of a process."""
        match said.message:
            case Ready(incarnation=incarnation):
                self._ready[said.member] = incarnation
            case StateTensors() as layout:
                self._tensors[layout.number, layout.tensor_rank, layout.plan] = layout.tensors
            case Leaving(incarnation=incarnation):
                worker = Worker.parse(split_member(said.member)[0])
                if incarnation == self._processes.incarnation(worker):
                    self.departures.ask(worker, by_signal=True)
            case _:
                self._heard.take(said)

    def take_reports(self, said: Iterable[FromWorker]) -> list[FromWorker]:
        """Take the reports of iterations among these messages; the others."""
        return self._heard.take_reports(said)

    def is_ready(self, worker: Worker) -> bool:
        """Whether all of the worker's present processes have started up, and are not to end."""
        number = self._processes.incarnation(worker)
        return not self._processes.is_killed(worker) and all(
            self._ready.get(member) == number for member in members_of([worker], self._tensor_parallel)
        )

    def _forget_ready(self, worker: Worker) -> None:
        for member in members_of([worker], self._tensor_parallel):
            self._ready.pop(member, None)

    # Who takes part.

    def expect_rejoin(self, worker: Worker, step: int) -> None:
        """A worker that, once dead, shall take part again from the start of iteration `step` on, or soon after."""
        self._rejoins.expect(worker, step)

    def adopt_rejoins(self) -> None:
        """Processes that another leader has started for expected workers, as their agents say, are those that come
        back."""
        self._rejoins.adopt(self.live)

    def admit(self, worker: Worker) -> None:
        """`worker`, whose new process is ready, shall take part from the next boundary on."""
        self._rejoins.expect(worker, self.next_step, started=True)

    @property
    def awaited(self) -> set[Worker]:
        """The dead workers that are expected back."""
        return {rejoin.worker for rejoin in self._rejoins.awaited(self.live)}

    @property
    def hosts(self) -> Hosts:
        """Who hosts what, as of the last generation that ran."""
        return self._holdings.hosts

    @property
    def next_step(self) -> int:
        """The iteration after the committed one."""
        return self.record.committed + 1

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.phase is GenerationPhase.FINISHED

    @property
    def _failed(self) -> frozenset[Worker]:
        return self._everybody - self.live

    @property
    def _holders(self) -> set[Worker]:
        """The live workers that hold what the last generation that ran has given them."""
        return self.live - self._joined

    # The register.

    def cursor(self) -> Cursor:
        """The part of the register that changes within a generation."""
        record = self.record
        return Cursor(
            record.generation,
            self._persisted_phase,
            record.committed,
            record.commit,
            record.mode,
            record.evaluated,
            record.verified,
            record.candidate,
            dict(self.struck),
            dict(self.departures.released),
            dict(self.departures.gone),
            self._earlier,
        )

    def resumable_cursor(self) -> Cursor:
        """The cursor of a run that was ended early and shall go on: its last step does not end it."""
        cursor = self.cursor()
        assert cursor.commit is not None
        commit = msgspec.structs.replace(cursor.commit, last=None, finished=False)
        return msgspec.structs.replace(cursor, commit=commit)

    def persist(self, phase: PersistedPhase | None = None, record: GenerationRecord | None = None) -> None:
        """Write the cursor, in another phase if there is one, and the record where it has changed."""
        self._persisted_phase = phase or self._persisted_phase
        self._outbox.put(Persist(self.cursor(), record))

    def _announce(self, record: GenerationRecord, phase: PersistedPhase = "proposed", plan: str = "") -> None:
        """Make this the register's record and propose it, or have its generation be over from the start."""
        self.record, self._earlier = record, None
        self._heard.begin(record)
        self.persist(phase, record)
        if phase == "proposed":
            self._checkpoints.proposed(record, self.hosts)
            self._outbox.put(Tell(Propose(record, plan)))

    def adopt(self, begin: Begin) -> None:
        """Go on from the register that another leader left, with the workers that it names.

        Its last decisions are told again. A generation that runs goes on; of any other what was undecided is void, and
        workers that copied their state in it copy it again.
        """
        record, cursor = begin.record, begin.cursor
        assert record is not None
        if cursor is not None and cursor.generation == record.generation:
            record = msgspec.structs.replace(
                record,
                committed=cursor.committed,
                commit=cursor.commit,
                mode=cursor.mode,
                evaluated=cursor.evaluated,
                verified=cursor.verified,
                candidate=cursor.candidate,
            )
            self._persisted_phase, self._earlier = cursor.phase, cursor.earlier
        else:
            self._persisted_phase = "proposed"
        if cursor is not None:
            self.struck = dict(cursor.struck)
            for fault, member in self.struck.items():  # also to agents and processes that are new
                self._outbox.put(Tell(Strike(fault, member)))
            self.departures.released.update(cursor.released)
            self.departures.gone.update(cursor.gone)
        self.record = record
        self.live = {Worker.parse(worker) for worker in record.live}
        self._heard.begin(record)
        self._forming.follow()
        has_run = self._persisted_phase in ("running", "ended")
        self._take_up(record.holds if has_run else record.held)
        if self._persisted_phase in ("proposed", "running"):  # one that is over from the start is for no process
            self._outbox.put(Tell(Propose(record)))
        if self._persisted_phase == "running":
            self._outbox.put(Tell(Permit(record.generation, "form")))
            self._outbox.put(Tell(Permit(record.generation, "run")))
        elif self._persisted_phase != "proposed":  # the last leader may not have told all
            self._outbox.put(Tell(Stop(record.generation)))
        if self._earlier is not None:  # a process that has not heard of it waits for it
            self._outbox.put(Tell(Committed(record.generation, self._earlier)))
        if record.commit is not None and record.plan:  # without a plan it is the record of a restart
            self._outbox.put(Tell(Committed(record.generation, record.commit)))
            if record.evaluated is not None and record.evaluated.step == record.committed:
                self._outbox.put(Tell(EvaluationResult(record.generation, record.evaluated)))
            self._note_commit(record.commit)
            if record.commit.finished and not record.is_evaluation_due:
                self._enter(GenerationPhase.FINISHED)
                return
        has_committed = begin.record is not None and begin.record.committed != record.committed
        is_last = has_committed and record.commit is not None and record.commit.last == record.committed
        if self._persisted_phase == "running" and (record.is_evaluation_due or not is_last):
            self._enter(GenerationPhase.RUNNING)
            self._iteration_since = self._outbox.now
            return
        if not has_run:
            self._joined = {Worker.parse(joiner) for joiner in record.joins}
        self._lost_since = self._outbox.now
        self._end()

    def _take_up(self, plan: str) -> None:
        """The workers hold what the plan of this name gives them; empty for what they start with."""
        hosts = self._holdings.named(plan, self._plans.hosts) if plan else None
        if plan and hosts is None:
            raise RunError(f"plan {plan}, which says what the workers hold, is not in the run directory any more")
        self._holdings.take_up(plan, hosts)

    def resume(self, generation: int, commit: Commit) -> None:
        """Go on from a checkpoint with processes that are still to be started; `generation` was the last one."""
        self.record = msgspec.structs.replace(self.record, generation=generation)
        self._start_over(self.live, commit)

    def restart(self, live: Collection[Worker], commit: Commit, places: Mapping[Worker, Worker]) -> None:
        """Go back to a checkpoint with new processes, which all start from its state.

        The register says so before any process is started: it holds a generation of these workers that is over from the
        start, so that another leader goes on from there.
        """
        self._start_over(live, commit)
        names = {str(worker): str(place) for worker, place in places.items()}
        self._announce(started_record(self.record, self.live, names, self._processes.incarnations), "abandoned")

    def _start_over(self, live: Collection[Worker], commit: Commit) -> None:
        self.record = GenerationRecord(self.record.generation, [], {}, "", commit.step, commit)
        self.live = set(live)
        self._joined.clear()
        self._holdings.start_over()
        self._detector = FailureDetector(self.job)
        self._rejoins.start_over()
        self.departures.start_over()
        self._ready.clear()
        self._attempts, self._repeated, self._disputed = 0, None, []
        self._judge.start_over()
        self._forming.forgive()
        self._enter(GenerationPhase.BETWEEN)

    # The end of the run.

    def end_early(self) -> None:
        """The run ends with the next iteration after which all workers can stop together."""
        self._is_ending = True
        self._judge.end_early()

    @property
    def end_patience(self) -> float:
        """Seconds that a run which is told to end waits for that iteration."""
        half = self.job.membership.grace / 2
        return min(half, max(END_SECONDS, END_ITERATIONS * self._longest)) if self._longest else half

    def end_at_committed(self) -> None:
        """End the run with the state after the committed step.

        The next generation has nothing left to do: workers go to the committed state, keep it and end. A worker that
        makes no progress although it waits for nobody is fenced, as it would not come there, unless the state of a
        stage would be lost: the workers may only be compiling. Raises RunError when that state is lost already.
        """
        patience = self.end_patience / 2  # it may have been stuck only since the run was told to end
        stuck = self._detector.stuck(self.live, patience)
        if self._holdings.lost(self._holders - stuck):
            stuck = set()
        for worker in sorted(stuck | self._joined):
            self._processes.kill(worker)
            self._take_out(worker)
            if worker in stuck:
                cause = f"no progress for {patience:g} s, and the run is to end"
                self._outbox.log("detected", worker=str(worker), step=self.next_step, cause=cause, over=True)
        self._end()
        if units := self._holdings.lost(self._holders):
            raise RunError(f"{self._holdings.described(units[0])} no live host that could keep its state")
        before = self.record.commit
        assert before is not None, "a step is committed"
        is_new = not before.checkpoint and self._checkpoints.due(before.step, True)
        commit = msgspec.structs.replace(
            before, last=before.step, finished=True, evaluate=False, checkpoint=before.checkpoint or is_new
        )
        self._announce_end(commit)
        if is_new:
            self._checkpoints.committed(msgspec.structs.replace(before, checkpoint=True), self.record, self.hosts)

    def _announce_end(self, commit: Commit) -> None:
        """Propose a generation of the live workers that has nothing left to do."""
        record = msgspec.structs.replace(
            self.record,
            generation=self.record.generation + 1,
            live=[str(worker) for worker in sorted(self.live)],
            joins=[],
            copies=[],
            behind=[],
            commit=commit,
            held=self._holdings.plan,
            holds=self._holdings.plan,
            incarnations=self._processes.incarnations,
        )
        self._announce(record)
        self._enter(GenerationPhase.FINISHED)

    def release_after_last(self) -> None:
        """After the last iteration: workers whose connections broke while they gathered parameters wait for another
        generation. Give them one in which they end with the committed state."""
        if self._heard.trouble or self._heard.cut is not None:
            assert self.record.commit is not None
            self._end()
            self._announce_end(self.record.commit)

    def lost_while_finishing(self, beats: Any, done: Collection[str]) -> dict[Worker, str]:
        """Workers that died or hang after the last commit, each with why.

        Args:
            beats: as of `Tick`.
            done: processes that have nothing more to do.
        """
        return self._detector.lost(self.live, beats, self._outbox.now, done)

    # Decisions.

    def tick(self, beats: Any) -> None:
        """Decide what follows from all that was heard. Raises StageLost, RunError."""
        if self.is_finished:
            return
        now = self._outbox.now
        self._waited += min(now - self._ticked, self.job.membership.heartbeat)  # do not count pauses of this process
        self._ticked = now
        lost = {worker: how for worker, how in self._processes.take_ended().items() if worker in self.live}
        self.departures.look(self.live, self._joined, self.next_step)
        if self.phase is not GenerationPhase.BETWEEN or self.record.generation:
            lost |= self._detector.lost(self.live, beats, now)
        # An iteration that all have reported is committed even if a worker has died since; so may be the next one.
        while self.phase is GenerationPhase.RUNNING and self._decide():
            pass
        if self.phase is GenerationPhase.RUNNING:
            self._take_in_copies()
        lost = {worker: how for worker, how in (self.departures.overdue() | lost).items() if worker in self.live}
        if lost and not self.is_finished:
            self._lose(lost)
        self._rejoins.start(self.live, self.next_step, self.record.generation, self.phase is GenerationPhase.RUNNING)
        due: dict[GenerationPhase, Callable[[], None]] = {
            GenerationPhase.BETWEEN: self._propose,
            GenerationPhase.PROPOSED: self._form,
            GenerationPhase.FORMING: self._run,
            GenerationPhase.RUNNING: self._watch,
        }
        if self.phase in due:
            due[self.phase]()

    def _enter(self, phase: GenerationPhase) -> None:
        self.phase, self._waited = phase, 0.0

    def _lose(self, lost: Mapping[Worker, str]) -> None:
        """Fence the lost workers and end the generation."""
        for worker, how in sorted(lost.items()):
            self._processes.kill(worker)
            self._take_out(worker)
            self._outbox.log("detected", worker=str(worker), step=self.next_step, cause=how)
        self._attempts = 0
        self._forming.forgive()
        self._end()
        if self._lost_since is None:
            self._lost_since = self._outbox.now
        if units := self._holdings.lost(self._holders):
            raise StageLost(
                f"{self._holdings.described(units[0])} no live host left after step {self.record.committed}: its"
                f" parameters are lost with worker {self._ended_as(max(lost), lost)}"
            )

    def _take_out(self, worker: Worker) -> None:
        """The worker takes no part any more."""
        self._forget_ready(worker)  # its process may take a while to end, and does not wait to join
        self.live.discard(worker)
        self._joined.discard(worker)

    def _ended_as(self, worker: Worker, lost: Mapping[Worker, str]) -> str:
        """The worker and how it ended; after an error of its own with the last line of its log."""
        how = lost[worker]
        last = self._processes.last_lines(worker).rpartition(LINE_SEPARATOR)[2] if how.startswith("ended") else ""
        return f"{worker}, which {how} ({last})" if last else f"{worker}, {how}"

    def _end(self) -> None:
        """End the current generation: what is undecided is void, and survivors wake up."""
        if self.record.generation and self._persisted_phase in ("proposed", "running"):
            self.persist("ended" if self._persisted_phase == "running" else "abandoned")
            self._outbox.put(Tell(Stop(self.record.generation)))
        self._enter(GenerationPhase.BETWEEN)

    def _propose(self) -> None:
        """Between generations: let workers leave and join, then propose the next as soon as a plan exists."""
        self.departures.look(self.live, self._joined, self.next_step)  # one that was to leave may be a last host by now
        for worker in self.departures.release(self.live, self.next_step):
            self._take_out(worker)
        if not self._is_ending and not self._rejoins.settled(self.live, self.next_step, self._admit):
            return
        plan = self._plans.ready(self._failed)
        if plan is None:
            if self._waited > PLAN_SECONDS:
                dead = " ".join(map(str, sorted(self._failed))) or "any"
                raise RunError(f"no plan without workers {dead} was made within {PLAN_SECONDS:g} s; see [planner]")
            return
        if units := self._holdings.lost(self._holders):
            raise RunError(f"{self._holdings.described(units[0])} no live host among the workers that are there")
        self._wanted = wanted = self._holdings.wanted(plan.hosts, self.live, self._holders)
        record = next_record(
            self.record,
            plan,
            self.live,
            self._joined,
            self._holdings,
            wanted,
            self._disputed,
            self._processes.incarnations,
        )
        self._forming.begin()
        self._announce(record, plan=plan.text)
        self._outbox.log(
            "generation",
            step=self.next_step,
            generation=record.generation,
            plan=plan.digest,
            live=record.live,
            roles=record.roles,
        )
        self._enter(GenerationPhase.PROPOSED)

    def _admit(self, worker: Worker) -> None:
        self.live.add(worker)
        self._joined.add(worker)
        self._detector.forget(worker)

    def _form(self) -> None:
        """Once all have acknowledged, all may form."""
        answer = self._forming.acknowledged(self._waited, self._holders, self._detector)
        if not isinstance(answer, AllAcknowledged):
            self._give_way(answer)
            return
        if answer.undone or self._repeated:
            cause = self._repeated or "it was not committed when the generation ended"
            self._outbox.log("undone", step=self.next_step, count=answer.undone, cause=cause)
            self._repeated = None
        self._outbox.put(Tell(Permit(self.record.generation, "form", self._heard.is_stale)))
        self._enter(GenerationPhase.FORMING)

    def _run(self) -> None:
        """Once all groups stand, all may run; a failure to form is tried again with the same workers."""
        cut = self._forming.cut(self._holders, self._detector)
        answer = cut or self._forming.formed(self.record, self._waited, self._holders)
        if answer is not True:
            self._give_way(answer)
            return
        self.persist("running")
        self._outbox.put(Tell(Permit(self.record.generation, "run")))
        self._holdings.take_up(self.record.holds, self._wanted)
        self._enter(GenerationPhase.RUNNING)
        self._iteration_since = self._outbox.now
        self._lines.runs(self._outbox.now)
        self._log_copies(self._forming.copied(), self._joined)
        for worker in self._joined:
            self._forget_ready(worker)
        self._joined.clear()
        if self._lost_since is not None:
            seconds = self._outbox.now - self._lost_since
            self._outbox.log("recovered", step=self.next_step, seconds=seconds, generation=self.record.generation)
            self._lost_since = None
        self._log_spare()

    def _log_spare(self) -> None:
        """Write how many deaths each stage can bear, where that has changed."""
        spare = self._holdings.spare(self.live)
        if spare != self._spare:
            self._spare = spare
            deaths = list(spare.values())
            self._outbox.log("shards", step=self.next_step, generation=self.record.generation, further_deaths=deaths)

    def _take_in_copies(self) -> None:
        """Workers that have copied a shard while the generation runs hold it from now on; the register says so."""
        copied = list(self._new_copies())
        if copied:
            self.record = msgspec.structs.replace(self.record, holds=self._holdings.plan)
            self.persist(record=self.record)
            self._log_copies(copied, (), while_running=True)
            self._log_spare()

    def _new_copies(self) -> Iterator[tuple[str, Copied]]:
        """What all tensor ranks of a worker have copied since the last call."""
        for copy in self.record.behind:
            worker, units = Worker.parse(copy.worker), (copy.first, copy.last)
            members = members_of([copy.worker], self._tensor_parallel)
            if worker not in self.live or not all(member in self._heard.copied for member in members):
                continue
            if any(first <= copy.first and copy.last <= last for first, last in self._holdings.of(worker)):
                continue
            copies = [
                next((one for one in self._heard.copied[member] if (one.first, one.last) == units), None)
                for member in members
            ]
            if copies[0] is not None and None not in copies:
                self._holdings.copied(worker, units)
                yield copy.worker, copies[0]

    def _log_copies(
        self, copied: Sequence[tuple[str, Copied]], joined: Collection[Worker], while_running: bool = False
    ) -> None:
        """Write an event for each worker that has joined, and one for whatever else a worker has copied."""
        for worker in sorted(joined):
            copies = [copy for name, copy in copied if name == str(worker)]
            self._outbox.log(
                "rejoined",
                worker=str(worker),
                step=self.next_step,
                copied_from=" ".join(dict.fromkeys(copy.source for copy in copies)),
                bytes=sum(copy.bytes for copy in copies),
                seconds=round(sum(copy.seconds for copy in copies), 6),
            )
        groups: dict[tuple[Any, ...], list[Copied]] = {}
        for place, (name, copy) in enumerate(copied):
            key = (name, copy.source) if self._holdings.are_logged_together else (name, copy.source, place)
            groups.setdefault(key, []).append(copy)
        for (name, source, *_), copies in groups.items():
            if Worker.parse(name) not in joined:
                self._outbox.log(
                    "moved",
                    worker=name,
                    step=self.next_step,
                    **self._holdings.event_fields([(copy.first, copy.last) for copy in copies]),
                    source=source,
                    bytes=sum(copy.bytes for copy in copies),
                    seconds=round(sum(copy.seconds for copy in copies), 6),
                    **({"while_running": True} if while_running else {}),
                )

    def _give_way(self, answer: Fence | RetryFormation | bool | None) -> None:
        """The generation cannot form like this, or is still on its way."""
        if isinstance(answer, Fence):
            self._lose(answer.workers)
        elif isinstance(answer, RetryFormation):
            self._attempts += 1
            if self._attempts >= ATTEMPTS:
                raise RunError(f"gave up after {ATTEMPTS} attempts with the same workers: {answer.cause}")
            self._end()

    def _watch(self) -> None:
        """A transport may break while the generation runs without a death that explains it; or all wait in vain."""
        self._give_way(self._forming.trouble(self._holders, self._detector) or self._standstill())

    def _standstill(self) -> RetryFormation | None:
        """All workers have waited for so long that what they wait for is not on its way."""
        limits, seconds = self.job.membership, self._detector.standstill(self.live)
        usual = max(limits.form_timeout, limits.hung_factor * self._longest)
        commit = self.record.commit
        if commit is not None and commit.finished and commit.checkpoint:  # which waits for the one before
            usual = max(usual, self.job.train.checkpoint_deadline)
        if seconds <= (usual if self._longest else limits.transport_timeout):
            return None
        return RetryFormation(f"all workers have waited for {seconds:.0f} s, and none has made progress")

    def _decide(self) -> bool:
        """Decide the running generation's next evaluation or commit; whether it could be decided."""
        return self._evaluate() if self.record.is_evaluation_due else self._commit()

    def _evaluate(self) -> bool:
        """Decide the result of the evaluation if every process has reported its part."""
        reports = self._heard.evaluations(self.record.committed)
        if reports is None:
            return False
        result = evaluate(self.record.committed, reports)
        self.record = msgspec.structs.replace(self.record, evaluated=result)
        self.persist()
        self._outbox.put(Tell(EvaluationResult(self.record.generation, result)))
        # There is no line of a step that training has gone back to.
        line = self._line if self._line.get("step") == result.step else self._metrics_line()
        self._outbox.put(MetricsLine(self._lines.with_evaluation(line, self._outbox.now, result.loss)))
        self._lines.starts(self._outbox.now)
        self._go_on()
        return True

    def _go_on(self) -> None:
        """All that belongs to the committed step is done."""
        commit = self.record.commit
        assert commit is not None
        if commit.finished:
            self._enter(GenerationPhase.FINISHED)
        elif commit.last == commit.step:
            self._end()

    def _commit(self) -> bool:
        """Commit the next iteration if every process of every live worker has reported it."""
        by_process = self._heard.reports(self.next_step)
        if by_process is None:
            return False
        reports = ReportColumns.of(by_process)
        verdict = self._judge.judge(self.record, reports, self._holders, lambda step: self._changes(step, reports))
        if not isinstance(verdict, Commit):
            self._carry_out(verdict)
            return False
        verified, candidate = verified_after(
            self.record, reports.has_states, lambda: self._holdings.name_of_states(reports.states())
        )
        self._earlier = self.record.commit
        self.record = msgspec.structs.replace(
            self.record,
            committed=self.next_step,
            commit=verdict,
            mode=verdict.next_mode,
            verified=verified,
            candidate=candidate,
        )
        self.persist()
        self._outbox.put(Tell(Committed(self.record.generation, verdict)))
        now = self._outbox.now
        self._longest, self._iteration_since = max(self._longest, now - self._iteration_since), now
        self._attempts, self._disputed = 0, []
        self._forming.forgive()
        self._note_commit(verdict)
        if not self.record.is_evaluation_due:
            self._go_on()
        return True

    def _note_commit(self, commit: Commit) -> None:
        """Write the step's line of metrics, or keep it until its evaluation is done; see to the step's checkpoint."""
        line = self._metrics_line()
        self._checkpoints.committed(commit, self.record, self.hosts)
        if self.record.is_evaluation_due:
            self._line = line
            self._outbox.put(Waiting(f"the evaluation after step {commit.step}"))
        else:
            self._outbox.put(MetricsLine(line))

    def _metrics_line(self) -> dict[str, Any]:
        assert self.record.commit is not None
        return self._lines.line(self._outbox.now, self.record.commit, self.record, len(self.live), self._plans.compute)

    def write_line(self) -> None:
        """Write the line of the committed step, whose evaluation is not asked for any more."""
        self._outbox.put(MetricsLine(self._metrics_line()))

    def _changes(self, step: int, reports: ReportColumns) -> list[int]:
        """The iterations before which other workers or plans are to take over; `step` is about to be committed."""
        failed = self._failed
        self._plans.observe(failed, step, reports.times())
        better = [step + 1] if self._plans.has_better(failed) else []
        self.departures.look(self.live, self._joined, step)  # a tick may commit several iterations
        leaving = [step + 1] if self.departures.is_prepared else []
        return [*better, *leaving, *(rejoin.step for rejoin in self._rejoins.awaited(self.live))]

    def _carry_out(self, verdict: Repeat | Fence | RewindVerdict | GoBack) -> None:
        """End the generation as the verdict on an iteration asks for."""
        if isinstance(verdict, Fence):
            self._lose(verdict.workers)
            return
        if isinstance(verdict, RewindVerdict):
            self._roll_back(verdict)
            return
        self._end()
        if isinstance(verdict, Repeat):
            self._repeated = verdict.cause
            self._disputed = [(stage, *micro_batch) for stage, micro_batch in verdict.disputed]
        else:
            self._lost_since = self._outbox.now
            raise StageLost(verdict.cause)

    def _roll_back(self, verdict: RewindVerdict) -> None:
        """Fence the workers that are wrong, and have all others go on from the last state that they agreed on.

        The register says so at once, with a generation that is over from the start, so that another leader goes on from
        there too.
        """
        if verdict.workers:
            self._lose(verdict.workers)
        else:
            self._end()
        verified = self.record.verified
        assert verified is not None, "only an older state than the present one is gone back to"
        self._joined |= {worker for worker in self.live if str(worker) in verified.without}
        self._take_up(verified.holds)
        self._disputed = []
        self._announce(rollback_record(self.record, verified, self.live, self._joined), "abandoned")
        self.rewind(verified.step)
        self._repeated = f"{verdict.cause}; all are back behind step {verified.step}, where they agreed"
        if units := self._holdings.lost(self._holders):
            raise StageLost(f"{verdict.cause}, and {self._holdings.described(units[0])} no live host that kept a state")

    def rewind(self, step: int) -> None:
        """Training goes on after `step`: what was written of later iterations may be wrong."""
        self._outbox.put(Rewind(step, checkpoints=True))
        self._checkpoints.rewind(step)
        self._lines.throughput.start_over()

    def _name_bits(self, bits: Sequence[Bit]) -> list[dict[str, Any]]:
        """Bits of states by the names of their tensors, as the hosts of the stages have told them."""
        named = []
        for bit in bits:
            tensors = self._tensors.get((bit.stage, bit.tensor_rank, self._holdings.layout), ())
            place = described(bit.place, [StateTensor(*tensor) for tensor in tensors])
            if place is not None:
                tensor, index, number = place
                worker = members_of([bit.worker], self._tensor_parallel)[bit.tensor_rank]
                stage = self._holdings.stage_of(bit.stage)
                named.append({"worker": worker, "stage": stage, "tensor": tensor, "index": index, "bit": number})
        return named
