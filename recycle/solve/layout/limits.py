"""Explain why no layer moves, and find the smallest memory limits of the job with which layers would move.

Each value tried is planned by list scheduling: steps double until a value allows a faster layout, then a bisection
follows. One limit is reported if one suffices, the limit on activations before that on state; otherwise both. Limits:
assumes that a larger value allows all that a smaller one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import ceil, inf, log
from typing import TypeVar

import msgspec

from recycle.ir.memory import held_activations, static_bytes
from recycle.ir.schedule import Schedule
from recycle.job import PricedJob
from recycle.job.pricing import byte_limit, profile_of_layout, size_text
from recycle.job.shape import Worker
from recycle.plans import LayoutLimit, Plan, RaisedLimit
from recycle.solve.constants import CLOSE
from recycle.solve.effort import Deadline
from recycle.solve.layout.elastic import LayoutPlanner
from recycle.solve.layout.ranges import fitting
from recycle.solve.layout.units import Units, count_units

LIMIT_SECONDS = 1.0, 5.0
"""Range of the wall-clock limit of the search, which is `[planner] seconds`."""
BYTES_STEP = 1.02
"""Factor between the limits in bytes that are tried."""

Value = TypeVar("Value")
Limit = int | list[int] | str | None
"""Value of `[memory] limit`."""


class _OutOfTime(Exception):
    pass


def layout_limit(
    job: PricedJob,
    failed: Iterable[Worker],
    period: float,
    bound: float,
    deadline: Deadline,
    within: Schedule | None = None,
) -> LayoutLimit:
    """Explain why no layout of `job` without `failed` has a shorter period than the given one.

    Args:
        period: of the plan in which no layer moves; infinite without such a plan.
        bound: lower bound on the period of any layout.
        within: as in `elastic_plan`.
    """
    if period <= bound * CLOSE:
        return LayoutLimit("bound")
    search = _Search(job, frozenset(failed), period, deadline, within)
    try:
        return search.find()
    except _OutOfTime:
        return LayoutLimit("time")


@dataclass(frozen=True)
class _Search:
    job: PricedJob
    failed: frozenset[Worker]
    period: float
    deadline: Deadline
    within: Schedule | None

    def find(self) -> LayoutLimit:
        memory = self.job.memory
        if memory.limit is not None and (faster := self._layout(memory.state_limit, None)) is not None:
            limit, plan = self._raised_limit(memory.state_limit, faster)
            return LayoutLimit("limits", (limit,), plan.period)
        if (raised := self._raised_state(memory.limit)) is not None:
            return LayoutLimit("limits", (raised[0],), raised[1].period, self._layers(raised[1]))
        if memory.limit is None or (raised := self._raised_state(None)) is None:
            return LayoutLimit("none")
        state, faster = raised
        assert isinstance(state.needed, float)
        limit, plan = self._raised_limit(state.needed, faster)
        return LayoutLimit("limits", (state, limit), plan.period, self._layers(plan))

    def _raised_state(self, limit: Limit) -> tuple[RaisedLimit, Plan] | None:
        values = _state_limits(Units.from_job(self.job), self.job.memory.state_limit)
        smallest = _smallest(values, lambda value: self._layout(value, limit))
        if smallest is None:
            return None
        return RaisedLimit("memory.state_limit", self.job.memory.state_limit, smallest[0]), smallest[1]

    def _raised_limit(self, state_limit: float, faster: Plan) -> tuple[RaisedLimit, Plan]:
        now = self.job.memory.limit
        assert now is not None
        values = _limits_up_to(self.job, now, faster)
        smallest = _smallest(values, lambda value: self._layout(state_limit, value), faster)
        assert smallest is not None
        return RaisedLimit("memory.limit", now, smallest[0]), smallest[1]

    def _layout(self, state_limit: float, limit: Limit) -> Plan | None:
        if self.deadline.is_over:
            raise _OutOfTime
        memory = msgspec.structs.replace(self.job.memory, state_limit=state_limit, limit=limit)
        job = msgspec.structs.replace(self.job, memory=memory)
        planner = LayoutPlanner(job, self.failed, self.within)
        below = self.period
        if limit != self.job.memory.limit:  # the job's stages may profit from the limit as well
            below = min(below, _work_of_given(job, planner.units, planner.live))
        listed = planner.list_hostings(below / CLOSE, self.deadline)
        plans = (planner.plan(hosting) for hosting in listed if hosting.copied)
        return next((plan for plan in plans if plan is not None and plan.period * CLOSE < below), None)

    def _layers(self, faster: Plan) -> tuple[int, int] | None:
        units = Units.from_job(self.job)
        allowed = max(1, *(fitting(units.static[begin:], units.most_static) for begin in range(len(units))))
        schedule = faster.schedule
        needed = max(count_units(tuple(schedule.unit_runs(worker))) for worker in schedule.live)
        return (allowed, needed) if needed > allowed else None


def _work_of_given(job: PricedJob, units: Units, live: Sequence[Worker]) -> float:
    most = 0.0
    for rank, parts in enumerate(units.fault_free):
        pace = sum(1 / job.prices.speed_of(worker) for worker in live if worker.rank == rank)
        seconds = sum(float(units.seconds[begin:end].sum()) for begin, end in parts)
        most = max(most, job.shape.global_micro_batches * seconds / pace if pace else inf)
    return most


def _state_limits(units: Units, now: float) -> list[float]:
    heaviest = max(units.static_of(parts) for parts in units.fault_free)
    upto = [0.0, *accumulate(units.static.tolist())]
    ranges = {later - before for before, later in combinations(upto, 2)}
    if units.chunks > 1:  # a worker may hold a range in addition to its present units
        ranges |= {units.static_of(parts) + more for parts in set(units.fault_free) for more in ranges}
    hundredths = {ceil(static / heaviest * 100 - 1e-6) for static in ranges if static <= upto[-1] * (1 + 1e-9)}
    return [value / 100 for value in sorted(hundredths) if value / 100 > now]


def _limits_up_to(job: PricedJob, now: int | list[int] | str, faster: Plan) -> Sequence[int | list[int] | str]:
    schedule, profile = faster.schedule, profile_of_layout(job, job.prices, faster.schedule.shape)
    peaks, _ = held_activations(schedule, profile, in_bytes=isinstance(now, str))
    if isinstance(now, str):
        room = byte_limit(job, job.prices)
        assert room is not None
        most = max(fixed + peak for fixed, peak in zip(static_bytes(schedule, profile), peaks, strict=True))
        steps = ceil(log(max(most / room, 1.0)) / log(BYTES_STEP))
        return [size_text(room * BYTES_STEP**step, now) for step in range(1, max(1, steps) + 1)]
    entries = now if isinstance(now, list) else [now]
    over = [peak for w, peak in enumerate(peaks) if peak > entries[w % len(entries)]]
    raised = range(min(entries) + 1, max(ceil(max(over, default=0.0) - 1e-6), min(entries) + 1) + 1)
    return [[max(entry, value) for entry in now] for value in raised] if isinstance(now, list) else raised


def _smallest(
    values: Sequence[Value], layout_with: Callable[[Value], Plan | None], largest: Plan | None = None
) -> tuple[Value, Plan] | None:
    below, at, plan, count = -1, len(values) - 1, largest, len(values)
    if plan is None:
        at = 0
        while at < count and (plan := layout_with(values[at])) is None:
            below, at = at, count if at == count - 1 else min(count - 1, 2 * at + 1)
    if plan is None:
        return None
    with contextlib.suppress(_OutOfTime):
        while at - below > 1:
            middle = (below + at) // 2
            if (tried := layout_with(values[middle])) is None:
                below = middle
            else:
                at, plan = middle, tried
    return values[at], plan
