"""Schedule families: each a pure function Shape -> Schedule in its own file, registered here by its name."""

from __future__ import annotations

from collections.abc import Callable

from recycle.ir.families.gpipe import gpipe
from recycle.ir.families.one_f_one_b import one_f_one_b
from recycle.ir.schedule import Schedule

FAMILIES: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}

__all__ = ["FAMILIES", "gpipe", "one_f_one_b"]
