"""The generations of a run: commits, faulty workers and rollbacks.

Every change takes the same path: end the generation, get a plan, propose the next generation, let all acknowledge, form
their groups, and run. A death on the way restarts the path with the next generation number.

An iteration is repeated if its gradient is not finite, or if a staggered step turns out to need clipping. If hosts
disagree, the minority host is fenced when a peer survives. Otherwise the iteration is repeated once, then training
restores a checkpoint, at most once per iteration. If states disagree, training restores the last state that all agreed
on. If hosts computed different results for a micro-batch, the iteration is repeated to attribute the fault.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.checksums import StateTensor, locate
from recycle.exec.leader.actions import Begin, Line, Rewind, Waiting
from recycle.exec.leader.commit import ReportColumns, decide, evaluate, norm_within_limit, soonest_end, verified_after
from recycle.exec.leader.disagreement import Bit, Disagreement, Votes, count_votes, votes_of
from recycle.exec.leader.forming import Forming, HostsDisagree, StageLost, StatesDiffer
from recycle.exec.leader.state import Phase, RunDescription
from recycle.exec.members import parse_workers
from recycle.exec.protocol import (
    Commit,
    Committed,
    Cursor,
    CutOff,
    EvaluationReport,
    EvaluationResult,
    GenerationRecord,
    Permit,
    Propose,
    Report,
    StateTensors,
    Stop,
    Strike,
    Trouble,
)
from recycle.ir.replays import Checked
from recycle.job.shape import MicroBatch, Worker

END_SECONDS, END_ITERATIONS = 5.0, 3.0
"""A run that is asked to end waits for the next commit this long: seconds, and multiples of its longest iteration."""


class Generations(Forming):
    """The run's state, and the decisions about its iterations."""

    def __init__(self, run: RunDescription, now: float) -> None:
        super().__init__(run, now)
        self._last = run.steps - 1
        self._retried_step = self._disagreed_step = self._restored_step = self._voted_step = -1
        self._votes: Votes = {}
        self._tensors: dict[tuple[int, int, str], Sequence[tuple[str, int, int, int]]] = {}
        self._line: dict[str, Any] = {}

    # The beginning.

    def adopt(self, begin: Begin, before: GenerationRecord) -> None:
        """Continue from another leader's register, with the workers that the register names.

        A running generation continues; the undecided work of any other is void. `before` is the record as proposed.
        """
        cursor, tell = begin.cursor, self.tell
        self.live = parse_workers(before.live)
        self.expect_processes(before.incarnations, before.places)
        self.plans.adopt(self.failed, begin.plan, begin.hosts, begin.times)
        if cursor is not None:
            self.struck.update(cursor.struck)
            self.released.update(cursor.released)
            self.gone.update(cursor.gone)
        if cursor is None or cursor.generation != before.generation:
            cursor = Cursor(before.generation, "proposed", **before.progress())
        self.record = record = msgspec.structs.replace(before, **cursor.progress())
        self._persisted_phase = phase = cursor.phase
        generation, commit, earlier = record.generation, record.commit, record.earlier
        self.log("coordinator", node=begin.node, generation=generation, step=self.next_step)
        for fault, member in self.struck.items():  # for new agents and processes too
            tell(Strike(fault, member))
        self.received.start_generation(record)
        # Silence cannot be judged before heartbeats had time to arrive.
        self._judges_cuts_from = self.now + self.limits.dead_after / 2 + 2 * self.limits.heartbeat
        has_run = phase in ("running", "ended")
        self._set_holdings(record.holds if has_run else record.held)
        if phase in ("proposed", "running"):  # no process takes part in an abandoned generation
            tell(Propose(record))
        if phase == "running":
            tell(Permit(generation, "form"))
            tell(Permit(generation, "run"))
        elif phase != "proposed":  # the last leader may not have told all
            tell(Stop(generation))
        if earlier is not None and earlier.step > before.committed:  # a process without this commit waits for it
            tell(Committed(generation, earlier))
        if commit is not None and record.plan:  # the record of a restart has no plan
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
            self.end_generation()
            self.enter(Phase.BETWEEN if record.plan else Phase.STARTING)
        self.put(Rewind(record.committed))  # the last leader may have died during a rollback

    def _set_holdings(self, plan: str) -> None:
        hosts = self.holdings.by_name(plan, self.plans.hosts.get)
        if hosts is None:
            raise RunError(f"plan {plan}, which defines what the workers hold, is missing in the run directory")
        self.holdings.set_current(plan, hosts)

    def start_over(self, live: Collection[Worker], record: GenerationRecord) -> None:
        """Continue from the committed iteration of a record without plan; the workers are still to be started."""
        self.record, self.live = record, set(live)
        self.joined.clear()
        self.holdings.start_over()
        self.checkpoints.pending.clear()
        self._repeated, self._disputed = None, []
        self._retried_step = self._disagreed_step = self._voted_step = -1
        self.reset_failures()
        self.restart_all()

    # The end of the run.

    @property
    def end_patience(self) -> float:
        """Seconds that an ending run waits for the iteration after which all workers can stop together."""
        half = self.limits.grace / 2
        return min(half, max(END_SECONDS, END_ITERATIONS * self._longest)) if self._longest else half

    def end_at_committed(self) -> None:
        """End the run with the state after the committed step.

        The next generation has no iterations: workers roll to the committed state, save it and end. A worker that is
        stuck without waiting for others is fenced, unless a stage's state would be lost: the worker may be compiling.

        Raises:
            RunError: a stage's state is lost already.
        """
        stuck = self._stuck()
        for worker in sorted(stuck.keys() | self.joined):
            self.kill(worker)
            self.remove_live(worker)
            if worker in stuck:
                self.log_detected(worker, stuck[worker], over=True)
        self.end_generation()
        if unit := self.lost_unit(self.holders):
            raise RunError(f"{unit} no live host that could keep its state")
        before = self.commit
        is_new = not before.checkpoint and self.checkpoints.due(before.step, True)
        is_kept = before.checkpoint or is_new
        last, replace = before.step, msgspec.structs.replace
        self._announce_end(replace(before, last=last, finished=True, evaluate=False, checkpoint=is_kept))
        if is_new:
            self.checkpoints.committed(replace(before, checkpoint=True), self.record, self.holdings.hosts)

    def fence_stuck(self) -> None:
        """Let the others make the last iteration: a user's script cannot leave one that it has begun."""
        if stuck := self._stuck():
            self.fence(stuck)

    def _stuck(self) -> dict[Worker, str]:
        """Workers that are stuck while the run ends, each with the reason; none if a stage's state would be lost."""
        patience = self.end_patience / 2  # they may be stuck only since the request to end
        stuck = self.detector.stuck(self.live, patience)
        reason = f"no progress for {patience:g} s while the run ends"
        return {} if self.lost_unit(self.holders - stuck) else dict.fromkeys(stuck, reason)

    def _announce_end(self, commit: Commit) -> None:
        self.announce(commit=commit)
        self.enter(Phase.FINISHED)

    def release_after_last(self) -> None:
        """Give workers a final generation if connections broke during the last gather of parameters."""
        if bool(self.received.by_process(Trouble)) or self.received.by_process(CutOff):
            self.end_generation()
            self._announce_end(self.commit)

    # Decisions.

    def advance(self) -> None:
        """Decide the next actions from all messages so far. Raises StageLost, RunError."""
        lost = self.take_fresh_ends()
        self.prepare_departures()
        if self.phase is not Phase.BETWEEN or self.record.generation:
            lost = self.silent_workers() | lost
        # Commit an iteration that all have reported, even if a worker has died since; the next one too.
        while self.phase is Phase.RUNNING and (self._evaluate() if self.record.is_evaluation_due else self._commit()):
            pass
        if self.phase is Phase.RUNNING:
            self.record_copies()
        lost = {worker: how for worker, how in (self.overdue_leavers() | lost).items() if worker in self.live}
        if lost and self.phase is not Phase.FINISHED:
            self.fence(lost)
        self.start_rejoins()
        match self.phase:
            case Phase.BETWEEN:
                self.propose()
            case Phase.PROPOSED:
                self.permit_forming()
            case Phase.FORMING:
                self.start_running()
            case Phase.RUNNING:
                self.judge_waits()

    def _evaluate(self) -> bool:
        reports = self.received.take_parts(EvaluationReport, self.record.committed)
        if reports is None:
            return False
        result = evaluate(self.record.committed, reports)
        self.change(evaluated=result)
        self.tell(EvaluationResult(self.record.generation, result))
        if not self.script_ends:
            # A step that was rolled back has no line.
            line = self._line if self._line.get("step") == result.step else self._metrics_line()
            self.put(Line(self.lines.with_evaluation(line, self.now, result.loss)))
        self.lines.start_pipeline(self.now)
        self._after_commit()
        return True

    def _after_commit(self) -> None:
        if self.commit.finished:
            self.enter(Phase.FINISHED)
        elif self.commit.last == self.commit.step:
            self.end_generation()

    def _commit(self) -> bool:
        by_process = self.received.take_parts(Report, self.next_step)
        if by_process is None:
            return False
        reports = ReportColumns.from_reports(by_process)
        commit = self._judge(reports)
        if commit is None:
            return False
        verified, candidate = verified_after(
            self.record, reports.has_states, lambda: self.holdings.name_of_states(reports.states())
        )
        self.change(
            committed=commit.step,
            commit=commit,
            earlier=self.record.commit,
            mode=commit.next_mode,
            verified=verified,
            candidate=candidate,
        )
        self.tell(Committed(self.record.generation, commit))
        now = self.now
        self._longest, self._iteration_since = max(self._longest, now - self._iteration_since), now
        self._disputed = []
        self.reset_failures()
        self._note_commit()
        if not self.record.is_evaluation_due:
            self._after_commit()
        return True

    def _note_commit(self) -> None:
        line = self._metrics_line()
        self.checkpoints.committed(self.commit, self.record, self.holdings.hosts)
        is_due, ends = self.record.is_evaluation_due, self.script_ends
        if is_due and not ends:
            self._line = line
        else:
            self.put(Line(line))
        if is_due:
            self.put(Waiting("the end of the script" if ends else f"the evaluation after step {self.commit.step}"))

    def _metrics_line(self) -> dict[str, Any]:
        return self.lines.line(self.now, self.commit, self.record, len(self.live), self.plans.compute)

    def write_line(self) -> None:
        self.put(Line(self._metrics_line()))

    # Whether an iteration is right.

    def _judge(self, reports: ReportColumns) -> Commit | None:
        record, step = self.record, self.next_step
        before, mode = record.commit, record.mode
        soonest = soonest_end(step, mode, before)
        is_announced = before is not None and before.last == step  # workers will leave after it
        if self.ends_early:
            self._last = min(self._last, soonest)
        is_last = step >= self._last
        votes = votes_of(reports.replayed)
        replays = count_votes(step, votes, self._votes if self._voted_step == step else None)
        try:
            commit = decide(self.job, step, reports, before.recent if before is not None else ())
        except Disagreement as sums:
            # An error spread through the sums does not show its origin; replays may.
            if replays is None or not sums.ranks or self._fenceable(sums.odd):
                self._resolve(sums)
                return None
        if replays is not None:
            if not replays.odd and self._voted_step != step:
                self._voted_step, self._votes = step, votes
                self._repeat_iteration(
                    f"{replays.description}; it is repeated to find the faulty worker", replays.disputed
                )
            else:
                self._resolve(replays)
            return None
        finite = commit.clip_factor is not None
        if not finite and self._retried_step != step:
            self._retried_step = step
            self._repeat_iteration("a gradient is not finite")
            return None
        if mode == "staggered" and not norm_within_limit(commit):
            self._repeat_iteration(f"its gradient has norm {commit.grad_norm:.4g} and must be clipped")
            return None
        if not finite and self.job.train.non_finite == "fatal":
            raise RunError(f"step {step}: a gradient is not finite, also when repeated ([train] non_finite = 'fatal')")
        ends = [max(change - 1, soonest) for change in self._changes(step, reports)]
        return msgspec.structs.replace(
            commit,
            mode=mode,
            next_mode=commit.next_mode if commit.next_mode in record.periods else "barrier",
            last=step if is_announced else min([self._last, *ends]),
            finished=is_last,
            checkpoint=self.checkpoints.due(step, is_last),
            # A script evaluates and saves after its last step; its end is waited for as an evaluation.
            evaluate=is_last if self.run.is_script else self.job.is_evaluated(step, step + 1 >= self.run.steps),
        )

    def _changes(self, step: int, reports: ReportColumns) -> list[int]:
        self.plans.observe(self.failed, step, reports.times())
        has_better = self.plans.has_better(self.failed)
        self.prepare_departures()  # a tick may commit several iterations
        changes = [step + 1] if has_better or self.is_prepared else []
        return [*changes, *(rejoin.step for rejoin in self.awaited())]

    def _repeat_iteration(self, cause: str, disputed: Sequence[Checked] = ()) -> None:
        self.end_generation()
        self._repeated = cause
        self._disputed = [(stage, *micro_batch) for stage, micro_batch in disputed]

    def _fenceable(self, odd: Mapping[str, str]) -> dict[Worker, str]:
        culprits = {worker: reason for name, reason in odd.items() if (worker := Worker.parse(name)) in self.holders}
        return {} if self.holdings.lost(self.holders.difference(culprits)) else culprits

    def _resolve(self, disagreement: Disagreement) -> None:
        """Fence a known culprit if a peer lives; otherwise roll back or repeat once, then restore a checkpoint."""
        step, odd, verified = disagreement.step, self._fenceable(disagreement.odd), self.record.verified
        is_first, self._voted_step = self._disagreed_step != step, -1
        parts = [*disagreement.parts, *self._name_bits(disagreement.bits)]
        bits = {"bits": parts} if disagreement.parts or disagreement.bits else {}
        accused = [] if disagreement.ranks and not odd else list(disagreement.odd)
        self.log("corrupt", step=step, workers=accused, what=disagreement.description, held=disagreement.held, **bits)
        if disagreement.is_of_state or disagreement.is_of_replays:
            if verified is not None and verified.step < step - 1 and (odd or is_first):
                self._disagreed_step, self._retried_step = step, -1  # each discarded step may be repeated once more
                self._roll_back(disagreement.description, odd)
                return
        elif not odd and is_first:
            self._disagreed_step = step
            self._repeat_iteration(disagreement.description, self._disputed_in(disagreement.ranks))
            return
        if odd:
            self.fence(odd)
            return
        cause = f"{disagreement}, also when repeated"
        if self._restored_step == step:
            raise StatesDiffer(f"{cause} and from a checkpoint; one of their devices or networks is broken")
        self._restored_step = step
        self.end_generation()
        self._lost_since = self.now
        raise HostsDisagree(cause)

    def _disputed_in(self, numbers: Sequence[int]) -> list[Checked]:
        stages = sorted({self.holdings.stage_of(number) for number in numbers})
        return [Checked(stage, MicroBatch(0, 0)) for stage in stages] if self.job.integrity.every else []

    def take_tensors(self, member: str, layout: StateTensors) -> None:
        self._tensors[layout.number, layout.tensor_rank, layout.plan] = layout.tensors

    def _name_bits(self, bits: Sequence[Bit]) -> list[dict[str, Any]]:
        named, holdings = [], self.holdings
        for bit in bits:
            tensors = self._tensors.get((bit.stage, bit.tensor_rank, holdings.layout), ())
            place = locate(bit.place, [StateTensor(*tensor) for tensor in tensors])
            if place is not None:
                tensor, index, number = place
                worker, stage = self.members(bit.worker)[bit.tensor_rank], holdings.stage_of(bit.stage)
                named.append({"worker": worker, "stage": stage, "tensor": tensor, "index": index, "bit": number})
        return named

    def _roll_back(self, cause: str, wrong: Mapping[Worker, str]) -> None:
        """An abandoned generation records the rollback, so that another leader continues from the same state."""
        if wrong:
            self.fence(wrong)
        else:
            self.end_generation()
        verified, evaluated = self.record.verified, self.record.evaluated
        assert verified is not None, "only an older state than the present one is gone back to"
        self.joined |= self.live & parse_workers(verified.without)
        self._set_holdings(verified.holds)
        self._disputed = []
        if evaluated is not None and evaluated.step > verified.step:
            evaluated = None
        step, commit = verified.step, verified.commit
        self.announce("abandoned", committed=step, commit=commit, earlier=None, evaluated=evaluated)
        self.rewind(verified.step)
        self._repeated = f"{cause}; restored the state after step {verified.step}, the last that all hosts agreed on"
        if unit := self.lost_unit(self.holders):
            raise StageLost(f"{cause}, and {unit} no live host that kept a state")

    def rewind(self, step: int) -> None:
        """Discard the metrics and checkpoints of iterations after `step`, which may be wrong."""
        self.put(Rewind(step, checkpoints=True))
        self.checkpoints.rewind(step)
        self.lines.throughput.start_over()
