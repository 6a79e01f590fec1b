"""How much later each instruction starts in the second of two iterations, as the browser colours lanes by it and
draws it below them.

It gets one float32 per operation, NaN where the other timeline has no such instruction, once per content; which of the
five shades an operation takes follows from two lengths of time that go with the address.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from recycle.ir.simulate import Timeline
from viz.analysis.differences import Matches
from viz.figures.palette import SHADES
from viz.lane_cache import BoundedCache, content_hash
from viz.lanes import LaneTable

LATE = 0.01
"""Share of the first one's makespan from which a start counts as another."""
MOST_BYTES = 100_000_000


def edges_of(first: Timeline, matches: Matches) -> tuple[float, float]:
    """Two shades either way: up to half of the largest difference, and beyond; in the unit of the timelines."""
    some = LATE * first.makespan
    return some, max(some, float(np.abs(matches.delta).max(initial=0.0)) / 2)


def later(table: LaneTable, matches: Matches) -> npt.NDArray[np.float32]:
    """How much later each operation of `table`, the second one's lanes, starts than in the first; NaN: not there."""
    rows = int(max(table.instruction_id.max(initial=0), matches.second.max(initial=0))) + 1
    of_row = np.full(rows, np.nan, dtype=np.float32)
    of_row[matches.second] = matches.delta
    return of_row[table.instruction_id]


class Shades:
    """Differences by the hash of their bytes; the last ones stay. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: BoundedCache[str, bytes] = BoundedCache(MOST_BYTES, len)

    def put(self, differences: npt.NDArray[np.float32]) -> str:
        """Keep them and return where the browser finds them."""
        content = differences.astype("<f4").tobytes()
        digest = content_hash(content)
        self._kept.put(digest, content)
        return f"shades/{digest}.bin"

    def get(self, digest: str) -> bytes | None:
        """The bytes of that hash, None where they are no longer kept."""
        return self._kept.get(digest)


def for_canvas(address: str, edges: tuple[float, float], titles: tuple[str, str], *, is_shaded: bool) -> dict[str, Any]:
    """What the canvas needs: where the differences are, the titles of the first and the second timeline, and the shades
    where it colours by them."""
    paints, (title, name) = [asdict(paint) for paint in SHADES], titles
    return {
        "address": address,
        "edges": edges,
        "title": title,
        "name": name,
        "paints": paints,
        "is_shaded": is_shaded,
    }
