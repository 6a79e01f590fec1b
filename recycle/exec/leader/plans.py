"""Selects the plan that the live workers run, and decides when to change to a better one.

After a death training continues at once with a plan that re-routes the dead workers' micro-batches without copies. The
plan uses the given stages, or, after layers have moved, the present layout while every unit has a host. A rejoining
worker copies its state anyway; the others then move back to the given stages if that pays.

Meanwhile a search for a better plan runs in the background (`_Search`):

    layout   after a death: repartitions the model across the live workers, or changes a worker's stage
    times    when the workers' times drift (drift.py): for the measured profile

When the answer is worth the pause of a new generation, all workers stop after the same iteration, copy, and continue. A
search is dropped when the live workers or their plan change. Copy durations follow the profile's bytes and links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from recycle.errors import RunError
from recycle.exec.leader.actions import Ask, Outbox, Planned, PreparedPlan, Question
from recycle.exec.leader.drift import DriftMonitor
from recycle.exec.leader.holdings import Holdings
from recycle.exec.leader.metrics import ComputeTimes
from recycle.exec.protocol import StepMode
from recycle.ir.families import interleaved, one_f_one_b
from recycle.ir.instruction import Backward, BackwardInput, BackwardWeight, Instruction
from recycle.ir.schedule import Schedule
from recycle.job import PricedJob
from recycle.job.pricing import profile_of_layout
from recycle.job.profile import Profile
from recycle.job.sections import TimesSection
from recycle.job.shape import Worker
from recycle.plans import failure_vector
from recycle.plans.hosting import Hosts, is_same, layers_in, layers_of

MARGIN = 0.05
"""Share of the period that a plan for drifted times must save.

A new generation costs about an iteration: the pipeline drains, groups form, and the first iteration waits for its
barrier. So the change has paid for itself after 20 iterations.
"""
QUIET = 4
"""A change within this many pauses of the last change doubles the next pause.

So times that fluctuate, for example on shared cores, cause ever fewer changes. The first pause is a window.
"""
_Failed = frozenset[Worker]


def is_worth(before: float, after: float, pause: float, until_change: float) -> bool:
    """Return whether a move saves more than it costs: (before - after) / before * until_change > pause.

    Periods `before` and `after`, the expected time to the next change of live workers, and the pause have one unit.
    """
    return before > after and (before - after) / before * until_change > pause


def common_mode(first: Collection[StepMode], second: Collection[StepMode]) -> StepMode:
    """Return the step mode in which to compare two plans, given the modes that each supports."""
    return "staggered" if "staggered" in first and "staggered" in second else "barrier"


class CopyCost(NamedTuple):
    """Bytes to copy, and the duration in the profile's unit of time if each source sends its copies one by one."""

    bytes: float
    seconds: float


def copy_cost(job: PricedJob, before: Hosts | None, after: Hosts | None) -> CopyCost:
    """Return the cost of the copies that turn the holdings `before` into `after`."""
    assert before is not None
    assert after is not None
    shape, workers, amounts, until = job.shape, sorted(after.units), list[float](), defaultdict[str, float](float)
    # Embedding and head count as parts of the adjacent layers.
    by_layer = profile_of_layout(job, job.prices, replace(shape, cut=(1,) * sum(layers_of(job))))
    each = by_layer.per_stage("static", sum(layers_of(job)))
    for copy in Holdings(before).copies(after, workers, workers):
        start, end = layers_in((copy.first, copy.last), after.count)
        amounts.append(float(sum(each[start:end])))
        source, worker = (shape.worker_index(Worker.parse(name)) for name in (copy.source, copy.worker))
        until[copy.source] += float(job.prices.copy_seconds(shape, [source], [worker], amounts[-1])[0])
    return CopyCost(sum(amounts), max(until.values(), default=0.0))


@dataclass
class _Search:
    """A background search for a better plan.

    Attributes:
        running: the plan that ran at the time of the request.
        profile, cause: profile to plan with, and the reason; None and empty for a layout.
        better: the result, if worth a new generation.
    """

    question: Question
    running: PreparedPlan
    profile: Profile | None = None
    cause: str = ""
    better: PreparedPlan | None = None


class Plans:
    """The plans of a run: questions to the planner, answers, and the decisions that follow.

    Args:
        outbox: receives questions and the events `layout`, `slow-link` and `replanned`.
        own: the workers that the user's own schedule leaves out, and its plan.
        is_script: a user's script trains, so times are real, and are compared with the plan's also if the job states
            none. The first plan is then 1F1B.

    Attributes:
        own_text: the schedule of all workers that a user's script gives; empty without one.
        hosts: hash of a plan -> its hosts.
        compute: compute times of the last iteration, for its metrics line.
    """

    def __init__(
        self,
        job: PricedJob,
        outbox: Outbox,
        own: tuple[_Failed, PreparedPlan] | None = None,
        can_search: bool = True,
        is_script: bool = False,
    ) -> None:
        self.own_text, self._first_text = "", first_plan(job) if is_script else ""
        self._job, self._outbox, self._own = job, outbox, own
        self._usual = Hosts.at_start(job, None)
        self._can_move = (job.planner.layout == "elastic" or job.planner.move) and can_search
        takes_time = job.model.kind != "emulated" or job.model.seconds_per_unit > 0 or is_script
        watches = job.membership.drift > 0 and job.planner.reroute and can_search and takes_time
        self._drift = DriftMonitor(job, is_script) if watches else None
        self._answers: dict[Question, Planned | None] = {}
        self.hosts: dict[str, Hosts] = {}
        if own is not None:
            self._note_hosts(own[1])
        self._search: _Search | None = None
        self._given: dict[_Failed, PreparedPlan] = {}
        """Plans of the given stages that improve on the first plan."""
        self._last: dict[_Failed, PreparedPlan] = {}
        self._times: dict[str, Profile] = {}
        """Hash of a plan -> the measured times that it was made for, or was found to suit."""
        self._failed: _Failed = frozenset()
        self._running: PreparedPlan | None = None
        self._has_searched_layout = False
        """For the present workers."""
        self._refused: set[tuple[_Failed, str]] = set()
        self._returns: dict[tuple[_Failed, str], bool] = {}
        self._step = -1
        self._changed: int | None = None
        self._pause = job.membership.drift_iterations
        self.compute: dict[str, Any] = {"compute": {}}

    # The planner.

    def _note_hosts(self, plan: PreparedPlan) -> None:
        if plan.hosts is not None:
            self.hosts[plan.digest] = plan.hosts

    def take(self, planned: Planned) -> None:
        """Take an answer. An error does not replace a plan."""
        if planned.plan is not None:
            self._note_hosts(planned.plan)
        if planned.plan is not None or self._answers.get(planned.question) is None:
            self._answers[planned.question] = planned

    def adopt(
        self, failed: _Failed, plan: PreparedPlan | None, hosts: Mapping[str, Hosts], times: Profile | None = None
    ) -> None:
        """Continue with another leader's plan, made for measured times if `times` are given."""
        self.hosts.update(hosts)
        if plan is not None:
            self.take(Planned(Question(failed, is_urgent=True), plan))
            if times is not None:
                self._times[plan.digest] = times

    def times_of(self, plan: PreparedPlan) -> str:
        """Return the digest of the measured times that suit a plan; empty for the job's."""
        times = self._times.get(plan.digest)
        return "" if times is None else times.digest()

    def _ask(self, question: Question, profile: Profile | None = None) -> None:
        if question not in self._answers:
            self._answers[question] = None
            self._outbox.put(Ask(question, profile))

    def _urgent_plan(self, failed: _Failed, within: str = "") -> PreparedPlan | None:
        """With `within`, the hash of a plan in use, keep its layout. None while the plan is being made."""
        if self._own is not None and not within and self._own[0] == failed:
            return self._own[1]
        text = "" if failed or within else self.own_text or self._first_text
        question = Question(failed, is_urgent=True, within=within, text=text)
        self._ask(question)
        answer = self._answers[question]
        if answer is not None and answer.plan is None:
            vector = failure_vector(self._job.shape, failed)
            raise RunError(f"no plan for {vector} dead workers per stage: {answer.error}")
        return None if answer is None else answer.plan

    # What runs next.

    def plan_for(self, failed: _Failed) -> PreparedPlan | None:
        """Return the plan without the failed workers; None while the planner works. Raises RunError if none exists."""
        running = self._last.get(failed) if failed == self._failed else None
        plan = self._take_better(failed)
        if plan is not None and not self._is_moved(plan):
            self._given[failed] = plan
        plan = plan or (running if self._is_moved(running) else self._immediate_plan(failed))
        if plan is not None:
            self._last[failed] = plan
        return plan

    def has_better(self, failed: _Failed) -> bool:
        """Return whether `ready` would now return a plan that is worth a new generation."""
        search = self._search
        return search is not None and search.better is not None and search.question.failed == failed

    def _take_better(self, failed: _Failed) -> PreparedPlan | None:
        search = self._search
        if search is None or not self.has_better(failed) or search.running is not self._last.get(failed):
            return None
        self._search = None
        if search.better is not None and search.profile is not None:
            self._times[search.better.digest] = search.profile
            step = self._step + 1
            is_quiet = self._changed is None or step >= self._changed + QUIET * self._pause
            self._pause = self._job.membership.drift_iterations if is_quiet else 2 * self._pause
            self._changed = step
            self._outbox.log(
                "replanned",
                step=step,
                plan=search.better.digest,
                cause=search.cause,
                period_before=search.better.compared_period,
                period=search.better.periods[common_mode(search.better.periods, search.running.periods)],
                profile=search.question.profile,
            )
        return search.better

    def _is_moved(self, plan: PreparedPlan | None) -> bool:
        return plan is not None and plan.hosts is not None and not is_same(plan.hosts, self._usual)

    def _immediate_plan(self, failed: _Failed) -> PreparedPlan | None:
        layout = self._layout_to_stay_in(failed)
        if layout is None:
            return self._given.get(failed) or self._urgent_plan(failed)
        key = failed, layout.digest
        try:
            within = self._urgent_plan(failed, layout.digest)
        except RunError as refusal:
            self._outbox.log("warning", message=f"{refusal}; training continues in the given stages")
            self._refused.add(key)
            return self._immediate_plan(failed)
        if self._failed < failed:
            return within
        given = self._given.get(failed) or self._urgent_plan(failed)
        if within is None or given is None:
            return None
        if key not in self._returns:
            self._returns[key] = self._is_worth_returning(failed, layout, within, given)
        return given if self._returns[key] else within

    def _layout_to_stay_in(self, failed: _Failed) -> PreparedPlan | None:
        layout, hosts = self._running, _repartitioned(self._running)
        is_change = failed > self._failed or failed < self._failed
        if layout is None or hosts is None or not (self._can_move and is_change):
            return None
        is_lost = Holdings(hosts).lost(hosts.units.keys() - failed)
        return None if is_lost or (failed, layout.digest) in self._refused else layout

    def _is_worth_returning(
        self, failed: _Failed, layout: PreparedPlan, within: PreparedPlan, given: PreparedPlan
    ) -> bool:
        """The rejoining worker copies its state anyway, so only the additional copies count as a pause."""
        stays, goes = (copy_cost(self._job, layout.hosts, plan.hosts) for plan in (within, given))
        pause = max(0.0, goes.seconds - stays.seconds)
        return self._is_worth(within, given, goes, pause, failed, returned=sorted(map(str, self._failed - failed)))

    def observe(self, failed: _Failed, step: int, times: ComputeTimes) -> None:
        """Take the compute times of an iteration that is about to be committed."""
        self.compute, self._step = times.line(), step
        if failed != self._failed:
            if self._drift is not None:
                for worker in failed - self._failed:
                    self._drift.forget(worker)
            self._failed, self._has_searched_layout = failed, False
        running = self._running = self._last.get(failed) or self.plan_for(failed)  # another leader may have begun it
        is_moved, search = self._is_moved(running), self._search
        drift = self._drift if self._can_move or not is_moved else None
        if drift is not None:
            drift.observe(times, self._profile_of(running), by_stage=is_moved)
        if search is not None and (search.question.failed != failed or search.running is not running):
            search = self._search = None
        if search is not None and search.better is None:
            self._check_answer(search)
        is_own = (self._own is not None and self._own[0] == failed) or bool(self.own_text and not failed)
        if self._search is not None or running is None or is_own:
            return
        if self._can_move and not self._has_searched_layout and (failed or is_moved):
            self._has_searched_layout = True
            within = running.digest if _repartitioned(running) else ""
            self._start_search(_Search(Question(failed, moves=True, within=within), running))
        elif drift is not None and (self._changed is None or step >= self._changed + self._pause):
            self._search_for_times(drift, running)

    def _profile_of(self, plan: PreparedPlan | None) -> Profile:
        return self._job.prices if plan is None else self._times.get(plan.digest, self._job.prices)

    def _start_search(self, search: _Search) -> None:
        self._search = search
        self._ask(search.question, search.profile)

    def _search_for_times(self, drift: DriftMonitor, running: PreparedPlan) -> None:
        departure = drift.departed(self._profile_of(running))
        if departure is None:
            return
        for link in departure.slow_links:
            self._outbox.log("slow-link", step=self._step, **link)
        profile, is_moved = departure.profile, self._is_moved(running)
        question = Question(self._failed, moves=is_moved, profile=profile.digest(), compared=running.digest)
        self._start_search(_Search(question, running, profile, "; ".join(departure.causes)))

    def _check_answer(self, search: _Search) -> None:
        answer = self._answers.get(search.question)
        if answer is None:
            return
        del self._answers[search.question]  # the question may be asked again
        if search.profile is None and answer.plan is None:
            self._log(self._failed, False, cause=answer.error)
        if answer.plan is not None and self._is_better(search, answer.plan):
            search.better = answer.plan
            return
        self._search = None
        if search.profile is not None:  # the next departure is relative to these times
            self._times[search.running.digest] = search.profile

    def _is_better(self, search: _Search, plan: PreparedPlan) -> bool:
        running, before = search.running, plan.compared_period
        mode = common_mode(running.periods, plan.periods)
        after = plan.periods[mode]
        if search.profile is None:
            before = running.periods[mode]
        elif before is None or not after < before * (1 - MARGIN):
            return False
        elif not search.question.moves:
            return True
        cost = copy_cost(self._job, running.hosts, plan.hosts)
        # The pipeline drains, groups form, and the first iteration waits for its barrier: about an iteration.
        pause = before + cost.seconds
        if search.profile is None:
            return self._is_worth(running, plan, cost, pause, self._failed)
        return is_worth(before, after, pause, self._job.planner.iterations_between_changes * before)

    def _is_worth(
        self, current: PreparedPlan, candidate: PreparedPlan, cost: CopyCost, pause: float, failed: _Failed, **more: Any
    ) -> bool:
        mode, limit, section = (
            common_mode(current.periods, candidate.periods),
            candidate.layout_limit,
            self._job.planner,
        )
        before, after = current.periods[mode], candidate.periods[mode]
        until_change = section.iterations_between_changes * before
        if limit is not None and (limit.period is None or limit.period < before):
            more |= {"layout_limit": msgspec.to_builtins(limit), "cause": str(limit)}
        elif before <= after:
            more |= {"cause": "no layout is faster than the present one"}
        is_worth_it = section.move_when == "always" or is_worth(before, after, pause, until_change)
        return self._log(
            failed,
            before > after and is_worth_it,
            plan=candidate.digest,
            period_before=before,
            period=after,
            pause=pause,
            copy=cost.seconds,
            bytes=cost.bytes,
            until_change=until_change,
            move_when=section.move_when,
            **more,
        )

    def _log(self, failed: _Failed, moves: bool, **details: Any) -> bool:
        names = sorted(map(str, failed))
        self._outbox.log("layout", step=self._step + 1, failed=names, moves=moves, **details)
        return moves


def first_plan(job: PricedJob) -> str:
    """1F1B, which needs no times and holds what Megatron's loop does, with I and W; empty if the job states either."""
    shape = job.shape
    if job.times != TimesSection() or job.memory.limit is not None:
        return ""
    size = None if shape.micro_batches % shape.ranks == 0 else shape.micro_batches
    schedule = one_f_one_b(shape) if shape.chunks == 1 else interleaved(shape, group_size=size)
    if job.planner.decoupled:
        programs = {worker: chain.from_iterable(map(_halves, schedule.program(worker))) for worker in schedule.live}
        schedule = Schedule.build(shape, programs)
    return schedule.dumps()


def _halves(instruction: Instruction) -> Sequence[Instruction]:
    if not isinstance(instruction, Backward):
        return (instruction,)
    return [half(instruction.stage, instruction.micro_batch) for half in (BackwardInput, BackwardWeight)]


def _repartitioned(plan: PreparedPlan | None) -> Hosts | None:
    return plan.hosts if plan is not None and plan.hosts is not None and plan.hosts.cut and plan.is_kept else None
