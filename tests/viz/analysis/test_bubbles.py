"""Bubbles are found where they lie, and their reason is the cause that the gaps have."""

from __future__ import annotations

from recycle import Profile, Shape, simulate
from recycle.ir.families import gpipe, one_f_one_b
from recycle.ir.gaps import GapCause
from viz.analysis.bubbles import Bubbles


def test_the_bubble_under_a_point_says_what_it_waits_for() -> None:
    bubbles = Bubbles(simulate(one_f_one_b(Shape(1, 4, 4)), Profile.uniform(link=0.5)))
    told = {
        time: [bubbles.reason(gap) for gap in bubbles.between(3, time, time + 0.1)] for time in (2.0, 4.25, 5.0, 25.0)
    }
    assert told == {
        2.0: ["Idle for 4: 3F0.0 waits for 2F0.0 on 0.2, which ends at 4."],
        4.25: ["Idle for 0.5: 3F0.0 waits for 2SEND_F0.0@0.3 on 0.2, its value is made and not here yet."],
        5.0: [],  # it works then
        25.0: ["Idle for 7.5: its program has ended; the iteration ends at 26."],
    }
    own = [gap.start for gap in bubbles.gaps if gap.worker.rank == 3]
    assert [gap.start for gap in bubbles.between(3, 0.0, 26.0)] == own


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
