"""Iterations that reduce jointly, and Bamboo's: the closed form, takeovers, fatal pairs; random ones pass check."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import JobError, Profile, Schedule, Shape, Worker, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Backward, RedundantForward
from recycle.systems.bamboo.pipelines import StageRanks, after_losing, healthy, iteration
from recycle.systems.joint_iteration import (
    computed,
    joint_schedule,
    micro_batches_of,
    reduce_order,
    shape_for,
    synchronised,
)
from recycle.systems.oobleck.pipelines import iteration as unequal

quick = settings(derandomize=True, max_examples=60, deadline=None, database=None)
UNIT = Profile.uniform()


def healthy_seconds(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """Seconds of S >= 2 balanced stages with redundant forwards, without communication, reduce and step:
    (M + S - 1) (F + B) + max(0, (M - 1) F - B + max(0, B - F)).

    Without redundant forwards 1F1B takes (M + S - 1) c. The last stage has none; the one before it has the most to do,
    M (c + F), starts (S - 2) c later than a pipeline of its own would in all, and waits B for its first gradient, in
    which one redundant forward is hidden. What that comes to above (M + S - 1) c is seen. The stages before it wait
    longer, and hide more.

    With B = 2 F this is (M + S - 1) c + max over s <= S - 2 of max(0, M F - (S - 1 - s) B), the usual form.
    """
    plain = (micro_batches + stages - 1) * (forward + backward)
    if stages == 1:
        return plain
    return plain + max(0.0, (micro_batches - 1) * forward - backward + max(0.0, backward - forward))


def computing(made: Schedule) -> dict[str, str]:
    """The programs without reduces and steps."""
    return {
        worker: " ".join(word for word in text.split() if not word.endswith(("REDUCE_GRAD", "STEP")))
        for worker, text in made.text().items()
    }


@quick
@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 5), st.integers(1, 9))
def test_the_closed_form_is_the_simulation(stages: int, micro_batches: int, forward: int, backward: int) -> None:
    profile = Profile.uniform(forward, backward, 0.0)
    made = simulate(lower(iteration([healthy(stages)], [micro_batches])), profile)
    assert made.makespan == healthy_seconds(stages, micro_batches, forward, backward)


def test_a_worker_that_took_over_runs_both_lists_step_by_step() -> None:
    hosts = after_losing(healthy(4), 2)
    assert hosts == (0, 1, 1, 3)
    made = iteration([hosts], [3])
    assert made.failed == {Worker(0, 2)}
    assert check(made) == []
    text = computing(made)
    assert text["0.1"] == "1F0.0 2F0.0 1F0.1 2F0.1 2B0.0 1F0.2 1B0.0 2F0.2 2B0.1 1B0.1 2B0.2 1B0.2"
    assert text["0.0"] == "0F0.0 0F0.1 0F0.2 1R0.0 0B0.0 1R0.1 0B0.1 1R0.2 0B0.2"
    assert text["0.3"] == "3F0.0 3B0.0 3F0.1 3B0.1 3F0.2 3B0.2"
    lowered = lower(made)
    assert lowered.text()["0.1"].endswith("2REDUCE_GRAD 1REDUCE_GRAD 2STEP 1STEP")
    assert lowered.text()["0.0"].endswith("0REDUCE_GRAD 1REDUCE_GRAD 0STEP 1STEP")
    assert not any(word.endswith("@0.2") for word in lowered.words())
    assert not any("2SEND_B" in word or "2RECV_F" in word for word in lowered.words())


@pytest.mark.parametrize(
    ("dead", "fatal"),
    [([2], [1, 3]), ([0], [1, 4]), ([1, 3], [0, 2, 4]), ([2, 0], [1, 3, 4])],
)
def test_neighbours_and_whoever_runs_two_stages_must_not_be_lost(dead: list[int], fatal: list[int]) -> None:
    hosts: StageRanks | None = healthy(5)
    for rank in dead:
        assert hosts is not None
        hosts = after_losing(hosts, rank)
    assert hosts is not None
    assert [rank for rank in sorted(set(hosts)) if after_losing(hosts, rank) is None] == fatal


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[StageRanks], list[int]]:
    stages, count = draw(st.integers(2, 7)), draw(st.integers(1, 4))
    pipelines = []
    for _ in range(count):
        hosts = healthy(stages)
        for rank in draw(st.lists(st.integers(0, stages - 1), max_size=3, unique=True)):
            left = after_losing(hosts, rank) if rank in hosts else None
            hosts = left or hosts
        pipelines.append(hosts)
    shares = [draw(st.integers(1, 9)) for _ in pipelines]
    return pipelines, shares


@pytest.mark.search
@quick
@given(damaged(), st.randoms(use_true_random=False))
def test_random_damage_passes_check_and_takes_what_its_slowest_pipeline_takes(
    case: tuple[list[StageRanks], list[int]], rng: random.Random
) -> None:
    pipelines, shares = case
    made = iteration(pipelines, shares)
    stages = len(pipelines[0])
    assert check(lower(made), about_to_run=True) == check(made) == []
    assert made.shape.global_micro_batches == sum(shares)
    profile = Profile(*([float(rng.randint(1, 4)) for _ in range(stages)] for _ in range(3)))
    timeline = simulate(lower(made), profile)
    alone = [simulate(lower(iteration([h], [n])), profile).makespan for h, n in zip(pipelines, shares, strict=True)]
    assert timeline.makespan == timeline.period == max(alone)


@quick
@given(damaged())
def test_every_micro_batch_has_its_forwards_and_each_copied_stage_its_redundant_one(
    case: tuple[list[StageRanks], list[int]],
) -> None:
    pipelines, shares = case
    made = iteration(pipelines, shares)
    for k, hosts in enumerate(pipelines):
        for rank in set(hosts):
            program = made.program(Worker(k, rank))
            doubled = [one.stage for one in program if one.kind == RedundantForward.kind]
            has_copy = rank + 1 < len(hosts) and hosts[rank + 1] == rank + 1
            assert doubled == [rank + 1] * (shares[k] if has_copy else 0)
            for one, after in pairwise(program):
                if one.kind == RedundantForward.kind:
                    assert (after.kind, after.stage, after.micro_batch) == (Backward.kind, rank, one.micro_batch)  # type: ignore[attr-defined]


def test_the_shape_has_room_for_all_and_exactly_the_batch() -> None:
    assert shape_for(3, 4, 18) == Shape(3, 4, 6)
    assert shape_for(7, 4, 32) == Shape(8, 4, 4)
    assert shape_for(3, 4, 7, chunks=2) == Shape(7, 4, 1, 2)
    with pytest.raises(JobError):
        shape_for(5, 4, 4)


def test_every_micro_batch_is_dealt_once_and_first_to_its_home() -> None:
    dealt = micro_batches_of(Shape(4, 2, 4), [7, 6, 3])
    assert [" ".join(map(str, own)) for own in dealt] == [
        "0.0 0.1 0.2 0.3 2.3 3.0 3.1",
        "1.0 1.1 1.2 1.3 3.2 3.3",
        "2.0 2.1 2.2",
    ]


FREE = Profile(0.0, 0.0, 0.0, reduce=1.0)


def test_copies_reduce_even_stages_then_odd_ones() -> None:
    """Each of the 8 workers shares a stage with either neighbour: two rounds, not eight in a row."""
    made = iteration([healthy(8)], [1])
    assert reduce_order(made.placement, [1.0] * 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert simulate(lower(made), FREE).makespan == 2


def test_pipelines_that_are_cut_differently_need_no_more_than_their_fullest_worker() -> None:
    """Stages 0 1 2 | 3 4 5 and 0 1 | 2 3 | 4 5: three rounds where one behind the other would be six."""
    made, common = unequal([(3, 3), (2, 2, 2)], [1, 1])
    assert common == (1,) * 6
    assert simulate(lower(made), FREE).makespan == 3


def test_every_stage_is_reduced_once_and_all_workers_agree() -> None:
    chance = random.Random(3)
    for _ in range(30):
        stages = chance.randint(1, 8)
        hosted = [chance.sample(range(stages), chance.randint(0, stages)) for _ in range(6)]
        order = reduce_order(hosted, [chance.choice([1.0, 2.0, 5.0]) for _ in range(stages)])
        assert sorted(order) == list(range(stages))


def test_a_plain_schedule_gets_what_lower_would_write() -> None:
    plain = one_f_one_b(Shape(2, 3, 4), "barrier")
    programs = {worker: plain.program(worker) for worker in plain.live}
    made = joint_schedule(plain.shape, programs, plain.placement, [1.0] * 3, **plain.metadata)
    assert check(lower(made), about_to_run=True) == []
    assert lower(made) == lower(plain)


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("late", [0.0, 5.0, 50.0])
def test_copies_chain_the_reduces_of_neighbours(dead: int, late: float) -> None:
    hosts = after_losing(healthy(4), dead)
    assert hosts is not None
    profile = Profile(1.0, 1.0, 1.0, reduce=[1.0, late, 2.0, 3.0], step=[1.0, 2.0, 0.0, 0.0])
    workers = computed(iteration([healthy(4)], [7]), profile) + computed(iteration([hosts], [3]), profile)
    together = simulate(lower(iteration([healthy(4), hosts], [7, 3])), profile).period
    assert synchronised(workers, profile, [1.0] * 4) == together
