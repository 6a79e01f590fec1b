"""Schedule families: pure functions Shape -> Schedule, registered by name. `register` adds other packages' families."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from recycle.errors import RecycleError, ScheduleError
from recycle.ir.families.dualpipe_v import dualpipe_v as dualpipe_v
from recycle.ir.families.loop import (
    gpipe as gpipe,
    interleaved as interleaved,
    looped_bfs as looped_bfs,
    one_f_one_b as one_f_one_b,
    zb_h1 as zb_h1,
    zb_h2 as zb_h2,
)
from recycle.ir.families.memory_capped import v_half as v_half, v_min as v_min, zb_v as zb_v
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
"""The families of the package. The planner's searches start from these only, so plans do not depend on plugins."""
TWO_CHUNKS = frozenset({"zb-v", "v-half", "v-min", "dualpipe-v"})

F = TypeVar("F", bound=Callable[..., Schedule])


def register(name: str) -> Callable[[F], F]:
    """Decorator that registers a family under `name`; its exceptions become ScheduleErrors that name the family.

    Raises:
        TypeError: the family is not a function.
        ValueError: the name is taken, or is not one word.
    """

    def enter(family: F) -> F:
        if not callable(family):
            raise TypeError(f"a family is a function of a shape, not {type(family).__name__}")
        if name in FAMILIES:
            raise ValueError(f"the family {name} is already registered")
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
