"""Grouping of edges: the compiled counting sort gives what a stable sort gives."""

from __future__ import annotations

import numpy as np

from recycle.ir.compiled import COMPILE_FROM
from recycle.ir.event_graph import group_edges


def test_many_edges_are_grouped_as_a_stable_sort_groups_them() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 7, 12 * COMPILE_FROM):
        values, keys = rng.integers(0, 1 << 40, count), rng.integers(0, 900, count)
        offsets, grouped = group_edges(values, keys, 1000)
        assert (np.diff(offsets) == np.bincount(keys, minlength=1000)).all()
        assert (grouped == values[np.argsort(keys, kind="stable")]).all()
