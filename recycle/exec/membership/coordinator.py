"""The coordinator: decides who is alive, what runs next and what is committed; a state machine that is ticked.

It alone decides what a silence means; failure_detector.py finds silences. One path serves every change: end the
generation (what is undecided becomes void, survivors wake up), get a plan for whoever is left, propose the next
generation, let all acknowledge, let all form their groups, let them run. A death on the way begins the same path again,
with the next number. Who beats, but does not answer on that way until a deadline, is fenced, and so is who fails twice
to form its groups though others came. A generation in which all workers wait, and none makes progress, for much longer
than an iteration takes ends as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.exit_description import last_line
from recycle.exec.leader.departures import Departures
from recycle.exec.leader.detector import Beats, FailureDetector
from recycle.exec.leader.disagreement import Bit
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.rejoins import Rejoins
from recycle.exec.leader.report_columns import ReportColumns
from recycle.exec.leader.shard_holdings import ShardHoldings
from recycle.exec.leader.verdict import Fence, GoBack, Judge, Repeat, Rewind
from recycle.exec.leader.verified_states import verified_after
from recycle.exec.membership import schema
from recycle.exec.membership.copy_progress import CopyProgress
from recycle.exec.membership.final_states import final_digests
from recycle.exec.membership.forming import Again, Forming, TookBack
from recycle.exec.membership.going_back import gone_back, named_bits
from recycle.exec.membership.heartbeats import ReadHeartbeats, read_heartbeats
from recycle.exec.membership.interfaces import Log, Plans, Processes
from recycle.exec.membership.moving import log_copies
from recycle.exec.membership.plan_files import pack_plan
from recycle.exec.membership.proposal import of_started, proposed
from recycle.exec.membership.readiness import Readiness
from recycle.exec.membership.register import Register
from recycle.exec.membership.reported import Reported
from recycle.exec.membership.store import RunStore
from recycle.exec.membership.trouble import Trouble
from recycle.exec.protocol import Commit, GenerationRecord
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts
from recycle.shape import Shape, Worker

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
    different ones and nobody can say which is right."""


@dataclass(kw_only=True)
class Coordinator:
    """Drives the generations of one run.

    Args:
        job: the job; its `[membership]` section holds every deadline.
        steps: iterations to train.
        live: the processes that are started.
        store, processes, plans: of the run.
        log: takes events. committed: called as committed(commit, record) for every commit.
        evaluated: called with the record for the result of every evaluation.
        now: monotonic seconds.
        keeps: whether the state after (step, whether it is the last) goes to a checkpoint.
        went_back: called when training has gone back to the state after this step, which the workers had kept.
        heartbeats: gives those of all processes; read from the store when left out.
        initial: what processes host that start with the initial state, or with a checkpoint's; as the job's shape says
            when left out.

    Attributes:
        running_since: when the generation began to run; may be set to None by who has taken note of it.
    """

    job: PricedJob
    steps: int
    live: set[Worker]
    store: RunStore
    processes: Processes
    plans: Plans
    log: Log
    committed: Callable[[Commit, GenerationRecord], None]
    now: Callable[[], float]
    evaluated: Callable[[GenerationRecord], None] = lambda record: None
    keeps: Callable[[int, bool], bool] = lambda step, is_last: False
    went_back: Callable[[int], None] = lambda step: None
    heartbeats: ReadHeartbeats | None = None
    initial: Hosts | None = None
    phase: GenerationPhase = GenerationPhase.BETWEEN
    record: GenerationRecord = field(default_factory=lambda: GenerationRecord(0, [], {}, ""))
    _everybody: frozenset[Worker] = field(init=False)
    _detector: FailureDetector = field(init=False)
    _judge: Judge = field(init=False)
    _forming: Forming = field(init=False)
    _rejoins: Rejoins = field(init=False)
    _holdings: Holdings = field(init=False)
    _background: CopyProgress = field(init=False)
    departures: Departures = field(init=False)
    _register: Register = field(init=False)
    _reported: Reported = field(init=False)
    _trouble: Trouble = field(init=False)
    _readiness: Readiness = field(init=False)
    _joined: set[Worker] = field(default_factory=set)
    _attempts: int = 0
    _ticked: float = 0.0
    _waited: float = 0.0
    _repeated: str | None = None
    _disputed: list[tuple[int, int, int]] = field(default_factory=list)
    _lost_since: float | None = None
    _is_ending: bool = False
    _longest: float = 0.0
    _iteration_since: float = 0.0
    running_since: float | None = None
    _wanted: Hosts | None = None
    _spare: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._everybody = frozenset(self.shape.workers())
        self._detector = FailureDetector(self.job)
        initial = self.initial or Hosts.at_start(self.job, None)
        if self.job.train.sharded_optimizer:
            self._holdings = ShardHoldings(self.job, initial, self._everybody)
        else:
            self._holdings = Holdings(initial)
        self._background = CopyProgress(self.store, self._holdings, self.job.grid.tensor_parallel)
        self._judge = Judge(self.job, self.steps, self.log, self.keeps, self._holdings, self._name_bits)
        self._forming = Forming(self.store, self.job.membership, self.now, self._holdings)
        self._register = Register(self.store)
        self._reported = Reported(self.store, self.job.grid.tensor_parallel)
        self._trouble = Trouble(self.store, self.now, self._holdings)
        self._readiness = Readiness(self.store, self.processes, self.job.grid.tensor_parallel)
        self._rejoins = Rejoins(self.processes, self.is_ready, self.log, self.now, self.job.membership.rejoin_deadline)
        self.departures = Departures(
            self.shape, self.store, self.processes, self.plans, self._holdings, self.log, self.now
        )

    def expect_rejoins(self, rejoins: Iterable[tuple[Worker, int]]) -> None:
        """Workers that, once dead, shall take part again from the start of an iteration on, or soon after.

        The run waits for each up to a deadline. Called before the first tick, with the iteration of each.
        """
        for worker, step in rejoins:
            self._rejoins.expect(worker, step)
        self._rejoins.adopt(self.live)

    @property
    def hosts(self) -> Hosts:
        """Who hosts what, as of the last generation that ran."""
        return self._holdings.hosts

    def admit(self, worker: Worker) -> None:
        """`worker`, whose new process is ready, shall take part from the next boundary on."""
        self._rejoins.expect(worker, self.next_step, started=True)

    def end_early(self) -> None:
        """The run ends with the next iteration after which all workers can stop together."""
        self._is_ending = True
        self._judge.end_early()

    @property
    def end_patience(self) -> float:
        """Seconds that a run which is told to end waits for that iteration."""
        half = self.job.membership.grace / 2
        return min(half, max(END_SECONDS, END_ITERATIONS * self._longest)) if self._longest else half

    def end_at_committed(self) -> bool:
        """End the run with the state after the committed step; whether the workers are to keep it in a checkpoint now.

        The next generation is one that has nothing left to do: workers go to the committed state, keep it and end. Who
        makes no progress although it waits for nobody is fenced, as it would not come there, unless the state of a
        stage would be lost: the workers may only be compiling. Raises RunError when that state is lost already.
        """
        patience = self.end_patience / 2  # it may have been stuck only since the run was told to end
        stuck = self._detector.stuck(self.live, patience)
        if self._holdings.lost(self._holders - stuck):
            stuck = set()
        for worker in sorted(stuck | self._joined):
            self.processes.kill(worker)
            self._take_out(worker)
            if worker in stuck:
                cause = f"no progress for {patience:g} s, and the run is to end"
                self.log("detected", worker=str(worker), step=self.next_step, cause=cause, over=True)
        self._end()
        if units := self._holdings.lost(self._holders):
            raise RunError(f"{self._holdings.described(units[0])} no live host that could keep its state")
        before = self.record.commit
        assert before is not None, "a step is committed"
        is_new = not before.checkpoint and self.keeps(before.step, True)
        commit = msgspec.structs.replace(
            before, last=before.step, finished=True, evaluate=False, checkpoint=before.checkpoint or is_new
        )
        self.record = msgspec.structs.replace(
            self.record,
            generation=self.record.generation + 1,
            live=[str(worker) for worker in sorted(self.live)],
            joins=[],
            copies=[],
            behind=[],
            commit=commit,
            held=self._holdings.plan,
            holds=self._holdings.plan,
        )
        self._register.announce(self.record)
        self._enter(GenerationPhase.FINISHED)
        return is_new

    @property
    def awaited(self) -> set[Worker]:
        """The dead workers that shall come back."""
        return {rejoin.worker for rejoin in self._rejoins.awaited(self.live)}

    def take_over(self, record: GenerationRecord) -> None:
        """Go on from the register that another coordinator left, with the workers that it names; before the first tick.

        What the other coordinator wrote to the register is completed. A generation that runs goes on; of any other
        what the other had not decided becomes void, and workers that copied their state in it copy it again.
        """
        self.record = record
        self.live = {Worker.parse(worker) for worker in record.live}
        has_run = self._register.has_run(record)
        self._take_up(record.holds if has_run else record.held)
        self._register.take_over(record)
        if record.commit is not None and record.plan:  # without a plan it is the record of a restart
            self._register.complete_commit(record)
            self.committed(record.commit, record)
            if self.next_step >= self.steps and not record.is_evaluation_due:
                self._enter(GenerationPhase.FINISHED)
                return
        if self._register.still_runs(record):
            self._enter(GenerationPhase.RUNNING)
            self._iteration_since = self.now()
            return
        if not has_run:
            self._joined = {Worker.parse(joiner) for joiner in record.joins}
        self._lost_since = self.now()
        self._end()

    def _take_up(self, plan: str) -> None:
        """The workers hold what the plan of this name gives them; empty for what they start with."""
        hosts = self._holdings.named(plan, self.plans.hosts) if plan else None
        if plan and hosts is None:
            raise RunError(f"plan {plan}, which says what the workers hold, is not in the run directory any more")
        self._holdings.take_up(plan, hosts)

    @property
    def shape(self) -> Shape:
        return self.job.shape

    @property
    def next_step(self) -> int:
        return self.record.committed + 1

    def tick(self) -> None:
        """Look at everything once and do what is due. Raises RunError when the run cannot go on."""
        if self._finished():
            return
        now = self.now()
        self._waited += min(now - self._ticked, self.job.membership.heartbeat)  # a pause of this process is nobody's
        self._ticked = now
        lost = {worker: how for worker, how in self.processes.gone().items() if worker in self.live}
        self.departures.look(self.live, self._joined, self.next_step)
        if self.phase is not GenerationPhase.BETWEEN or self.record.generation:
            lost |= self._detector.lost(self.live, self._heartbeats(), self.now())
        # An iteration that all have reported is committed even if a worker has died since; so may be the next one.
        while self.phase is GenerationPhase.RUNNING and self._decide():
            pass
        if self.phase is GenerationPhase.RUNNING:
            self._take_in_copies()
        lost = {worker: how for worker, how in (self.departures.overdue() | lost).items() if worker in self.live}
        if lost and not self._finished():
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

    def final_digests(self) -> dict[str, dict[int, str]] | None:
        """Worker -> stage -> sha256 of the stage's final state, once every worker that still lives has left them after
        the last commit; None before. A worker that dies or hangs meanwhile is detected as ever, without consequence.
        """
        return final_digests(
            self.live,
            self.store,
            self.processes,
            self.job.grid.tensor_parallel,
            lambda done: self._detector.lost(self.live, self._heartbeats(), self.now(), done),
            self.log,
            self.record.committed,
        )

    def _heartbeats(self) -> Beats | None:
        """The last heartbeats of all processes; None when there are no newer ones than those of the last call."""
        if self.heartbeats is not None:
            return self.heartbeats()
        return read_heartbeats(self.store, self._detector.members)

    def _finished(self) -> bool:
        return self.phase is GenerationPhase.FINISHED

    def _enter(self, phase: GenerationPhase) -> None:
        self.phase, self._waited = phase, 0.0
        self._trouble.begin()

    def _lose(self, lost: dict[Worker, str]) -> None:
        """Fence the lost workers and end the generation."""
        for worker, how in sorted(lost.items()):
            self.processes.kill(worker)
            self._take_out(worker)
            self.log("detected", worker=str(worker), step=self.next_step, cause=how)
        self._attempts = 0
        self._forming.forgive()
        self._end()
        if self._lost_since is None:
            self._lost_since = self.now()
        if units := self._holdings.lost(self._holders):
            raise StageLost(
                f"{self._holdings.described(units[0])} no live host left after step {self.record.committed}: its"
                f" parameters are lost with worker {self._ended_as(max(lost), lost)}"
            )

    def _take_out(self, worker: Worker) -> None:
        """The worker takes no part any more."""
        self._readiness.forget(worker)  # its process may take a while to end, and is not one that waits to join
        self.live.discard(worker)
        self._joined.discard(worker)

    def _ended_as(self, worker: Worker, lost: Mapping[Worker, str]) -> str:
        """The worker and how it ended; of an error of its own with the last line of its log, which says what it was."""
        is_own = lost[worker].startswith("ended")
        how, last = last_line(lost[worker], self.processes.tail(worker) if is_own else "")
        return f"{worker}, which {how} ({last})" if last else f"{worker}, {how}"

    def start_over(self, live: set[Worker], committed: int, commit: Commit) -> None:
        """Go on from a checkpoint with new processes, which all start from its state.

        Args:
            live: the processes.
            committed, commit: the step of the checkpoint, and its commit.
        """
        self.record = GenerationRecord(self.record.generation, [], {}, "", committed, commit)
        self.live = set(live)
        self._joined.clear()
        self._holdings.start_over()
        self._detector = FailureDetector(self.job)
        self._rejoins.start_over()
        self.departures.start_over()
        self._attempts, self._repeated, self._disputed = 0, None, []
        self._judge.start_over()
        self._forming.forgive()
        self._enter(GenerationPhase.BETWEEN)

    def restart(self, live: set[Worker], committed: int, commit: Commit) -> None:
        """Start over, and write this to the register before any process is started, for a coordinator that takes over.

        The register then holds a generation of the workers that are to be started, which is over from the start.
        """
        self.start_over(live, committed, commit)
        self.record = of_started(self.record, live)
        self._register.announce_over(self.record)

    def _end(self) -> None:
        """End the current generation: whatever is undecided is void, and survivors wake up."""
        if self.record.generation:
            self._register.end(self.record)
        self._reported.forget()
        self._enter(GenerationPhase.BETWEEN)

    def _propose(self) -> None:
        """Between generations: let go who leaves, admit who is awaited, then propose as soon as a plan exists."""
        for worker in self.departures.release(self.live, self.next_step):
            self._take_out(worker)
        if not self._is_ending and not self._rejoins.settled(self.live, self.next_step, self._admit):
            return
        plan = self.plans.ready(self._failed)
        if plan is None:
            if self._waited > PLAN_SECONDS:
                dead = " ".join(map(str, sorted(self._failed))) or "any"
                raise RunError(f"no plan without workers {dead} was made within {PLAN_SECONDS:g} s; see [planner]")
            return
        if units := self._holdings.lost(self._holders):
            raise RunError(f"{self._holdings.described(units[0])} no live host among the workers that are there")
        self._wanted = wanted = self._holdings.wanted(plan.hosts, self.live, self._holders)
        self.record = proposed(self.record, plan, self.live, self._joined, self._holdings, wanted, self._disputed)
        generation = self.record.generation
        if not plan.is_kept:
            self.store.set(schema.PlanKey(generation), pack_plan(plan.text))
        self._forming.begin(self.record, self._reported.present(self.record))
        self._register.announce(self.record)
        self.log(
            "generation",
            step=self.next_step,
            generation=generation,
            plan=plan.digest,
            live=self.record.live,
            roles=self.record.roles,
        )
        self._enter(GenerationPhase.PROPOSED)

    @property
    def _failed(self) -> frozenset[Worker]:
        return self._everybody - self.live

    @property
    def _holders(self) -> set[Worker]:
        """The live workers that hold what the last generation that ran has given them."""
        return self.live - self._joined

    def is_ready(self, worker: Worker) -> bool:
        """Whether all of the worker's present processes have started up."""
        return self._readiness.is_ready(worker)

    def _admit(self, worker: Worker) -> None:
        self.live.add(worker)
        self._joined.add(worker)
        self._detector.forget(worker)

    def _form(self) -> None:
        """Once all have acknowledged, all may form; log how many workers have taken the step back for that."""
        answer = self._forming.acknowledged(self._waited, self._holders, self._detector)
        if not isinstance(answer, TookBack):
            self._give_way(answer)
            return
        if answer.workers or self._repeated:
            cause = self._repeated or "it was not committed when the generation ended"
            self.log("undone", step=self.next_step, count=answer.workers, cause=cause)
            self._repeated = None
        self._register.allow(self.record, "form")
        self._enter(GenerationPhase.FORMING)

    def _run(self) -> None:
        """Once all groups stand, all may run; a failure to form is tried again with the same workers."""
        cut = self._trouble.cut(self.record.generation, self._holders, self._detector)
        answer = cut or self._forming.formed(self._waited, self._holders)
        if answer is not True:
            self._give_way(answer)
            return
        g = self.record.generation
        self._register.allow(self.record, "run")
        self._holdings.take_up(self.record.holds, self._wanted)
        self._enter(GenerationPhase.RUNNING)
        self.running_since = self._iteration_since = self.now()
        log_copies(self.log, self.next_step, self._forming.copied(), self._joined, self._holdings)
        for worker in self._joined:
            self._readiness.forget(worker)
        self._joined.clear()
        if self._lost_since is not None:
            self.log("recovered", step=self.next_step, seconds=self.now() - self._lost_since, generation=g)
            self._lost_since = None
        self._log_spare()  # behind all that says how long the pause was: by now the workers have the processor

    def _log_spare(self) -> None:
        """Say how many deaths each stage bears, if these are others than before."""
        spare = self._holdings.spare(self.live)
        if spare != self._spare:
            self._spare = spare
            deaths = list(spare.values())
            self.log("shards", step=self.next_step, generation=self.record.generation, further_deaths=deaths)

    def _take_in_copies(self) -> None:
        """Who has copied a shard while the generation runs holds it from now on; the register says so."""
        copied = self._background.look(self.record, self.live)
        if copied:
            self.record = msgspec.structs.replace(self.record, holds=self._holdings.plan)
            self._register.hold(self.record)
            log_copies(self.log, self.next_step, copied, (), self._holdings, while_running=True)
            self._log_spare()

    def _give_way(self, answer: Fence | Again | bool | None) -> None:
        """The generation cannot form like this, or is still on its way."""
        if isinstance(answer, Fence):
            self._lose(answer.workers)
        elif isinstance(answer, Again):
            self._again(answer.cause)

    def _again(self, reason: str) -> None:
        self._attempts += 1
        if self._attempts >= ATTEMPTS:
            raise RunError(f"gave up after {ATTEMPTS} attempts with the same workers: {reason}")
        self._end()

    def _watch(self) -> None:
        """A transport may break while the generation runs, and no death explain it; or all wait in vain."""
        trouble = self._trouble.look(self.record.generation, self._holders, self._detector)
        self._give_way(trouble or self._standstill())

    def _standstill(self) -> Again | None:
        """All workers have waited for so long that what they wait for is not on its way."""
        limits, seconds = self.job.membership, self._detector.standstill(self.live)
        usual = max(limits.form_timeout, limits.hung_factor * self._longest)
        commit = self.record.commit
        if commit is not None and commit.finished and commit.checkpoint:  # which waits for the one before
            usual = max(usual, self.job.train.checkpoint_deadline)
        if seconds <= (usual if self._longest else limits.transport_timeout):
            return None
        return Again(f"all workers have waited for {seconds:.0f} s, and none has made progress")

    def _decide(self) -> bool:
        """Decide what the running generation comes to next: an evaluation or a commit; whether it could be."""
        return self._evaluate() if self.record.is_evaluation_due else self._commit()

    def _evaluate(self) -> bool:
        """Take down the result of the evaluation if every process has reported its part."""
        result = self._reported.evaluation(self.record)
        if result is None:
            return False
        self.record = msgspec.structs.replace(self.record, evaluated=result)
        self._register.evaluated(self.record)
        self.evaluated(self.record)
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
        reports = self._reported.iteration(self.record)
        if reports is None:
            return False
        verdict = self._judge.judge(self.record, reports, self._holders, lambda step: self._changes(step, reports))
        if not isinstance(verdict, Commit):
            self._carry_out(verdict)
            return False
        verified, candidate = verified_after(
            self.record, reports.has_states, lambda: self._holdings.name_of_states(reports.states())
        )
        self.record = after = msgspec.structs.replace(
            self.record,
            committed=self.next_step,
            commit=verdict,
            mode=verdict.next_mode,
            verified=verified,
            candidate=candidate,
        )
        self._register.commit(after)
        now = self.now()
        self._longest, self._iteration_since = max(self._longest, now - self._iteration_since), now
        self._attempts, self._disputed = 0, []
        self._forming.forgive()
        self.committed(verdict, after)
        if not after.is_evaluation_due:
            self._go_on()
        return True

    def _changes(self, step: int, reports: ReportColumns) -> list[int]:
        """The iterations before which other workers or plans are to take over; `step` is about to be committed."""
        failed = self._failed
        self.plans.observe(failed, step, reports.times())
        better = [step + 1] if self.plans.has_better(failed) else []
        self.departures.look(self.live, self._joined, step)  # a tick may commit several iterations
        leaving = [step + 1] if self.departures.is_prepared else []
        return [*better, *leaving, *(rejoin.step for rejoin in self._rejoins.awaited(self.live))]

    def _go_back(self, verdict: Rewind) -> None:
        """Fence who is wrong, and have all others go on from the last state that they agreed on.

        The register says so at once, with a generation that is over from the start: whoever takes over goes on from
        there, too. What was written of later iterations is for `went_back` to take back.
        """
        if verdict.workers:
            self._lose(verdict.workers)
        else:
            self._end()
        verified = self.record.verified
        assert verified is not None, "only an older state than the one at hand is gone back to"
        self._joined |= {worker for worker in self.live if str(worker) in verified.without}
        self._take_up(verified.holds)
        self.record = gone_back(self.record, verified, self.live, self._joined)
        self._disputed = []
        self._register.announce_over(self.record)
        self.went_back(verified.step)
        self._repeated = f"{verdict.cause}; all are back behind step {verified.step}, where they agreed"
        if units := self._holdings.lost(self._holders):
            raise StageLost(f"{verdict.cause}, and {self._holdings.described(units[0])} no live host that kept a state")

    def _name_bits(self, bits: Sequence[Bit]) -> list[dict[str, Any]]:
        """Bits of states by the names of their tensors, as the hosts of the stages have told them."""
        plan = self._holdings.layout or schema.GIVEN
        named = named_bits(
            bits,
            lambda number, rank: self.store.read(schema.StateLayoutKey(number, rank, plan)) or [],
            self.job.grid.tensor_parallel,
        )
        return [bit | {"stage": self._holdings.stage_of(bit["stage"])} for bit in named]

    def _carry_out(self, verdict: Repeat | Fence | Rewind | GoBack) -> None:
        """End the generation as the verdict on an iteration asks for."""
        if isinstance(verdict, Fence):
            self._lose(verdict.workers)
            return
        if isinstance(verdict, Rewind):
            self._go_back(verdict)
            return
        self._end()
        if isinstance(verdict, Repeat):
            self._repeated = verdict.cause
            self._disputed = [(stage, *micro_batch) for stage, micro_batch in verdict.disputed]
        else:
            self._lost_since = self.now()
            raise StageLost(verdict.cause)
