"""Iterations that reduce jointly, and Bamboo's: the closed form, takeovers, fatal pairs; random ones pass check."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from recycle import Profile, Schedule, Worker, check, lower, simulate
from recycle.ir.instruction import Backward, RedundantForward
from recycle.systems.bamboo.pipelines import StageRanks, healthy_hosts, hosts_after_loss, iteration_schedule
from recycle.systems.joint_iteration import (
    reduce_order,
)
from recycle.systems.oobleck.pipelines import iteration_schedule as unequal

quick = settings(max_examples=60)
UNIT = Profile.uniform()


def healthy_seconds(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """Seconds of S >= 2 balanced stages with redundant forwards, without communication, reduce and step:
    (M + S - 1) (F + B) + max(0, (M - 1) F - B + max(0, B - F)).

    Without redundant forwards 1F1B takes (M + S - 1) c. The last stage has none; the one before it has the most to do,
    M (c + F), starts (S - 2) c later than a separate pipeline would in all, and waits B for its first gradient, in
    which one redundant forward is hidden. What that comes to above (M + S - 1) c is seen. The stages before it wait
    longer, and hide more.

    With B = 2 F this is (M + S - 1) c + max over s <= S - 2 of max(0, M F - (S - 1 - s) B), the usual form.
    """
    plain = (micro_batches + stages - 1) * (forward + backward)
    if stages == 1:
        return plain
    return plain + max(0.0, (micro_batches - 1) * forward - backward + max(0.0, backward - forward))


def computing(schedule: Schedule) -> dict[str, str]:
    """The programs without reduces and steps."""
    return {
        worker: " ".join(word for word in text.split() if not word.endswith(("REDUCE_GRAD", "STEP")))
        for worker, text in schedule.text().items()
    }


@quick
@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 5), st.integers(1, 9))
def test_the_closed_form_is_the_simulation(stages, micro_batches, forward, backward):
    profile = Profile.uniform(forward, backward, 0.0)
    schedule = simulate(lower(iteration_schedule([healthy_hosts(stages)], [micro_batches])), profile)
    assert schedule.makespan == healthy_seconds(stages, micro_batches, forward, backward)


def test_worker_with_two_stages_merges_their_programs_by_step():
    hosts = hosts_after_loss(healthy_hosts(4), 2)
    assert hosts == (0, 1, 1, 3)
    schedule = iteration_schedule([hosts], [3])
    assert schedule.failed == {Worker(0, 2)}
    assert check(schedule) == []
    text = computing(schedule)
    assert text["0.1"] == "1F0.0 2F0.0 1F0.1 2F0.1 2B0.0 1F0.2 1B0.0 2F0.2 2B0.1 1B0.1 2B0.2 1B0.2"
    assert text["0.0"] == "0F0.0 0F0.1 0F0.2 1R0.0 0B0.0 1R0.1 0B0.1 1R0.2 0B0.2"
    assert text["0.3"] == "3F0.0 3B0.0 3F0.1 3B0.1 3F0.2 3B0.2"
    lowered = lower(schedule)
    assert lowered.text()["0.1"].endswith("2REDUCE_GRAD 1REDUCE_GRAD 2STEP 1STEP")
    assert lowered.text()["0.0"].endswith("0REDUCE_GRAD 1REDUCE_GRAD 0STEP 1STEP")
    assert not any(word.endswith("@0.2") for word in lowered.words())
    assert not any("2SEND_B" in word or "2RECV_F" in word for word in lowered.words())


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[StageRanks], list[int]]:
    stages, count = draw(st.integers(2, 7)), draw(st.integers(1, 4))
    pipelines = []
    for _ in range(count):
        hosts = healthy_hosts(stages)
        for rank in draw(st.lists(st.integers(0, stages - 1), max_size=3, unique=True)):
            hosts_after = hosts_after_loss(hosts, rank) if rank in hosts else None
            hosts = hosts_after or hosts
        pipelines.append(hosts)
    shares = [draw(st.integers(1, 9)) for _ in pipelines]
    return pipelines, shares


@pytest.mark.search
@quick
@given(damaged(), st.randoms(use_true_random=False))
def test_random_damage_passes_check_and_takes_the_slowest_pipelines_time(case, rng):
    pipelines, shares = case
    schedule = iteration_schedule(pipelines, shares)
    stages = len(pipelines[0])
    assert check(lower(schedule), about_to_run=True) == check(schedule) == []
    assert schedule.shape.global_micro_batches == sum(shares)
    profile = Profile(*([float(rng.randint(1, 4)) for _ in range(stages)] for _ in range(3)))
    timeline = simulate(lower(schedule), profile)
    alone = [
        simulate(lower(iteration_schedule([h], [n])), profile).makespan for h, n in zip(pipelines, shares, strict=True)
    ]
    assert timeline.makespan == timeline.period == max(alone)


@quick
@given(damaged())
def test_redundant_forwards_precede_the_backwards_of_copied_stages(case):
    pipelines, shares = case
    schedule = iteration_schedule(pipelines, shares)
    for k, hosts in enumerate(pipelines):
        for rank in set(hosts):
            program = schedule.program(Worker(k, rank))
            doubled = [instruction.stage for instruction in program if instruction.kind == RedundantForward.kind]
            has_copy = rank + 1 < len(hosts) and hosts[rank + 1] == rank + 1
            assert doubled == [rank + 1] * (shares[k] if has_copy else 0)
            for instruction, after in pairwise(program):
                if instruction.kind == RedundantForward.kind:
                    assert (after.kind, after.stage, after.micro_batch) == (
                        Backward.kind,
                        rank,
                        instruction.micro_batch,
                    )


FREE = Profile(0.0, 0.0, 0.0, reduce=1.0)


def test_copies_reduce_even_stages_then_odd_ones():
    """Each of the 8 workers shares a stage with either neighbour: two rounds, not eight in a row."""
    schedule = iteration_schedule([healthy_hosts(8)], [1])
    assert reduce_order(schedule.placement, [1.0] * 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert simulate(lower(schedule), FREE).makespan == 2


def test_reduces_of_unequal_pipelines_run_in_parallel():
    """Stages 0 1 2 | 3 4 5 and 0 1 | 2 3 | 4 5: three rounds instead of six in sequence."""
    schedule, common = unequal([(3, 3), (2, 2, 2)], [1, 1])
    assert common == (1,) * 6
    assert simulate(lower(schedule), FREE).makespan == 3
