"""The gradient sum: exact in any order and on any host, and loud beyond its bound."""

from __future__ import annotations

import math

import pytest
import torch

from recycle.exec.model.state.accumulate import ExactSum, FastSum, FlatLayout, grid_exponent
from recycle.job.footprint import ON_CPU

CPU = torch.device("cpu")
ADDENDS = 18


def addends(count: int = ADDENDS, size: int = 10_000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) * 10.0 ** -(place % 5) for place in range(count)]


def total(kind: type[ExactSum] | type[FastSum], parts: list[torch.Tensor], exponent: int = 6) -> torch.Tensor:
    accumulator = kind(FlatLayout([parts[0].shape]), ADDENDS, exponent, CPU)
    for part in parts:
        accumulator.add(0, part)
    return accumulator.buffer


def test_the_exact_sum_does_not_depend_on_order() -> None:
    parts = addends()
    shuffled = [parts[place] for place in torch.randperm(ADDENDS, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(total(ExactSum, parts), total(ExactSum, shuffled))
    # The plain sum does, or the test above would show nothing.
    differing = (total(FastSum, parts) != total(FastSum, shuffled)).float().mean()
    assert differing > 0.3


def test_the_exact_sum_does_not_depend_on_the_split_over_hosts() -> None:
    parts = addends()
    hosts = [total(ExactSum, parts[0:5]), total(ExactSum, parts[5:6]), total(ExactSum, parts[6:])]
    other = [total(ExactSum, parts[1::2]), total(ExactSum, parts[0::2])]
    whole = total(ExactSum, parts)
    assert torch.equal(hosts[0] + hosts[1] + hosts[2], whole)
    assert torch.equal(hosts[2] + (hosts[1] + hosts[0]), whole)
    assert torch.equal(other[0] + other[1], whole)


def test_each_addend_is_rounded_to_the_nearest_grid_point_ties_to_even() -> None:
    unit = 2.0 ** -grid_exponent(ADDENDS, 6)
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 0.51, 3.0]) * unit
    assert (total(ExactSum, [values])[:8] / unit).tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 0.0, 1.0, 3.0]


def test_long_parameters_are_rounded_and_added_in_chunks_with_the_same_result() -> None:
    part = addends(1, size=2 * ON_CPU.added + 17)[0]
    accumulator = ExactSum(FlatLayout([torch.Size([3]), part.shape, torch.Size([2])]), ADDENDS, 6, CPU)
    accumulator.add(1, part)
    accumulator.add(1, part)
    first, summed, last = accumulator.layout.views(accumulator.buffer)
    scale = 2.0 ** grid_exponent(ADDENDS, 6)
    assert torch.equal(summed, 2 * (part.double() * scale).round() / scale)
    assert not first.any()
    assert not last.any()


def test_the_largest_addends_allowed_still_sum_exactly() -> None:
    ones = [torch.full((1,), 64.0 - 2.0**-17) for _ in range(ADDENDS)]
    assert float(total(ExactSum, ones)[0]) == ADDENDS * (64.0 - 2.0**-17)
    mixed = [*ones[:-1], torch.full((1,), 2.0**-42)]
    assert float(total(ExactSum, mixed)[0]) == math.fsum([17 * (64.0 - 2.0**-17), 2.0**-42])


@pytest.mark.parametrize("value", [64.01, -65.0, math.inf, -math.inf, math.nan])
def test_an_addend_out_of_bounds_makes_the_norm_not_finite(value: float) -> None:
    accumulator = ExactSum(FlatLayout([torch.Size([4]), torch.Size([2])]), ADDENDS, 6, CPU)
    accumulator.add(1, torch.tensor([1.0, value]))
    # Also when a later addend brings the sum back within bounds.
    accumulator.add(1, torch.tensor([0.0, -value]))
    assert not math.isfinite(math.fsum(accumulator.mean_norms_squared(ADDENDS)))
    # A reduction carries it to a host whose own addends were fine.
    other = ExactSum(accumulator.layout, ADDENDS, 6, CPU)
    other.add(0, torch.ones(4))
    other.buffer += accumulator.buffer
    assert not math.isfinite(math.fsum(other.mean_norms_squared(ADDENDS)))
    accumulator.clear()
    assert math.fsum(accumulator.mean_norms_squared(ADDENDS)) == 0.0


@pytest.mark.parametrize("kind", [ExactSum, FastSum])
def test_mean_and_norm_divide_once_by_all_micro_batches(kind: type[ExactSum] | type[FastSum]) -> None:
    accumulator = kind(FlatLayout([torch.Size([2]), torch.Size([1])]), 6, 6, CPU)
    for _ in range(6):
        accumulator.add(0, torch.tensor([3.0, 0.0]))
        accumulator.add(1, torch.tensor([4.0]))
    mean = torch.full([accumulator.layout.size], math.nan)
    accumulator.mean(6, mean)
    tail = torch.full([accumulator.layout.size - 2], math.nan)
    accumulator.mean(6, tail, start=2)
    assert torch.equal(tail, mean[2:])
    assert mean.dtype == torch.float32
    assert int((mean != 0).sum()) == 2
    assert [view.tolist() for view in accumulator.layout.views(mean)] == [[3.0, 0.0], [4.0]]
    assert math.fsum(accumulator.mean_norms_squared(6)) == pytest.approx(25.0, rel=1e-15)
