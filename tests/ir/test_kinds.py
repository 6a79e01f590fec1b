"""Kinds beyond F, B, I and W: redundant forwards, replays, gathers; and schedules of forwards alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

from recycle import Finding, Profile, Schedule, Shape, check, lower, simulate
from recycle.ir.dependencies import dependencies
from recycle.ir.families import FAMILIES, interleaved, one_f_one_b, zb_h1
from recycle.ir.formats import read, write
from recycle.ir.lower import forward_only, with_barrier
from tests.ir.families import chunks_of

bounded = settings(derandomize=True, max_examples=60, deadline=None, database=None)

THREE = Shape(1, 3, 2)
COPIES = {"0.0": [0, 1], "0.1": [1, 2]}
WITH_COPIES = {
    "0.0": "0F0.0 0F0.1 1R0.0 0B0.0 1R0.1 0B0.1",
    "0.1": "1F0.0 1F0.1 2R0.0 1B0.0 2R0.1 1B0.1",
    "0.2": "2F0.0 2B0.0 2F0.1 2B0.1",
}


def with_copies(**programs: str) -> Schedule:
    return Schedule.from_text(THREE, WITH_COPIES | programs, placement=COPIES, optimizer="barrier")


def test_it_takes_its_time_and_holds_its_share_until_the_backward_of_the_stage_before() -> None:
    """The last stage makes the first gradient at 3, worker 0.1 has it at 5 without redundant work, at 6 with it."""
    profile = Profile(activation=[1.0, 2.0, 4.0], redundant_stash=0.5)
    timeline = simulate(lower(with_copies()), profile)
    assert (timeline.makespan, timeline.period, timeline.busy) == (12, 12, [8, 8, 6])
    assert timeline.peak_bytes == [1 + 1 + 2, 2 + 2 + 4, 4]
    assert simulate(lower(with_copies()), Profile(redundant_forward=[9, 2.0, 3.0])).busy == [10, 12, 6]


def test_nothing_is_sent_for_it_and_both_hosts_of_a_copy_reduce_and_step() -> None:
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


def test_its_input_and_its_gradient_come_from_those_who_made_them_for_its_peer() -> None:
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


def test_it_holds_an_activation_while_it_runs() -> None:
    early = replayed(**{"0.1": "1F0.0 1F0.1 1REPLAY1.0 1B0.0 1B0.1"})
    assert simulate(replayed()).peak_activations[1] == 2
    assert simulate(early).peak_activations[1] == 3
    assert [f.rule for f in check(early, limits=[2, 2, 2])] == ["activation-limit"]
    weights = Profile(activation=[1.0, 10.0, 100.0], recomputed_from=[1.0, 4.0, 100.0])
    assert simulate(early, weights).peak_bytes[1] == 4 + 4 + 10


def test_nobody_waits_for_it_but_its_own_worker() -> None:
    lowered = lower(replayed())
    graph = dependencies(lowered)
    row = lowered.words().index("1REPLAY1.0")
    assert not (graph.source == row).any()
    needed = [lowered.words()[source] for source in graph.source[graph.target == row].tolist()]
    assert needed == ["1RECV_F1.0@1.0", "1RECV_B1.0@1.2"]
    carried = graph.carried_source[graph.carried_target == row].tolist()
    assert [lowered.words()[source] for source in carried] == ["1STEP"]
    assert lowered.position(carried[0])[0] == lowered.position(row)[0]


def test_one_behind_its_reduce_is_found() -> None:
    texts = lower(replayed()).text()
    texts["0.1"] = texts["0.1"].replace(" 1REPLAY1.0 1REDUCE_GRAD", " 1REDUCE_GRAD 1REPLAY1.0")
    (finding,) = check(Schedule.from_text(REPLAYED, texts))
    assert (finding.rule, finding.instruction) == ("replay", "1REPLAY1.0")
    assert "1REDUCE_GRAD on worker 0.1" in finding.message
    assert [one.instruction for one in finding.others] == ["1REDUCE_GRAD"]


TWO = Shape(pipelines=2, ranks=2, micro_batches=2)


def gathering(schedule: Schedule) -> Schedule:
    return replace(schedule, gathers=True)


def changed(schedule: Schedule, worker: str, old: str, new: str) -> list[Finding]:
    """What is found once the text of a worker's program is changed in one place."""
    programs = schedule.text()
    assert old in programs[worker]
    programs[worker] = programs[worker].replace(old, new, 1)
    return check(Schedule.from_text(schedule.shape, programs))


def test_every_host_gathers_behind_its_steps_last_stage_first() -> None:
    chunks = lower(gathering(interleaved(Shape(2, 2, 2, chunks=2))))
    assert chunks.text()["1.1"].endswith("3REDUCE_GRAD 1REDUCE_GRAD 3STEP 1STEP 3GATHER_PARAMS 1GATHER_PARAMS")
    assert check(chunks) == []
    assert lower(chunks) == chunks
    written_out = replace(lower(interleaved(Shape(2, 2, 2, chunks=2))), gathers=True)
    assert lower(written_out) == chunks
    assert with_barrier(gathering(zb_h1(TWO))).text()["0.0"].endswith("0REDUCE_GRAD 0STEP 0GATHER_PARAMS")


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


SHAPE = Shape(2, 4, 8)
REROUTED = {
    "0.0": "0F0.0 0F1.0 0B0.0 0B1.0",
    "0.1": "1F0.0 1F1.0 1I0.0 1W0.0 1B1.0",
    "1.1": "",
}


def rules(schedule: Schedule, **options: bool) -> list[str]:
    return [finding.rule for finding in check(schedule, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_of_every_family_are_valid_and_run_where_training_runs_them(family: str) -> None:
    shape = Shape(2, 4, 8, chunks_of(family))
    trained = FAMILIES[family](shape)
    evaluated = forward_only(trained)
    assert rules(evaluated) == []
    assert rules(lower(evaluated), about_to_run=True) == []
    assert evaluated.placement == trained.placement
    for worker in shape.workers():
        text = str(trained.text()[str(worker)]).replace("(", " ").replace(";", " ").split()
        assert sorted(evaluated.text()[str(worker)].split()) == sorted(word for word in text if "F" in word)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_keep_workers_busy_and_hold_one_activation(family: str) -> None:
    """The busiest worker never waits but for the pipeline to fill, twice on a V."""
    chunks = chunks_of(family)
    timeline = simulate(forward_only(FAMILIES[family](Shape(2, 4, 16, chunks))))
    assert timeline.makespan <= 16 * chunks + 3 * chunks
    assert timeline.peak_activations == [1.0] * 8
    assert timeline.busy == [16.0 * chunks] * 8


def test_micro_batches_of_the_dead_stay_with_who_took_them() -> None:
    trained = Schedule.from_text(Shape(2, 2, 1), REROUTED, failed=["1.0"])
    evaluated = forward_only(trained)
    assert evaluated.text() == {"0.0": "0F0.0 0F1.0", "0.1": "1F0.0 1F1.0", "1.1": ""}
    assert rules(evaluated) == []


def test_lowering_adds_transfers_of_activations_and_nothing_else() -> None:
    lowered = lower(forward_only(replace(one_f_one_b(Shape(1, 2, 1)), buckets=3)))
    assert lowered.text() == {"0.0": "0F0.0 0SEND_F0.0@0.1", "0.1": "1RECV_F0.0@0.0 1F0.0"}
    assert lower(lowered) == lowered


@pytest.mark.parametrize("name", ["s.json", "s.trace.json"])
def test_files_keep_it(tmp_path: Path, name: str) -> None:
    evaluated = forward_only(one_f_one_b(Shape(1, 3, 2)))
    write(evaluated, tmp_path / name)
    assert read(tmp_path / name) == evaluated
    assert '"forward_only": true' in (tmp_path / name).read_text().replace('":true', '": true')
    write(one_f_one_b(Shape(1, 3, 2)), tmp_path / name)
    assert "forward_only" not in (tmp_path / name).read_text()
