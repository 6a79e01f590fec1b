"""Policy search: make small random changes to a list scheduling policy and keep those that are not worse.

Changes caps on micro-batches in flight, the number of waiting W, and preferences, for runs of stages. The result
depends only on the seed and the number of steps, unless the deadline ends the search.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from recycle.solve.constants import POLICY_RATIO
from recycle.solve.effort import Effort, Incumbent
from recycle.solve.problem import Problem
from recycle.solve.search.event_loop import UNLIMITED
from recycle.solve.search.kernels import load_if_worth_it
from recycle.solve.search.list_scheduling import Policy, groups, schedule_by_policy
from recycle.solve.search.order_kernels import evaluate

_PER_STAGE = ("hold", "hold", "weights", "forward_first", "weight_first")
"""Fields per stage, weighted by repetition; the hold matters most."""


def vary_policy(problem: Problem, start: Incumbent, policy: Policy, effort: Effort) -> Incumbent:
    """Search locally over policies; return `start` if the policy's own order is much worse."""
    random = Random(effort.seed)
    load_if_worth_it(problem, effort.orders, effort.deadline)
    own = evaluate(problem, schedule_by_policy(problem, policy)).period
    best, current, current_period = start, policy, max(own, start.period)
    if own > POLICY_RATIO * start.period:
        return start
    while effort.claim_order(problem, best.period):
        candidate = _neighbour(problem, current, random)
        result = evaluate(problem, schedule_by_policy(problem, candidate))
        if result.period <= current_period:
            current, current_period = candidate, result.period
            if result.period < best.period:
                best = result
        effort.report("searching", best.period)
    return best


def _neighbour(problem: Problem, policy: Policy, random: Random) -> Policy:
    lists: dict[str, list[Any]] = {name: list(getattr(policy, name)) for name in _PER_STAGE}
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(_PER_STAGE)
        span = _some_stages(problem.shape.stages, random)
        if name in ("forward_first", "weight_first"):
            lists[name][span.start : span.stop] = [random.random() < 0.5] * len(span)
        elif name == "weights" or problem.shape.chunks == 1:
            _change(lists[name], span, problem.shape.stages, name == "weights", random)
    group = random.choice(groups(problem)) if problem.shape.chunks > 1 and random.random() < 0.15 else policy.group
    evenness = policy.evenness
    if not problem.is_even and random.random() < 0.15:
        evenness = random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
    changed: dict[str, Any] = {name: tuple(entries) for name, entries in lists.items()}
    return replace(policy, group=group, evenness=evenness, **changed)


def _some_stages(stages: int, random: Random) -> range:
    kind, first = random.random(), random.randrange(stages)
    if kind < 0.35:
        return range(first, first + 1)
    if kind < 0.8:
        return range(first, min(stages, first + 1 + random.randrange(max(1, stages // 2))))
    return range(stages)


def _change(entries: list[int], span: range, stages: int, rising: bool, random: Random) -> None:
    how = random.randrange(4)
    step, more, slope = random.choice((-2, -1, 1, 2)), random.randint(0, 6), random.choice((1, 1, 1, 1.25, 1.5, 2))
    for s in span:
        line = s if rising else stages - s
        if how == 0:
            entries[s] = UNLIMITED
        elif how == 1:
            entries[s] = max(1, (entries[s] if entries[s] < UNLIMITED else 2 * line) + step)
        elif how == 2:
            entries[s] = max(1, line + more)
        else:
            entries[s] = max(1, int(line * slope) + more - 1)
