"""GATHER_PARAMS: how it is written, lowered, checked and timed, and what schedules without it are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle import Finding, Profile, Schedule, ScheduleError, Shape, check, lower, simulate
from recycle.ir.families import interleaved, one_f_one_b, zb_h1
from recycle.ir.instruction import GatherParameters, parse_instruction
from recycle.ir.lower import forward_only, with_barrier

TWO = Shape(pipelines=2, ranks=2, micro_batches=2)


def gathering(schedule: Schedule) -> Schedule:
    return replace(schedule, gathers=True)


def changed(schedule: Schedule, worker: str, old: str, new: str) -> list[Finding]:
    """What is found once the text of a worker's program is changed in one place."""
    programs = schedule.text()
    assert old in programs[worker]
    programs[worker] = programs[worker].replace(old, new, 1)
    return check(Schedule.from_text(schedule.shape, programs))


def test_it_is_written_with_its_stage_alone() -> None:
    assert parse_instruction("2GATHER_PARAMS") == GatherParameters(2)
    assert str(GatherParameters(2)) == "2GATHER_PARAMS"
    with pytest.raises(ScheduleError, match="takes no micro-batch and no worker, write 2GATHER_PARAMS"):
        parse_instruction("2GATHER_PARAMS1.5")


def test_files_say_that_parameters_are_gathered_and_those_without_are_as_before() -> None:
    for schedule in (gathering(zb_h1(TWO)), lower(gathering(zb_h1(TWO)))):
        assert Schedule.loads(schedule.dumps()) == schedule
        assert Schedule.loads(schedule.dumps()).gathers
    assert "gathers" not in zb_h1(TWO).dumps()
    with pytest.raises(ScheduleError, match="gathers must be true or false, got 1"):
        Schedule.from_text(TWO, {}, gathers=1)  # type: ignore[arg-type]


def test_every_host_gathers_behind_its_steps_last_stage_first() -> None:
    chunks = lower(gathering(interleaved(Shape(2, 2, 2, chunks=2))))
    assert chunks.text()["1.1"].endswith("3REDUCE_GRAD 1REDUCE_GRAD 3STEP 1STEP 3GATHER_PARAMS 1GATHER_PARAMS")
    assert check(chunks) == []
    assert lower(chunks) == chunks
    written_out = replace(lower(interleaved(Shape(2, 2, 2, chunks=2))), gathers=True)
    assert lower(written_out) == chunks
    assert with_barrier(gathering(zb_h1(TWO))).text()["0.0"].endswith("0REDUCE_GRAD 0STEP 0GATHER_PARAMS")


def test_an_evaluation_gathers_nothing() -> None:
    evaluated = lower(forward_only(gathering(one_f_one_b(TWO))))
    assert not evaluated.gathers
    assert not (evaluated.columns.kind == GatherParameters.kind).any()


def test_peers_that_gather_two_stages_in_unlike_orders_wait_for_each_other() -> None:
    schedule = lower(gathering(interleaved(Shape(2, 2, 2, chunks=2))))
    found = changed(schedule, "1.1", "3GATHER_PARAMS 1GATHER_PARAMS", "1GATHER_PARAMS 3GATHER_PARAMS")
    assert [finding.rule for finding in found] == ["reduce-order"]
    # A gather between two reduces that the peer does both first.
    first = "3REDUCE_GRAD 3STEP 3GATHER_PARAMS 1REDUCE_GRAD 1STEP 1GATHER_PARAMS"
    usual = "3REDUCE_GRAD 1REDUCE_GRAD 3STEP 1STEP 3GATHER_PARAMS 1GATHER_PARAMS"
    assert "reduce-order" in {finding.rule for finding in changed(schedule, "1.1", usual, first)}


def test_a_gather_waits_for_the_step_of_every_host() -> None:
    """Worker 1.0 steps stage 1 first, so that stage 0 is gathered when it has stepped that too."""
    begin = "0F{k}.0 1F{k}.0 1B{k}.0 0B{k}.0 1REDUCE_GRAD 0REDUCE_GRAD"
    ends = "0STEP 0GATHER_PARAMS 1STEP 1GATHER_PARAMS", "1STEP 0STEP 0GATHER_PARAMS 1GATHER_PARAMS"
    programs = {f"{k}.0": f"{begin.format(k=k)} {end}" for k, end in enumerate(ends)}
    timeline = simulate(Schedule.from_text(Shape(2, 1, 1, 2), programs), Profile(step=0.5))
    gathers = [row for row, word in enumerate(timeline.schedule.words()) if word == "0GATHER_PARAMS"]
    assert timeline.start[gathers].tolist() == [7, 7]


def test_its_seconds_are_those_of_the_profile_and_lengthen_the_period() -> None:
    slow = Profile(reduce=1.0, step=0.5, gather=0.75)
    for optimizer in ("staggered", "barrier"):
        plain = replace(one_f_one_b(TWO), optimizer=optimizer)
        before, after = simulate(plain, slow), simulate(gathering(plain), slow)
        assert after.makespan == before.makespan + 0.75
        assert after.period == before.period + 0.75
