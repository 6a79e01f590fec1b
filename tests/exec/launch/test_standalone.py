"""Users' schedules on real stages: any order that passes `check` gives the same losses."""

import pytest

from recycle import Schedule, ScheduleError
from recycle.exec import run
from recycle.ir.families import gpipe, one_f_one_b
from recycle.ir.lower import forward_only
from tests.exec.runs import job

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module")
def gpt():
    return job(3, 2, 2, kind="gpt")


@pytest.fixture(scope="module")
def by_hand(gpt):
    """Worker 1.1 is dead; 0.1 takes micro-batch 1.0 and 2.1 takes 1.1, with the weight gradients deferred."""
    return Schedule.from_text(
        gpt.shape,
        {
            "0.0": "0F0.0 0F0.1 0I0.0 0I0.1 0W0.1 0W0.0",
            "0.1": "1F0.0 1B0.0 1F1.0 1I1.0 1F0.1 1I0.1 1W1.0 1W0.1",
            "1.0": "0F1.0 0F1.1 0B1.0 0B1.1",
            "2.0": "0F2.0 0F2.1 0B2.0 0B2.1",
            "2.1": "1F2.0 1B2.0 1F1.1 1B1.1 1F2.1 1B2.1",
        },
        failed=["1.1"],
    )


def test_a_schedule_written_by_hand_trains_to_the_same_bits_in_one_process_and_between_processes(gpt, by_hand, launch):
    losses = run(one_f_one_b(gpt.shape), gpt, steps=STEPS).losses
    assert losses[0] == pytest.approx(5.545, abs=0.15)
    result, holders = run(by_hand, gpt, steps=STEPS), launch(gpt, STEPS, schedule=by_hand, planner=None)
    assert result.losses == holders.losses == losses
    assert result.digests == holders.digests
    assert sorted(result.digests) == ["0.0", "0.1", "1.0", "2.0", "2.1"]
    assert result.digests["0.1"] == result.digests["2.1"]


def test_a_schedule_that_cannot_be_trained_with_is_refused_before_anything_runs(gpt, by_hand):
    defect = Schedule.from_text(gpt.shape, by_hand.text() | {"1.0": "0F1.0 0F1.1 0B1.0"}, failed=["1.1"])
    tight = job(3, 2, 2, kind="gpt", memory={"limit": 1})
    for config, schedule, says in (
        (gpt, defect, r"does not pass check: .*1\.1"),
        (gpt, forward_only(one_f_one_b(gpt.shape)), "the schedule is forward-only and cannot train"),
        (gpt, one_f_one_b(job(2, 2, 2).shape), "the schedule is for D=2 P=2 m=2, the job for D=3 P=2 m=2"),
        (tight, gpipe(tight.shape), "does not pass check"),
    ):
        with pytest.raises(ScheduleError, match=says):
            run(schedule, config, steps=STEPS)
