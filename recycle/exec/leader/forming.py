"""Forms a generation, from its proposal to its first iteration, and decides when a generation must form again.

First all workers acknowledge the generation, then all form their groups. A live worker that misses a deadline is
fenced, unless it is the last host of a unit. So is one that alone fails twice to form its groups, and one of two that
cannot reach each other. After any other failure, or if all wait too long, the same workers form again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.leader.detector import select_fenced
from recycle.exec.leader.membership import Membership
from recycle.exec.leader.metrics import MetricsLines
from recycle.exec.leader.state import Phase, RunDescription
from recycle.exec.members import split_member, worker_names, worker_of
from recycle.exec.protocol import (
    LINE_SEPARATOR,
    Acknowledged,
    Copied,
    CopyProgress,
    CutOff,
    Formed,
    Permit,
    Stop,
    Trouble,
)
from recycle.job.shape import Worker

ATTEMPTS = 5
"""Failed attempts to form or run with the same live workers before the run is given up."""
FAILURES = 2
"""Failed attempts of a worker to form its groups before the worker is fenced."""
OF_PEER = re.compile("connection|peer|remote", re.IGNORECASE)
"""Matches errors of gloo, NCCL and sockets that another process causes."""
GRACE_SECONDS = 1.0
"""Seconds to wait for a death that explains a failure, before the same workers form again."""
PLAN_SECONDS = 3600.0
"""Most seconds to wait for an urgent plan; most plans have shorter deadlines (planner_process.py)."""


class StatesDiffer(RunError):
    """Workers hold different numbers that must be equal, and repeating did not help."""

    code = "states-differ"


class StageLost(RunError):
    """A stage has no live host, or its hosts disagree without a culprit: training must restore a checkpoint."""

    code = "stage-lost"

    def without_restore(self, reason: str) -> StageLost:
        """Return the error that ends the run, because no checkpoint can be restored."""
        return type(self)(f"{self}, and {reason}")


class HostsDisagree(StageLost):
    """The hosts of a stage disagree without a culprit, also when they repeat the iteration."""

    code = StatesDiffer.code


class Forming(Membership):
    """The run's state, and how generations form and end; `ends_early` after a request to end the run."""

    def __init__(self, run: RunDescription, now: float) -> None:
        super().__init__(run, now)
        self.lines = MetricsLines(self.job, run.started, now)
        self.ends_early = False
        self._attempts = 0
        self._failures: Counter[Worker] = Counter()
        self._blamed: set[Worker] = set()
        self._failed_since: float | None = None
        self._judges_cuts_from = 0.0
        self._repeated: str | None = None
        self._disputed: list[tuple[int, int, int]] = []
        self._lost_since: float | None = None
        self._longest = self._iteration_since = 0.0
        self._target = self.holdings.hosts
        self._spare: dict[int, int] = {}

    # The end of a generation.

    def end_generation(self) -> None:
        """End the current generation: undecided work is void, and survivors wake up."""
        if self.record.generation and self._persisted_phase in ("proposed", "running"):
            self.persist("ended" if self._persisted_phase == "running" else "abandoned")
            self.tell(Stop(self.record.generation))
        self.enter(Phase.BETWEEN)

    def fence(self, lost: Mapping[Worker, str]) -> None:
        """Fence workers, each with its reason, and end the generation. Raises StageLost."""
        for worker in lost:
            self.remove_live(worker)
        self.reset_failures()
        self.end_generation()
        for worker, cause in sorted(lost.items()):  # after the barrier: a leader without the role kills no worker
            self.kill(worker)
            self.log_detected(worker, self.with_reason(worker, cause))
        if self._lost_since is None:
            self._lost_since = self.now
        if unit := self.lost_unit(self.holders):
            holders = [worker for worker in lost if self.lost_unit({*self.holders, worker}) != unit]
            last = max(holders or lost)
            ended = f"{last}, {self.with_reason(last, lost[last])}"
            committed = self.record.committed
            moment = f"after step {committed}" if committed >= 0 else "before the first step"
            raise StageLost(f"{unit} no live host left {moment}: the parameters are lost with worker {ended}")

    def with_reason(self, worker: Worker, cause: str) -> str:
        """Add the last line of the log to the cause of a process that ended by itself."""
        line = self.processes[worker].lines.rpartition(LINE_SEPARATOR)[2] if cause.startswith("ended") else ""
        return f"{cause} ({line.rpartition(' ends: ')[2]})" if line else cause

    def reset_failures(self) -> None:
        self._attempts = 0
        self._failures.clear()

    def _form_again(self, cause: str) -> None:
        self._attempts += 1
        if self._attempts >= ATTEMPTS:
            raise RunError(f"gave up after {ATTEMPTS} attempts with the same workers: {cause}")
        self.end_generation()

    # From one generation to the next.

    def propose(self) -> None:
        """Drain and admit workers, then propose the next generation once a plan exists."""
        if not self.ends_early and not self.admit_rejoins():
            return
        self.prepare_departures()  # a leaving worker may have become a last host
        failed = self.failed.union(self.prepared)
        plan = self.plans.plan_for(failed)
        if plan is None:
            if self.waited > PLAN_SECONDS:
                dead = " ".join(worker_names(failed)) or "any"
                raise RunError(f"no plan without workers {dead} was made within {PLAN_SECONDS:g} s; see [planner]")
            return
        leaves = [self.release(worker) for worker in sorted(self.prepared)]
        if unit := self.lost_unit(self.holders):
            raise RunError(f"{unit} no live host among the present workers")
        live, holdings, commit = self.live, self.holdings, self.record.commit
        self._target = target = holdings.target(plan.hosts, live, self.holders)
        if commit is not None and self.record.is_evaluation_due:
            commit = msgspec.structs.replace(commit, last=None)  # the next generation has not announced its end
        roles = {name: name for name in worker_names(live)}  # plans name processes
        self._failed_since, self._judges_cuts_from = None, 0.0
        self.announce(
            plan=plan.digest,
            text=plan.text,
            roles=roles,
            commit=commit,
            periods=dict(plan.periods),
            copies=holdings.copies(target, live, self.holders),
            holds=holdings.name_of(plan.digest, target),
            rounds=plan.rounds,
            times=self.plans.times_of(plan),
            disputed=self._disputed,
            behind=holdings.background_copies(target, live),
        )
        for leave in leaves:  # behind the record: a leader that was replaced releases no worker that counts
            self.tell(leave)
        number = self.record.generation
        self.log("generation", step=self.next_step, generation=number, plan=plan.digest, live=list(roles), roles=roles)
        self.enter(Phase.PROPOSED)

    def permit_forming(self) -> None:
        if not self.received.is_complete(Acknowledged):
            if self.waited > (limit := self.limits.form_timeout):
                # The worker may be in an operation that cannot be interrupted.
                missing = self.received.missing(Acknowledged)
                late = {worker for worker in missing if self.waited > limit + self.detector.patience_with(worker)}
                self._fence_late(late, f"generation {self.record.generation} was not acknowledged")
            return
        acknowledged = self.received.by_process(Acknowledged)
        undone = {split_member(member)[0] for member, answer in acknowledged.items() if answer.undone}
        if undone or self._repeated:
            cause = self._repeated or "it was not committed when the generation ended"
            self.log("undone", step=self.next_step, count=len(undone), cause=cause)
            self._repeated = None
        is_stale = any(answer.stale for answer in acknowledged.values())
        self.tell(Permit(self.record.generation, "form", is_stale))
        self.enter(Phase.FORMING)

    def start_running(self) -> None:
        """Permit running once all groups are formed; retry a failed formation with the same workers."""
        if self._fence_cut():
            return
        if self.received.failed or not self.received.is_complete(Formed):
            self._judge_formation()
            return
        self.persist("running")
        self.tell(Permit(self.record.generation, "run"))
        self.holdings.set_current(self.record.holds, self._target)
        self.enter(Phase.RUNNING)
        self._iteration_since = now = self.now
        self.lines.start_generation(now)
        formed = self.received.by_process(Formed)
        self._log_copies({name: formed[name].copied for name in self.record.live})
        for worker in self.joined:
            self.processes[worker].ready.clear()
        self.joined.clear()
        if self._lost_since is not None:
            seconds, generation = now - self._lost_since, self.record.generation
            self.log("recovered", step=self.next_step, seconds=seconds, generation=generation)
            self._lost_since = None
        self._log_spare()

    def _judge_formation(self) -> None:
        received, generation = self.received, self.record.generation
        answers = received.by_process(Formed)
        failed = [member for member in received.members if member in received.failed] if received.failed else []
        if own := {worker_of(name): answers[name].error for name in failed if not answers[name].expired}:
            self._blame(own)
        elif received.is_complete(Formed):
            self._form_again(f"worker {failed[0]} could not form generation {generation}: {answers[failed[0]].error}")
        else:
            # A worker that waits for a late worker answers after `form_timeout`, or after the timeout of a copy.
            limit = 2 * self.limits.form_timeout + (self.limits.transport_timeout if self.record.copies else 0.0)
            late = received.missing(Formed) if self.waited > limit else set[Worker]()
            self._fence_late(late, f"groups of generation {generation} did not form")

    def _blame(self, failed: Mapping[Worker, str]) -> None:
        """Blame workers whose error names no peer, else those that fail first: other failures may be consequences."""
        if self._failed_since is None:
            self._blamed = set(failed)
        if self._may_be_explained():
            return
        self._blamed = {worker for worker, error in failed.items() if not OF_PEER.search(error)} or self._blamed
        self._failures.update(self._blamed)
        often = [worker for worker in self._blamed if self._failures[worker] >= FAILURES]
        fenced = select_fenced(often, self.holders, hosts=self.holdings.fewest_hosts(often, self.holders))
        reason = f"could not form generation {self.record.generation}: {failed[fenced or min(self._blamed)]}"
        if fenced:
            self.fence({fenced: reason})
        else:
            self._form_again(f"worker {min(self._blamed)} {reason}")

    def _may_be_explained(self) -> bool:
        self._failed_since = self.now if self._failed_since is None else self._failed_since
        return self.now - self._failed_since <= GRACE_SECONDS

    def _fence_late(self, late: set[Worker], event: str) -> None:
        if not late:
            return
        cause = f"{event} within {self.waited:.0f} s"
        if self.lost_unit(self.holders - late):
            self._form_again(f"{cause} by workers {' '.join(map(str, sorted(late)))}")
        else:
            self.fence(dict.fromkeys(late, cause))

    def _fence_cut(self) -> bool:
        if self.now < self._judges_cuts_from or not (cuts := self.received.by_process(CutOff)):
            return False
        member, message = next(iter(cuts.items()))
        pair = [worker_of(member), Worker.parse(message.peer)]
        suspects = [worker for worker in pair if self.detector.is_silent(worker, self.now)]
        if not suspects:  # one that several others cannot reach
            reports = {(worker_of(member), Worker.parse(cut.peer)) for member, cut in cuts.items()}
            named = Counter(peer for _, peer in reports)
            suspects = [worker for worker in pair if named[worker] > 1]
        fenced = select_fenced(pair, self.holders, suspects, self.holdings.fewest_hosts(pair, self.holders))
        why = "" if self.is_reached else "the leader cannot reach etcd"
        if fenced is None:
            why = "each is its stage's last host"
        elif self._judges_cuts_from and not suspects:
            why = "this may be over"
        if fenced is None or why:
            self._form_again(f"workers {pair[0]} and {pair[1]} cannot reach each other, and {why}")
        else:
            (peer,) = (worker for worker in pair if worker != fenced)
            self.fence({fenced: f"cut off from worker {peer}"})
        return True

    # While it runs.

    def judge_waits(self) -> None:
        """Form again if connections broke without a death, or all workers wait without progress."""
        if self._fence_cut():
            return
        if (troubles := self.received.by_process(Trouble)) and not self._may_be_explained():
            self._form_again(next(iter(troubles.values())).message)
            return
        seconds, commit = self.detector.standstill(self.live), self.record.commit
        usual = max(self.limits.form_timeout, self.limits.hung_factor * self._longest)
        if commit is not None and commit.finished and commit.checkpoint:  # waits for an earlier checkpoint
            usual = max(usual, self.job.train.checkpoint_deadline)
        if seconds > (usual if self._longest else self.limits.transport_timeout):
            hint = "; do all processes of the script make the same collectives?" if self.run.is_script else ""
            self._form_again(f"all workers have waited for {seconds:.0f} s, and none has made progress{hint}")

    def record_copies(self) -> None:
        """Record copies that finished while the generation runs: the workers hold these shards from now on."""
        progress, copied = self.received.by_process(CopyProgress), dict[str, list[Copied]]()
        for copy in self.record.behind:
            worker, units, members = Worker.parse(copy.worker), (copy.first, copy.last), self.members(copy.worker)
            if any(first <= copy.first and copy.last <= last for first, last in self.holdings.units_of(worker)):
                continue
            by_members = [done_copy for name in members if name in progress for done_copy in progress[name].copied]
            done = [copied for copied in by_members if (copied.first, copied.last) == units]
            if len(done) == len(members):
                self.holdings.add_copied(worker, units)
                copied.setdefault(copy.worker, []).append(done[0])
        if copied:
            self.record = msgspec.structs.replace(self.record, holds=self.holdings.plan)
            self.persist(record=self.record)
            self._log_copies(copied, while_running=True)
            self._log_spare()

    def _log_spare(self) -> None:
        spare = self.holdings.spare(self.live)
        if spare != self._spare:
            self._spare = spare
            deaths, generation = list(spare.values()), self.record.generation
            self.log("shards", step=self.next_step, generation=generation, further_deaths=deaths)

    def _log_copies(self, copied: Mapping[str, Sequence[Copied]], **more: Any) -> None:
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
