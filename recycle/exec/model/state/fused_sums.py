"""Exact accumulation of one gradient as one Triton kernel, which tests, rounds and adds in one pass over memory.

Has the bits of `ExactSum.add` on the CPU. Triton compiles a kernel at its first use, and loading it then waits for the
whole device, so `compiled_for` compiles all variants before training: both types of gradients, aligned or not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements of a program of the kernel."""

FUSED = 1 << 30
"""Elements that one launch adds; offsets then fit into 32 bits."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_block(sums, violation, addend, places, inside, scale, unit, bound, IS_FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_FULL:  # without a mask the loads are wide
        value, before = tl.load(addend + places).to(tl.float32), tl.load(sums + places)
    else:
        value = tl.load(addend + places, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(sums + places, mask=inside, other=0.0)
    scaled = value * scale
    magnitude = tl.abs(scaled)
    # Adding 2^23 rounds smaller numbers half to even; larger ones are integers. Comparisons with NaN are false.
    rounded = tl.where(magnitude < 8388608.0, magnitude + 8388608.0 - 8388608.0, magnitude)
    rounded = tl.where(scaled < 0.0, -rounded, rounded)
    after = before + rounded.to(tl.float64) * unit
    if IS_FULL:
        tl.store(sums + places, after)
    else:
        tl.store(sums + places, after, mask=inside)
    is_out_of_bounds = ~((value >= -bound) & (value <= bound))
    tl.store(violation + places * 0, tl.full(places.shape, float("nan"), tl.float64), mask=is_out_of_bounds)


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _round_and_add(sums, violation, addend, size, scale, unit, bound, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    begin = tl.program_id(0) * BLOCK
    places = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= size:
        _add_block(sums, violation, addend, places, places < size, scale, unit, bound, True)
    else:
        _add_block(sums, violation, addend, places, places < size, scale, unit, bound, False)


class FusedAdd:
    """Adds gradients to sums; for each gradient one launch per `FUSED` elements.

    Attributes:
        launches: launches of this object.
    """

    def __init__(self) -> None:
        self.launches = 0

    def __call__(
        self, sums: Tensor, violation: Tensor, addend: Tensor, scale: float, unit: float, bound: float
    ) -> None:
        """Add `addend`, fp32 or bf16 [n], rounded to multiples of `unit` = 1 / `scale`, to `sums`, fp64 [n].

        Writes NaN to `violation`, fp64 [1], if the absolute value of an element exceeds `bound` or is NaN.
        """
        with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
            for target, part in zip(torch.split(sums, FUSED), torch.split(addend.contiguous(), FUSED), strict=True):
                programs = (triton.cdiv(part.numel(), BLOCK),)
                _round_and_add[programs](target, violation, part, part.numel(), scale, unit, bound, BLOCK=BLOCK)
                self.launches += 1


def compiled_for(device: torch.device) -> FusedAdd:
    """The kernel, compiled for a device. Raises an exception of Triton's if that is impossible."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        addend = torch.zeros(2, dtype=dtype, device=device)
        for begin in (0, 1):
            FusedAdd()(sums[:1], sums[:1], addend[begin : begin + 1], 1.0, 1.0, 1.0)
    return FusedAdd()
