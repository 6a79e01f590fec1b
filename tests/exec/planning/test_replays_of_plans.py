"""Plans of a running job, and what is noted in them ahead of any failure."""

from __future__ import annotations

import pytest

from recycle import MicroBatch, Worker
from recycle.cli.planner import plan_for_training
from recycle.exec.planning.planner_process import Question, answer
from recycle.ir import replays
from recycle.ir.replays import Checked, with_replays
from recycle.plans import Plan
from recycle.plans.plan import rotation_of
from tests.exec.runs import job


def test_who_makes_a_plan_notes_which_stages_have_room_for_replays_and_nobody_times_rounds_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for another dead worker of the same stage; what replays then is what working it out anew would give."""
    of = job(3, 4, 6, planner={"steps": 20}, train={"checkpoint_every": 0}, integrity={"every": "gaps"})
    answered = answer(plan_for_training, of, None, Question((0, 1, 0, 0)))
    assert answered.error == ""
    for pipeline in (0, 2):
        schedule = Plan.from_text(answered.text, "plan").for_processes([Worker(pipeline, 1)]).schedule
        anew = with_replays(schedule, "gaps", of.prices)
        assert len(anew.turns.round)
        with monkeypatch.context() as patched:
            patched.setattr(replays, "_that_fit", lambda *_: pytest.fail("rounds are timed"))
            rotation = rotation_of(schedule, of)
            disputed = rotation_of(schedule, of, [Checked(0, MicroBatch(0, 0))])
        assert rotation is not None
        assert [column.tolist() for column in rotation.turns] == [column.tolist() for column in anew.turns]
        assert rotation.whole == anew.whole
        assert disputed is not None
        assert len(disputed.turns.round) > len(anew.turns.round)
    none = answer(plan_for_training, of, None, Question((2, 2, 2, 2)))
    alone = rotation_of(Plan.from_text(none.text, "plan").schedule, of)
    assert alone is not None
    assert (alone.rounds, alone.turns.round.tolist()) == (0, [])
