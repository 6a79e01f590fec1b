"""Plans whose layout follows the failures: at a death at once as ever, then with the model cut anew where that pays.

Without a worker the run goes on by the plan of the given stages, which re-routes its micro-batches and copies nothing.
Meanwhile a planner's process looks for a better layout: the model cut anew for whoever is alive, or a worker that
changes its stage. Once that plan is there and moving is worth its pause (`is_worth`), all workers stop after the same
iteration, copy what is new to them, and go on. A worker that comes back brings the plan of the given stages with it.

Limits: one layout is asked for per set of dead workers. What a copy takes is what the profile says of bytes and links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from recycle.errors import RecycleError
from recycle.exec.membership.compute_times import ComputeTimes
from recycle.exec.membership.interfaces import Ready
from recycle.exec.membership.messages import Mode
from recycle.exec.planning.planner_process import Question
from recycle.exec.planning.planning import PlanService
from recycle.exec.planning.replanning import Replanner
from recycle.job import PricedJob
from recycle.plans import Plan, failure_vector
from recycle.plans.hosting import Hosts
from recycle.plans.moves import Move
from recycle.plans.plan import in_process_names
from recycle.shape import Worker


def is_worth(before: float, after: float, pause: float, until_change: float) -> bool:
    """Whether moving saves more than it costs: (before - after) / before * until_change > pause.

    Args:
        before, after: periods. pause: that the move takes. until_change: expected time to the next change of the live
            workers. All in one unit of time.
    """
    return before > after and (before - after) / before * until_change > pause


def copy_time(moves: tuple[Move, ...]) -> float:
    """Until all is copied, each source sending one after the other, in the profile's unit of time."""
    until: Counter[str] = Counter()
    for move in moves:
        until[move.source] += move.seconds  # type: ignore[assignment]  # counts are of any number
    return float(max(until.values(), default=0.0))


@dataclass(frozen=True)
class _Layout:
    """What the planner has answered.

    Attributes:
        ready: the plan; None where none is better than that of the given stages.
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

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        if self._is_due(failed):
            self._taken = failed
        ready = self._found[failed].ready if failed == self._taken else self._given.ready(failed)
        if ready is not None:
            self._last[failed] = ready
        return ready

    def _is_due(self, failed: frozenset[Worker]) -> bool:
        """Whether training goes on without these workers, and better so in another layout that is there."""
        return failed == self._failed != self._taken and failed in self._found and self._found[failed].is_due

    def has_better(self, failed: frozenset[Worker]) -> bool:
        return self._is_due(failed) or (failed != self._taken and self._given.has_better(failed))

    def hosts(self, digest: str) -> Hosts | None:
        return self._plans.hosts(digest)

    def observe(self, failed: frozenset[Worker], step: int, times: ComputeTimes) -> None:
        if failed != self._failed:
            self._failed, self._taken = failed, None
        running = self._last.get(failed) or self.ready(failed)  # another coordinator may have begun the generation
        is_cut = running is not None and running.hosts is not None and bool(running.hosts.cut)
        has_moved = failed == self._taken or is_cut
        if has_moved:
            self._given.compute = times.line()  # the drift of times is watched for the given stages alone
        else:
            self._given.observe(failed, step, times)
        if not self._is_on or has_moved or not failed or running is None or self._plans.is_own(failed):
            return
        if failed not in self._found and failed not in self._asked:
            names = tuple(map(str, sorted(failed)))
            question = Question(failure_vector(self._job.shape, failed), False, names, moves=True)
            self._asked[failed] = question
            self._plans.ask(question)
        for question, text, error in self._plans.answers(moves=True):
            for dead in [dead for dead, asked in self._asked.items() if asked == question]:
                del self._asked[dead]
                self._found[dead] = self._judged(dead, step, text, error)

    def _judged(self, failed: frozenset[Worker], step: int, text: str, error: str) -> _Layout:
        """Decide whether to move to what was planned without these workers, and write the event."""
        found = self._judge(failed, text, error)
        self._log("layout", step=step + 1, failed=sorted(map(str, failed)), moves=found.is_due, **found.details)
        return found

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
        mode: Mode = "staggered" if "staggered" in ready.periods and "staggered" in now.periods else "barrier"
        before, after = now.periods[mode], ready.periods[mode]
        section, copying = self._job.planner, copy_time(plan.moves)
        until_change = section.iterations_between_changes * before
        # The pipeline drains, groups form, and the first iteration waits for its barrier: about an iteration.
        pause = before + copying
        details = {
            "plan": ready.digest,
            "period_before": before,
            "period": after,
            "pause": pause,
            "copy": copying,
            "bytes": sum(move.bytes for move in plan.moves),
            "until_change": until_change,
            "move_when": section.move_when,
        }
        if not self._plans.is_moved(ready.hosts):
            return _Layout(None, details | {"cause": "no layout is faster than that of the given stages"}, False)
        is_due = section.move_when == "always" or is_worth(before, after, pause, until_change)
        return _Layout(ready, details, is_due)
