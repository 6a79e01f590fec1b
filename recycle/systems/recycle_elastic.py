"""ReCycle with elastic stages: re-route immediately, and move layers at the next boundary if that pays.

`solve.layout` finds a layout for the number of live workers by list scheduling. The layout is adopted at the next
iteration boundary if its gain until the next change exceeds the pause for copying.

Assumptions: workers are alike, so the first set with a number of live workers determines that number's layout. Copies
are counted from the fault-free layout. Every host has all of the optimizer's state.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from recycle.job.pricing import profile_of_layout
from recycle.plans import Plan, Vector, plan_key
from recycle.solve.effort import Deadline
from recycle.solve.layout.elastic import quick_elastic_plan
from recycle.systems.recycle import PlanConfiguration, ReCycle
from recycle.systems.scenario import Scenario
from recycle.systems.system import Change, DoesNotFit, Loss, Nodes, State

_LAYOUTS: dict[tuple[str, int], Plan | None] = {}
"""Layouts by cache key of the job and number of live workers, kept for the process: the same for every trace."""


class ElasticReCycle(ReCycle):
    name = "recycle_elastic"
    copies = 0

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._key = plan_key(self.job, (0,) * self.job.shape.ranks)

    def _is_searched(self, vector: Vector) -> bool:
        return True

    def begin(self, live: Nodes) -> State | DoesNotFit:
        state = super().begin(live)
        if isinstance(state, PlanConfiguration) and (plan := self._layout(state)) is not None:
            return self._with_layout(state, plan)
        return state

    def change(self, state: State, failed: Nodes, joined: Nodes) -> Change:
        if isinstance(state, PlanConfiguration) and state.reconsider and not failed and not joined:
            plan = self._layout(state)
            assert plan is not None
            amount, seconds = self._copies(plan)
            pause = dataclasses.replace(self.scenario.pause(detected=False), copy=seconds)
            return Change(state=self._with_layout(state, plan), pause=pause, bytes=amount, event="move layers")
        change = super().change(state, failed, joined)
        after = change.state
        if not isinstance(after, PlanConfiguration) or (plan := self._layout(after)) is None:
            return change
        if change.loss is Loss.CHECKPOINT:  # all workers read their layers from a checkpoint
            return dataclasses.replace(change, state=self._with_layout(after, plan))
        seconds = self.scenario.pauses.rebuild + self._copies(plan)[1]
        pays = (after.period - plan.period) * self._iterations_until_change() > seconds
        return dataclasses.replace(change, state=dataclasses.replace(after, reconsider=pays))

    def _with_layout(self, state: PlanConfiguration, plan: Plan) -> PlanConfiguration:
        hosts = sum(bool(stages) for stages in plan.schedule.placement)
        return dataclasses.replace(
            state,
            period=plan.period,
            reconsider=False,
            idle=len(self.scenario.slots(state.live)) - hosts,
            schedules=lambda: [(plan.schedule, profile_of_layout(self.job, self.profile, plan.shape))],
        )

    def _layout(self, state: PlanConfiguration) -> Plan | None:
        count = len(self.scenario.slots(state.live))
        key = self._key, count
        if key not in _LAYOUTS:
            live = {self.job.shape.worker_at(slot) for slot in self.scenario.slots(state.live)}
            dead = frozenset(self.job.shape.workers()) - live
            _LAYOUTS[key] = quick_elastic_plan(self.job, dead, Deadline(None))
        plan = _LAYOUTS[key]
        return plan if plan is not None and plan.period < state.period else None

    def _copies(self, plan: Plan) -> tuple[float, float]:
        busy: dict[str, float] = defaultdict(float)
        total = 0.0
        for move in plan.moves:
            amount = sum(layer.state for layer in self.scenario.layers[slice(*move.units)])
            total += amount
            for end in (f"from {move.source}", f"to {move.worker}"):
                busy[end] += amount
        return total, self.scenario.copy_seconds(max(busy.values(), default=0.0))
