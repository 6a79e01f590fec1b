"""Plans whose layout follows the failures: at a death at once as ever, then with the model cut anew where that pays.

Without a worker the run goes on at once by a plan that re-routes its micro-batches and copies nothing: in the given
stages, or, where layers have moved before, in the layout at hand as long as somebody hosts each unit. Meanwhile a
planner's process looks for a better layout: the model cut anew for whoever is alive, or a worker that changes its
stage. Once that plan is there and moving is worth its pause (`is_worth`), all workers stop after the same iteration,
copy what is new to them, and go on. A worker that comes back copies its state anyway, and by the same rule the others
move back to the given stages in that pause, or stay and it hosts its own stage beside them.

Limits: one layout is asked for per set of dead workers, and another one when the times drift. What a copy takes is what
the profile says of bytes and links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from recycle.errors import RecycleError, RunError
from recycle.exec.leader.compute_times import ComputeTimes
from recycle.exec.leader.worth import copy_time, is_worth, moves_between
from recycle.exec.membership.interfaces import Ready
from recycle.exec.planning.planner_process import Question
from recycle.exec.planning.planning import PlanService
from recycle.exec.planning.replanning import Replanner
from recycle.exec.protocol import StepMode
from recycle.job import PricedJob
from recycle.plans import LayoutLimit, Plan, failure_vector
from recycle.plans.hosting import Hosts, joined, without
from recycle.plans.moves import Move
from recycle.plans.plan import in_process_names
from recycle.shape import Worker


@dataclass(frozen=True)
class _Layout:
    """What the planner has answered.

    Attributes:
        ready: the plan, which may be a better order where nobody moves; None where none is faster than the one at hand.
        details: what the event says of it.
        is_due: whether moving is worth its pause.
    """

    ready: Ready | None
    details: dict[str, Any]
    is_due: bool


class Layouts:
    """Implements the coordinator's `Plans` on those of the given stages.

    Args:
        job: `[planner]` says whether layers may move, and when.
        plans: asks the planner.
        given: plans of the given stages.
        log: takes the event `layout`.
    """

    def __init__(self, job: PricedJob, plans: PlanService, given: Replanner, log: Callable[..., None]) -> None:
        self._job, self._plans, self._given, self._log = job, plans, given, log
        self._is_on = (job.planner.layout == "elastic" or job.planner.move) and plans.can_plan
        self._found: dict[frozenset[Worker], _Layout] = {}
        self._asked: dict[frozenset[Worker], Question] = {}
        self._failed: frozenset[Worker] | None = None
        self._taken: frozenset[Worker] | None = None
        self._last: dict[frozenset[Worker], Ready] = {}
        self._running: Ready | None = None
        self._refused: set[tuple[frozenset[Worker], str]] = set()
        self._returned: dict[tuple[frozenset[Worker], str], bool] = {}
        self._step = -1

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        last = self._last.get(failed)
        if self._is_due(failed):
            self._taken = failed
            ready = self._found[failed].ready
            if ready is not None and not self._is_moved(ready):
                self._given.adopt(failed, ready)
        elif failed == self._failed and last is not None and self._is_moved(last):
            ready = self._given.ready(failed, last)
        else:
            ready = self._at_once(failed)
        if ready is not None:
            self._last[failed] = ready
        return ready

    def _is_due(self, failed: frozenset[Worker]) -> bool:
        """Whether training goes on without these workers, and better so in another layout that is there."""
        return failed == self._failed != self._taken and failed in self._found and self._found[failed].is_due

    def _is_moved(self, ready: Ready) -> bool:
        """Whether somebody hosts something else by this plan than by those of the given stages."""
        return ready.hosts is not None and self._plans.is_moved(ready.hosts)

    def _at_once(self, failed: frozenset[Worker]) -> Ready | None:
        """The plan to go on with: nobody copies anything where the layout at hand allows that."""
        layout = self._running
        if not self._is_on or layout is None or not self._can_stay(layout, failed):
            return self._given.ready(failed)
        assert self._failed is not None
        comes_back = self._failed > failed
        given = self._given.ready(failed) if comes_back else None
        try:
            within = self._plans.rerouted(failed, layout.digest)
        except RunError as refusal:
            self._refused.add((failed, layout.digest))
            self._log("warning", message=f"{refusal}; training goes on in the given stages")
            return self._given.ready(failed)
        if not comes_back or given is None or within is None:
            return None if comes_back else within
        return given if self._goes_back(failed, layout, within, given) else within

    def _can_stay(self, layout: Ready, failed: frozenset[Worker]) -> bool:
        """Whether workers have died or come back where the model is cut anew, and each unit has a host there."""
        hosts, before = layout.hosts, self._failed
        if hosts is None or not hosts.cut or not layout.is_kept or (failed, layout.digest) in self._refused:
            return False
        if before is None or not (failed > before or failed < before):
            return False
        left = (units for worker, ranges in hosts.units.items() if worker not in failed for units in ranges)
        return not without([(0, hosts.count)], joined(left))

    def _goes_back(self, failed: frozenset[Worker], layout: Ready, within: Ready, given: Ready) -> bool:
        """Decide whether a return brings the given stages, and write the event.

        Whoever comes back copies its state in any case: what copying takes longer beyond that is the pause that has to
        pay.
        """
        key = failed, layout.digest
        if key not in self._returned:
            assert layout.hosts is not None
            assert within.hosts is not None
            assert given.hosts is not None
            stays, goes = (moves_between(self._job, layout.hosts, then) for then in (within.hosts, given.hosts))
            pause = max(0.0, copy_time(goes) - copy_time(stays))
            found = self._decided(within, given, goes, pause)
            self._returned[key] = found.is_due
            self._found.pop(failed, None)  # what was found without these workers before was of another layout
            assert self._failed is not None
            back = sorted(map(str, self._failed - failed))
            self._write(failed, self._step + 1, found, returned=back)
        return self._returned[key]

    def has_better(self, failed: frozenset[Worker]) -> bool:
        return self._is_due(failed) or self._given.has_better(failed)

    def hosts(self, digest: str) -> Hosts | None:
        return self._plans.hosts(digest)

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        self._step = step
        if failed != self._failed:
            self._failed, self._taken, self._running = failed, None, None
        running = self._running = self._last.get(failed) or self.ready(failed)  # another coordinator may have begun it
        layout = running if running is not None and self._is_moved(running) else None
        self._given.observe(failed, step, times, layout, may_replan=self._is_on or layout is None)
        if not self._is_on or failed == self._taken or running is None or self._plans.is_own(failed):
            return
        if not failed and layout is None:
            return
        if failed not in self._found and failed not in self._asked:
            names = tuple(map(str, sorted(failed)))
            within = self._plans.layout_file(running)
            question = Question(failure_vector(self._job.shape, failed), False, names, moves=True, within=within)
            self._asked[failed] = question
            self._plans.ask(question)
        for question, text, error in self._plans.answers(drifted=False):
            for dead in [dead for dead, asked in self._asked.items() if asked == question]:
                del self._asked[dead]
                self._found[dead] = self._judged(dead, step, text, error)

    def _judged(self, failed: frozenset[Worker], step: int, text: str, error: str) -> _Layout:
        """Decide whether to move to what was planned without these workers, and write the event."""
        found = self._judge(failed, text, error)
        self._write(failed, step + 1, found)
        return found

    def _write(self, failed: frozenset[Worker], step: int, found: _Layout, **more: Any) -> None:
        names = sorted(map(str, failed))
        self._log("layout", step=step, failed=names, moves=found.is_due, **more, **found.details)

    def _judge(self, failed: frozenset[Worker], text: str, error: str) -> _Layout:
        now = self._last[failed]
        if error:
            return _Layout(None, {"cause": error}, False)
        try:
            plan = Plan.from_text(text, "plan of another layout")
            schedule = in_process_names(plan)
            ready = self._plans.prepare(schedule, replace(plan, schedule=schedule, moves=()), self._job.prices)
        except RecycleError as refusal:
            return _Layout(None, {"cause": str(refusal)}, False)
        assert ready.hosts is not None
        assert now.hosts is not None
        moves = moves_between(self._job, now.hosts, ready.hosts)
        # The pipeline drains, groups form, and the first iteration waits for its barrier: about an iteration.
        pause = now.periods[_mode(now, ready)] + copy_time(moves)
        return self._decided(now, ready, moves, pause, plan.layout_limit)

    def _decided(
        self, now: Ready, then: Ready, moves: Sequence[Move], pause: float, limit: LayoutLimit | None = None
    ) -> _Layout:
        """Whether to go over to another plan, and what the event says of it.

        Args:
            now, then: the plans.
            moves: what is copied.
            pause: what that takes, beyond what is lost anyway.
            limit: why no layer moves by the other plan.
        """
        mode = _mode(now, then)
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


def _mode(now: Ready, then: Ready) -> StepMode:
    """In which mode two plans are compared."""
    return "staggered" if "staggered" in now.periods and "staggered" in then.periods else "barrier"
