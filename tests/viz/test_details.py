"""What the page says of a selection: what was needed and how long it lay there, why a worker is idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recycle import Schedule, Timeline, simulate
from viz.details import Details, details
from viz.lane_cache import CachedLanes, Explainer, LaneCache
from viz.lanes import LaneTable
from viz.run_files import load_run


def shown_of(timeline: Timeline, limits: tuple[float, ...] | None = None) -> CachedLanes:
    cache = LaneCache()
    found = cache.get(cache.put(LaneTable.from_timeline(timeline), Explainer(timeline, limits=limits)))
    return found


def place(shown: CachedLanes, text: str) -> int:
    return next(i for i in range(len(shown.table)) if str(shown.table.instruction(i)) == text)


def details_of(shown: CachedLanes, **choice: Any) -> Details:
    answer = details(shown, choice)
    return answer


def texts(shown: CachedLanes, operations: list[int]) -> list[str]:
    return [str(shown.table.instruction(operation)) for operation in operations]


def test_an_operation_lists_what_it_needed_with_slack(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    answer = details_of(shown, operation=place(shown, "1F1.0"))
    assert answer.title == "1F1.0"
    assert answer.needs == [
        ["1F0.0", "0.1", "before it in the program", "2", "none: waited for this"],
        ["0F1.0", "1.0", "its value", "1", "1"],
    ]
    assert texts(shown, answer.inputs) == ["0F1.0"]
    assert texts(shown, answer.outputs) == ["1I1.0"]
    assert texts(shown, [answer.waited]) == ["1F0.0"]


def test_an_executed_operation_is_explained_by_what_ran(run_dir: Path) -> None:
    run = load_run(run_dir)
    ran = run.executed(4)
    table, explainer = ran
    cache = LaneCache()
    shown = cache.get(cache.put(table, explainer))
    for operation in range(len(table)):
        row = explainer.row(table, operation)
        assert str(explainer.timeline.schedule.instruction(row)) == str(table.instruction(operation))
        assert explainer.timeline.start[row] == pytest.approx(table.start[operation])
    answer = details_of(shown, operation=place(shown, "1F1.0"))
    assert {need[0] for need in answer.needs} == {"0F1.0", "1F0.0"}
    assert texts(shown, answer.outputs) == ["1I1.0"]


def test_a_gap_tells_its_cause(broken_timeline: Timeline) -> None:
    answer = details_of(shown_of(broken_timeline), lane=0, **{"from": 2.0, "to": 5.0})
    assert answer.title == "Worker 0.0 is idle"
    assert answer.lines == ["from 2 to 5, 3", "Idle for 3: 0B0.0 waits for 1B0.0 on 0.1, which ends at 5."]


def test_every_gap_that_the_canvas_can_show_has_causes_that_cover_it(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    table = shown.table
    for lane in np.flatnonzero(~table.failed).tolist():
        idle = 0.0
        for i in range(int(table.offsets[lane]), int(table.offsets[lane + 1])):
            if table.start[i] > idle + 1e-9:
                answer = details_of(shown, lane=lane, **{"from": idle, "to": float(table.start[i])})
                assert len(answer.lines) >= 2
            idle = max(idle, float(table.end[i]))


def test_a_worker_is_summed_up(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    assert details_of(shown, lane=1).lines[0] == "7 instructions, busy 81.8 % of the time"
    assert "3 of them re-routed to it" in details_of(shown, lane=1).lines
    assert details_of(shown, lane=3).lines[-1] == "has failed"
    limited = shown_of(broken_timeline, limits=(4.0, 3.0))
    assert "holds at most 2 of 3 activations, from 1F1.0 on" in details_of(limited, lane=1).lines


@pytest.mark.parametrize(
    "choice", [{}, {"operation": -1}, {"operation": 10**9}, {"operation": "1"}, {"lane": 6}, {"lane": None}]
)
def test_what_is_not_there_has_no_details(broken_timeline: Timeline, choice: dict[str, Any]) -> None:
    assert details(shown_of(broken_timeline), choice) is None


def test_the_shelf_keeps_what_was_used_last(broken_timeline: Timeline, healthy: Schedule) -> None:
    first, second = LaneTable.from_timeline(broken_timeline), LaneTable.from_timeline(simulate(healthy))
    cache = LaneCache(most_bytes=1, at_least=1)
    digest = cache.put(first)
    assert cache.put(first) == digest
    other = cache.put(second)
    assert cache.get(digest) is None
    assert cache.get(other) is not None
    assert cache.put(first) == digest
    assert cache.get(digest) is not None
