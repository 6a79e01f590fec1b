"""REPLAY: what it needs is brought, it costs F + I + W and an activation while it runs, and it counts for nothing."""

from __future__ import annotations

from collections import Counter

from recycle import Profile, Schedule, Shape, check, lower, simulate
from recycle.ir.dependencies import dependencies

SHAPE = Shape(2, 3, 2)
PROGRAMS = {
    "0.0": "0F0.0 0F0.1 0B0.0 0B0.1",
    "0.1": "1F0.0 1F0.1 1B0.0 1B0.1 1REPLAY1.0",
    "0.2": "2F0.0 2B0.0 2F0.1 2B0.1",
    "1.0": "0F1.0 0F1.1 0B1.0 0B1.1",
    "1.1": "1F1.0 1F1.1 1B1.0 1B1.1",
    "1.2": "2F1.0 2B1.0 2F1.1 2B1.1",
}


def schedule(**programs: str) -> Schedule:
    return Schedule.from_text(SHAPE, PROGRAMS | programs)


def test_its_input_and_its_gradient_come_from_those_who_made_them_for_its_peer() -> None:
    programs = lower(schedule()).text()
    assert "1RECV_F1.0@1.0" in programs["0.1"]
    assert "1RECV_B1.0@1.2" in programs["0.1"]
    assert "0F1.0 0SEND_F1.0@0.1 0SEND_F1.0@1.1" in programs["1.0"]
    assert "2B1.0 2SEND_B1.0@0.1 2SEND_B1.0@1.1" in programs["1.2"]
    assert check(lower(schedule()), about_to_run=True) == []
    ends = lower(schedule(**{"0.0": PROGRAMS["0.0"] + " 0REPLAY1.1", "1.2": PROGRAMS["1.2"] + " 2REPLAY0.0"})).text()
    assert ends["0.0"].endswith("0RECV_B1.1@1.1 0REPLAY1.1 0REDUCE_GRAD 0STEP")
    assert "RECV_F1.1@" not in ends["0.0"]
    assert "RECV_B0.0@" not in ends["1.2"]


def test_it_costs_what_the_stage_costs_and_the_two_transfers() -> None:
    profile = Profile(forward=[1, 2, 4], backward_input=8, backward_weight=16, latency=0.5, message=1.0)
    times = [simulate(one, profile) for one in (schedule(), schedule(**{"0.1": "1F0.0 1F0.1 1B0.0 1B0.1"}))]
    busy = [timeline.busy for timeline in times]
    assert [a - b for a, b in zip(*busy, strict=True)] == [0, 2 + 8 + 16, 0, 0, 0, 0]  # type: ignore[operator]
    rows = [Counter(timeline.schedule.words()) for timeline in times]
    assert sorted((rows[0] - rows[1]).elements()) == [
        "0SEND_F1.0@0.1",
        "1RECV_B1.0@1.2",
        "1RECV_F1.0@1.0",
        "1REPLAY1.0",
        "2SEND_B1.0@0.1",
    ]


def test_it_holds_an_activation_while_it_runs() -> None:
    early = schedule(**{"0.1": "1F0.0 1F0.1 1REPLAY1.0 1B0.0 1B0.1"})
    assert simulate(schedule()).peak_activations[1] == 2
    assert simulate(early).peak_activations[1] == 3
    assert [f.rule for f in check(early, limits=[2, 2, 2])] == ["activation-limit"]
    weights = Profile(activation=[1.0, 10.0, 100.0], recomputed_from=[1.0, 4.0, 100.0])
    assert simulate(early, weights).peak_bytes[1] == 4 + 4 + 10


def test_nobody_waits_for_it_but_its_own_worker() -> None:
    lowered = lower(schedule())
    graph = dependencies(lowered)
    row = lowered.words().index("1REPLAY1.0")
    assert not (graph.source == row).any()
    needed = [lowered.words()[source] for source in graph.source[graph.target == row].tolist()]
    assert needed == ["1RECV_F1.0@1.0", "1RECV_B1.0@1.2"]
    carried = graph.carried_source[graph.carried_target == row].tolist()
    assert [lowered.words()[source] for source in carried] == ["1STEP"]
    assert lowered.position(carried[0])[0] == lowered.position(row)[0]


def test_one_behind_its_reduce_is_found() -> None:
    texts = lower(schedule()).text()
    texts["0.1"] = texts["0.1"].replace(" 1REPLAY1.0 1REDUCE_GRAD", " 1REDUCE_GRAD 1REPLAY1.0")
    (finding,) = check(Schedule.from_text(SHAPE, texts))
    assert (finding.rule, finding.instruction) == ("replay", "1REPLAY1.0")
    assert "1REDUCE_GRAD on worker 0.1" in finding.message
    assert [one.instruction for one in finding.others] == ["1REDUCE_GRAD"]


def test_it_is_no_forward_that_a_micro_batch_needs() -> None:
    found = check(schedule(**{"1.1": "1F1.1 1B1.1"}))
    assert [(f.rule, f.message[:36]) for f in found] == [("missing", "stage 1 does not run micro-batch 1.0")]
