"""Kinds beyond F, B, I and W: redundant forwards, replays, gathers; and schedules of forwards alone."""

from dataclasses import replace

import pytest

from recycle import Profile, Schedule, Shape, check, lower, simulate
from recycle.ir.families import FAMILIES, interleaved, one_f_one_b, zb_h1
from recycle.ir.lower import forward_only, with_barrier
from tests.ir.families import chunks_of

THREE = Shape(1, 3, 2)
COPIES = {"0.0": [0, 1], "0.1": [1, 2]}
WITH_COPIES = {
    "0.0": "0F0.0 0F0.1 1R0.0 0B0.0 1R0.1 0B0.1",
    "0.1": "1F0.0 1F0.1 2R0.0 1B0.0 2R0.1 1B0.1",
    "0.2": "2F0.0 2B0.0 2F0.1 2B0.1",
}


def with_copies(**programs: str) -> Schedule:
    return Schedule.from_text(THREE, WITH_COPIES | programs, placement=COPIES, optimizer="barrier")


def test_redundant_forwards_take_time_and_are_held_until_the_previous_stages_backward():
    """The last stage makes the first gradient at 3, worker 0.1 has it at 5 without redundant work, at 6 with it."""
    profile = Profile(activation=[1.0, 2.0, 4.0], redundant_stash=0.5)
    timeline = simulate(lower(with_copies()), profile)
    assert (timeline.makespan, timeline.period, timeline.busy) == (12, 12, [8, 8, 6])
    assert timeline.peak_bytes == [1 + 1 + 2, 2 + 2 + 4, 4]
    assert simulate(lower(with_copies()), Profile(redundant_forward=[9, 2.0, 3.0])).busy == [10, 12, 6]


def test_redundant_forwards_add_no_transfers_and_both_hosts_of_a_copy_update_it():
    lowered = lower(with_copies())
    assert check(with_copies()) == check(lowered) == []
    assert lowered.text()["0.0"] == (
        "0F0.0 0SEND_F0.0@0.1 0F0.1 0SEND_F0.1@0.1 1R0.0 0RECV_B0.0@0.1 0B0.0 1R0.1 0RECV_B0.1@0.1 0B0.1"
        " 1REDUCE_GRAD 0REDUCE_GRAD 1STEP 0STEP"
    )
    assert Schedule.from_text(THREE, lowered.text(), placement=COPIES, optimizer="barrier") == lowered


REPLAYED = Shape(2, 3, 2)
WITH_REPLAY = {
    "0.0": "0F0.0 0F0.1 0B0.0 0B0.1",
    "0.1": "1F0.0 1F0.1 1B0.0 1B0.1 1REPLAY1.0",
    "0.2": "2F0.0 2B0.0 2F0.1 2B0.1",
    "1.0": "0F1.0 0F1.1 0B1.0 0B1.1",
    "1.1": "1F1.0 1F1.1 1B1.0 1B1.1",
    "1.2": "2F1.0 2B1.0 2F1.1 2B1.1",
}


def replayed(**programs: str) -> Schedule:
    return Schedule.from_text(REPLAYED, WITH_REPLAY | programs)


def test_a_replay_receives_its_inputs_from_the_producers_of_its_peer():
    programs = lower(replayed()).text()
    assert "1RECV_F1.0@1.0" in programs["0.1"]
    assert "1RECV_B1.0@1.2" in programs["0.1"]
    assert "0F1.0 0SEND_F1.0@0.1 0SEND_F1.0@1.1" in programs["1.0"]
    assert "2B1.0 2SEND_B1.0@0.1 2SEND_B1.0@1.1" in programs["1.2"]
    assert check(lower(replayed()), about_to_run=True) == []
    ends = lower(
        replayed(**{"0.0": WITH_REPLAY["0.0"] + " 0REPLAY1.1", "1.2": WITH_REPLAY["1.2"] + " 2REPLAY0.0"})
    ).text()
    assert ends["0.0"].endswith("0RECV_B1.1@1.1 0REPLAY1.1 0REDUCE_GRAD 0STEP")
    assert "RECV_F1.1@" not in ends["0.0"]
    assert "RECV_B0.0@" not in ends["1.2"]


def test_a_replay_holds_an_activation_while_it_runs():
    early = replayed(**{"0.1": "1F0.0 1F0.1 1REPLAY1.0 1B0.0 1B0.1"})
    assert simulate(replayed()).peak_activations[1] == 2
    assert simulate(early).peak_activations[1] == 3
    assert [f.rule for f in check(early, limits=[2, 2, 2])] == ["activation-limit"]
    weights = Profile(activation=[1.0, 10.0, 100.0], recomputed_from=[1.0, 4.0, 100.0])
    assert simulate(early, weights).peak_bytes[1] == 4 + 4 + 10


def test_a_replay_after_its_reduce_is_found():
    texts = lower(replayed()).text()
    texts["0.1"] = texts["0.1"].replace(" 1REPLAY1.0 1REDUCE_GRAD", " 1REDUCE_GRAD 1REPLAY1.0")
    (finding,) = check(Schedule.from_text(REPLAYED, texts))
    assert (finding.rule, finding.instruction) == ("replay", "1REPLAY1.0")
    assert "1REDUCE_GRAD on worker 0.1" in finding.message


TWO = Shape(pipelines=2, ranks=2, micro_batches=2)


def gathering(schedule: Schedule) -> Schedule:
    return replace(schedule, gathers=True)


def test_every_host_gathers_after_its_steps_last_stage_first():
    chunks = lower(gathering(interleaved(Shape(2, 2, 2, chunks=2))))
    assert chunks.text()["1.1"].endswith("3REDUCE_GRAD 1REDUCE_GRAD 3STEP 1STEP 3GATHER_PARAMS 1GATHER_PARAMS")
    assert check(chunks) == []
    assert lower(chunks) == chunks
    assert lower(gathering(lower(interleaved(Shape(2, 2, 2, chunks=2))))) == chunks
    assert with_barrier(gathering(zb_h1(TWO))).text()["0.0"].endswith("0REDUCE_GRAD 0STEP 0GATHER_PARAMS")


def test_a_gather_waits_for_the_step_of_every_host():
    """Worker 1.0 steps stage 1 first, so that stage 0 is gathered when it has stepped that too."""
    begin = "0F{k}.0 1F{k}.0 1B{k}.0 0B{k}.0 1REDUCE_GRAD 0REDUCE_GRAD"
    ends = "0STEP 0GATHER_PARAMS 1STEP 1GATHER_PARAMS", "1STEP 0STEP 0GATHER_PARAMS 1GATHER_PARAMS"
    programs = {f"{k}.0": f"{begin.format(k=k)} {end}" for k, end in enumerate(ends)}
    timeline = simulate(Schedule.from_text(Shape(2, 1, 1, 2), programs), Profile(step=0.5))
    gathers = [row for row, word in enumerate(timeline.schedule.words()) if word == "0GATHER_PARAMS"]
    assert timeline.start[gathers].tolist() == [7, 7]


def test_a_gather_takes_the_profiles_time_and_lengthens_the_period():
    slow = Profile(reduce=1.0, step=0.5, gather=0.75)
    for optimizer in ("staggered", "barrier"):
        plain = replace(one_f_one_b(TWO), optimizer=optimizer)
        before, after = simulate(plain, slow), simulate(gathering(plain), slow)
        assert after.makespan == before.makespan + 0.75
        assert after.period == before.period + 0.75


REROUTED = {
    "0.0": "0F0.0 0F1.0 0B0.0 0B1.0",
    "0.1": "1F0.0 1F1.0 1I0.0 1W0.0 1B1.0",
    "1.1": "",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_only_family_is_valid_and_keeps_its_workers_busy(family):
    """Forwards run on the workers of training; the busiest worker waits only for the pipeline to fill, twice on a V."""
    chunks = chunks_of(family)
    trained = FAMILIES[family](Shape(2, 4, 16, chunks))
    evaluated = forward_only(trained)
    assert check(evaluated) == check(lower(evaluated), about_to_run=True) == []
    assert evaluated.placement == trained.placement
    for worker, program in trained.text().items():
        words = program.replace("(", " ").replace(";", " ").split()
        assert sorted(evaluated.text()[worker].split()) == sorted(word for word in words if "F" in word)
    timeline = simulate(evaluated)
    assert timeline.makespan <= 16 * chunks + 3 * chunks
    assert timeline.peak_activations == [1.0] * 8
    assert timeline.busy == [16.0 * chunks] * 8


def test_forwards_of_dead_workers_stay_with_the_workers_that_took_them():
    trained = Schedule.from_text(Shape(2, 2, 1), REROUTED, failed=["1.0"])
    evaluated = forward_only(trained)
    assert evaluated.text() == {"0.0": "0F0.0 0F1.0", "0.1": "1F0.0 1F1.0", "1.1": ""}
    assert check(evaluated) == []


def test_lowering_a_forward_only_schedule_adds_only_transfers_of_activations():
    lowered = lower(forward_only(replace(one_f_one_b(Shape(1, 2, 1)), buckets=3)))
    assert lowered.text() == {"0.0": "0F0.0 0SEND_F0.0@0.1", "0.1": "1RECV_F0.0@0.0 1F0.0"}
    assert lower(lowered) == lowered
