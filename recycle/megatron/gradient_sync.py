"""When Megatron's DDP may reduce: its hooks count a parameter's gradient as whole only where synchronisation is on.

With I and W apart, some parameters get their last gradient in a chunk's last I, the others in its last W, and other W's
may run between the two. So synchronisation is on during these two instructions alone. Where that cannot be said of a
chunk, and where the job gives a `grad_sync_func` of its own, the chunk's reduction starts behind the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from recycle.ir.instruction import Compute


class GradientSync:
    """Synchronisation of one iteration; off inside `off`, but for what `on_for` lets through.

    Args:
        config: of the model.
        models: its chunks.
        settled: see `recycle.megatron.order.Order`.
    """

    def __init__(self, config: Any, models: Sequence[Any], settled: Collection[Compute]) -> None:
        functions = config.no_sync_func
        self._functions = functions if isinstance(functions, list) else [functions] if functions is not None else []
        starts = config.grad_sync_func
        self._starts: list[Any] | None = None
        if starts is not None:
            self._starts = starts if isinstance(starts, list) else [starts] * len(models)
        self._models = models
        self._settled = settled if self._starts is None else ()
        self._held = ExitStack()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Synchronisation is off inside."""
        self._hold()
        try:
            yield
        finally:
            self._held.close()

    @contextmanager
    def on_for(self, instruction: Compute) -> Iterator[None]:
        """On inside, if the instruction makes gradients whole."""
        if instruction not in self._settled:
            yield
            return
        self._held.close()
        try:
            yield
        finally:
            self._hold()

    def start_rest(self, stages: Sequence[int]) -> None:
        """Behind the program: start the reductions that no instruction did.

        Args:
            stages: of each chunk.
        """
        done = {one.stage for one in self._settled}
        for place, (stage, model) in enumerate(zip(stages, self._models, strict=True)):
            if self._starts is not None:
                self._starts[place](model.parameters())
            elif stage not in done and getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
                model.start_grad_sync()

    def _hold(self) -> None:
        for function in self._functions:
            self._held.enter_context(function())
