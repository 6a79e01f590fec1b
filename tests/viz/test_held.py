"""What all workers hold: the same as each worker's own curve, at every start and end."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from recycle import Profile, Schedule, Shape, simulate
from recycle.ir.families import one_f_one_b
from viz.analysis.memory import encode_held, held_by_all, memory_curve
from viz.app import build_app
from viz.lane_cache import CachedLanes, Explainer
from viz.lanes import LaneTable
from viz.sources import schedule_source


def shown(schedule: Schedule, profile: Profile | None = None, limits: tuple[float, ...] | None = None) -> CachedLanes:
    timeline = simulate(schedule, profile or Profile.uniform(link=0.25))
    return CachedLanes(LaneTable.from_timeline(timeline), b"", Explainer(timeline, limits=limits))


def test_each_operation_has_what_its_workers_curve_says(broken: Schedule) -> None:
    lanes = shown(broken, limits=(3.0, 2.0))
    explainer, table = lanes.explainer, lanes.table
    limits, from_start, from_end = held_by_all(lanes, explainer)
    assert limits[[0, 1, 2, 4, 5]].tolist() == [3, 2, 3, 3, 2]
    assert np.isnan(limits[3])  # has failed
    for lane in (0, 1, 2, 4, 5):
        curve = memory_curve(explainer.timeline, lane)
        for operation in range(table.offsets[lane], table.offsets[lane + 1]):
            for moment, found in ((table.start, from_start), (table.end, from_end)):
                at = np.searchsorted(curve.time, moment[operation], side="right") - 1
                assert found[operation] == curve.held[at]
        assert from_start[table.offsets[lane] : table.offsets[lane + 1]].max() == curve.peak[0]


def test_bytes_are_shown_where_the_profile_knows_them() -> None:
    profile = replace(Profile.uniform(), activation=5e8, static=[3e9, 2e9, 1e9, 1e9], capacity=6e9)
    lanes = shown(one_f_one_b(Shape(1, 4, 8)), profile)
    limits, from_start, _ = held_by_all(lanes, lanes.explainer)
    assert limits.tolist() == [6e9] * 4
    peaks = [from_start[a:b].max() for a, b in zip(lanes.table.offsets, lanes.table.offsets[1:], strict=False)]
    assert peaks == [3e9 + 4 * 5e8, 2e9 + 3 * 5e8, 1e9 + 2 * 5e8, 1e9 + 5e8]
    assert peaks == lanes.explainer.timeline.peak_bytes
    assert struct.unpack_from("<II", encode_held(lanes, lanes.explainer)) == (4, 1)


def test_it_is_served_beside_the_lanes(broken: Schedule) -> None:
    source = schedule_source(Path("broken"), broken)
    client = build_app([source]).server.test_client()
    page = client.get("/").get_data(as_text=True)
    address = re.search(r"lanes/\w+\.bin", page)[0]  # type: ignore[index]
    content = client.get("/" + address.replace("lanes/", "held/")).data
    assert struct.unpack_from("<II", content) == (6, 0)
    assert len(content) == 8 + 4 * 6 + 8 * len(source.lanes)
    assert client.get("/held/0.bin").status_code == 404
