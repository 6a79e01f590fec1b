"""Bamboo's schedules: the closed form, takeovers, fatal pairs; random ones pass check and beat no bound."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle import Profile, Schedule, Shape, Worker, check, lower, simulate
from recycle.ir.families import one_f_one_b
from recycle.ir.instruction import Backward, RedundantForward
from recycle.systems.bamboo.pipelines import StageRanks, after_losing, healthy, iteration
from tests.systems.closed_forms import healthy_seconds

quick = settings(derandomize=True, max_examples=60, deadline=None, database=None)
UNIT = Profile.uniform()


def computing(made: Schedule) -> dict[str, str]:
    """The programs without reduces and steps."""
    return {
        worker: " ".join(word for word in text.split() if not word.endswith(("REDUCE_GRAD", "STEP")))
        for worker, text in made.text().items()
    }


TABLE = [
    (4, 6, 27, 31), (4, 8, 33, 39), (4, 16, 57, 71), (8, 16, 69, 83), (8, 32, 117, 147), (12, 32, 129, 159),
    (12, 48, 177, 223),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "micro_batches", "plain", "redundant"), TABLE)
def test_redundant_forwards_cost_what_the_table_says(
    stages: int, micro_batches: int, plain: int, redundant: int
) -> None:
    made = simulate(lower(iteration([healthy(stages)], [micro_batches])), UNIT)
    assert made.makespan == made.period == healthy_seconds(stages, micro_batches, 1, 2) == redundant
    assert simulate(one_f_one_b(Shape(1, stages, micro_batches), "barrier"), UNIT).period == plain


@quick
@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 5), st.integers(1, 9))
def test_the_closed_form_is_the_simulation(stages: int, micro_batches: int, forward: int, backward: int) -> None:
    profile = Profile.uniform(forward, backward, 0.0)
    made = simulate(lower(iteration([healthy(stages)], [micro_batches])), profile)
    assert made.makespan == healthy_seconds(stages, micro_batches, forward, backward)


@quick
@given(st.integers(2, 12), st.integers(1, 60), st.integers(1, 5))
def test_the_usual_form_is_that_of_backwards_twice_as_long(stages: int, micro_batches: int, forward: int) -> None:
    backward = 2 * forward
    usual = (micro_batches + stages - 1) * (forward + backward)
    usual += max(max(0, micro_batches * forward - (stages - 1 - s) * backward) for s in range(stages - 1))
    assert healthy_seconds(stages, micro_batches, forward, backward) == usual


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 6), (5, 3), (6, 12)])
def test_but_for_redundant_forwards_every_worker_has_the_programs_of_1f1b(stages: int, micro_batches: int) -> None:
    made = computing(iteration([healthy(stages)], [micro_batches]))
    own = {worker: " ".join(word for word in text.split() if "R" not in word) for worker, text in made.items()}
    assert own == one_f_one_b(Shape(1, stages, micro_batches)).text()


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


def test_the_last_worker_takes_the_first_stage() -> None:
    hosts = after_losing(healthy(3), 0)
    assert hosts == (2, 1, 2)
    made = iteration([hosts], [4])
    assert check(made) == []
    assert made.stages_of(Worker(0, 2)) == (2, 0)
    assert simulate(lower(made), UNIT).makespan >= 4 * 2 * 3


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


def test_a_single_stage_has_no_copy() -> None:
    assert after_losing(healthy(1), 0) is None
    assert iteration([healthy(1)], [3]).stages_of(Worker(0, 0)) == (0,)


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


def bound(hosts: StageRanks, micro_batches: int, profile: Profile, made: Schedule, worker: Worker) -> float:
    """Work of one worker, and the shortest way of a micro-batch to it and back."""
    stages = len(hosts)
    forward = profile.per_stage("forward", stages)
    backward = [
        i + w
        for i, w in zip(profile.per_stage("backward_input", stages), profile.per_stage("backward_weight", stages),
                        strict=True)
    ]  # fmt: skip
    mine = [stage for stage, host in enumerate(hosts) if host == worker.rank]
    first, last = min(mine), max(mine)
    redundant = sum(forward[one.stage] for one in made.program(worker) if one.kind == RedundantForward.kind)
    work = micro_batches * sum(forward[s] + backward[s] for s in mine) + redundant
    if [first, last] == [0, stages - 1] and len(mine) == 2:
        return work
    return sum(forward[:first]) + work + sum(backward[:first])


@pytest.mark.search
@quick
@given(damaged(), st.randoms(use_true_random=False))
def test_random_damage_passes_check_and_beats_no_bound(
    case: tuple[list[StageRanks], list[int]], rng: random.Random
) -> None:
    pipelines, shares = case
    made = iteration(pipelines, shares)
    stages = len(pipelines[0])
    assert check(lower(made), about_to_run=True) == check(made) == []
    assert made.shape.global_micro_batches == sum(shares)
    profile = Profile(*([float(rng.randint(1, 4)) for _ in range(stages)] for _ in range(3)))
    timeline = simulate(lower(made), profile)
    for k, (hosts, share) in enumerate(zip(pipelines, shares, strict=True)):
        for rank in set(hosts):
            assert timeline.makespan >= bound(hosts, share, profile, made, Worker(k, rank))
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
