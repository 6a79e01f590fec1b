"""Schedule families: each a pure function Shape -> Schedule in its own file, registered here by its name."""

from __future__ import annotations

from collections.abc import Callable

from recycle.ir.families.dualpipe_v import dualpipe_v
from recycle.ir.families.gpipe import gpipe
from recycle.ir.families.interleaved import interleaved
from recycle.ir.families.looped_bfs import looped_bfs
from recycle.ir.families.one_f_one_b import one_f_one_b
from recycle.ir.families.v_half import v_half
from recycle.ir.families.v_min import v_min
from recycle.ir.families.zb_h1 import zb_h1
from recycle.ir.families.zb_h2 import zb_h2
from recycle.ir.families.zb_v import zb_v
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

__all__ = [
    "FAMILIES",
    "TWO_CHUNKS",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
