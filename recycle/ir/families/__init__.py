"""Schedule families: pure functions Shape -> Schedule, registered here by their names. A file holds one, or a few that
share their construction."""

from __future__ import annotations

from collections.abc import Callable

from recycle.ir.families.breadth_first import gpipe as gpipe
from recycle.ir.families.breadth_first import looped_bfs as looped_bfs
from recycle.ir.families.dualpipe_v import dualpipe_v as dualpipe_v
from recycle.ir.families.interleaved import interleaved as interleaved
from recycle.ir.families.one_f_one_b import one_f_one_b as one_f_one_b
from recycle.ir.families.v_capped import v_half as v_half
from recycle.ir.families.v_capped import v_min as v_min
from recycle.ir.families.v_capped import zb_v as zb_v
from recycle.ir.families.zero_bubble import zb_h1 as zb_h1
from recycle.ir.families.zero_bubble import zb_h2 as zb_h2
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

TWO_CHUNKS = frozenset({"zb-v", "v-half", "v-min", "dualpipe-v"})
"""Families on the V, where each worker hosts two stages."""
