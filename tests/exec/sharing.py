"""A plan with more lanes at some workers than a worker has communicators for lanes."""

from recycle import Schedule, Worker, lower
from recycle.job import Job, price
from recycle.plans import Plan
from recycle.solve.planner import plan_for_training


def shared_plan() -> Schedule:
    """The plan for one dead worker of 6 x 4, whose neighbors have lanes to all of its peers."""
    keys = "[shape]\npipelines = 6\nranks = 4\nmicro_batches = 12\n[memory]\nlimit = 8\n[planner]\nsteps = 1\n"
    plan = Plan.from_text(plan_for_training(price(Job.from_toml(keys)), (0, 1, 0, 0), True), "plan")
    return lower(plan.for_processes(frozenset([Worker(1, 1)])).schedule)
