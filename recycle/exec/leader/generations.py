"""The generations of a run: who is alive, what runs next, what is committed.

Every change takes the same path: end the generation (what is undecided is void, survivors wake up), get a plan for the
workers that are left, propose the next generation, let all acknowledge it, let all form their groups, let them run. A
death on the way begins the path again with the next number. The leader alone decides what a silence means. A generation
in which all workers wait, and none makes progress, for much longer than an iteration takes ends as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.leader.actions import Begin, Rewind, Waiting
from recycle.exec.leader.actions import Line as MetricsLine
from recycle.exec.leader.commit import ReportColumns, evaluate, verified_after
from recycle.exec.leader.detector import FailureDetector
from recycle.exec.leader.forming import Forming, RetryFormation
from recycle.exec.leader.membership import Departures, Rejoins
from recycle.exec.leader.metrics import MetricsLines
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.leader.plans import Plans
from recycle.exec.leader.state import Phase, RunDescription, RunState
from recycle.exec.leader.verdict import Fence, GoBack, Judge, Repeat
from recycle.exec.leader.verdict import Rewind as RewindVerdict
from recycle.exec.members import parse_workers, split_member, worker_names
from recycle.exec.protocol import (
    LINE_SEPARATOR,
    Acknowledged,
    Commit,
    Committed,
    Copied,
    CopyProgress,
    Cursor,
    CutOff,
    EvaluationReport,
    EvaluationResult,
    Formed,
    GenerationRecord,
    Permit,
    Propose,
    Report,
    Stop,
    Strike,
    Trouble,
)
from recycle.job.shape import Worker

PLAN_SECONDS = 3600.0
"""How long a plan that is needed now may take; most have shorter deadlines (planner_process.py)."""
END_SECONDS, END_ITERATIONS = 5.0, 3.0
"""A run that is told to end waits so long, and so many times its longest iteration, for the next commit."""


class StageLost(RunError):
    """A stage's state is lost, and only a checkpoint can bring it back: it has no live host left, or its hosts hold
    different states and the wrong one cannot be told."""


class Generations(RunState):
    """Drives the generations of one run.

    Attributes:
        departures, rejoins: workers that leave and come back.
        lines: makes the lines of metrics.
        judge: of iterations.
        answers: of the planner.
        ends_early: the run was told to end before its last iteration.
    """

    def __init__(self, run: RunDescription, now: float) -> None:
        super().__init__(run, now)
        self.lines = MetricsLines(self.job, run.started, now)
        self.answers = PlanAnswers(self.job, self, run.own, run.can_search)
        self._plans = Plans(self.job, self.answers, self)
        self.judge = Judge(self)
        self._forming = Forming(self)
        self.departures = Departures(self, self._plans)
        self.rejoins = Rejoins(self, self.departures)
        self._repeated: str | None = None
        self._disputed: list[tuple[int, int, int]] = []
        self._lost_since: float | None = None
        self.ends_early = False
        self._longest = self._iteration_since = 0.0
        self._wanted = self.holdings.hosts
        self._spare: dict[int, int] = {}
        self._line: dict[str, Any] = {}

    # The beginning.

    def adopt(self, begin: Begin, before: GenerationRecord) -> None:
        """Go on from the register that another leader left, with the workers that it names.

        Its last decisions are told again. A generation that runs goes on; of any other what was undecided is void, and
        workers that copied their state in it copy it again.

        Args:
            before: the record as that leader proposed it.
        """
        cursor, tell = begin.cursor, self.tell
        self.live = parse_workers(before.live)
        self.processes.expect(self.live, before.incarnations, before.places, self.run.absent)
        self.answers.adopt(self.failed, begin.plan, begin.hosts)
        if cursor is not None:
            self.struck.update(cursor.struck)
            self.released.update(cursor.released)
            self.gone.update(cursor.gone)
        if cursor is None or cursor.generation != before.generation:
            cursor = Cursor(before.generation, "proposed", **before.progress())
        self.record = record = msgspec.structs.replace(before, **cursor.progress())
        self._persisted_phase, self._earlier = phase, earlier = cursor.phase, cursor.earlier
        generation, commit = record.generation, record.commit
        self.log("coordinator", node=begin.node, generation=generation, step=self.next_step)
        for fault, member in self.struck.items():  # also to agents and processes that are new
            tell(Strike(fault, member))
        self.heard.begin(record)
        self._forming.follow()
        has_run = phase in ("running", "ended")
        self._take_up(record.holds if has_run else record.held)
        if phase in ("proposed", "running"):  # one that is over from the start is for no process
            tell(Propose(record))
        if phase == "running":
            tell(Permit(generation, "form"))
            tell(Permit(generation, "run"))
        elif phase != "proposed":  # the last leader may not have told all
            tell(Stop(generation))
        if earlier is not None:  # a process that has not heard of it waits for it
            tell(Committed(generation, earlier))
        if commit is not None and record.plan:  # without a plan it is the record of a restart
            tell(Committed(generation, commit))
            if record.evaluated is not None and record.evaluated.step == record.committed:
                tell(EvaluationResult(generation, record.evaluated))
            self._note_commit()
        is_last = before.committed != record.committed and commit is not None and commit.last == record.committed
        if commit is not None and record.plan and commit.finished and not record.is_evaluation_due:
            self.enter(Phase.FINISHED)
        elif phase == "running" and (record.is_evaluation_due or not is_last):
            self.enter(Phase.RUNNING)
            self._iteration_since = self.now
        else:
            self.joined = set() if has_run else parse_workers(record.joins)
            self._lost_since = self.now
            self.end()
            self.enter(Phase.BETWEEN if record.plan else Phase.STARTING)
        self.put(Rewind(record.committed))  # the last leader may have gone back and died then

    def _take_up(self, plan: str) -> None:
        """The workers hold what the plan of this name gives them; empty for what they start with."""
        hosts = self.holdings.named(plan, self._plans.hosts)
        if hosts is None:
            raise RunError(f"plan {plan}, which says what the workers hold, is not in the run directory any more")
        self.holdings.take_up(plan, hosts)

    def start_over(self, live: Collection[Worker], commit: Commit, generation: int) -> None:
        """Go on from a checkpoint, from whose state these workers are still to be started.

        Args:
            commit: of its step.
            generation: the last one.
        """
        self.record = GenerationRecord(generation, [], {}, "", committed=commit.step, commit=commit)
        self.live = set(live)
        self.joined.clear()
        self.holdings.start_over()
        self.checkpoints.pending.clear()
        self.detector = FailureDetector(self.job, self.beats)
        self.rejoins.start_over()
        self.departures.start_over()
        self._repeated, self._disputed = None, []
        self.judge.start_over()
        self._forming.forgive()
        self.enter(Phase.STARTING)

    # The end of the run.

    def end_early(self) -> None:
        """The run ends with the next iteration after which all workers can stop together, and keeps its state."""
        self.ends_early = self.checkpoints.keeps_last = True
        self.judge.end_early()

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
        stuck = self.detector.stuck(self.live, patience)
        if self.lost_unit(self.holders - stuck):
            stuck = set()
        for worker in sorted(stuck | self.joined):
            self.processes.kill(worker)
            self._take_out(worker)
            if worker in stuck:
                self.log_detected(worker, f"no progress for {patience:g} s, and the run is to end", over=True)
        self.end()
        if unit := self.lost_unit(self.holders):
            raise RunError(f"{unit} no live host that could keep its state")
        before = self.commit
        is_new = not before.checkpoint and self.checkpoints.due(before.step, True)
        is_kept = before.checkpoint or is_new
        last, replace = before.step, msgspec.structs.replace
        self._announce_end(replace(before, last=last, finished=True, evaluate=False, checkpoint=is_kept))
        if is_new:
            self.checkpoints.committed(replace(before, checkpoint=True), self.record, self.holdings.hosts)

    def _announce_end(self, commit: Commit) -> None:
        """Propose a generation of the live workers that has nothing left to do."""
        self.announce(commit=commit)
        self.enter(Phase.FINISHED)

    def release_after_last(self) -> None:
        """After the last iteration: workers whose connections broke while they gathered parameters wait for another
        generation. Give them one in which they end with the committed state."""
        if bool(self.heard.of(Trouble)) or self.heard.of(CutOff):
            self.end()
            self._announce_end(self.commit)

    # Decisions.

    def tick(self) -> None:
        """Decide what follows from all that was heard. Raises StageLost, RunError."""
        lost = self.processes.take_ended()
        self.departures.look()
        if self.phase is not Phase.BETWEEN or self.record.generation:
            lost |= self.detector.lost(self.live, self.now)
        # An iteration that all have reported is committed even if a worker has died since; so may be the next one.
        while self.phase is Phase.RUNNING and (self._evaluate() if self.record.is_evaluation_due else self._commit()):
            pass
        if self.phase is Phase.RUNNING:
            self._take_in_copies()
        lost = {worker: how for worker, how in (self.departures.overdue() | lost).items() if worker in self.live}
        if lost and self.phase is not Phase.FINISHED:
            self._lose(lost)
        self.rejoins.start()
        match self.phase:
            case Phase.BETWEEN:
                self._propose()
            case Phase.PROPOSED:
                self._form()
            case Phase.FORMING:
                self._run()
            case Phase.RUNNING:  # all may wait in vain, or a transport break without a death that explains it
                self._settle(self._forming.trouble() or self._standstill())

    def _settle(self, answer: Fence | Repeat | RewindVerdict | GoBack | RetryFormation | None) -> None:
        """End the generation as the answer asks for."""
        match answer:
            case Fence():
                self._lose(answer.workers)
            case RewindVerdict():
                self._roll_back(answer)
            case RetryFormation():
                self._forming.count_attempt(answer.cause)
                self.end()
            case Repeat():
                self.end()
                self._repeated = answer.cause
                self._disputed = [(stage, *micro_batch) for stage, micro_batch in answer.disputed]
            case GoBack():
                self.end()
                self._lost_since = self.now
                raise StageLost(answer.cause)

    def _lose(self, lost: Mapping[Worker, str]) -> None:
        """Fence the lost workers and end the generation."""
        for worker, how in sorted(lost.items()):
            self.processes.kill(worker)
            self._take_out(worker)
            self.log_detected(worker, how)
        self._forming.forgive()
        self.end()
        if self._lost_since is None:
            self._lost_since = self.now
        if unit := self.lost_unit(self.holders):
            last, how = max(lost.items())
            line = self.processes[last].lines.rpartition(LINE_SEPARATOR)[2] if how.startswith("ended") else ""
            ended = f"{last}, which {how} ({line})" if line else f"{last}, {how}"
            raise StageLost(
                f"{unit} no live host left after step {self.record.committed}: its parameters are lost with worker"
                f" {ended}"
            )

    def _take_out(self, worker: Worker) -> None:
        """The worker takes no part any more."""
        self.processes[worker].ready.clear()  # its process may take a while to end, and does not wait to join
        self.live.discard(worker)
        self.joined.discard(worker)

    def end(self) -> None:
        """End the current generation: what is undecided is void, and survivors wake up."""
        if self.record.generation and self._persisted_phase in ("proposed", "running"):
            self.persist("ended" if self._persisted_phase == "running" else "abandoned")
            self.tell(Stop(self.record.generation))
        self.enter(Phase.BETWEEN)

    def _propose(self) -> None:
        """Between generations: let workers leave and join, then propose the next as soon as a plan exists."""
        for worker in self.departures.release():
            self._take_out(worker)
        if not self.ends_early and not self.rejoins.settle():
            return
        plan = self._plans.ready(self.failed)
        if plan is None:
            if self.waited > PLAN_SECONDS:
                dead = " ".join(worker_names(self.failed)) or "any"
                raise RunError(f"no plan without workers {dead} was made within {PLAN_SECONDS:g} s; see [planner]")
            return
        if unit := self.lost_unit(self.holders):
            raise RunError(f"{unit} no live host among the workers that are there")
        live, holdings, commit = self.live, self.holdings, self.record.commit
        self._wanted = wanted = holdings.wanted(plan.hosts, live, self.holders)
        if commit is not None and self.record.is_evaluation_due:
            commit = msgspec.structs.replace(commit, last=None)  # this generation is new
        roles = {str(worker): str(plan.roles[worker]) for worker in sorted(live)}
        self._forming.begin()
        self.announce(
            plan=plan.digest,
            text=plan.text,
            roles=roles,
            commit=commit,
            periods=dict(plan.periods),
            copies=holdings.copies(wanted, live, self.holders),
            holds=holdings.name_of(plan.digest, wanted),
            rounds=plan.rounds,
            disputed=self._disputed,
            behind=holdings.behind(wanted, live),
        )
        self.log(
            "generation",
            step=self.next_step,
            generation=self.record.generation,
            plan=plan.digest,
            live=self.record.live,
            roles=roles,
        )
        self.enter(Phase.PROPOSED)

    def _form(self) -> None:
        """Once all have acknowledged, all may form."""
        if not self.heard.all_said(Acknowledged):
            self._settle(self._forming.not_acknowledged())
            return
        acknowledged = self.heard.of(Acknowledged)
        undone = {split_member(member)[0] for member, said in acknowledged.items() if said.undone}
        if undone or self._repeated:
            cause = self._repeated or "it was not committed when the generation ended"
            self.log("undone", step=self.next_step, count=len(undone), cause=cause)
            self._repeated = None
        is_stale = any(said.stale for said in acknowledged.values())
        self.tell(Permit(self.record.generation, "form", is_stale))
        self.enter(Phase.FORMING)

    def _run(self) -> None:
        """Once all groups stand, all may run; a failure to form is tried again with the same workers."""
        stand = self.heard.all_said(Formed) and not self.heard.failed
        if (answer := self._forming.cut()) or not stand:
            self._settle(answer or self._forming.not_formed())
            return
        self.persist("running")
        self.tell(Permit(self.record.generation, "run"))
        self.holdings.take_up(self.record.holds, self._wanted)
        self.enter(Phase.RUNNING)
        self._iteration_since = now = self.now
        self.lines.runs(now)
        formed = self.heard.of(Formed)
        self._log_copies({name: formed[name].copied for name in self.record.live})
        for worker in self.joined:
            self.processes[worker].ready.clear()
        self.joined.clear()
        if self._lost_since is not None:
            seconds, generation = now - self._lost_since, self.record.generation
            self.log("recovered", step=self.next_step, seconds=seconds, generation=generation)
            self._lost_since = None
        self._log_spare()

    def _log_spare(self) -> None:
        """Write how many deaths each stage can bear, where that has changed."""
        spare = self.holdings.spare(self.live)
        if spare != self._spare:
            self._spare = spare
            deaths, generation = list(spare.values()), self.record.generation
            self.log("shards", step=self.next_step, generation=generation, further_deaths=deaths)

    def _take_in_copies(self) -> None:
        """Workers that have copied a shard while the generation runs hold it from now on; the register says so."""
        said, copied = self.heard.of(CopyProgress), dict[str, list[Copied]]()
        for copy in self.record.behind:
            worker, units, members = Worker.parse(copy.worker), (copy.first, copy.last), self.members(copy.worker)
            if any(first <= copy.first and copy.last <= last for first, last in self.holdings.of(worker)):
                continue
            by_members = [one for name in members if name in said for one in said[name].copied]
            done = [one for one in by_members if (one.first, one.last) == units]
            if len(done) == len(members):
                self.holdings.copied(worker, units)
                copied.setdefault(copy.worker, []).append(done[0])
        if copied:
            self.record = msgspec.structs.replace(self.record, holds=self.holdings.plan)
            self.persist(record=self.record)
            self._log_copies(copied, while_running=True)
            self._log_spare()

    def _log_copies(self, copied: Mapping[str, Sequence[Copied]], **more: Any) -> None:
        """Write an event for each worker that has joined, and for what others have copied."""

        def log(kind: str, worker: str, copies: Sequence[Copied], **fields: Any) -> None:
            total, seconds = sum(copy.bytes for copy in copies), sum(copy.seconds for copy in copies)
            step = self.next_step
            self.log(kind, worker=worker, step=step, **fields, bytes=total, seconds=round(seconds, 6), **more)

        joined = worker_names(self.joined)
        for name in joined:
            log("rejoined", name, copied[name], copied_from=" ".join(dict.fromkeys(c.source for c in copied[name])))
        for name in [name for name in copied if name not in joined]:
            for what, copies in self.holdings.copy_events(copied[name]):
                log("moved", name, copies, **what, source=copies[0].source)

    def _standstill(self) -> RetryFormation | None:
        """All workers have waited for so long that what they wait for is not on its way."""
        limits, seconds = self.job.membership, self.detector.standstill(self.live)
        usual = max(limits.form_timeout, limits.hung_factor * self._longest)
        commit = self.record.commit
        if commit is not None and commit.finished and commit.checkpoint:  # which waits for the one before
            usual = max(usual, self.job.train.checkpoint_deadline)
        if seconds <= (usual if self._longest else limits.transport_timeout):
            return None
        return RetryFormation(f"all workers have waited for {seconds:.0f} s, and none has made progress")

    def _evaluate(self) -> bool:
        """Decide the result of the evaluation if every process has reported its part; whether that is so."""
        reports = self.heard.take_parts(EvaluationReport, self.record.committed)
        if reports is None:
            return False
        result = evaluate(self.record.committed, reports)
        self.change(evaluated=result)
        self.tell(EvaluationResult(self.record.generation, result))
        # There is no line of a step that training has gone back to.
        line = self._line if self._line.get("step") == result.step else self._metrics_line()
        self.put(MetricsLine(self.lines.with_evaluation(line, self.now, result.loss)))
        self.lines.starts(self.now)
        self._go_on()
        return True

    def _go_on(self) -> None:
        """All that belongs to the committed step is done."""
        if self.commit.finished:
            self.enter(Phase.FINISHED)
        elif self.commit.last == self.commit.step:
            self.end()

    def _commit(self) -> bool:
        """Commit the next iteration if every process of every live worker has reported it; whether it is committed."""
        by_process = self.heard.take_parts(Report, self.next_step)
        if by_process is None:
            return False
        reports = ReportColumns.of(by_process)
        verdict = self.judge.judge(reports, lambda step: self._changes(step, reports))
        if not isinstance(verdict, Commit):
            self._settle(verdict)
            return False
        verified, candidate = verified_after(
            self.record, reports.has_states, lambda: self.holdings.name_of_states(reports.states())
        )
        self._earlier = self.record.commit
        self.change(
            committed=verdict.step, commit=verdict, mode=verdict.next_mode, verified=verified, candidate=candidate
        )
        self.tell(Committed(self.record.generation, verdict))
        now = self.now
        self._longest, self._iteration_since = max(self._longest, now - self._iteration_since), now
        self._disputed = []
        self._forming.forgive()
        self._note_commit()
        if not self.record.is_evaluation_due:
            self._go_on()
        return True

    def _note_commit(self) -> None:
        """Write the step's line of metrics, or keep it until its evaluation is done; see to the step's checkpoint."""
        line = self._metrics_line()
        self.checkpoints.committed(self.commit, self.record, self.holdings.hosts)
        if self.record.is_evaluation_due:
            self._line = line
            self.put(Waiting(f"the evaluation after step {self.commit.step}"))
        else:
            self.put(MetricsLine(line))

    def _metrics_line(self) -> dict[str, Any]:
        return self.lines.line(self.now, self.commit, self.record, len(self.live), self._plans.compute)

    def write_line(self) -> None:
        """Write the line of the committed step, whose evaluation is not asked for any more."""
        self.put(MetricsLine(self._metrics_line()))

    def _changes(self, step: int, reports: ReportColumns) -> list[int]:
        """The iterations before which other workers or plans are to take over; `step` is about to be committed."""
        self._plans.observe(self.failed, step, reports.times())
        has_better = self._plans.has_better(self.failed)
        self.departures.look()  # a tick may commit several iterations
        changes = [step + 1] if has_better or self.departures.is_prepared else []
        return [*changes, *(rejoin.step for rejoin in self.rejoins.awaited())]

    def _roll_back(self, verdict: RewindVerdict) -> None:
        """Fence the workers that are wrong, and have all others go on from the last state that they agreed on.

        The register says so at once, with a generation that is over from the start, so that another leader goes on from
        there too. It says nothing of the steps after that state: they are run, evaluated and kept again.
        """
        if verdict.workers:
            self._lose(verdict.workers)
        else:
            self.end()
        verified, evaluated = self.record.verified, self.record.evaluated
        assert verified is not None, "only an older state than the present one is gone back to"
        self.joined |= self.live & parse_workers(verified.without)
        self._take_up(verified.holds)
        self._disputed = []
        if evaluated is not None and evaluated.step > verified.step:
            evaluated = None
        self.announce("abandoned", committed=verified.step, commit=verified.commit, evaluated=evaluated)
        self.rewind(verified.step)
        self._repeated = f"{verdict.cause}; all are back behind step {verified.step}, where they agreed"
        if unit := self.lost_unit(self.holders):
            raise StageLost(f"{verdict.cause}, and {unit} no live host that kept a state")

    def rewind(self, step: int) -> None:
        """Training goes on after `step`: what was written of later iterations may be wrong."""
        self.put(Rewind(step, checkpoints=True))
        self.checkpoints.rewind(step)
        self.lines.throughput.start_over()
