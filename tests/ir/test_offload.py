"""Activations that leave for the host and return: times of the copies, memory, and idle times that they cause."""

from dataclasses import replace

import pytest

from recycle import Profile, Schedule, Shape, check, lower, simulate
from recycle.ir.gaps import GapCause

PROGRAMS = {
    "0.0": "0F0.0 0F0.1 0OFFLOAD0.0 0F0.2 0RELOAD0.0 0B0.0 0B0.1 0B0.2",
    "0.1": "1F0.0 1B0.0 1F0.1 1B0.1 1F0.2 1B0.2",
}
SCHEDULE = Schedule.from_text(Shape(1, 2, 3), PROGRAMS)


def with_program(program: str) -> Schedule:
    return Schedule.from_text(SCHEDULE.shape, PROGRAMS | {"0.0": program})


def starts(schedule: Schedule, bandwidth: float, **profile) -> dict[str, float]:
    timeline = simulate(schedule, Profile(host_bandwidth=bandwidth, **profile))
    return dict(zip(timeline.schedule.words(), timeline.start.tolist(), strict=True))


@pytest.mark.parametrize(("bandwidth", "third", "back", "backward"), [(1, 2, 3, 4), (0.5, 3, 4, 6), (0.25, 5, 6, 10)])
def test_a_copy_runs_beside_compute_and_what_needs_its_memory_waits(bandwidth, third, back, backward):
    """0F0.0 ends at 1, where the copy begins; 0F0.2 waits for its end, and 0B0.0 for the copy that 0F0.2 is before."""
    times = starts(SCHEDULE, bandwidth)
    assert [times[name] for name in ("0OFFLOAD0.0", "0F0.2", "0RELOAD0.0", "0B0.0")] == [1, third, back, backward]


def test_the_copies_of_a_worker_in_one_direction_follow_each_other():
    moves = "0F0.0 0F0.1 0OFFLOAD0.0 0OFFLOAD0.1 0F0.2 0RELOAD0.0 0RELOAD0.1 0B0.0 0B0.1 0B0.2"
    times = starts(with_program(moves), 0.25, speed={"0.0": 1.0})
    assert [times[f"0OFFLOAD0.{j}"] for j in (0, 1)] == [1, 5]
    assert [times[f"0RELOAD0.{j}"] for j in (0, 1)] == [10, 14]
    assert starts(with_program(moves), 0.25, speed={"0.0": 2.0})["0OFFLOAD0.1"] == 6, "a slow worker copies as fast"
    opposite = "0F0.0 0F0.1 0OFFLOAD0.0 0RELOAD0.0 0OFFLOAD0.1 0F0.2 0B0.0 0RELOAD0.1 0B0.1 0B0.2"
    times = starts(with_program(opposite), 0.25)
    assert times["0OFFLOAD0.1"] == times["0RELOAD0.0"] == 5, "the two directions do not wait for each other"


def test_memory_leaves_at_the_end_of_the_copy_and_returns_at_the_begin_of_the_other():
    early = with_program("0F0.0 0F0.1 0OFFLOAD0.0 0F0.2 0RELOAD0.0 0B0.0 0B0.1 0B0.2")
    late = with_program("0F0.0 0F0.1 0OFFLOAD0.0 0F0.2 0OFFLOAD0.2 0RELOAD0.0 0B0.0 0RELOAD0.2 0B0.1 0B0.2")
    assert [simulate(schedule).peak_activations[0] for schedule in (early, late)] == [3, 2]
    assert check(late, limits=[2, 1]) == []
    assert [finding.rule for finding in check(early, limits=[2, 1])] == ["activation-limit"]
    kept = Profile(activation=[10.0, 1.0], recomputed_from=[4.0, 1.0], host_bandwidth=2.0)
    assert simulate(late, kept).peak_bytes[0] == 4 + 10
    assert starts(late, 2.0, activation=10.0, recomputed_from=4.0)["0F0.2"] == 1 + 2


def test_copies_are_kept_in_files_and_implied_steps_are_added():
    lowered = lower(SCHEDULE)
    assert "0OFFLOAD0.0 0RECV_B0.0@0.1 0F0.2 0SEND_F0.2@0.1 0RELOAD0.0 0B0.0" in lowered.text()["0.0"]
    assert Schedule.loads(lowered.dumps()) == lowered
    assert check(lowered, about_to_run=True) == []


def test_a_worker_that_waits_for_a_copy_waits_for_a_transfer():
    schedule = Schedule.from_text(Shape(1, 1, 2), {"0.0": "0F0.0 0OFFLOAD0.0 0F0.1 0B0.1 0RELOAD0.0 0B0.0"})
    gaps = simulate(schedule, Profile(host_bandwidth=0.25)).gaps(limits=[1])
    assert [(gap.start, gap.end, gap.cause) for gap in gaps] == [
        (1, 5, GapCause.TRANSFER), (8, 12, GapCause.TRANSFER)]  # fmt: skip


def test_the_period_is_at_least_the_load_of_the_lane():
    shape = Shape(1, 1, 4)
    program = " ".join(f"0F0.{j} 0OFFLOAD0.{j} 0RELOAD0.{j} 0B0.{j}" for j in range(4))
    schedule = Schedule.from_text(shape, {"0.0": program})
    profile = Profile(host_bandwidth=0.1)
    assert simulate(schedule, profile).period == 4 * (1 + 10 + 10 + 2)
    assert simulate(schedule, replace(profile, host_bandwidth=None)).period == 12


def test_the_picture_has_a_line_per_direction():
    lines = simulate(SCHEDULE, Profile(host_bandwidth=1.0)).text().splitlines()
    assert [line[:5].strip() for line in lines[1:]] == ["0.0", "out", "back", "0.1"]
    assert (lines[2][6:].index("0"), lines[3][6:].index("0")) == (3, 9)
