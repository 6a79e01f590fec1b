"""Replays: every micro-batch is replayed once, schedules stay valid, and gaps lengthen no iteration."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from recycle import MicroBatch, Profile, Schedule, Shape, Worker, check, simulate
from recycle.ir.families import one_f_one_b, zb_h1
from recycle.ir.instruction import Compute, Forward, OverlappedPair, Replay
from recycle.ir.lower import lower, with_barrier, with_first_micro_batches
from recycle.ir.replays import EVERY_ITERATION, ReplayTarget, Rotation, with_replays
from tests.ir.random_schedules import random_profile, random_schedule


def hosts_of(schedule: Schedule) -> dict[ReplayTarget, Worker]:
    hosts = {}
    for worker in schedule.live:
        for instruction in schedule.program(worker):
            forward = instruction.forward if isinstance(instruction, OverlappedPair) else instruction
            if isinstance(forward, Forward):
                hosts[ReplayTarget(forward.stage, forward.micro_batch)] = worker
    return hosts


def replays(schedule: Schedule) -> list[tuple[Worker, ReplayTarget]]:
    return [
        (worker, ReplayTarget(instruction.stage, instruction.micro_batch))
        for worker in schedule.live
        for instruction in schedule.program(worker)
        if isinstance(instruction, Replay)
    ]


def computes(schedule: Schedule) -> dict[str, list[str]]:
    """Return the computes of each worker, without replays."""
    return {
        str(worker): [
            str(instruction)
            for instruction in schedule.program(worker)
            if isinstance(instruction, Compute | OverlappedPair) and not isinstance(instruction, Replay)
        ]
        for worker in schedule.live
    }


@pytest.mark.parametrize("seed", range(40))
def test_every_round_of_a_random_schedule_is_valid_and_the_rounds_replay_everything_once(seed):
    """Failed workers, re-routed micro-batches, split backwards, overlapped pairs, chunks in loops and Vs."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    profile = random_profile(rng, schedule)
    start, every = rng.choice([schedule, lower(schedule)]), rng.choice([1, 2, 3, 7, "gaps"])
    rotation = with_replays(start, every, profile)
    assert [f for f in check(rotation.whole, profile=profile) if f.severity == "error"] == []
    hosts, seen = hosts_of(schedule), Counter()
    plain = simulate(schedule, profile)
    for iteration in range(max(1, rotation.rounds)):
        ran = rotation.schedule(iteration)
        assert [f for f in check(with_barrier(ran), profile=profile, about_to_run=True) if f.severity == "error"] == []
        assert computes(ran) == computes(schedule)
        assert all(hosts[checked] != worker for worker, checked in replays(ran))
        assert {checked for _, checked in replays(ran)} == rotation.checked(iteration)
        assert {str(w): rotation.program(w, iteration) for w in ran.live} == {str(w): ran.program(w) for w in ran.live}
        seen.update(checked for _, checked in replays(ran))
        timeline = simulate(ran, profile)
        held = zip(timeline.peak_activations, plain.peak_activations, strict=True)
        assert all(with_it is None or with_it <= max(without or 0, 1) for with_it, without in held)
        if every == "gaps":
            assert timeline.period <= plain.period * (1 + 1e-6)
    have_peers = {checked for checked in hosts if len(schedule.hosts(checked.stage)) > 1}
    assert set(seen.values()) <= {1}
    if every != "gaps":
        assert (rotation.rounds, set(seen)) == (every, have_peers)


def test_a_host_is_checked_by_all_its_peers_in_turn():
    rotation = with_replays(zb_h1(Shape(4, 2, 6)), every=6)
    homes, workers = rotation.slots.micro_batch // 6, rotation.slots.worker // 2
    checked_by = Counter(zip(homes.tolist(), workers.tolist(), strict=True))
    assert checked_by == {(home, peer): 4 for home in range(4) for peer in range(4) if home != peer}
    # As every worker has six, each iteration has one of each worker.
    assert [len(rotation.checked(n)) for n in range(6)] == [8] * 6


def test_1f1b_has_gaps_for_replays_of_all_stages_but_the_first():
    """Each of 6 micro-batches takes 3 slots at each of 4 stages. Worker 0.0 has no gap of 3 after the first gradient;
    later stages have a gap before their first input."""
    schedule = one_f_one_b(Shape(3, 4, 6))
    period = simulate(schedule).period
    rotation = with_replays(schedule, "gaps")
    assert set(rotation.slots.stage.tolist()) == {1, 2, 3}
    assert rotation.rounds == 6
    assert [simulate(rotation.schedule(n)).period for n in range(6)] == [period] * 6
    forced = with_replays(schedule, 6)
    assert set(forced.slots.stage.tolist()) == {0, 1, 2, 3}
    assert [simulate(forced.schedule(n)).period - period for n in range(6)] == [3.0] * 6


def test_a_gap_in_the_middle_is_used_where_it_holds_the_replay_and_memory_allows():
    """The second stage is done with its first micro-batch long before the second comes: each worker of it waits from 3
    to 10, and the replay of a micro-batch of the other pipeline, which is ready at 2, fits in between."""
    shape = Shape(2, 2, 2)
    programs = {f"{k}.0": f"0F{k}.0 0B{k}.0 0F{k}.1 0B{k}.1" for k in range(2)}
    programs |= {f"{k}.1": f"1F{k}.0 1B{k}.0 1F{k}.1 1B{k}.1" for k in range(2)}
    schedule = Schedule.from_text(shape, programs)
    rotation = with_replays(schedule, 2)
    assert computes(rotation.schedule(0)) == computes(schedule)
    texts = [rotation.schedule(n).text()["0.1"] for n in range(2)]
    assert [" ".join(w for w in text.split() if "SEND" not in w and "RECV" not in w) for text in texts] == [
        "1F0.0 1B0.0 1REPLAY1.0 1F0.1 1B0.1 1REDUCE_GRAD 1STEP",
        "1F0.0 1B0.0 1F0.1 1B0.1 1REPLAY1.1 1REDUCE_GRAD 1STEP",
    ]
    assert simulate(rotation.schedule(0)).peak_activations == [1, 1, 1, 1]


def test_disputed_work_is_replayed_by_all_other_hosts_in_every_iteration():
    schedule = one_f_one_b(Shape(4, 2, 2))
    disputed = ReplayTarget(1, MicroBatch(2, 1))
    rotation = with_replays(schedule, 50, disputed=[disputed])
    for iteration in (0, 1, 30):
        workers = [str(worker) for worker, checked in replays(rotation.schedule(iteration)) if checked == disputed]
        assert workers == ["0.1", "1.1", "3.1"]
        assert check(rotation.schedule(iteration), about_to_run=True) == []
    only_disputed = with_replays(schedule, 0, disputed=[disputed])
    assert (only_disputed.rounds, set(only_disputed.slots.round.tolist())) == (0, {EVERY_ITERATION})
    assert only_disputed.checked(7) == {disputed}


def test_a_schedule_may_contain_replays():
    shape = Shape(2, 1, 2)
    schedule = Schedule.from_text(
        shape, {"0.0": "0F0.0 0B0.0 0F0.1 0B0.1 0REPLAY1.1", "1.0": "0F1.0 0B1.0 0F1.1 0B1.1"}
    )
    assert not check(lower(schedule))
    rotation = with_replays(schedule, 0, Profile.uniform())
    assert isinstance(rotation, Rotation)
    assert rotation.checked(3) == {ReplayTarget(0, MicroBatch(1, 1))}


@pytest.mark.parametrize("seed", range(40))
def test_schedule_without_its_last_micro_batches_is_valid_for_fewer(seed):
    rng = random.Random(seed)
    schedule = replace(random_schedule(rng), buckets=rng.choice([1, 1, 2]))
    count = rng.randint(1, schedule.shape.micro_batches)
    fewer = with_first_micro_batches(with_barrier(schedule) if rng.random() < 0.5 else lower(schedule), count)
    alone = replace(fewer, shape=replace(schedule.shape, micro_batches=count))
    assert [f for f in check(alone, about_to_run=True) if f.severity == "error"] == []


def test_rotation_drops_replays_with_their_micro_batches():
    rotation = with_replays(one_f_one_b(Shape(2, 2, 4)), 2)
    ramped = replace(rotation, micro_batches=lambda iteration: min(iteration // 2 + 1, 4))
    for iteration in range(9):
        count, whole = min(iteration // 2 + 1, 4), rotation.checked(iteration)
        assert ramped.checked(iteration) == {each for each in whole if each.micro_batch.index < count}
        assert {target for _, target in replays(ramped.schedule(iteration))} == ramped.checked(iteration)
    assert ramped.program(Worker(0, 1), 8) == rotation.program(Worker(0, 1), 8)
