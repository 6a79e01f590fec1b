"""Plans: schedules for failure vectors as files, the roles in them, and the library that finds them.

Begin with `plan`, then `roles` and `library`.
"""

from recycle.plans.library import (
    Entry,
    PlanLibrary,
    cache_directory,
    cache_path,
    cached_plan,
    errors,
    plan_key,
)
from recycle.plans.plan import LayoutLimit, PlacedPeriod, Plan, RaisedLimit, schedule_hash, with_updates_of
from recycle.plans.roles import (
    Move,
    Vector,
    arrange,
    assign_roles,
    count_vectors,
    dead_roles,
    failure_vector,
    likely_vectors,
    moves_needed,
    rename,
    require_hosts,
    touched,
)

__all__ = [
    "Entry",
    "LayoutLimit",
    "Move",
    "PlacedPeriod",
    "Plan",
    "PlanLibrary",
    "RaisedLimit",
    "Vector",
    "arrange",
    "assign_roles",
    "cache_directory",
    "cache_path",
    "cached_plan",
    "count_vectors",
    "dead_roles",
    "errors",
    "failure_vector",
    "likely_vectors",
    "moves_needed",
    "plan_key",
    "rename",
    "require_hosts",
    "schedule_hash",
    "touched",
    "with_updates_of",
]
