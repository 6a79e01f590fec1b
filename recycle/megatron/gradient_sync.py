"""GradientSync: turns on gradient synchronization of Megatron's DDP for the last gradients of each parameter.

DDP's hooks count a gradient as complete only while synchronization is on. With split backwards, some parameters get
their last gradient in a chunk's last I, others in its last W, and other W's may run between these two. So
synchronization is on during these two instructions only. If a chunk has no such instructions, or the job sets a
`grad_sync_func`, the chunk's reduction starts after the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from recycle.ir.instruction import Compute


class GradientSync:
    """Synchronization of one iteration: off inside `off`, except inside `on_for`."""

    def __init__(self, config: Any, models: Sequence[Any], completing: Collection[Compute]) -> None:
        functions = config.no_sync_func
        self._functions = functions if isinstance(functions, list) else [functions] if functions is not None else []
        starts = config.grad_sync_func
        self._starts: list[Any] | None = None
        if starts is not None:
            self._starts = starts if isinstance(starts, list) else [starts] * len(models)
        self._models = models
        self._completing = completing if self._starts is None else ()
        self._held = ExitStack()

    @contextmanager
    def off(self) -> Iterator[None]:
        self._hold()
        try:
            yield
        finally:
            self._held.close()

    @contextmanager
    def on_for(self, instruction: Compute) -> Iterator[None]:
        """Turn synchronization on inside the block, if the instruction completes gradients."""
        if instruction not in self._completing:
            yield
            return
        self._held.close()
        try:
            yield
        finally:
            self._hold()

    def start_remaining(self, stages: Sequence[int]) -> None:
        """Start the reductions that no instruction started; call it after the program."""
        done = {compute.stage for compute in self._completing}
        for place, (stage, model) in enumerate(zip(stages, self._models, strict=True)):
            if self._starts is not None:
                self._starts[place](model.parameters())
            elif stage not in done and getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
                model.start_grad_sync()

    def _hold(self) -> None:
        for function in self._functions:
            self._held.enter_context(function())
