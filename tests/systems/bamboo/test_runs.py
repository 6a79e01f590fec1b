"""Bamboo's schedules on real stages: redundant forwards and takeovers give the gradients of fault-free 1F1B."""

from __future__ import annotations

import pytest

from recycle import Job, Worker
from recycle.exec.launch.launcher import RunResult
from recycle.exec.launch.standalone import LocalRun
from recycle.ir.lower import with_barrier
from recycle.plans import with_updates_of
from recycle.systems.bamboo.pipelines import StageRanks, after_losing, healthy, iteration
from tests.systems.gpt import assert_same_bits, gpt, reference, states

pytestmark = pytest.mark.slow

SPLIT = [1, 1, 1, 1]


@pytest.fixture(scope="module")
def of() -> Job:
    return gpt(2, 4, 4, SPLIT)


@pytest.fixture(scope="module")
def fault_free(of: Job) -> RunResult:
    return reference(of)


def test_a_healthy_iteration_and_its_copies(of: Job, fault_free: RunResult) -> None:
    result = assert_same_bits(iteration([healthy(4)] * 2, [4, 4]), of, fault_free)
    assert states(result) == states(fault_free)
    assert {worker: sorted(stages) for worker, stages in result.digests.items()}["1.2"] == [2, 3]


@pytest.mark.parametrize(
    "dead", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3]
)
def test_a_takeover_of_any_stage(of: Job, fault_free: RunResult, dead: int) -> None:
    hosts = after_losing(healthy(4), dead)
    assert hosts is not None
    result = assert_same_bits(iteration([healthy(4), hosts], [5, 3]), of, fault_free)
    assert states(result) == states(fault_free)
    assert str(Worker(1, dead)) not in result.digests


def test_two_takeovers_in_one_pipeline(of: Job, fault_free: RunResult) -> None:
    hosts: StageRanks | None = after_losing(healthy(4), 1)
    assert hosts is not None
    hosts = after_losing(hosts, 3)
    assert hosts is not None
    assert states(assert_same_bits(iteration([hosts, healthy(4)], [4, 4]), of, fault_free)) == states(fault_free)


def test_what_redundant_forwards_hold_is_let_go(of: Job) -> None:
    ran = LocalRun(with_barrier(with_updates_of(iteration([healthy(4)] * 2, [4, 4]), of)), of)
    ran.iterate(0)
    assert {stage.held_micro_batches() for stages in ran.stages.values() for stage in stages.values()} == {0}
