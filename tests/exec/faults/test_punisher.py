"""Faults at random: the same for a seed, as often as asked for, and none that ends the run."""

from __future__ import annotations

import pytest

from recycle import JobError, Shape, Worker
from recycle.exec.faults.faults import check_faults
from recycle.exec.faults.punisher import parse_punishment, punish
from tests.exec.runs import job

JOB = job(3, 2, 2)
SHAPE = JOB.shape


def test_a_seed_gives_the_same_faults_again_and_another_seed_gives_others() -> None:
    assert punish(SHAPE, 200, 5.0, 7) == punish(SHAPE, 200, 5.0, 7)
    assert punish(SHAPE, 200, 5.0, 7) != punish(SHAPE, 200, 5.0, 8)


@pytest.mark.parametrize("mean", [1.0, 4.0, 25.0])
def test_the_mean_is_that_of_the_iterations_between_two_faults(mean: float) -> None:
    faults = punish(SHAPE, 20_000, mean, 1)
    assert 19_999 / len(faults) == pytest.approx(mean, rel=0.1)
    assert {fault.kind for fault in faults} == {"kill", "rejoin"}
    assert {fault.worker for fault in faults} == set(SHAPE.workers())


@pytest.mark.parametrize("seed", range(20))
def test_every_fault_can_strike_and_no_stage_ever_loses_its_last_host(seed: int) -> None:
    absent = frozenset({Worker(1, 1)})
    faults = punish(SHAPE, 300, 1.5, seed, absent)
    check_faults(faults, JOB, 300, absent)
    dead = set(absent)
    for fault in faults:
        dead ^= {fault.worker}
        assert all(sum(worker.rank == rank for worker in dead) < 3 for rank in range(2))


@pytest.mark.parametrize("seed", range(5))
def test_kinds_are_drawn_as_often_as_they_are_given_and_each_can_strike(seed: int) -> None:
    faults = punish(SHAPE, 2000, 2.0, seed, kinds=["kill", "kill", "kill", "stop", "cut"])
    check_faults(faults, JOB, 2000)
    counts = {kind: sum(fault.kind == kind for fault in faults) for kind in ("kill", "stop", "cut")}
    assert counts["kill"] > 2 * counts["stop"] > 0
    assert counts["cut"] > 0


def test_one_pipeline_cannot_be_punished() -> None:
    with pytest.raises(JobError, match="none may die"):
        punish(Shape(1, 4, 8), 10, 2.0, 0)


@pytest.mark.parametrize("text", ["", "often", "0", "0.5", "nan", "inf", "20,", "20,x", "20,1.5", "20,1,2", "1e300"])
def test_a_punishment_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="expected MEAN_STEPS"):
        parse_punishment(text)
