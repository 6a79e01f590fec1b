"""Bubbles are found where they lie, and their reason is the cause that the gaps have."""

from __future__ import annotations

from recycle import Profile, Shape, simulate
from recycle.ir.families import gpipe, one_f_one_b
from recycle.ir.gaps import GapCause
from viz.analysis.bubbles import Bubbles


def test_the_bubble_under_a_point_says_what_it_waits_for() -> None:
    bubbles = Bubbles(simulate(one_f_one_b(Shape(1, 4, 4)), Profile.uniform(link=0.5)))
    found = bubbles.at(3, 2.0)
    assert found is not None
    assert bubbles.reason(found) == "Idle for 4: 3F0.0 waits for 2F0.0 on 0.2, which ends at 4."
    found = bubbles.at(3, 4.25)
    assert found is not None
    assert bubbles.reason(found) == (
        "Idle for 0.5: 3F0.0 waits for 2SEND_F0.0@0.3 on 0.2, its value is made and not here yet."
    )
    assert bubbles.at(3, 5.0) is None  # it works then
    last = bubbles.at(3, 25.0)
    assert last is not None
    assert bubbles.reason(last) == "Idle for 7.5: its program has ended; the iteration ends at 26."


def test_going_from_bubble_to_bubble_visits_each_once() -> None:
    bubbles = Bubbles(simulate(one_f_one_b(Shape(1, 4, 4)), Profile.uniform(link=0.5)))
    times, now = [], -1.0
    while (gap := bubbles.next(3, now)) is not None:
        times.append(gap.start)
        now = gap.start
    assert times == [gap.start for gap in bubbles.gaps if gap.worker.rank == 3]


def test_a_memory_limit_is_named_as_the_cause() -> None:
    timeline = simulate(one_f_one_b(Shape(1, 2, 6)))
    reasons = {bubbles.reason(gap) for bubbles in [Bubbles(timeline, [2, 1])] for gap in bubbles.gaps.longest(None, 20)}
    limited = [text for text in reasons if "memory limit" in text]
    assert limited
    assert all("holds back 0F0." in text for text in limited)


def test_a_step_behind_the_barrier_names_it() -> None:
    from dataclasses import replace

    schedule = replace(gpipe(Shape(1, 3, 2)), optimizer="barrier")
    timeline = simulate(schedule, Profile.uniform(step=1.0))
    bubbles = Bubbles(timeline)
    reasons = [bubbles.reason(gap) for gap in bubbles.gaps.longest(GapCause.REDUCE, 9)]
    assert any("STEP waits for the barrier" in text for text in reasons)
