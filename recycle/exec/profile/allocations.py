"""What an action allocates on a device: the bytes that it leaves behind, and the most that it has at once.

On a GPU torch's allocator keeps this account. On a CPU torch's profiler reports every allocation and every release,
those inside kernels too.

Limits: only what torch allocates is seen, and on a CPU only by the calling thread; what was allocated there outside of
such an action is released unseen.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_MEMORY = "[memory]"


class Allocated(NamedTuple):
    """Bytes, over those before the action.

    Attributes:
        kept: at its end; below 0 where it released more than it allocated.
        peak: at most; at least 0.
    """

    kept: int
    peak: int


def allocated_by(action: Callable[[], object], device: torch.device) -> Allocated:
    """What `action` allocates on `device`. What it returns is let go of."""
    return _on_gpu(action, device) if device.type == "cuda" else _on_cpu(action)


def _on_gpu(action: Callable[[], object], device: torch.device) -> Allocated:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    peak = torch.cuda.max_memory_allocated(device)
    return Allocated(torch.cuda.memory_allocated(device) - before, peak - before)


def _on_cpu(action: Callable[[], object]) -> Allocated:
    with (
        _without_garbage(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        action()
    assert profiler.profiler is not None
    reported = [event for event in profiler.profiler.kineto_results.events() if event.name() == _MEMORY]
    sizes = [event.nbytes() for event in sorted(reported, key=lambda event: event.start_ns())]
    held = list(accumulate(sizes, initial=0))
    return Allocated(held[-1], max(held))


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    """Nothing is collected meanwhile, so that what is freed was the action's."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
