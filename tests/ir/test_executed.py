"""An executed iteration answers like the plan that it followed, and contradictory clocks are found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recycle import Profile, Shape, Timeline, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.gaps import GapCause
from recycle.ir.trace import Trace, executed_timeline, first_impossible, transfer_leads
from recycle.job.shape import Worker
from recycle.runs import logs

SHAPE = Shape(pipelines=2, ranks=3, micro_batches=3)
PROFILE = Profile.uniform(link=0.25)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Trace]:
    """Writes a timeline as an executor would, receives announced when the worker comes to them, and reads it back."""

    def write(timeline: Timeline, shift: dict[str, float]) -> Trace:
        schedule = timeline.schedule
        for w, worker in enumerate(SHAPE.workers()):
            late, now, ran = 100.0 + shift.get(str(worker), 0.0), 0.0, []
            for row in range(int(schedule.columns.offsets[w]), int(schedule.columns.offsets[w + 1])):
                instruction = schedule.instruction(row)
                start, end = timeline.start[row], timeline.end[row]
                if "RECV" in str(instruction):
                    start = end = now
                if "SEND" in str(instruction):
                    end = start
                ran.append((instruction, late + start, late + end))
                now = max(now, end)
            logs.append_iteration(logs.log_path(tmp_path, worker), 0, 0, worker, ran)
        return logs.read_logs(tmp_path, SHAPE).window(0, 0)

    return write


def test_what_ran_as_planned_has_the_plans_times_and_bubbles(record: Callable[..., Trace]) -> None:
    planned = simulate(lower(one_f_one_b(SHAPE)), PROFILE)
    ran = executed_timeline(record(planned, {}), PROFILE)
    assert ran.schedule == planned.schedule
    assert ran.makespan == pytest.approx(planned.makespan)
    waiting = planned.gaps().seconds
    executed = ran.gaps().seconds
    assert executed == pytest.approx(waiting)
    assert first_impossible(ran) is None
    assert transfer_leads(ran).min() == pytest.approx(0.25)


def test_a_value_used_before_it_was_sent_is_found(record: Callable[..., Trace]) -> None:
    planned = simulate(lower(one_f_one_b(SHAPE)), PROFILE)
    ran = executed_timeline(record(planned, {"1.1": 5.0}), PROFILE)
    found = first_impossible(ran)
    assert found is not None
    assert ran.schedule.position(found.producer)[0] == Worker(1, 1)
    assert found.seconds == pytest.approx(4.75)


def test_who_does_not_begin_though_all_is_there_is_told_apart(record: Callable[..., Trace]) -> None:
    planned = simulate(lower(one_f_one_b(SHAPE)), PROFILE)
    rows = np.arange(int(planned.schedule.columns.offsets[1]))
    late = rows[planned.start[rows] >= 1.0]  # worker 0.0 pauses for a second before its second forward
    planned.start[late] += 1.0
    planned.end[late] += 1.0
    ran = executed_timeline(record(planned, {}), PROFILE)
    idle = [gap for gap in ran.gaps() if str(gap.worker) == "0.0" and gap.cause == GapCause.ORDER]
    assert [(gap.end - gap.start, gap.ready == gap.row) for gap in idle][:1] == [(pytest.approx(1.0), True)]
