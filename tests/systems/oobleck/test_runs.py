"""Oobleck's unequal pipelines on real stages: the gradients of fault-free 1F1B."""

from __future__ import annotations

import pytest

from recycle.exec.launch.launcher import RunResult
from recycle.systems.joint_iteration import shape_for
from recycle.systems.oobleck.iteration import iteration
from recycle.systems.setting import Split
from tests.systems.gpt import assert_same_bits, gpt, reference, states

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[list[Split], list[int]]] = {
    "two and three stages": ([(3, 3), (2, 2, 2)], [3, 5]),
    "three depths": ([(6,), (3, 3), (2, 1, 2, 1)], [2, 2, 4]),
    "another cut at the same depth": ([(4, 2), (2, 4)], [5, 3]),
}


@pytest.fixture(scope="module")
def fault_free() -> RunResult:
    """Six layers, eight micro-batches, one worker per layer and pipeline."""
    return reference(gpt(2, 6, 4, [1] * 6))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_unequal_pipelines_train_to_the_bits_of_1f1b(
    case: tuple[list[Split], list[int]], fault_free: RunResult
) -> None:
    splits, shares = case
    schedule, common = iteration(splits, shares)
    shape = schedule.shape
    assert shape.global_micro_batches == 8
    of = gpt(shape.pipelines, shape.ranks, shape.micro_batches, list(common), shape.chunks)
    result = assert_same_bits(schedule, of, fault_free)
    assert sorted(states(result)) == list(range(shape.stages))
    if common == (1,) * 6:
        assert states(result) == states(fault_free)


def test_the_shape_has_homes_for_all_micro_batches() -> None:
    assert shape_for(3, 4, 8).pipelines == 4
