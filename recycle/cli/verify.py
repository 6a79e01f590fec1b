"""`recycle verify`: the bound of a plan, proven again from its certificate without the planner."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from recycle.cli.terminal import Result, print_table
from recycle.errors import PlanError
from recycle.ir.schedule import Schedule
from recycle.job import Job, price
from recycle.plans import Entry, Plan
from recycle.plans.library import MANIFEST, job_key
from recycle.plans.verify import NotProven
from recycle.plans.verify import verify as verify_plan


def verify(plan: Path, job: Path | None = None) -> Result:
    """Prove the bound of a plan again from its certificate, without the planner, and simulate its period.

    Exit status: 0 proven, 1 not proven, 2 unreadable or bad arguments.

    Example: **recycle verify plan.json --job job.toml**

    Args:
        plan: plan file, or folder of a plan library.
        job: job file that the plan must be for.
    """
    files = sorted(file for file in plan.glob("*.json") if file.name != MANIFEST) if plan.is_dir() else [plan]
    if not files:
        raise PlanError(f"{plan}: has no plan; recycle plan JOB --failures N --library {plan} makes some")
    key = None if job is None else job_key(price(Job.load(job)))
    plans = [_verified(file, key) for file in files]
    proven = all(each["proven"] for each in plans)
    figures = {"proven": proven, "plans": plans} if plan.is_dir() else plans[0]
    return Result(figures, partial(_print_verdicts, plans), int(not proven))


def _verified(file: Path, key: str | None) -> dict[str, Any]:
    schedule = Schedule.load(file)
    plan = Plan.from_schedule(schedule, str(file))
    rules = [] if plan.certificate is None else list(dict.fromkeys(rule for rule, *_ in plan.certificate.rows))
    figures = {"file": str(file), "bound": None, "period": plan.period, "gap": None, "rules": rules, "reason": None}
    try:
        if key is not None and Entry.of(plan).job != key:
            raise NotProven("the plan is for another job")
        bound, period = verify_plan(schedule, str(file))
    except NotProven as reason:
        return {**figures, "proven": False, "reason": str(reason)}
    return {**figures, "proven": True, "bound": bound, "period": period, "gap": max(0.0, period / bound - 1)}


def _print_verdicts(plans: list[dict[str, Any]]) -> None:
    rows = [
        (plan["file"], f"{plan['bound']:g}", f"{plan['period']:g}", f"{plan['gap']:.1%}", " ".join(plan["rules"]))
        for plan in plans
        if plan["proven"]
    ]
    if rows:
        print_table(("plan", "proven bound", "period", "gap", "rules"), rows, left=("plan", "rules"))
    for plan in plans:
        if not plan["proven"]:
            print(f"{plan['file']}: not proven: {plan['reason']}")
