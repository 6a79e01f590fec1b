"""The planner of the simulated world."""

from __future__ import annotations

import random
from collections.abc import MutableMapping

from recycle.exec.leader.actions import PreparedPlan, Question
from recycle.job import PricedJob
from recycle.plans.hosting import Hosts, joined, layers_of, without


def draw_plan(
    job: PricedJob, question: Question, plans: MutableMapping[str, PreparedPlan], draws: random.Random
) -> PreparedPlan | None:
    """A plan in the given stages, in the layout at hand, or in one that is drawn; None where there is none.

    Args:
        plans: by their hash; the new one is added.
    """
    live = [worker for worker in job.shape.workers() if worker not in question.failed]
    most = job.shape.stages
    has_dead_rank = len({worker.rank for worker in live}) < job.shape.ranks
    cut: tuple[int, ...] = ()
    if question.within and not question.moves:
        before = plans[question.within].hosts
        assert before is not None
        stages, cut = {worker: before.stages.get(worker, ()) for worker in live}, before.cut
    elif question.moves or (job.planner.layout == "elastic" and has_dead_rank):
        if len(live) < most:
            return None
        layers = sum(layers_of(job))
        ends = sorted(draws.sample(range(1, layers), most - 1))
        cut = tuple(end - begin for begin, end in zip([0, *ends], [*ends, layers], strict=True))
        order = draws.sample(live, len(live))
        stages = {worker: (place % most,) for place, worker in enumerate(order)}
    else:
        given = Hosts.at_start(job, None).stages
        stages = {worker: given[worker] for worker in live}
    hosts = Hosts.of(job, stages, cut)
    if without([(0, hosts.count)], joined(units for ranges in hosts.units.values() for units in ranges)):
        return None
    digest = f"{' '.join(f'{worker}:{stages[worker]}' for worker in live)} {cut}"
    factor = 0.5 if question.moves else 1.0
    plan = PreparedPlan(digest, {worker: worker for worker in live}, {"barrier": 2.0 * factor}, hosts=hosts)
    if job.planner.staggered:
        plan = PreparedPlan(digest, plan.roles, {**plan.periods, "staggered": 1.5 * factor}, hosts=hosts)
    plans[digest] = plan
    return plan
