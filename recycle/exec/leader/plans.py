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

from collections.abc import Sequence
from typing import Any

import msgspec

from recycle.errors import RunError
from recycle.exec.leader.actions import Outbox, Planned, PreparedPlan, Question
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.plan_answers import PlanAnswers
from recycle.exec.leader.replanning import Replanner
from recycle.exec.leader.worth import common_mode, copy_time, is_worth, moves_between
from recycle.job import PricedJob
from recycle.job.shape import Worker
from recycle.plans.hosting import Hosts, is_same
from recycle.plans.moves import Move

_Failed = frozenset[Worker]


class Plans:
    """The plans of a run.

    Args:
        job: `[planner]` says whether layers may move, and when.
        answers: of the planner.
        outbox: takes the events `layout` and `replanned`.

    Attributes:
        compute: the computing times of the last iteration, for its line of metrics.
    """

    def __init__(self, job: PricedJob, answers: PlanAnswers, outbox: Outbox) -> None:
        self._job, self._answers, self._outbox = job, answers, outbox
        self._replanner = Replanner(job, answers, outbox)
        self._usual = Hosts.at_start(job, None)
        self._can_move = (job.planner.layout == "elastic" or job.planner.move) and answers.can_search
        self._asked: dict[_Failed, Question] = {}
        self._layouts: dict[_Failed, PreparedPlan | None] = {}
        """What the planner has found, where moving is worth its pause."""
        self._taken = False
        """Whether the layout for the present workers was taken."""
        self._given: dict[_Failed, PreparedPlan] = {}
        """Better plans of the given stages than the first one."""
        self._last: dict[_Failed, PreparedPlan] = {}
        self._failed: _Failed = frozenset()
        self._running: PreparedPlan | None = None
        self._refused: set[tuple[_Failed, str]] = set()
        self._returned: dict[tuple[_Failed, str], bool] = {}
        self._step = -1
        self.compute: dict[str, Any] = {"compute": {}}

    def ready(self, failed: _Failed) -> PreparedPlan | None:
        """The plan without the failed workers, None while it is being made. Raises RunError if there is none."""
        running = self._last.get(failed) if failed == self._failed else None
        if self._is_due(failed):
            self._taken, plan = True, self._layouts[failed]
        else:
            plan = self._replanner.take_better(failed, running)
        if plan is not None and not self._is_moved(plan):
            self._given[failed] = plan
        plan = plan or (running if self._is_moved(running) else self._at_once(failed))
        if plan is not None:
            self._last[failed] = plan
        return plan

    def _is_due(self, failed: _Failed) -> bool:
        """Whether training goes on without these workers, and better so in another layout that was found."""
        return failed == self._failed and not self._taken and self._layouts.get(failed) is not None

    def _is_moved(self, plan: PreparedPlan | None) -> bool:
        """Whether some worker hosts other parts of the model by this plan than by those of the given stages."""
        return plan is not None and plan.hosts is not None and not is_same(plan.hosts, self._usual)

    def _at_once(self, failed: _Failed) -> PreparedPlan | None:
        """The plan to go on with: no worker copies anything where the present layout allows that."""
        layout, within = self._layout_to_stay_in(failed), None
        if layout is not None:
            try:
                within = self._answers.needed(failed, layout.digest)
            except RunError as refusal:
                self._refused.add((failed, layout.digest))
                self._outbox.log("warning", message=f"{refusal}; training goes on in the given stages")
                layout = None
        if layout is not None and self._failed < failed:
            return within
        given = self._given.get(failed) or self._answers.needed(failed)
        if layout is None or given is None:
            return given
        return given if within is not None and self._goes_back(failed, layout, within, given) else within

    def _layout_to_stay_in(self, failed: _Failed) -> PreparedPlan | None:
        """The plan that runs, where workers have died or returned while the model is repartitioned, and each unit has a
        host there."""
        layout, hosts = self._running, _repartitioned(self._running)
        is_change = failed > self._failed or failed < self._failed
        if layout is None or hosts is None or not (self._can_move and is_change):
            return None
        is_lost = Holdings(hosts).lost(hosts.units.keys() - failed)
        return None if is_lost or (failed, layout.digest) in self._refused else layout

    def _goes_back(self, failed: _Failed, layout: PreparedPlan, within: PreparedPlan, given: PreparedPlan) -> bool:
        """Decide whether a return brings the given stages, and write the event.

        The returning worker copies its state in any case: the pause that has to pay is what copying takes beyond that.
        """
        key = failed, layout.digest
        if key not in self._returned:
            stays, goes = (moves_between(self._job, layout.hosts, then.hosts) for then in (within, given))
            pause = max(0.0, copy_time(goes) - copy_time(stays))
            self._layouts.pop(failed, None)  # what was found without these workers before was of another layout
            back = sorted(map(str, self._failed - failed))
            self._returned[key] = self._is_worth(failed, within, given, goes, pause, returned=back)
        return self._returned[key]

    def hosts(self, digest: str) -> Hosts | None:
        """The hosts by the plan with this hash; None for an unknown plan."""
        return self._answers.hosts.get(digest)

    def has_better(self, failed: _Failed) -> bool:
        """Whether `ready` would now give a plan that is worth a new generation."""
        return self._is_due(failed) or self._replanner.has_better(failed)

    def observe(self, failed: _Failed, step: int, times: ComputeTimes) -> None:
        """An iteration is about to be committed, in which the workers computed for so long."""
        self.compute, self._step = times.line(), step
        if failed != self._failed:
            self._failed, self._taken = failed, False
        running = self._running = self._last.get(failed) or self.ready(failed)  # another leader may have begun it
        is_moved, is_own = self._is_moved(running), self._answers.is_own(failed)
        if self._can_move or not is_moved:
            self._replanner.observe(failed, step, times, running, is_moved=is_moved, is_own=is_own)
        if not self._can_move or self._taken or running is None or is_own or not (failed or is_moved):
            return
        if failed not in self._layouts and failed not in self._asked:
            self._asked[failed] = Question(failed, moves=True, within=running.digest if _repartitioned(running) else "")
            self._answers.ask(self._asked[failed])
        for dead, question in list(self._asked.items()):
            if (answer := self._answers.pop(question)) is not None:
                del self._asked[dead]
                self._layouts[dead] = answer.plan if self._is_worth_moving(dead, answer) else None

    def _is_worth_moving(self, failed: _Failed, answer: Planned) -> bool:
        """Decide whether to move to what was planned without these workers, and write the event."""
        now, then = self._last[failed], answer.plan
        if then is None:
            return self._log(failed, False, cause=answer.error)
        moves = moves_between(self._job, now.hosts, then.hosts)
        # The pipeline drains, groups form, and the first iteration waits for its barrier: about an iteration.
        pause = now.periods[common_mode(now.periods, then.periods)] + copy_time(moves)
        return self._is_worth(failed, now, then, moves, pause)

    def _is_worth(
        self, failed: _Failed, now: PreparedPlan, then: PreparedPlan, moves: Sequence[Move], pause: float, **more: Any
    ) -> bool:
        """Decide whether to go over to another plan, and write the event.

        Args:
            moves: what is copied.
            pause: what that takes, beyond what is lost anyway.
            more: of the event.
        """
        mode, limit, section = common_mode(now.periods, then.periods), then.layout_limit, self._job.planner
        before, after = now.periods[mode], then.periods[mode]
        until_change = section.iterations_between_changes * before
        if limit is not None and (limit.period is None or limit.period < before):
            more |= {"layout_limit": msgspec.to_builtins(limit), "cause": str(limit)}
        elif before <= after:
            more |= {"cause": "no layout is faster than the present one"}
        is_worth_it = section.move_when == "always" or is_worth(before, after, pause, until_change)
        return self._log(
            failed,
            before > after and is_worth_it,
            plan=then.digest,
            period_before=before,
            period=after,
            pause=pause,
            copy=copy_time(moves),
            bytes=sum(move.bytes for move in moves),
            until_change=until_change,
            move_when=section.move_when,
            **more,
        )

    def _log(self, failed: _Failed, moves: bool, **details: Any) -> bool:
        names = sorted(map(str, failed))
        self._outbox.log("layout", step=self._step + 1, failed=names, moves=moves, **details)
        return moves


def _repartitioned(plan: PreparedPlan | None) -> Hosts | None:
    """The hosts by a plan that cuts the model anew, if planners find its file."""
    return plan.hosts if plan is not None and plan.hosts is not None and plan.hosts.cut and plan.is_kept else None
