"""Schedule families: pure functions Shape -> Schedule, registered here by their names. A file holds one, or a few that
share their construction. `register` enters a family that is defined outside the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from recycle.errors import RecycleError, ScheduleError
from recycle.ir.families.dualpipe_v import dualpipe_v as dualpipe_v
from recycle.ir.families.loop import gpipe as gpipe
from recycle.ir.families.loop import interleaved as interleaved
from recycle.ir.families.loop import looped_bfs as looped_bfs
from recycle.ir.families.loop import one_f_one_b as one_f_one_b
from recycle.ir.families.loop import zb_h1 as zb_h1
from recycle.ir.families.loop import zb_h2 as zb_h2
from recycle.ir.families.memory_capped import v_half as v_half
from recycle.ir.families.memory_capped import v_min as v_min
from recycle.ir.families.memory_capped import zb_v as zb_v
from recycle.ir.schedule import Schedule

FAMILIES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}

BUILT_IN = tuple(FAMILIES)
"""The families of the package. Searches of the planner begin with these alone, so that plans do not depend on what is
installed."""
TWO_CHUNKS = frozenset({"zb-v", "v-half", "v-min", "dualpipe-v"})
"""Families on the V, where each worker hosts two stages."""

F = TypeVar("F", bound=Callable[..., Schedule])


def register(name: str) -> Callable[[F], F]:
    """Decorator that enters a family under `name`; the decorated function itself is returned.

    What the family raises besides errors of recycle is raised as a ScheduleError that names the family.

    Raises:
        TypeError: it is not a function.
        ValueError: there is another family of this name, or the name is not one word.
    """

    def enter(family: F) -> F:
        if not callable(family):
            raise TypeError(f"a family is a function of a shape, not {type(family).__name__}")
        if name in FAMILIES:
            raise ValueError(f"there is a family {name} already")
        if not name or name.split() != [name]:
            raise ValueError(f"{name!r} is not a name of one word")
        FAMILIES[name] = _guarded(name, family)
        return family

    return enter


def _guarded(name: str, family: Callable[..., Any]) -> Callable[..., Schedule]:
    @wraps(family)
    def build(*arguments: Any, **options: Any) -> Schedule:
        try:
            schedule = family(*arguments, **options)
        except RecycleError:
            raise
        except Exception as error:
            raise ScheduleError(f"family {name}: {family.__module__} raised {type(error).__name__}: {error}") from error
        if not isinstance(schedule, Schedule):
            raise ScheduleError(
                f"family {name}: {family.__module__} returned {type(schedule).__name__}, not a Schedule"
            )
        return schedule

    return build
