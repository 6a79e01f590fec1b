"""What is told of a selection: what was needed and how long it lay there, why a worker is idle, what a worker does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recycle import Profile, Schedule, Timeline, lower, simulate
from viz.details import Details, details
from viz.lanes import LaneTable
from viz.shelf import Shelf, Shown


def shown_of(timeline: Timeline) -> Shown:
    shelf = Shelf()
    found = shelf.get(shelf.put(LaneTable.from_timeline(timeline), timeline))
    assert found is not None
    return found


def place(shown: Shown, text: str) -> int:
    return next(i for i in range(len(shown.table)) if str(shown.table.instruction(i)) == text)


def told(shown: Shown, **choice: Any) -> Details:
    answer = details(shown, choice)
    assert answer is not None
    return answer


def texts(shown: Shown, operations: list[int]) -> list[str]:
    return [str(shown.table.instruction(operation)) for operation in operations]


def test_an_operation_lists_its_inputs_with_slack(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    answer = told(shown, operation=place(shown, "1F1.0"))
    assert answer.title == "1F1.0"
    assert [(need.instruction, need.worker, need.arrived, need.slack, need.decided) for need in answer.needs] == [
        ("0F1.0", "1.0", 1.0, 1.0, False)
    ]
    assert "began when its worker was free, after 1F0.0" in answer.lines
    assert texts(shown, answer.links.inputs) == ["0F1.0"]
    assert texts(shown, answer.links.outputs) == ["1I1.0"]
    assert answer.links.waited == -1


def test_what_an_operation_waited_for_has_no_slack(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    answer = told(shown, operation=place(shown, "0B0.0"))
    decided = [need for need in answer.needs if need.decided]
    assert [(need.instruction, need.worker, need.slack) for need in decided] == [("1B0.0", "0.1", 0.0)]
    assert texts(shown, [answer.links.waited]) == ["1B0.0"]
    assert [need.instruction for need in answer.needs] == ["0F0.0", "1B0.0"]


def test_a_transfer_that_takes_time_is_waited_for(healthy: Schedule) -> None:
    shown = shown_of(simulate(healthy, Profile.uniform(link=0.25)))
    answer = told(shown, operation=place(shown, "1F0.0"))
    (need,) = answer.needs
    assert (need.instruction, need.arrived, need.decided) == ("0F0.0", 1.25, True)


def test_a_step_names_its_last_reduce(broken: Schedule) -> None:
    shown = shown_of(simulate(lower(broken), Profile.uniform(step=0.5)))
    answer = told(shown, operation=place(shown, "0STEP"))
    assert [need.decided for need in answer.needs].count(True) == 1


def test_a_gap_tells_its_cause(broken_timeline: Timeline) -> None:
    answer = told(shown_of(broken_timeline), lane=0, **{"from": 2.0, "to": 5.0})
    assert answer.title == "Worker 0.0 is idle"
    assert answer.lines[0] == "from 2 to 5, 3"
    assert answer.lines[1:] == ["2 to 5: 0B0.0 needs what 1B0.0 of worker 0.1 has not made yet"]


def test_every_gap_that_the_canvas_can_show_has_causes_that_cover_it(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    table = shown.table
    for lane in np.flatnonzero(~table.failed).tolist():
        idle = 0.0
        for i in range(int(table.offsets[lane]), int(table.offsets[lane + 1])):
            if table.start[i] > idle + 1e-9:
                answer = told(shown, lane=lane, **{"from": idle, "to": float(table.start[i])})
                assert len(answer.lines) >= 2
            idle = max(idle, float(table.end[i]))


def test_a_worker_is_summed_up(broken_timeline: Timeline) -> None:
    shown = shown_of(broken_timeline)
    assert told(shown, lane=1).lines[0] == "9 instructions, busy 81.8% of the time"
    assert "3 of them re-routed to it" in told(shown, lane=1).lines
    assert told(shown, lane=3).lines[-1] == "has failed"


@pytest.mark.parametrize(
    "choice", [{}, {"operation": -1}, {"operation": 10**9}, {"operation": "1"}, {"lane": 6}, {"lane": None}]
)
def test_what_is_not_there_is_not_told(broken_timeline: Timeline, choice: dict[str, Any]) -> None:
    assert details(shown_of(broken_timeline), choice) is None


def test_the_shelf_keeps_what_was_used_last(broken_timeline: Timeline, healthy: Schedule) -> None:
    first, second = LaneTable.from_timeline(broken_timeline), LaneTable.from_timeline(simulate(healthy))
    shelf = Shelf(most_bytes=1)
    digest = shelf.put(first)
    assert shelf.put(first) == digest
    other = shelf.put(second)
    assert shelf.get(digest) is None
    assert shelf.get(other) is not None
    assert shelf.put(first) == digest
    assert shelf.get(digest) is not None
