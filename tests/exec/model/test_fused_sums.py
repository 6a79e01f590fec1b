"""Exact sums by one Triton kernel, in Triton's interpreter, against `ExactSum` on the CPU: equal bits.

Triton comes with torch's builds for GPUs; elsewhere these tests need `pip install triton`.
"""

import math
import os
import subprocess
import sys

import pytest
import torch

from recycle.exec.model.state import accumulate
from recycle.exec.model.state.accumulate import ExactSum, FlatLayout, grid_exponent
from tests.exec.drive import CPU, build_pipeline, run_pipelines, small_job

ADDENDS, EXPONENT = 18, 6
GRID = grid_exponent(ADDENDS, EXPONENT)


@pytest.fixture
def fused(monkeypatch):
    """The kernel in the interpreter, which sums created by the test use."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is defined
    pytest.importorskip("triton")
    from recycle.exec.model.state import fused_sums

    kernel = fused_sums.compiled_for(CPU)
    monkeypatch.setattr(accumulate, "fused_add", lambda device: kernel)
    return kernel


def special_values() -> torch.Tensor:
    """Subnormals, infinities, NaN, numbers whose scaled value overflows, bounds, ties, and a sample of all others."""
    ties = (torch.arange(-9.0, 10.0) / 2) * 2.0**-GRID
    bounds = torch.tensor([2.0**EXPONENT, math.nextafter(2.0**EXPONENT, math.inf), 2.0**EXPONENT + 2.0**-17])
    large = torch.tensor([2.0 ** (23 - GRID), 2.0 ** (23 - GRID) - 2.0 ** (-1 - GRID), 2.0**127, 3e38, math.inf])
    tiny = torch.tensor([2.0**-149, 2.0**-127, 2.0**-126, 0.0, 2.0 ** (-1 - GRID)])
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (5000,), generator=generator).to(torch.int32)
    positive = torch.cat([bounds, large, tiny])
    return torch.cat([ties, positive, -positive, torch.tensor([math.nan]), words.view(torch.float32)])


def sums_of(addends: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The sum of the addends and whether all were within bounds, between two other parameters."""
    layout = FlatLayout([torch.Size([3]), addends[0].shape, torch.Size([2])])
    accumulator = ExactSum(layout, ADDENDS, EXPONENT, CPU)
    for addend in addends:
        accumulator.add(1, addend)
    before, summed, after = layout.views(accumulator.buffer)
    assert not before.any()
    assert not after.any()
    return summed, accumulator.is_within_bounds()


def bits(sums: torch.Tensor) -> torch.Tensor:
    """Bits of a sum; of all NaNs the same."""
    return torch.where(sums.isnan(), torch.nan, sums).view(torch.int64)


def on_cpu(monkeypatch: pytest.MonkeyPatch, addends: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    with monkeypatch.context() as unfused:
        unfused.setattr(accumulate, "fused_add", lambda device: None)
        return sums_of(addends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_has_the_bits_of_the_cpu(fused, monkeypatch, dtype):
    values = special_values().to(dtype)
    for value in values[: -5000 + 20]:  # one by one, because one value out of bounds is enough
        (summed, within), (expected, expected_within) = sums_of([value[None]]), on_cpu(monkeypatch, [value[None]])
        assert torch.equal(bits(summed), bits(expected)), float(value)
        assert within == expected_within == (abs(float(value)) <= 2.0**EXPONENT), float(value)
    (summed, _), (expected, _) = sums_of([values, values.flip(0)]), on_cpu(monkeypatch, [values, values.flip(0)])
    assert torch.equal(bits(summed), bits(expected))


@pytest.mark.parametrize("size", [1, 2047, 2048, 2049, 5000])
def test_tails_and_strided_gradients_are_added_whole(fused, monkeypatch, size):
    generator = torch.Generator().manual_seed(size)
    addends = [torch.randn(size, generator=generator) for _ in range(2)]
    addends.append(torch.randn(size, 3, generator=generator)[:, 1])
    launches = fused.launches
    (summed, within), (expected, _) = sums_of(addends), on_cpu(monkeypatch, addends)
    assert torch.equal(summed, expected)
    assert within
    assert fused.launches - launches == 3


def test_a_long_gradient_takes_a_launch_per_block(fused, monkeypatch):
    from recycle.exec.model.state import fused_sums

    monkeypatch.setattr(fused_sums, "FUSED", 1024)
    addend = torch.randn(2500, generator=torch.Generator().manual_seed(1))
    launches = fused.launches
    summed, _ = sums_of([addend])
    assert torch.equal(summed, on_cpu(monkeypatch, [addend])[0])
    assert fused.launches - launches == 3 == len(FlatLayout([addend.shape]).blocks(1024))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from recycle.exec.model.state.fused_sums import BLOCK, _round_and_add
types = ["*fp64", "*fp64", "*bf16", "i32", "fp32", "fp32", "fp32", "constexpr"]
source = ASTSource(
    _round_and_add,
    dict(zip(_round_and_add.arg_names, types)),
    constexprs={"BLOCK": BLOCK},
    attrs={(place,): [["tt.divisibility", 16]] for place in range(3)},
)
print(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.process
def test_kernel_compiles_for_an_h100_with_wide_loads_and_subnormals(tmp_path):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ptx = subprocess.check_output([sys.executable, "-W", "ignore", "-c", COMPILE], env=environment, text=True)
    assert ".ftz" not in ptx, "numbers below 2^-126 would be flushed to zero"
    assert "ld.global.v4.b32" in ptx, "eight bf16 numbers at a time"
    assert "st.global.v2.b64" in ptx, "two sums at a time"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stage_launches_once_per_parameter_and_micro_batch_with_equal_bits(fused, monkeypatch, precision):
    job = small_job(ranks=2, train={"precision": precision})
    launches, count = fused.launches, 4
    pipeline = build_pipeline(job)
    run_pipelines([pipeline], step=0, count=count)
    parameters = sum(len(stage.parameters) for stage in pipeline)
    assert fused.launches - launches == count * (parameters + 1)  # and the loss
    monkeypatch.setattr(accumulate, "fused_add", lambda device: None)
    expected = build_pipeline(job)
    run_pipelines([expected], step=0, count=count)
    for stage, other in zip(pipeline, expected, strict=True):
        for buffer, other_buffer in zip(stage.gradient_buffers(), other.gradient_buffers(), strict=True):
            assert torch.equal(buffer, other_buffer)
