"""Which plan the live workers run, and when they change to a better one.

After a death training goes on at once by a plan that re-routes the dead workers' micro-batches and copies nothing: in
the given stages, or, after layers have moved, in the present layout as long as every unit has a host there. Meanwhile a
planner looks for a better layout, which repartitions the model across the live workers or changes a worker's stage.
Once that plan is there and moving is worth its pause (`is_worth`), all workers stop after the same iteration, copy what
is new to them, and go on. A worker that returns copies its state anyway; by the same rule the others then move back to
the given stages, or stay.

Times that drift from the profile bring another plan likewise (`Replanner`).

Limits: one layout is asked for per set of dead workers, and another one when the times drift. The seconds of a copy are
those that the profile states for bytes and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.leader.actions import Ask, Outbox, Planned, PreparedPlan, Question
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.replanning import Replanner
from recycle.exec.leader.worth import copy_time, is_worth, moves_between
from recycle.exec.protocol import StepMode
from recycle.job import PricedJob
from recycle.plans import failure_vector
from recycle.plans.hosting import Hosts, joined, without
from recycle.plans.moves import Move
from recycle.profile import Profile
from recycle.shape import Worker


class PlanAnswers:
    """What the planner has answered.

    Args:
        job: what plans are for.
        outbox: takes the questions.
        own: plan of the user's own schedule, and the workers that it leaves out.
        can_search: whether better plans than those that are needed now can be asked for.
    """

    def __init__(
        self,
        job: PricedJob,
        outbox: Outbox,
        own: tuple[frozenset[Worker], PreparedPlan] | None = None,
        can_search: bool = True,
    ) -> None:
        self._job, self._outbox, self._own = job, outbox, own
        self.can_search = can_search
        self._asked: set[Question] = set()
        self._plans: dict[Question, PreparedPlan] = {}
        self._errors: dict[Question, str] = {}
        self._hosts: dict[str, Hosts] = {}
        if own is not None:
            self._note(own[1])

    def _note(self, plan: PreparedPlan) -> None:
        if plan.hosts is not None:
            self._hosts[plan.digest] = plan.hosts

    def take(self, planned: Planned) -> None:
        """Take an answer."""
        if planned.plan is None:
            self._errors.setdefault(planned.question, planned.error)
            return
        self._plans[planned.question] = planned.plan
        self._errors.pop(planned.question, None)
        self._note(planned.plan)

    def needed(self, failed: frozenset[Worker], within: str = "") -> PreparedPlan | None:
        """The plan without the failed workers that training goes on with at once; None while it is being made.

        Args:
            within: hash of a plan in use whose layout is kept.

        Raises:
            RunError: there is none.
        """
        if self._own is not None and not within and self.is_own(failed):
            return self._own[1]
        question = Question(failed, is_urgent=True, within=within)
        if question in self._errors:
            vector = failure_vector(self._job.shape, failed)
            raise RunError(f"no plan for {vector} dead workers per stage: {self._errors[question]}")
        self.ask(question)
        return self._plans.get(question)

    def ask(self, question: Question, profile: Profile | None = None) -> None:
        """Ask a question, once."""
        if question not in self._asked:
            self._asked.add(question)
            self._outbox.put(Ask(question, profile))

    def pop(self, question: Question) -> Planned | None:
        """The answer to a question that may be asked again afterwards; None while there is none."""
        plan, error = self._plans.pop(question, None), self._errors.pop(question, "")
        if plan is None and not error:
            return None
        self._asked.discard(question)
        return Planned(question, plan, error)

    def adopt(self, failed: frozenset[Worker], plan: PreparedPlan | None, hosts: Mapping[str, Hosts]) -> None:
        """Take over from another leader the plan without the failed workers, and the hosts of earlier plans."""
        self._hosts.update(hosts)
        if plan is not None:
            question = Question(failed, is_urgent=True)
            self._asked.add(question)
            self.take(Planned(question, plan))

    def is_own(self, failed: frozenset[Worker]) -> bool:
        """Whether the user's own schedule runs without these workers."""
        return self._own is not None and self._own[0] == failed

    def hosts(self, digest: str) -> Hosts | None:
        """The hosts by the plan with this hash; None for an unknown plan."""
        return self._hosts.get(digest)


@dataclass(frozen=True)
class _Layout:
    """A layout that the planner has found.

    Attributes:
        plan: may be a better order in which no layer moves; None where none is faster than the present one.
        details: for the event.
        is_due: whether moving is worth its pause.
    """

    plan: PreparedPlan | None
    details: dict[str, Any]
    is_due: bool


class Plans:
    """The plans of a run.

    Args:
        job: `[planner]` says whether layers may move, and when.
        answers: of the planner.
        outbox: takes the events `layout` and `replanned`.
    """

    def __init__(self, job: PricedJob, answers: PlanAnswers, outbox: Outbox) -> None:
        self._job, self._answers, self._outbox = job, answers, outbox
        self._given = Replanner(job, answers, outbox)
        self._usual = Hosts.at_start(job, None)
        self._can_move = (job.planner.layout == "elastic" or job.planner.move) and answers.can_search
        self._layouts: dict[frozenset[Worker], _Layout] = {}
        self._asked: dict[frozenset[Worker], Question] = {}
        self._failed: frozenset[Worker] | None = None
        self._taken: frozenset[Worker] | None = None
        self._last: dict[frozenset[Worker], PreparedPlan] = {}
        self._running: PreparedPlan | None = None
        self._refused: set[tuple[frozenset[Worker], str]] = set()
        self._returned: dict[tuple[frozenset[Worker], str], bool] = {}
        self._step = -1

    @property
    def compute(self) -> dict[str, Any]:
        """The computing times of the last iteration, for its line of metrics."""
        return self._given.compute

    def ready(self, failed: frozenset[Worker]) -> PreparedPlan | None:
        """The plan without the failed workers, None while it is being made. Raises RunError if there is none."""
        last = self._last.get(failed)
        if self._is_due(failed):
            self._taken = failed
            plan = self._layouts[failed].plan
            if plan is not None and not self._is_moved(plan):
                self._given.adopt(failed, plan)
        elif failed == self._failed and last is not None and self._is_moved(last):
            plan = self._given.ready(failed, last)
        else:
            plan = self._at_once(failed)
        if plan is not None:
            self._last[failed] = plan
        return plan

    def _is_due(self, failed: frozenset[Worker]) -> bool:
        """Whether training goes on without these workers, and better so in another layout that was found."""
        return failed == self._failed != self._taken and failed in self._layouts and self._layouts[failed].is_due

    def _is_moved(self, plan: PreparedPlan) -> bool:
        """Whether some worker hosts other parts of the model by this plan than by those of the given stages."""
        hosts, usual = plan.hosts, self._usual
        if hosts is None:
            return False
        return bool(hosts.cut) or any(usual.stages[worker] != stages for worker, stages in hosts.stages.items())

    def _at_once(self, failed: frozenset[Worker]) -> PreparedPlan | None:
        """The plan to go on with: no worker copies anything where the present layout allows that."""
        layout = self._running
        if not self._can_move or layout is None or not self._can_stay(layout, failed):
            return self._given.ready(failed)
        assert self._failed is not None
        comes_back = self._failed > failed
        given = self._given.ready(failed) if comes_back else None
        try:
            within = self._answers.needed(failed, layout.digest)
        except RunError as refusal:
            self._refused.add((failed, layout.digest))
            self._outbox.log("warning", message=f"{refusal}; training goes on in the given stages")
            return self._given.ready(failed)
        if not comes_back or given is None or within is None:
            return None if comes_back else within
        return given if self._goes_back(failed, layout, within, given) else within

    def _can_stay(self, layout: PreparedPlan, failed: frozenset[Worker]) -> bool:
        """Whether workers have died or returned while the model is repartitioned, and each unit has a host there."""
        hosts, before = layout.hosts, self._failed
        if hosts is None or not hosts.cut or not layout.is_kept or (failed, layout.digest) in self._refused:
            return False
        if before is None or not (failed > before or failed < before):
            return False
        left = (units for worker, ranges in hosts.units.items() if worker not in failed for units in ranges)
        return not without([(0, hosts.count)], joined(left))

    def _goes_back(
        self, failed: frozenset[Worker], layout: PreparedPlan, within: PreparedPlan, given: PreparedPlan
    ) -> bool:
        """Decide whether a return brings the given stages, and write the event.

        The returning worker copies its state in any case: the pause that has to pay is what copying takes beyond that.
        """
        key = failed, layout.digest
        if key not in self._returned:
            assert layout.hosts is not None
            assert within.hosts is not None
            assert given.hosts is not None
            stays, goes = (moves_between(self._job, layout.hosts, then) for then in (within.hosts, given.hosts))
            pause = max(0.0, copy_time(goes) - copy_time(stays))
            decided = self._decided(within, given, goes, pause)
            self._returned[key] = decided.is_due
            self._layouts.pop(failed, None)  # what was found without these workers before was of another layout
            assert self._failed is not None
            back = sorted(map(str, self._failed - failed))
            self._write(failed, self._step + 1, decided, returned=back)
        return self._returned[key]

    def hosts(self, digest: str) -> Hosts | None:
        """The hosts by the plan with this hash; None for an unknown plan."""
        return self._answers.hosts(digest)

    def has_better(self, failed: frozenset[Worker]) -> bool:
        """Whether `ready` would now give a plan that is worth a new generation."""
        return self._is_due(failed) or self._given.has_better(failed)

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        """An iteration is about to be committed, in which the workers computed for so long."""
        self._step = step
        if failed != self._failed:
            self._failed, self._taken, self._running = failed, None, None
        running = self._running = self._last.get(failed) or self.ready(failed)  # another leader may have begun it
        layout = running if running is not None and self._is_moved(running) else None
        self._given.observe(failed, step, times, layout, may_replan=self._can_move or layout is None)
        if not self._can_move or failed == self._taken or running is None or self._answers.is_own(failed):
            return
        if not failed and layout is None:
            return
        if failed not in self._layouts and failed not in self._asked:
            is_cut = running.hosts is not None and bool(running.hosts.cut) and running.is_kept
            self._asked[failed] = Question(failed, moves=True, within=running.digest if is_cut else "")
            self._answers.ask(self._asked[failed])
        for dead, question in list(self._asked.items()):
            if (answer := self._answers.pop(question)) is not None:
                del self._asked[dead]
                self._layouts[dead] = layout_found = self._judge(dead, answer)
                self._write(dead, step + 1, layout_found)

    def _write(self, failed: frozenset[Worker], step: int, layout: _Layout, **more: Any) -> None:
        names = sorted(map(str, failed))
        self._outbox.log("layout", step=step, failed=names, moves=layout.is_due, **more, **layout.details)

    def _judge(self, failed: frozenset[Worker], answer: Planned) -> _Layout:
        """Decide whether to move to what was planned without these workers."""
        now, then = self._last[failed], answer.plan
        if then is None:
            return _Layout(None, {"cause": answer.error}, False)
        assert then.hosts is not None
        assert now.hosts is not None
        moves = moves_between(self._job, now.hosts, then.hosts)
        # The pipeline drains, groups form, and the first iteration waits for its barrier: about an iteration.
        return self._decided(now, then, moves, now.periods[_mode(now, then)] + copy_time(moves))

    def _decided(self, now: PreparedPlan, then: PreparedPlan, moves: Sequence[Move], pause: float) -> _Layout:
        """Whether to go over to another plan, and the details of the event.

        Args:
            moves: what is copied.
            pause: what that takes, beyond what is lost anyway.
        """
        mode, limit = _mode(now, then), then.layout_limit
        before, after = now.periods[mode], then.periods[mode]
        section = self._job.planner
        until_change = section.iterations_between_changes * before
        details = {
            "plan": then.digest,
            "period_before": before,
            "period": after,
            "pause": pause,
            "copy": copy_time(moves),
            "bytes": sum(move.bytes for move in moves),
            "until_change": until_change,
            "move_when": section.move_when,
        }
        if limit is not None and (limit.period is None or limit.period < before):
            details |= {"layout_limit": msgspec.to_builtins(limit), "cause": str(limit)}
        if before <= after:
            return _Layout(None, {"cause": "no layout is faster than the present one"} | details, False)
        is_due = section.move_when == "always" or is_worth(before, after, pause, until_change)
        return _Layout(then, details, is_due)


def _mode(now: PreparedPlan, then: PreparedPlan) -> StepMode:
    """In which mode two plans are compared."""
    return "staggered" if "staggered" in now.periods and "staggered" in then.periods else "barrier"
