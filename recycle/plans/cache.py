"""Plans that outlive a run: one file per plan in the user's cache, named by everything that the plan depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from recycle.errors import RecycleError
from recycle.ir.check import check
from recycle.ir.event_graph import EventGraph, lowered_graph
from recycle.ir.schedule import Schedule
from recycle.ir.simulate import time_graph
from recycle.job import PricedJob
from recycle.plans.plan import VERSION, Plan

BESIDE = ("ahead", "move", "iterations_between_changes")
"""Keys of `[planner]` that say which vectors to plan, not how: the plan of a vector does not depend on them."""


def plan_key(job: PricedJob, vector: Sequence[int]) -> str:
    """Content hash of everything that a plan of `vector` depends on: the cache's file name."""
    asked = {
        "version": VERSION,
        "shape": msgspec.to_builtins(job.grid),
        "profile": job.prices.digest(),
        "limits": job.limits,
        "planner": {key: value for key, value in msgspec.to_builtins(job.planner).items() if key not in BESIDE},
        "vector": list(vector),
    }
    if job.ties:
        asked["ties"] = job.ties
    if job.train.reduce_buckets > 1:
        asked["buckets"] = job.train.reduce_buckets
    if job.train.sharded_optimizer:
        asked["gathers"] = True
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where plans outlive a run: $RECYCLE_CACHE/plans, else $XDG_CACHE_HOME/recycle/plans, else ~/.cache."""
    if environment.get("RECYCLE_CACHE"):
        return Path(environment["RECYCLE_CACHE"]) / "plans"
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(environment.get("HOME") or Path.home()) / ".cache") / "recycle" / "plans"


def cache_path(directory: str | Path, job: PricedJob, vector: Sequence[int]) -> Path:
    """File of the plan of `vector` in a cache directory."""
    return Path(directory) / f"{plan_key(job, vector)}.json"


def cached_plan(path: str | Path, job: PricedJob, vector: Sequence[int]) -> Plan | None:
    """The plan in `path` if it is whole, of this job and vector, valid, and its figures are true; else None."""
    try:
        plan = Plan.load(path)
        limits = job.limits
        fits = (
            plan.shape == job.shape
            and plan.vector == tuple(vector)
            and plan.schedule.ties == job.ties
            and plan.schedule.buckets == job.train.reduce_buckets
            and plan.schedule.gathers == job.train.sharded_optimizer
            and plan.profile == job.prices.digest()
            and plan.limits == (None if limits is None else tuple(limits))
        )
        return plan if fits and is_true(plan, job) else None
    except RecycleError:
        return None


def is_true(plan: Plan, job: PricedJob) -> bool:
    """Whether a plan of the job passes `check` under its limits, and takes as long as it says."""
    graph = lowered_graph(plan.schedule)
    if errors(plan.schedule, job, graph):
        return False
    timeline = time_graph(graph, job.prices)
    stated, found = (plan.period, plan.makespan), (timeline.period, timeline.makespan)
    return bool(np.allclose(stated, found, rtol=1e-6)) and plan.lower_bound <= plan.period * (1 + 1e-9)


def errors(schedule: Schedule, job: PricedJob | None, graph: EventGraph | None = None) -> list[str]:
    """What `check` has against running the schedule, under the job's limits if there is one; empty when nothing.

    Args:
        graph: as of `check`.
    """
    profile, limits = (None, None) if job is None else (job.prices, job.limits)
    found = check(schedule, profile=profile, limits=limits, graph=graph)
    return [finding.message for finding in found if finding.severity == "error"]
