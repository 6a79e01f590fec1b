from hypothesis import given, settings

from recycle import Profile, Schedule, Shape, check, simulate
from recycle.ir.instruction import BackwardWeight
from recycle.solve.effort import Deadline
from recycle.solve.fuse_backward import fuse_backward
from recycle.solve.search.list_scheduling import schedule_by_policy
from tests.solve.jobs import small_problems


def test_first_stage_is_fused_and_a_stage_with_waiting_neighbors_is_not():
    text = {"0.0": "0F0 0F1 0I0 0W0 0I1 0W1", "0.1": "1F0 1I0 1W0 1F1 1I1 1W1"}
    schedule = Schedule.from_text(Shape(1, 2, 2), text)
    fused, timeline = fuse_backward(schedule, Profile(), Deadline(None))
    assert fused.text() == {"0.0": "0F0.0 0F0.1 0B0.0 0B0.1", "0.1": "1F0.0 1I0.0 1W0.0 1F0.1 1I0.1 1W0.1"}
    assert timeline.makespan == simulate(schedule).makespan


def test_separate_halves_are_not_fused():
    schedule = Schedule.from_text(Shape(1, 1, 2), {"0.0": "0F0 0I0 0F1 0W0 0I1 0W1"})
    assert fuse_backward(schedule, Profile(), Deadline(None))[0].text() == {"0.0": "0F0.0 0I0.0 0F0.1 0W0.0 0B0.1"}


@settings(max_examples=40)
@given(small_problems())
def test_fusing_keeps_schedules_valid_and_is_not_slower(case):
    priced, problem = case
    schedule, profile = problem.schedule(schedule_by_policy(problem)), priced.profile()
    fused, timeline = fuse_backward(schedule, profile, Deadline(None))
    before = simulate(schedule, profile)
    assert timeline.period <= before.period * (1 + 1e-9)
    assert timeline.makespan <= before.makespan * (1 + 1e-9)
    assert timeline.peak_activations == before.peak_activations
    assert check(fused, profile=profile, limits=priced.activation_limits()) == []
    assert (fused.columns.kind == BackwardWeight.kind).sum() <= (schedule.columns.kind == BackwardWeight.kind).sum()
