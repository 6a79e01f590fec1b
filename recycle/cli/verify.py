"""`recycle verify`: the bound of a plan, proven again from its certificate without the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from recycle.cli.terminal import Result
from recycle.errors import PlanError
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.job.sections import AUTO
from recycle.job.shape import Placing
from recycle.plans import Entry, Plan, PlanLibrary
from recycle.plans.library import job_key
from recycle.plans.verify import NotProven, verify as verify_plan


def verify(plan: Path, job: Path | None = None) -> Result:
    """Prove the bound of a plan again from its certificate, without the planner, and simulate its period.

    Exit status: 0 proven, 1 not proven, 2 unreadable or bad arguments.

    Example: **recycle verify plan.json --job job.toml**

    Args:
        plan: plan file, or folder of a plan library.
        job: job file that the plan must be for.
    """
    files = PlanLibrary(plan).files() if plan.is_dir() else [plan]
    if not files:
        raise PlanError(f"{plan}: has no plan; recycle plan JOB --failures N --library {plan} makes some")
    keys = None if job is None else _keys(Job.load(job))
    verdicts = [_verdict(file, keys) for file in files]
    proven = all(verdict["proven"] for verdict in verdicts)
    figures = {"proven": proven, "plans": verdicts} if plan.is_dir() else verdicts[0]
    return Result(figures, [_line(**verdict) for verdict in verdicts], int(not proven))


def _keys(job: Job) -> set[str]:
    placements = get_args(Placing) if job.grid.placement == AUTO else [job.grid.placement]
    return {job_key(price(job.placed(placement))) for placement in placements}


def _verdict(file: Path, keys: set[str] | None) -> dict[str, Any]:
    schedule = Schedule.load(file)
    plan = Plan.from_schedule(schedule, str(file))
    rules = [] if plan.certificate is None else list(dict.fromkeys(rule for rule, *_ in plan.certificate.rows))
    bound, period, reason = None, plan.period, None
    try:
        if plan.fixed_bound is not None:
            raise NotProven("its bound is about all elastic layouts, which no rule covers; plan with --layout fixed")
        if keys is not None and Entry.of(plan).job not in keys:
            raise NotProven("the plan is for another job")
        bound, period = verify_plan(schedule, str(file))
    except NotProven as error:
        reason = str(error)
    figures = {"bound": bound, "period": period, "gap": bound and max(0.0, period / bound - 1), "rules": rules}
    return {"file": str(file), "proven": bound is not None, **figures, "reason": reason}


def _line(file: str, bound: float | None, period: float, gap: float, rules: list[str], reason: str, **_: Any) -> str:
    if bound is None:
        return f"{file}: not proven: {reason}"
    return f"{file}: no period is below {bound:g}; the plan's is {period:g}, gap {gap:.1%} (rules: {', '.join(rules)})"
